"""Copies for drives: what waits for them, and which paths there are. Host memory stands for the GPU's."""

from __future__ import annotations

import ctypes
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from planner.errors import StorageError, UnsupportedError
from runtime.cuda import cuda_candidates, streams
from runtime.cuda.storage_paths import CudaCopier
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

    def copy(stream: Stream, *, target: int, source: int, size_bytes: int) -> None:
        ctypes.memmove(target, source, size_bytes)
        log.append(("copy", stream))

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(streams, "copy_by_driver", copy)
    return log


def memory() -> ctypes.Array[ctypes.c_char]:
    return ctypes.create_string_buffer(os.urandom(SIZE), SIZE)


def test_bytes_go_from_source_to_target_and_only_the_copy_is_waited_for(log: list[tuple[str, Stream | None]]) -> None:
    copier = CudaCopier(torch.device("cuda"))
    target, source = memory(), memory()
    expected = target.raw[:4096] + source.raw[4096:6000] + target.raw[6000:]
    wait = copier.copy(target=ctypes.addressof(target) + 4096, source=ctypes.addressof(source) + 4096, size_bytes=6000 - 4096)
    assert [name for name, _ in log] == ["copy", "record"]
    wait()
    assert [name for name, _ in log] == ["copy", "record", "wait"]
    assert target.raw == expected


def test_each_thread_copies_in_a_stream_of_its_own(log: list[tuple[str, Stream | None]]) -> None:
    copier = CudaCopier(torch.device("cuda"))
    target, source = memory(), memory()

    def copy(_: int) -> None:
        copier.copy(target=ctypes.addressof(target), source=ctypes.addressof(source), size_bytes=SIZE)()

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
