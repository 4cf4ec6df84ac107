"""As much of `torch.cuda` as teraio uses, in main memory: streams do at once what is queued, and memory has no limit."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import time
from collections.abc import Iterator
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from runtime.cuda import CudaStreams, drive_paths
from runtime.cuda import streams as cuda_streams
from runtime.transfer import aligned
from teraio.machine import Machine, Shared
from teraio.machine import machine as cuda_machine
from teraio.options import Options
from teraio.ranks import RankGroup
from teraio.registry import REGISTRY

CPU = torch.device("cpu")
TOTAL_BYTES = 1 << 34
MIB = 1 << 20
UNSET = {"PYTORCH_CUDA_ALLOC_CONF": "", "expandable_segments": False}


class Stream:
    def __init__(self, device: torch.device | None = None, priority: int = 0) -> None:
        self.cuda_stream = id(self)

    def wait_stream(self, stream: Stream) -> None:
        pass

    def wait_event(self, event: Event) -> None:
        pass

    def record_event(self) -> None:
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
    retries: how often the allocator had to take free memory away. settings: of the allocator, each time that they were changed.
    refusals: what the driver answers to the next copies before it copies again.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.pins = True
        self.limits = [1.0]
        self.retries = 0
        self.settings: list[str] = []
        self.refusals: list[int] = []
        default = Stream()
        self._current = ContextVar("stream", default=default)  # each thread has its own
        properties = SimpleNamespace(
            total_memory=TOTAL_BYTES, pci_domain_id=0, pci_bus_id=0xFF, pci_device_id=0x1F, name="made up", gcnArchName="made up"
        )
        for name, value in {
            "Stream": Stream,
            "Event": Event,
            "stream": self._stream,
            "current_stream": lambda device=None: self._current.get(),
            "default_stream": lambda device: default,
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
            "memory_snapshot": lambda include_traces: [],
            "memory._record_memory_history": lambda what, **_: None,
            "memory._snapshot": lambda device=None: {"device_traces": [[]], "allocator_settings": UNSET},
        }.items():
            monkeypatch.setattr(f"torch.cuda.{name}", value)
        for name, value in {
            "clearCublasWorkspaces": lambda: None,
            "getCurrentRawStream": lambda index: self._current.get().cuda_stream,
            "isHistoryEnabled": lambda: False,
        }.items():
            monkeypatch.setattr(torch._C, f"_cuda_{name}", value, raising=False)
        monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", self.settings.append)
        made = CudaStreams.__init__

        def make(streams: CudaStreams, device: torch.device) -> None:
            made(streams, torch.device("cuda", 0))
            streams.device = CPU

        def device_memory(device: object, address: int, size_bytes: int) -> torch.Tensor:
            return torch.frombuffer((ctypes.c_char * size_bytes).from_address(address), dtype=torch.uint8)

        def copy(target: int, source: int, size_bytes: int, stream: int) -> int:
            if self.refusals:
                return self.refusals.pop(0)
            ctypes.memmove(target, source, size_bytes)
            return 0

        def name_of(status: int, name: Any) -> None:
            name._obj.value = b"MADE_UP"

        def buffer(copier: drive_paths.CudaCopier, size_bytes: int) -> torch.Tensor:
            return aligned(lambda size: torch.empty(size, dtype=torch.uint8), size_bytes)

        monkeypatch.setattr(CudaStreams, "__init__", make)
        driver = SimpleNamespace(cuMemcpyAsync=copy, cuGetErrorName=name_of, cuPointerGetAttribute=lambda *_: 1)
        monkeypatch.setattr(cuda_streams, "_calls", lambda: driver)
        monkeypatch.setattr(cuda_streams, "device_memory", device_memory)
        monkeypatch.setattr(drive_paths.CudaCopier, "buffer", buffer)
        runtime = SimpleNamespace(
            cudaHostRegister=lambda *_: 0 if self.pins else 1,
            cudaHostUnregister=lambda _: 0,
            cudaGetErrorString=lambda _: "refused",
        )
        monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
        monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
        monkeypatch.setattr(drive_paths, "_SIDE", 8)
        monkeypatch.setattr(REGISTRY, "parts", dataclasses.replace(REGISTRY.parts, open_machine=open_machine))
        monkeypatch.setattr(REGISTRY, "shared", Shared())  # the paths of main memory lead nowhere here

    @contextlib.contextmanager
    def _stream(self, stream: Stream) -> Iterator[None]:
        before = self._current.set(stream)
        try:
            yield
        finally:
            self._current.reset(before)


def open_machine(
    options: Options, device: torch.device, shared: Shared, ranks: RankGroup | None, *, spare_bytes: int = MIB
) -> Machine:
    """The machine of the made-up GPU; what of a budget is kept free is scaled down with the models of the tests."""
    with mock.patch.multiple(cuda_machine, _SPARE_BYTES=spare_bytes, _PAGE_BYTES=MIB):
        return cuda_machine.open_machine(options, torch.device("cuda", 0), shared, ranks)
