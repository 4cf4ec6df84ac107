"""As much of `torch.cuda` as teraio uses, in main memory: streams do at once what is queued, and memory has no limit."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import time
from collections.abc import Iterator
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from runtime.cuda import CudaStreams, drive_paths
from runtime.cuda import streams as cuda_streams
from runtime.system import CudaPinner
from runtime.transfer import aligned
from teraio.machine import Machine, Shared
from teraio.machine import machine as cuda_machine
from teraio.machine.budgets import resolve_budgets, seen_by_ranks
from teraio.options import Options
from teraio.ranks import RankGroup
from teraio.registry import REGISTRY

CPU = torch.device("cpu")
TOTAL_BYTES = 1 << 34
MIB = 1 << 20


class Stream:
    def __init__(self, device: torch.device | None = None, priority: int = 0) -> None:
        self.cuda_stream = id(self)

    def wait_stream(self, stream: Stream) -> None:
        pass

    def wait_event(self, event: Event) -> None:
        pass


class Event:
    def __init__(self, enable_timing: bool = False, blocking: bool = False) -> None:
        self._at_seconds = 0.0

    def record(self, stream: Stream | None = None) -> None:
        self._at_seconds = time.perf_counter()

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: Event) -> float:
        return 1000 * (end._at_seconds - self._at_seconds)


class FakeCuda:
    """Takes the place of the GPU's machine and of the driver for one test. Blocks of "the GPU" are CPU tensors.

    pins: whether host memory can be pinned. limits: shares of the memory that the allocator was limited to, in order.
    retries: how often the allocator had to take free memory away.
    loads: how often the device was kept busy for a measurement.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.pins = True
        self.limits = [1.0]
        self.loads = self.retries = 0
        self._streams = [Stream()]
        properties = SimpleNamespace(
            total_memory=TOTAL_BYTES, pci_domain_id=0, pci_bus_id=0xFF, pci_device_id=0x1F, name="made up", gcnArchName="made up"
        )
        for name, value in {
            "Stream": Stream,
            "Event": Event,
            "stream": self._stream,
            "current_stream": lambda device=None: self._streams[-1],
            "current_device": lambda: 0,
            "get_device_properties": lambda device: properties,
            "get_device_name": lambda device: "made up",
            "get_per_process_memory_fraction": lambda device: self.limits[-1],
            "set_per_process_memory_fraction": lambda share, device: self.limits.append(share),
            "memory_allocated": lambda device: 0,
            "max_memory_allocated": lambda device: 0,
            "memory_reserved": lambda device: 0,
            "memory_stats_as_nested_dict": lambda device: {"num_alloc_retries": self.retries},
            "reset_peak_memory_stats": lambda device: None,
            "synchronize": lambda device=None: None,
            "mem_get_info": lambda device: (TOTAL_BYTES, TOTAL_BYTES),
            "empty_cache": lambda: None,
            "set_sync_debug_mode": lambda mode: None,
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None, raising=False)
        monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: self._streams[-1].cuda_stream, raising=False)
        monkeypatch.setattr(torch._C, "_cuda_isHistoryEnabled", lambda: True, raising=False)  # so that teraio records nothing
        made = CudaStreams.__init__

        def make(streams: CudaStreams, device: torch.device) -> None:
            made(streams, torch.device("cuda", 0))
            streams.device = CPU

        def device_memory(device: object, address: int, size_bytes: int) -> torch.Tensor:
            return torch.frombuffer((ctypes.c_char * size_bytes).from_address(address), dtype=torch.uint8)

        def copy(stream: Stream, *, target: int, source: int, size_bytes: int) -> None:
            ctypes.memmove(target, source, size_bytes)

        def buffer(copier: drive_paths.CudaCopier, size_bytes: int) -> torch.Tensor:
            return aligned(lambda size: torch.empty(size, dtype=torch.uint8), size_bytes)

        monkeypatch.setattr(CudaStreams, "__init__", make)
        monkeypatch.setattr(cuda_streams, "copy_by_driver", copy)
        monkeypatch.setattr(cuda_streams, "device_memory", device_memory)
        monkeypatch.setattr(drive_paths.CudaCopier, "buffer", buffer)
        refused = "CUDA error 1 (refused)"
        monkeypatch.setattr(CudaPinner, "_register", lambda self_, address, size: None if self.pins else refused)
        monkeypatch.setattr(CudaPinner, "_unregister", lambda self_, address: None)
        monkeypatch.setattr(cuda_machine, "_grow_segments", lambda undo: None)
        monkeypatch.setattr(cuda_machine, "computing", self._computing)
        monkeypatch.setattr(REGISTRY, "parts", dataclasses.replace(REGISTRY.parts, open_machine=open_machine))
        monkeypatch.setattr(REGISTRY, "shared", Shared())  # the paths of main memory lead nowhere here

    @contextlib.contextmanager
    def _stream(self, stream: Stream) -> Iterator[None]:
        self._streams.append(stream)
        try:
            yield
        finally:
            self._streams.remove(stream)

    @contextlib.contextmanager
    def _computing(self, device: torch.device) -> Iterator[None]:
        self.loads += 1
        yield


def open_machine(
    options: Options, device: torch.device, shared: Shared, ranks: RankGroup | None, *, spare_bytes: int = MIB
) -> Machine:
    """The machine of the made-up GPU; what of a budget is kept free is scaled down with the models of the tests."""
    budgets = resolve_budgets(options, *seen_by_ranks(options, torch.device("cuda", 0), ranks))
    with mock.patch.multiple(cuda_machine, _SPARE_BYTES=spare_bytes, _PAGE_BYTES=MIB):
        return cuda_machine.open_cuda(options, budgets, CPU, shared)
