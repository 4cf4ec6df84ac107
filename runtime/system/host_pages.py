"""Where the pages of host memory lie, and how they are pinned: near the device, so that it copies at full rate.

A page of memory lies on the node of the processor that touches it first (Linux, admin-guide/mm/numa_memory_policy). A copy
between a device and memory of another node crosses the bus between the sockets. So the threads that touch the pages of the
host tier first run on the device's node. A GPU copies from and to pinned memory at full rate and without the processor.
"""

from __future__ import annotations

import logging
import os
import resource
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from planner.errors import StorageError

# Memory is pinned in chunks of this size. No copy may cross from one chunk into the next: the driver refuses a call with
# memory of two registrations.
PIN_CHUNK_BYTES = 1 << 30

# cudaHostRegisterPortable: pinned for all devices. cudaHostRegisterMapped: kernels can read it at its own address.
_PORTABLE, _MAPPED = 1, 2

_log = logging.getLogger(__name__)


def pci_address(domain: int, bus: int, device: int) -> str:
    """Return the name of a PCI device in sysfs. For a GPU: `torch.cuda.get_device_properties(...).pci_domain_id` and so on."""
    return f"{domain:04x}:{bus:02x}:{device:02x}.0"


def processors_near(pci: str, root: Path = Path("/")) -> frozenset[int] | None:
    """Return the processors of a PCI device's node. None if there is only one node or it is unknown; the log says which."""
    nodes = list((root / "sys/devices/system/node").glob("node[0-9]*"))
    node = _node_of(pci, root)
    if len(nodes) < 2:
        reason = "the machine has one node of memory"
    elif node is None:
        reason = "the system does not know the device's node"
    elif not (near := _processors_of(node, root)):
        reason = f"node {node} has no processors"
    else:
        return near
    _log.info("host memory is not placed near device %s: %s", pci, reason)
    return None


def _node_of(pci: str, root: Path) -> int | None:
    try:
        node = int((root / "sys/bus/pci/devices" / pci.lower() / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None  # -1: the firmware does not say


def _processors_of(node: int, root: Path) -> frozenset[int]:
    """Return the processors of a node. The set is empty if there is no such node, or if the node has only memory."""
    try:
        text = (root / f"sys/devices/system/node/node{node}/cpulist").read_text().strip()
    except OSError:
        return frozenset()
    found: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)


@contextmanager
def on_processors(processors: frozenset[int] | None) -> Iterator[None]:
    """Run the calling thread only on those of `processors` that this process may use, until the context ends.

    If `processors` is None, the thread keeps its processors. It also keeps them if this process may use none of
    `processors`; this is logged.
    """
    allowed = os.sched_getaffinity(0)
    chosen = allowed & processors if processors is not None else allowed
    if not chosen:
        _log.info("host memory is not placed near the device: this process may not run on %s", sorted(processors or ()))
        chosen = allowed
    os.sched_setaffinity(0, chosen)
    try:
        yield
    finally:
        os.sched_setaffinity(0, allowed)


class CudaPinner:
    """Pins and unpins pages for copies by `device`: `cudaHostRegister`, portable and mapped, in chunks of PIN_CHUNK_BYTES.

    Both calls wait for the driver. Addresses and sizes are whole pages.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def pin(self, address: int, size_bytes: int) -> None:
        """Pin the range. Raises StorageError with value, limit and remedy; then nothing stays pinned."""
        _in_separate_thread(lambda: self._pin(address, size_bytes))

    def unpin(self, address: int, size_bytes: int) -> None:
        """Undo `pin` of the same range. To be called before the memory is freed: the driver would take what lies there next for
        pinned memory, and refuse copies. A warning says if it does not let go."""

        def unpin() -> None:
            for chunk, length in _chunks(address, size_bytes):
                if (failure := self._unregister(chunk)) is not None:
                    _log.warning("%s bytes of host memory stay pinned at %#x: %s", f"{length:,}", chunk, failure)

        _in_separate_thread(unpin)

    def _pin(self, address: int, size_bytes: int) -> None:
        with ExitStack() as undo:
            for chunk, length in _chunks(address, size_bytes):
                failure = self._register(chunk, length)
                if failure is not None:
                    raise StorageError(
                        f"cannot pin {size_bytes:,} bytes of host memory: {failure} after {chunk - address:,} bytes (limit on "
                        f"locked memory: {locked_limit()}); raise the limit (ulimit -l, or the container's), or lower "
                        "host_budget"
                    )
                undo.callback(self._unregister, chunk)
            undo.pop_all()

    def _register(self, address: int, size_bytes: int) -> str | None:
        """Return an error message, None for success."""
        with torch.cuda.device(self._device):
            return _failure(_cudart().cudaHostRegister(address, size_bytes, _PORTABLE | _MAPPED))

    def _unregister(self, address: int) -> str | None:
        with torch.cuda.device(self._device):
            return _failure(_cudart().cudaHostUnregister(address))


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _failure(code: Any) -> str | None:
    return None if int(code) == 0 else f"CUDA error {int(code)} ({_cudart().cudaGetErrorString(code)})"


def _chunks(address: int, size_bytes: int) -> list[tuple[int, int]]:
    return [(address + begin, min(PIN_CHUNK_BYTES, size_bytes - begin)) for begin in range(0, size_bytes, PIN_CHUNK_BYTES)]


def _in_separate_thread(work: Callable[[], object]) -> None:
    """Run `work` in a new thread and wait for it."""
    # CUDA keeps the last error of each thread. After a failed call here, PyTorch would take that error for one of its next
    # kernel. In a new thread, the error goes with the thread.
    with ThreadPoolExecutor(1) as thread:
        thread.submit(work).result()


def locked_limit() -> str:
    """Return how much memory the system lets this process lock, as text."""
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return "unlimited" if limit == resource.RLIM_INFINITY else f"{limit:,} bytes"
