"""What this machine has for training, and what it lacks: software, memory, the paths to drives; and its description, measured."""

from __future__ import annotations

import ctypes
import importlib.metadata
import mmap
import os
import platform
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Literal

import psutil
import torch

import planner
from planner.errors import StorageError, TeraioError, UnsupportedError, format_bytes
from planner.schema import FrozenModel
from runtime.cuda import cuda_candidates
from runtime.storage import KvikioStore, load_kvikio
from runtime.system import CudaPinner, host_limits, locked_limit, machine_cores, native, storage_swap
from runtime.transfer import Engine, LinkRates, TorchMemory, choose_path, cpu_candidates
from teraio.capturing import GpuModel, MachineDescription
from teraio.machine import open_machine
from teraio.options import Options

# note: nothing is wrong, but teraio could do more. slow: it works, slower than it should. missing: something does not work.
Verdict = Literal["ok", "note", "slow", "missing"]


class Finding(FrozenModel):
    """what: what was looked at. found: what there is. effect: what follows from that; remedy: what to do about it; both "" if
    nothing."""

    what: str
    verdict: Verdict
    found: str
    effect: str = ""
    remedy: str = ""


class Examination(FrozenModel):
    """findings: in the order in which things were looked at."""

    findings: tuple[Finding, ...]

    @property
    def healthy(self) -> bool:
        """Whether nothing is missing."""
        return all(finding.verdict != "missing" for finding in self.findings)


def examine(storage: Sequence[Path], device: torch.device) -> Examination:
    """Look at software, processor, memory, and the paths between `device` and the directories. Takes seconds for each."""
    processor = _processor()  # before this loads it
    drives = [finding for directory in storage for finding in _drive(directory, device)]
    return Examination(findings=(*_software(), processor, *_memory(), *drives))


def _software() -> Iterator[Finding]:
    """Yield what is installed. Compiles a small C++ file if that was not done before, which takes seconds."""
    yield Finding(what="Python", verdict="ok", found=platform.python_version())
    yield Finding(what="PyTorch", verdict="ok", found=torch.__version__)  # others are refused when they are imported
    yield from _compiler()
    yield Finding(what="solver", verdict="ok", found=f"HiGHS (highspy {importlib.metadata.version('highspy')})")
    if torch.version.cuda is not None:
        yield from _cuda(torch.version.cuda)
    else:
        yield Finding(
            what="GPU",
            verdict="note",
            found="none is used: this PyTorch is built for CPUs",
            effect="training runs on the CPU",
            remedy="for an NVIDIA GPU, install PyTorch's build for CUDA",
        )


def _compiler() -> Iterator[Finding]:
    remedy = "apt-get install g++, or name a compiler in the environment variable CXX"
    try:
        storage_swap.address(torch.empty(1).untyped_storage())
    except UnsupportedError as error:
        yield Finding(what="C++ functions", verdict="missing", found=str(error), effect="nothing can move", remedy=remedy)
    else:
        yield Finding(what="C++ functions", verdict="ok", found="load")
    path = native.compiler_path()
    if path is not None:
        yield Finding(what="C++ compiler", verdict="ok", found=path)
        return
    effect = 'Inductor has none for stages on the CPU: train there with codegen="eager"'
    yield Finding(what="C++ compiler", verdict="missing", found="none", effect=effect, remedy=remedy)


def _cuda(version: str) -> Iterator[Finding]:
    if not torch.cuda.is_available():
        yield Finding(
            what="GPU",
            verdict="missing",
            found=f"PyTorch is built for CUDA {version}, but sees no GPU",
            effect="training runs on the CPU",
            remedy="install NVIDIA's driver, and check with nvidia-smi that it sees the GPU",
        )
        return
    for index in range(torch.cuda.device_count()):
        free, total = (format_bytes(size) for size in torch.cuda.mem_get_info(index))
        yield Finding(what=f"GPU {index}", verdict="ok", found=f"{torch.cuda.get_device_name(index)}, {total}, {free} free")
    try:
        yield Finding(what="KvikIO", verdict="ok", found=load_kvikio().__version__)
    except UnsupportedError as error:
        yield Finding(
            what="KvikIO",
            verdict="note",
            found=str(error),
            effect="drives are read and written through pinned host memory",
            remedy=f"pip install kvikio-cu{version.partition('.')[0]}",
        )


_BUSY = 0.5  # load for each core above which others slow down what is measured here


def _processor() -> Finding:
    cores, load = machine_cores(), os.getloadavg()[0]
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    found = f"{next(named, platform.machine())}, {cores:g} cores, load {load:.1f}"
    if load <= _BUSY * cores:
        return Finding(what="processor", verdict="ok", found=found)
    effect = "it is busy: rates that are measured now are too low, here and when a training begins"
    return Finding(what="processor", verdict="slow", found=found, effect=effect, remedy="end what else runs, and look again")


_PINNED_BYTES = 64 << 20


