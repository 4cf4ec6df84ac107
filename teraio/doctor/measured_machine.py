"""A description of this machine from measurement, for `teraio capture` and for plans."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
import torch

import planner
from runtime.system import host_limits
from teraio.capturing import GpuModel, MachineDescription
from teraio.machine import open_machine
from teraio.options import Options

_LAUNCH_SECONDS = 2e-6  # assumed: the host is too slow to see how soon one kernel follows another
_SECONDS = 0.5  # how long each rate is measured
_HOST_SHARE = 0.25
_MOST_HOST_BYTES = 1 << 30
_UPDATED_ELEMENTS = 4 << 20


def measured_machine(storage: Sequence[Path], device: torch.device) -> MachineDescription:
    """Measure matmuls, memory, updates on the host and all links. Takes half a minute.

    Raises StorageError and UnsupportedError where a directory cannot be used.
    """
    on_gpu = device.type == "cuda"
    side = 8192 if on_gpu else 512
    types = (torch.float32, torch.bfloat16, torch.float16) if on_gpu else (torch.float32, torch.bfloat16)
    flops = {str(dtype).removeprefix("torch."): _matmul_rate(device, dtype, side) for dtype in types}
    if on_gpu:
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("high")
        try:
            flops["tf32"] = _matmul_rate(device, torch.float32, side)
        finally:
            torch.set_float32_matmul_precision(before)
    cache, gpu, tiny = 0, None, torch.zeros(1, device=device)
    if on_gpu:
        found = torch.cuda.get_device_properties(device)
        cache = int(found.L2_cache_size)
        gpu = GpuModel(capability=(found.major, found.minor), multiprocessors=found.multi_processor_count)
    return MachineDescription(
        flops_per_second=flops,
        matmul_efficiency=1.0,
        memory_bytes_per_second=_memory_rate(device, (1 << 30) if on_gpu else (256 << 20)),
        memory_efficiency=1.0,
        cache_bytes=cache,
        cache_bytes_per_second=_memory_rate(device, cache // 4) if cache else 0.0,
        launch_seconds=_LAUNCH_SECONDS if on_gpu else 0.0,
        operator_seconds=_seconds(device, lambda: tiny.add_(1.0)) if on_gpu else 0.0,
        gpu=gpu,
        hardware=_hardware(storage, device),
        sources=f"measured by teraio doctor, torch {torch.__version__}",
    )


def _hardware(storage: Sequence[Path], device: torch.device) -> planner.Hardware:
    free = min(limit.available_bytes for limit in host_limits())
    options = Options(
        memory_budget=1 << 30, storage=tuple(storage), host_budget=min(int(free * _HOST_SHARE), _MOST_HOST_BYTES) >> 20 << 20
    )
    machine = open_machine(options, device)
    try:
        found = machine.hardware()
    finally:
        machine.close()
    memory = psutil.virtual_memory().total
    return found.model_copy(
        update={
            "name": f"{platform.node()}, {found.name}",
            "host_memory_bytes": memory // 2,  # half of it is for other things, as by default in training
            "host_update_elements_per_second": _host_update_rate(),
        }
    )


def _matmul_rate(device: torch.device, dtype: torch.dtype, side: int) -> float:
    factor = torch.full((side, side), 1e-3, dtype=dtype, device=device)
    product = torch.empty_like(factor)
    return 2.0 * side**3 / _seconds(device, lambda: torch.mm(factor, factor, out=product))


def _memory_rate(device: torch.device, size_bytes: int) -> float:
    """Bytes read and written in a second by a copy within the device's memory."""
    source = torch.zeros(size_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2.0 * size_bytes / _seconds(device, lambda: target.copy_(source))


def _host_update_rate() -> float:
    parameter = torch.zeros(_UPDATED_ELEMENTS)
    parameter.grad = torch.ones_like(parameter)
    optimizer = torch.optim.AdamW([parameter], fused=True)
    return _UPDATED_ELEMENTS / _seconds(torch.device("cpu"), optimizer.step)


def _seconds(device: torch.device, work: Callable[[], object]) -> float:
    """Return the seconds of one run of `work`: the mean of the faster half of some groups of runs."""

    def group(runs: int) -> float:
        began = time.perf_counter()
        for _ in range(runs):
            work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return (time.perf_counter() - began) / runs

    group(1)  # the first run takes longer
    runs = max(1, int(_SECONDS / 8 / max(group(1), 1e-7)))
    found = sorted(group(runs) for _ in range(8))
    return sum(found[:4]) / 4
