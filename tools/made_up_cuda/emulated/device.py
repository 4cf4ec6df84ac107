"""The emulated GPU of this process: `install` gives it its machine, `Clock` tells where its time went."""

from __future__ import annotations

import ctypes
import importlib
import os
import threading
import time
from typing import Any

import torch

from planner.schema import Link
from teraio.capturing.hardware import MachineDescription
from teraio.stages import operator_kernel
from tools.made_up_cuda.emulated.build import MACHINE_VARIABLE, OPERATORS


class _Machine(ctypes.Structure):
    """`EmulatedMachine` of timeline.hpp."""

    _fields_ = [
        (name, ctypes.c_double)
        for name in (
            "launch_seconds",
            "device_bytes_per_second",
            "out_bytes_per_second",
            "out_latency_seconds",
            "in_bytes_per_second",
            "in_latency_seconds",
        )
    ]


class _Times(ctypes.Structure):
    """`EmulatedTimes` of timeline.hpp."""

    _fields_ = [
        *((name, ctypes.c_double) for name in ("computed", "awaited_copies", "awaited_host", "awaited_python", "out", "in")),
        *((name, ctypes.c_ulonglong) for name in ("kernels", "copies", "out_bytes", "in_bytes")),
    ]


def install() -> MachineDescription:
    """Let the GPU of this process be the machine that the environment names, see `build.environment`. Return its description.

    Teraio's host tier takes no pages from the system, its spill files take no room, and reads and writes of them only take their
    time, so it does not compare what comes back. Attention is PyTorch's own flash kernel, since cuDNN is not made up.
    """
    description = MachineDescription.load(os.environ[MACHINE_VARIABLE])
    links = {link.name: link for link in description.hardware.links}
    outward, inward = links["device->host"], links["host->device"]
    machine = _Machine(
        description.launch_seconds,
        description.memory_bytes_per_second * description.memory_efficiency,
        outward.bytes_per_second,
        outward.latency_seconds,
        inward.bytes_per_second,
        inward.latency_seconds,
    )
    ctypes.CDLL(None).emulated_machine(ctypes.byref(machine))
    torch.backends.cuda.enable_cudnn_sdp(False)

    def seconds(name: str, overload: str, arguments: list[Any], results: list[Any]) -> float:
        space, base = name.split("::")
        operator = getattr(getattr(getattr(torch.ops, space), base), overload or "default")
        named = dict(zip((each.name for each in operator._schema.arguments), arguments, strict=False))
        kernel = operator_kernel(operator, named, results)
        return description.launch_seconds if kernel is None else description.seconds(kernel)

    rate = description.hardware.host_update_elements_per_second
    importlib.import_module(OPERATORS).observe(seconds, rate or 1e9)
    keep_no_bytes(Drive(links["device->storage"]), Drive(links["storage->device"]), description.hardware.storage_bytes)
    return description


def times(*, reset: bool = False) -> dict[str, float]:
    """Return where the time of the device went since the last reset, in seconds; see timeline.hpp."""
    found = _Times()
    ctypes.CDLL(None).emulated_times(ctypes.byref(found), int(reset))
    return {field[0]: float(getattr(found, field[0])) for field in _Times._fields_}


class Drive:
    """One direction of a drive: one request after another, each for latency + bytes / rate."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._lock = threading.Lock()
        self._free_at = 0.0

    def wait(self, size_bytes: int) -> None:
        """Wait as long as a request of so many bytes would take now."""
        with self._lock:
            began = max(self._free_at, time.monotonic())
            self._free_at = end = began + self._link.latency_seconds + size_bytes / self._link.bytes_per_second
        time.sleep(max(end - time.monotonic(), 0.0))


def keep_no_bytes(write: Drive, read: Drive, storage_bytes: int) -> None:
    """Let lower tiers of this process keep nothing: copies to and from files only take the time of these drives."""
    from runtime.storage import file_copies, file_space, host
    from runtime.transfer import Engine

    def copy(action: str, call: Any, slot: Any, chunk: Any, address: int, size_bytes: int) -> None:
        (write if action == "write" else read).wait(size_bytes)

    changes: tuple[tuple[Any, str, Any], ...] = (
        (host.HostStore, "_prefault", lambda self, processors: None),
        (host, "check_host_memory", lambda size_bytes, limits: None),
        (file_copies, "copy_all", copy),
        (os, "posix_fallocate", lambda file, offset, length: os.ftruncate(file, offset + length)),
        (file_space.SpillFile, "available_bytes", property(lambda self: storage_bytes)),
        (Engine, "verify", lambda self, size_bytes=0: None),
    )
    for owner, name, function in changes:
        if not hasattr(owner, name):
            raise AttributeError(f"{owner!r} has no {name} any more: it would do real work here")
        setattr(owner, name, function)
