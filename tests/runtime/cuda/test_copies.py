"""Copies for drives: what waits for them, and which paths there are. Host memory stands for the GPU's."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from planner.errors import StorageError, UnsupportedError
from runtime.cuda import cuda_candidates
from runtime.cuda.storage_paths import CudaCopier, PinnedBuffer
from runtime.cuda.streams import host_bytes
from runtime.storage import ALIGNMENT_BYTES
from runtime.storage import kvikio as kvikio_file
from runtime.transfer import PathCandidate

from ..storage.fakes import FakeKvikio

SIZE = 8192


class Stream:
    def __init__(self, device: torch.device) -> None:
        self.device = device


class Cuda:
    """Stands for the functions of torch.cuda that the copier uses. log: all events, in order."""

    def __init__(self) -> None:
        self.log: list[tuple[str, object]] = []
        self.current: Stream | None = None
        self.elsewhere = False
        cuda = self

        class Event:
            def __init__(self, *, blocking: bool) -> None:
                assert blocking

            def record(self, stream: Stream) -> None:
                assert stream is cuda.current
                cuda.log.append(("record", stream))

            def synchronize(self) -> None:
                cuda.log.append(("wait", None))

        self.Event = Event

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        self.current = stream
        yield
        self.current = None

    def as_tensor(self, memory: Any, device: torch.device) -> torch.Tensor:
        address, size = memory.__cuda_array_interface__["data"][0], memory.__cuda_array_interface__["shape"][0]
        assert device == torch.device("cuda", 1)
        tensor = torch.frombuffer((ctypes.c_char * size).from_address(address), dtype=torch.uint8)
        return tensor.clone() if self.elsewhere else tensor


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    cuda = Cuda()
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "Event", cuda.Event)
    monkeypatch.setattr(torch.cuda, "stream", cuda.stream)
    monkeypatch.setattr(torch, "as_tensor", cuda.as_tensor)
    return cuda


def memory() -> ctypes.Array[ctypes.c_char]:
    return ctypes.create_string_buffer(os.urandom(SIZE), SIZE)


@pytest.mark.parametrize("call", ["to_host", "to_device"])
def test_bytes_go_from_source_to_target_and_only_the_copy_is_waited_for(cuda: Cuda, call: str) -> None:
    copier = CudaCopier(torch.device("cuda"))
    target, source = memory(), memory()
    expected = target.raw[:4096] + source.raw[4096:6000] + target.raw[6000:]
    copy = getattr(copier, call)(ctypes.addressof(target) + 4096, ctypes.addressof(source) + 4096, 6000 - 4096)
    assert [name for name, _ in cuda.log] == ["record"]
    copy.wait()
    assert [name for name, _ in cuda.log] == ["record", "wait"]
    assert target.raw == expected


def test_an_address_of_another_device_is_refused_instead_of_copied(cuda: Cuda) -> None:
    cuda.elsewhere = True
    target, source = memory(), memory()
    before = target.raw
    copier = CudaCopier(torch.device("cuda", 1))
    for call in (copier.to_host, copier.to_device):
        with pytest.raises(StorageError, match="is not in the memory of cuda:1"):
            call(ctypes.addressof(target), ctypes.addressof(source), SIZE)
    assert target.raw == before and cuda.log == []


@pytest.mark.parametrize("skew", [0, 64])
def test_buffers_are_aligned_also_where_pytorch_is_not(monkeypatch: pytest.MonkeyPatch, skew: int) -> None:
    asked: list[int] = []
    room = torch.zeros(4 * ALIGNMENT_BYTES, dtype=torch.uint8)
    begin = -room.data_ptr() % ALIGNMENT_BYTES + skew

    def empty(size: int, *, dtype: torch.dtype, pin_memory: bool) -> torch.Tensor:
        assert dtype == torch.uint8 and pin_memory
        asked.append(size)
        return room[begin : begin + size]

    monkeypatch.setattr(torch, "empty", empty)
    buffer = PinnedBuffer(ALIGNMENT_BYTES)
    assert buffer.address % ALIGNMENT_BYTES == 0
    assert asked == [ALIGNMENT_BYTES] if skew == 0 else asked == [ALIGNMENT_BYTES, 2 * ALIGNMENT_BYTES]
    assert room.data_ptr() + begin <= buffer.address
    assert buffer.address + ALIGNMENT_BYTES <= room.data_ptr() + begin + asked[-1]


def test_no_memory_to_pin_is_an_error_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    def empty(*_: object, **__: object) -> torch.Tensor:
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(torch, "empty", empty)
    with pytest.raises(StorageError, match="cannot pin a staging buffer of 4,096 bytes: CUDA error.*lower host_budget"):
        PinnedBuffer(4096)


# -- which paths there are: KvikIO's compatibility mode is taken only if it is asked for


def kvikio_candidate(folder: Path, module: FakeKvikio, monkeypatch: pytest.MonkeyPatch, forced: str) -> PathCandidate:
    monkeypatch.setattr(kvikio_file, "load_kvikio", lambda: module)
    kvikio, staged = cuda_candidates([folder], torch.device("cuda", 0), budget_bytes=None, checksums=False, forced=forced)
    assert (kvikio.name, staged.name) == ("kvikio", "staged")
    return kvikio


@pytest.mark.parametrize("forced", ["auto", "kvikio"])
def test_direct_storage_is_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forced: str) -> None:
    store = kvikio_candidate(tmp_path, FakeKvikio(compatible_only=False), monkeypatch, forced).open()
    store.close()


def test_the_compatibility_mode_must_be_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = FakeKvikio()
    candidate = kvikio_candidate(tmp_path, module, monkeypatch, "auto")
    with pytest.raises(UnsupportedError, match=r"compatibility mode .* would wait for stages; give storage_path='kvikio'"):
        candidate.open()
    assert not module.live and not list(tmp_path.iterdir())
    kvikio_candidate(tmp_path, module, monkeypatch, "kvikio").open().close()


# -- tensors over bytes of which only the address is known


def test_a_tensor_over_host_memory_shares_its_bytes_and_is_kept() -> None:
    memory = ctypes.create_string_buffer(b"some bytes")
    address = ctypes.addressof(memory)
    found = host_bytes(address + 5, 5)
    assert bytes(found.tolist()) == b"bytes" and found is host_bytes(address + 5, 5)
    found[0] = ord("k")
    assert memory.value == b"some kytes"


def test_what_inference_mode_has_made_can_be_written_outside_of_it() -> None:
    memory = ctypes.create_string_buffer(4)
    with torch.inference_mode():
        made = host_bytes(ctypes.addressof(memory), 4)
    made.copy_(torch.ones(4, dtype=torch.uint8))
    assert memory.raw == bytes([1, 1, 1, 1])
