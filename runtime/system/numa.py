"""Finds the processors that are near a device, and so the memory that is near it.

A page of memory lies on the node of the processor that touches it first (Linux, admin-guide/mm/numa_memory_policy). A copy
between a device and memory of another node crosses the bus between the sockets. So the threads that touch the pages of the
host tier first run on the device's node.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_log = logging.getLogger(__name__)


def pci_address(domain: int, bus: int, device: int) -> str:
    """Return the name of a PCI device in sysfs. For a GPU: `torch.cuda.get_device_properties(...).pci_domain_id` and so on."""
    return f"{domain:04x}:{bus:02x}:{device:02x}.0"


def node_of(pci: str, root: Path = Path("/")) -> int | None:
    """Return the node that a PCI device is attached to, None if the system does not know it."""
    try:
        node = int((root / "sys/bus/pci/devices" / pci.lower() / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def processors_of(node: int, root: Path = Path("/")) -> frozenset[int]:
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


def processors_near(pci: str, root: Path = Path("/")) -> frozenset[int] | None:
    """Return the processors of a PCI device's node. None if there is only one node or it is unknown; the log says which."""
    nodes = list((root / "sys/devices/system/node").glob("node[0-9]*"))
    node = node_of(pci, root)
    if len(nodes) < 2:
        reason = "the machine has one node of memory"
    elif node is None:
        reason = "the system does not know the device's node"
    elif not (near := processors_of(node, root)):
        reason = f"node {node} has no processors"
    else:
        return near
    _log.info("host memory is not placed near device %s: %s", pci, reason)
    return None


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
