"""The tiers of this machine as far as the options allow them: device memory, host memory, drives, and the links between."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

import planner
from planner.errors import StorageFullError, UnsupportedError
from runtime.storage import HostStore
from teraio.machine.cpu import open_cpu
from teraio.machine.cuda import open_cuda
from teraio.machine.tiers import MachineTiers, OpenTier
from teraio.options import Options

_INDEPENDENT = 0.95
"""Links that together carry this share of the sum of what each carries alone share nothing."""


class Machine:
    """Opens the lower tiers if something may have to move, and measures their links.

    device: where stages run. budget_bytes: the device budget, None where nothing limits it. mover: None where blocks have
    nowhere to go. memory: what stages allocate from, None if it cannot be asked.
    Raises UnsupportedError, StorageError, StorageFullError.
    """

    def __init__(self, options: Options, device: torch.device) -> None:
        self._opened = _open(options, device)
        self.device = self._opened.device
        self.budget_bytes = self._opened.budget_bytes
        self.mover = self._opened.mover
        self.memory = self._opened.memory
        self.measured_runs = self._opened.measured_runs

    @property
    def host_bytes(self) -> int | None:
        """Capacity of the host tier, None where there is none."""
        return next((each.tier.store.capacity_bytes for each in self._opened.tiers if each.tier.name == "host"), None)

    @contextlib.contextmanager
    def host_scratch(self, size_bytes: int) -> Iterator[int | None]:
        """Memory of the host tier for a while: its address, None if there is not so much of it in one piece."""
        store = next((each.tier.store for each in self._opened.tiers if each.tier.name == "host"), None)
        if not isinstance(store, HostStore):
            yield None
            return
        try:
            slot = store.allocate(size_bytes, "scratch")
        except StorageFullError:
            yield None
            return
        try:
            yield store.address_of_slot(slot)
        finally:
            store.release(slot)

    def trim(self) -> None:
        """While nothing is away: let free memory that is kept for reuse not exceed what the budget leaves."""
        self._opened.trim()

    def lift_limit(self) -> None:
        """Before everything is brought back: the device may hold more than the budget from now on."""
        self._opened.lift_limit()

    def ensure_room(self, size_bytes: int) -> None:
        """Reserve room in the spill files for what the host tier cannot hold. Raises StorageFullError if there is too little."""
        missing = size_bytes - (self.host_bytes or 0)
        if not self._opened.tiers or missing <= 0:
            return
        last = self._opened.tiers[-1]
        last.tier.store.ensure_capacity(missing if last.tier.name == "storage" else size_bytes)

    def hardware(self) -> planner.Hardware:
        """Capacities and measured link rates, for the trace."""
        tiers = self._opened.tiers
        storage = sum(each.tier.store.limit_bytes for each in tiers if each.tier.name == "storage")
        return planner.Hardware(
            name=self._opened.name,
            device_memory_bytes=self._opened.device_memory_bytes,
            host_memory_bytes=self.host_bytes or 0,
            storage_bytes=storage,
            links=tuple(link for each in tiers for link in each.links()),
            shared=(*(rate for each in tiers for rate in _shared(each)), *self._opened.shared),
        )

    def moved_bytes(self) -> dict[str, int]:
        """Bytes moved since the start, by link."""
        return {link: size for each in self._opened.tiers for link, size in each.moved_bytes().items()}

    def busy_seconds(self) -> dict[str, float]:
        """Seconds in which each link was moving something, since the start."""
        return {link: seconds for each in self._opened.tiers for link, seconds in each.busy_seconds().items()}

    def spill_directories(self) -> tuple[str, ...]:
        """Where the spill files are."""
        return tuple(str(path) for each in self._opened.tiers for path in each.tier.store.directories)

    def close(self) -> None:
        """Stop the I/O threads, free the host tier and remove the spill files, also where that fails for one of them.

        Blocks until copies in flight have ended. Raises StorageError where a drive does not answer any more.
        """
        self._opened.undo.close()


def _open(options: Options, device: torch.device) -> MachineTiers:
    if device.type == "cpu":
        return open_cpu(options)
    if device.type == "cuda":
        return open_cuda(options, device)
    raise UnsupportedError(f"teraio does not know devices of type {device.type!r}; train on cpu or cuda")


def _shared(tier: OpenTier) -> tuple[planner.SharedRate, ...]:
    """A rate that the tier's two links share, if they slow each other down."""
    both = tier.rates.duplex_write_bytes_per_second + tier.rates.duplex_read_bytes_per_second
    links = tier.links()
    if both >= _INDEPENDENT * sum(link.bytes_per_second for link in links):
        return ()
    name = "drives" if tier.tier.name == "storage" else "host memory"
    return (planner.SharedRate(name=name, links=tuple(link.name for link in links), bytes_per_second=both),)