def _memory() -> Iterator[Finding]:
    """Yield the limit of host memory. On a machine with a GPU, pins and unpins 64 MiB."""
    lowest = min(host_limits(), key=lambda limit: limit.available_bytes)
    yield Finding(what="host memory", verdict="ok", found=f"{lowest.what} {format_bytes(lowest.available_bytes)}")
    if torch.cuda.is_available():
        yield _pinning()


def _pinning() -> Finding:
    pinner, memory = CudaPinner(torch.device("cuda")), mmap.mmap(-1, _PINNED_BYTES)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    try:
        pinner.pin(address, _PINNED_BYTES)
        pinner.unpin(address, _PINNED_BYTES)
    except StorageError as error:
        return Finding(
            what="pinned memory",
            verdict="slow",
            found=str(error),
            effect="copies between GPU and host memory are slower, and wait for the processor",
            remedy="raise the limit on locked memory: ulimit -l unlimited, or docker run --ulimit memlock=-1",
        )
    return Finding(what="pinned memory", verdict="ok", found=f"works; limit on locked memory: {locked_limit()}")


_SLOW = 1e9  # bytes per second in each direction, while both are busy, below which a drive holds most trainings up
_LITTLE_ROOM = 32 << 30
_IN_MEMORY = ("tmpfs", "ramfs")


def _drive(directory: Path, device: torch.device) -> Iterator[Finding]:
    """Try and measure the paths between `device` and a directory. Takes seconds, and some hundred MiB there meanwhile."""
    what = f"storage {directory}"
    if not directory.is_dir():
        yield Finding(what=what, verdict="missing", found="there is no such directory", remedy=f"mkdir -p {directory}")
        return
    candidates = (
        cuda_candidates([directory], device, budget_bytes=None, checksums=False)
        if device.type == "cuda"
        else cpu_candidates([directory], budget_bytes=None)
    )
    try:
        path = choose_path(candidates, open_engine=lambda store: Engine(store, memory=TorchMemory(device)))
    except TeraioError as error:
        yield Finding(what=what, verdict="missing", found=str(error), effect="no block can wait there")
    else:
        how = path.store.description if isinstance(path.store, KvikioStore) else path.name
        path.close()
        yield _speed(what, path.name, how, path.rates)
        for name, reason in path.refused.items():
            yield Finding(what=what, verdict="note", found=f"the path {name!r} is not used: {reason}")
    yield from _place(what, directory)


def _speed(what: str, name: str, how: str, rates: LinkRates) -> Finding:
    both = min(each.duplex_bytes_per_second for each in rates)
    found = f"path {how!r}: {rates}"
    if name == "buffered":
        effect = "spill files go through the page cache, which is host memory that no budget counts"
        remedy = "give a directory on a file system with direct I/O, such as ext4 or xfs"
    elif both < _SLOW:
        effect = "training waits for it unless little has to move"
        remedy = "give a directory on an NVMe drive, several such directories, or a host_budget"
    else:
        return Finding(what=what, verdict="ok", found=found)
    return Finding(what=what, verdict="slow", found=found, effect=effect, remedy=remedy)


def _place(what: str, directory: Path) -> Iterator[Finding]:
    place = directory.resolve()
    inside = [each for each in psutil.disk_partitions(all=True) if place.is_relative_to(each.mountpoint)]
    innermost = max(inside, key=lambda each: len(Path(each.mountpoint).parts), default=None)
    kind = "unknown" if innermost is None else innermost.fstype
    if kind in _IN_MEMORY:
        yield Finding(
            what=what,
            verdict="slow",
            found=f"the file system is {kind}: it is memory, not a drive",
            effect="blocks that wait there take main memory, which no budget counts",
            remedy="give a directory on a drive; for main memory, give host_budget",
        )
    free = shutil.disk_usage(directory).free
    little = free < _LITTLE_ROOM
    found, effect = f"{format_bytes(free)} free ({kind})", "large models need more" if little else ""
    yield Finding(what=what, verdict="note" if little else "ok", found=found, effect=effect)


# -- its description

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
        operator_seconds=_seconds(lambda: tiny.add_(1.0)) if on_gpu else 0.0,
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
    return 2.0 * side**3 / _seconds(lambda: torch.mm(factor, factor, out=product))


def _memory_rate(device: torch.device, size_bytes: int) -> float:
    """Bytes read and written in a second by a copy within the device's memory."""
    source = torch.zeros(size_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2.0 * size_bytes / _seconds(lambda: target.copy_(source))


def _host_update_rate() -> float:
    parameter = torch.zeros(_UPDATED_ELEMENTS)
    parameter.grad = torch.ones_like(parameter)
    optimizer = torch.optim.AdamW([parameter], fused=True)
    return _UPDATED_ELEMENTS / _seconds(optimizer.step)


def _seconds(work: Callable[[], object]) -> float:
    """Return the seconds of one run of `work`, until the device has done it: the median of PyTorch's own measurement."""
    from torch.utils.benchmark import Timer  # takes long to import

    timer = Timer("work()", globals={"work": work}, num_threads=torch.get_num_threads())
    return timer.blocked_autorange(min_run_time=_SECONDS).median
