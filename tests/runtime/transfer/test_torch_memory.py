"""The memory that an engine measures and verifies a store with."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import pytest
import torch

from runtime.storage.posix import PosixStore
from runtime.storage.store import ALIGNMENT_BYTES
from runtime.transfer.engine import Engine
from runtime.transfer.torch_memory import TorchMemory

SIZE = 5 * ALIGNMENT_BYTES


@pytest.fixture
def memory() -> TorchMemory:
    return TorchMemory(torch.device("cpu"))


def test_what_is_written_is_at_the_address(memory: TorchMemory) -> None:
    content = os.urandom(SIZE)
    with memory.allocate(SIZE) as buffer:
        assert buffer.address % ALIGNMENT_BYTES == 0 and memory.on_host
        buffer.write(0, content)
        assert ctypes.string_at(buffer.address, SIZE) == content
        buffer.write(SIZE - 3, b"end")
        ctypes.memmove(buffer.address, b"begin", 5)
        assert buffer.read(0, SIZE) == b"begin" + content[5:-3] + b"end"
        assert buffer.read(SIZE - 3, 3) == b"end"


def test_buffers_share_nothing(memory: TorchMemory) -> None:
    with memory.allocate(SIZE) as one, memory.allocate(SIZE) as other:
        one.write(0, b"1" * SIZE)
        other.write(0, b"2" * SIZE)
        assert one.read(0, SIZE) == b"1" * SIZE and other.read(0, SIZE) == b"2" * SIZE


@pytest.mark.parametrize("given", [True, False])
def test_an_engine_measures_and_verifies_with_it(memory: TorchMemory, tmp_path: Path, given: bool) -> None:
    store = PosixStore([tmp_path], budget_bytes=None)
    engine = Engine(store, memory=memory if given else None)
    engine.verify(1 << 20)
    assert engine.measure(2 << 20).read_bytes_per_second > 0
    engine.close()
    store.close()


def test_memory_of_other_devices_is_not_the_hosts() -> None:
    assert not TorchMemory(torch.device("cuda")).on_host
