"""Copies for drives: what waits for them, and which paths there are. Host memory stands for the GPU's."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from planner.errors import StorageError, UnsupportedError
from runtime.cuda import CudaMemory, cuda_candidates, streams
from runtime.cuda.drive_paths import CudaCopier
from runtime.storage import ALIGNMENT_BYTES
from runtime.storage import kvikio as kvikio_file
from runtime.transfer import PathCandidate

from ..storage.fakes import FakeKvikio

SIZE = 8192


class Stream:
    def __init__(self, device: torch.device) -> None:
        self.device = device


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Stream | None]]:
    """What is queued and what is waited for, in order."""
    log: list[tuple[str, Stream | None]] = []

    class Event:
        def __init__(self, *, blocking: bool) -> None:
            assert blocking

        def record(self, stream: Stream) -> None:
            log.append(("record", stream))

        def synchronize(self) -> None:
            log.append(("wait", None))

    @contextlib.contextmanager
    def in_stream(stream: Stream) -> Iterator[None]:
        yield
        log.append(("copy", stream))

    def device_memory(device: torch.device, address: int, size_bytes: int) -> torch.Tensor:
        return torch.frombuffer((ctypes.c_char * size_bytes).from_address(address), dtype=torch.uint8)

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "stream", in_stream)
    monkeypatch.setattr(streams, "device_memory", device_memory)
    return log


def memory() -> torch.Tensor:
    return torch.frombuffer(bytearray(os.urandom(SIZE)), dtype=torch.uint8)


@pytest.mark.parametrize("to_device", [True, False])
def test_bytes_go_from_source_to_target_and_only_the_copy_is_waited_for(
    log: list[tuple[str, Stream | None]], to_device: bool
) -> None:
    copier = CudaCopier(torch.device("cuda"))
    buffer, device = memory(), memory()
    target, source = (device, buffer) if to_device else (buffer, device)
    expected = torch.cat([target[:4096], source[4096:6000], target[6000:]])
    wait = copier.copy(buffer[4096:6000], device.data_ptr() + 4096, to_device=to_device)
    assert [name for name, _ in log] == ["copy", "record"]
    wait()
    assert [name for name, _ in log] == ["copy", "record", "wait"]
    assert torch.equal(target, expected)


def test_memory_of_the_device_is_copied_by_a_buffer_of_the_thread(
    log: list[tuple[str, Stream | None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CudaCopier, "buffer", lambda copier, size: torch.zeros(size, dtype=torch.uint8))
    device, of_device = memory(), CudaMemory(torch.device("cuda", 0))
    for size in (4096, 100, SIZE):
        assert of_device.bytes_at(device.data_ptr(), size) == bytes(device[:size].numpy())


def test_each_thread_copies_in_a_stream_of_its_own(log: list[tuple[str, Stream | None]]) -> None:
    copier = CudaCopier(torch.device("cuda"))
    buffer, device = memory(), memory()

    def copy(_: int) -> None:
        copier.copy(buffer, device.data_ptr(), to_device=True)()

    copy(0)
    copy(0)
    with ThreadPoolExecutor(1) as thread:
        list(thread.map(copy, range(2)))
    streams = [stream for name, stream in log if name == "copy"]
    assert streams[0] is streams[1] and streams[2] is streams[3] and streams[0] is not streams[2]
    assert {stream.device for stream in streams if isinstance(stream, Stream)} == {torch.device("cuda", 1)}


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
    buffer = CudaCopier(torch.device("cuda", 0)).buffer(ALIGNMENT_BYTES)
    assert buffer.data_ptr() % ALIGNMENT_BYTES == 0
    assert asked == [ALIGNMENT_BYTES] if skew == 0 else asked == [ALIGNMENT_BYTES, 2 * ALIGNMENT_BYTES]
    assert room.data_ptr() + begin <= buffer.data_ptr()
    assert buffer.data_ptr() + ALIGNMENT_BYTES <= room.data_ptr() + begin + asked[-1]


def test_no_memory_to_pin_is_an_error_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    def empty(*_: object, **__: object) -> torch.Tensor:
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(torch, "empty", empty)
    with pytest.raises(StorageError, match="cannot pin a staging buffer of 4,096 bytes: CUDA error.*lower host_budget"):
        CudaCopier(torch.device("cuda", 0)).buffer(4096)


# -- which paths there are: KvikIO's compatibility mode is taken only if it is asked for


def kvikio_candidate(folder: Path, module: FakeKvikio, monkeypatch: pytest.MonkeyPatch, forced: str) -> PathCandidate:
    monkeypatch.setattr(kvikio_file, "load_kvikio", lambda: module)
    kvikio, staged = cuda_candidates([folder], torch.device("cuda", 0), budget_bytes=None, checksums=False, forced=forced)
    assert (kvikio.name, staged.name) == ("kvikio", "staged")
    return kvikio


def test_direct_storage_is_a_path_and_the_compatibility_mode_must_be_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kvikio_candidate(tmp_path, FakeKvikio(compatible_only=False), monkeypatch, "auto").open().close()
    module = FakeKvikio()
    candidate = kvikio_candidate(tmp_path, module, monkeypatch, "auto")
    with pytest.raises(UnsupportedError, match=r"compatibility mode .* would wait for stages; give storage_path='kvikio'"):
        candidate.open()
    assert not module.live and not list(tmp_path.iterdir())
    kvikio_candidate(tmp_path, module, monkeypatch, "kvikio").open().close()
