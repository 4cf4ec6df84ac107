"""The tiers of this machine that the options allow: device memory, host memory, drives, and the links between them."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch

import planner
from planner.errors import StorageFullError, UnsupportedError
from runtime.paging import StorageOwnership
from runtime.storage import HostStore
from teraio.machine.cpu import open_cpu
from teraio.machine.cuda import open_cuda
from teraio.machine.tiers import MachineTiers, MeasuredPaths, OpenTier
from teraio.options import Options
from teraio.ranks import RankGroup

logger = logging.getLogger("teraio")

_INDEPENDENT = 0.95
"""Two links are independent if together they carry at least this share of the sum of what each carries alone."""

OpenTiers = Callable[[Options, torch.device, MeasuredPaths, StorageOwnership], MachineTiers]
"""Opens the tiers for a device."""


def open_tiers(options: Options, device: torch.device, measured: MeasuredPaths, ownership: StorageOwnership) -> MachineTiers:
    """Open the tiers of a CPU or GPU.

    Raises UnsupportedError for other devices, OptionsError, StorageError, StorageFullError.
    """
    if device.type == "cpu":
        return open_cpu(options, measured, ownership)
    if device.type == "cuda":
        return open_cuda(options, device, measured, ownership)
    raise UnsupportedError(f"teraio does not know devices of type {device.type!r}; train on cpu or cuda")


class Machine:
    """Opens the lower tiers if the options give any, and measures their links.

    device: where stages run. budget_bytes: the device budget; None if there is no limit. mover: None if there is no lower tier.
    memory: the memory that stages allocate from; None if it cannot be measured. measured_runs: in how many of its runs a stage is
    measured there; None for all. allocator: of the device, None on the CPU. reserve: see `Reserve`; None without a hard limit.
    ranks: those of this machine that open theirs at the same time: links are measured once more, by one rank after the other and
    then by all together. Plans use the last rates.
    The arguments `measured` and `ownership` are shared by all machines of a process; default: new ones. `open_tiers`: for tests.
    Raises OptionsError, UnsupportedError, StorageError, StorageFullError.
    """

    def __init__(
        self,
        options: Options,
        device: torch.device,
        *,
        measured: MeasuredPaths | None = None,
        ownership: StorageOwnership | None = None,
        open_tiers: OpenTiers = open_tiers,
        ranks: RankGroup | None = None,
    ) -> None:
        self._opened = open_tiers(options, device, measured or MeasuredPaths(), ownership or StorageOwnership())
        if ranks is not None:
            try:
                self._opened = replace(self._opened, tiers=_measured_by_all(self._opened.tiers, ranks))
            except BaseException:
                self.close()
                raise
        self.device = self._opened.device
        self.budget_bytes = self._opened.budget_bytes
        self.mover = self._opened.mover
        self.memory = self._opened.memory
        self.measured_runs = self._opened.measured_runs
        self.allocator = self._opened.allocator
        self.reserve = self._opened.reserve

    @property
    def host_bytes(self) -> int | None:
        """Capacity of the host tier; None if there is no host tier."""
        return next((each.tier.store.capacity_bytes for each in self._opened.tiers if each.tier.name == "host"), None)

    @contextlib.contextmanager
    def host_scratch(self, size_bytes: int) -> Iterator[int | None]:
        """Reserve memory of the host tier within the block. Gives its address, or None if no contiguous range is large enough.

        Waits for the device: copies of the block that had the memory before may still use it (rule 7).
        """
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
            self.device.synchronize()
            yield slot.address
        finally:
            store.release(slot)

    def trim(self) -> None:
        """Free memory that is kept for reuse and exceeds what the budget leaves. For a time when no block is away."""
        self._opened.trim()

    def lift_limit(self) -> None:
        """Allow the device to hold more than the budget from now on. Call it before everything is brought back."""
        self._opened.lift_limit()

    def ensure_room(self, size_bytes: int) -> None:
        """Reserve room in the spill files for what the host tier cannot hold of `size_bytes`. Raises StorageFullError."""
        missing = size_bytes - (self.host_bytes or 0)
        if not self._opened.tiers or missing <= 0:
            return
        last = self._opened.tiers[-1]
        last.tier.store.ensure_capacity(missing if last.tier.name == "storage" else size_bytes)

    def hardware(self) -> planner.Hardware:
        """Return capacities and measured link rates, for the trace."""
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

    def used_bytes(self) -> dict[str, int]:
        """Return the bytes of the slots in each lower tier that has any."""
        used = {each.tier.name: each.tier.store.used_bytes for each in self._opened.tiers}
        return {name: size_bytes for name, size_bytes in used.items() if size_bytes}

    def moved_bytes(self) -> dict[str, int]:
        """Return the bytes moved since the start, by link."""
        return {link: size for each in self._opened.tiers for link, size in each.moved_bytes().items()}

    def busy_seconds(self) -> dict[str, float]:
        """Return the seconds in which each link was copying since the start, by link."""
        return {link: seconds for each in self._opened.tiers for link, seconds in each.busy_seconds().items()}

    def spill_directories(self) -> tuple[str, ...]:
        """Return the directories of the spill files."""
        return tuple(str(path) for each in self._opened.tiers for path in each.tier.store.directories)

    def close(self) -> None:
        """Stop the I/O threads, free the host tier and remove the spill files. A failure of one does not keep the others.

        Waits until copies in flight have ended. Raises StorageError if a drive no longer answers.
        """
        self._opened.undo.close()


def _measured_by_all(tiers: Sequence[OpenTier], ranks: RankGroup) -> list[OpenTier]:
    """Return the tiers with the rates that all ranks reach when they copy at the same time, and those of each rank alone."""
    with ranks.turn("measuring its links alone"):
        alone = [each.measure() for each in tiers]
    ranks.gather("measuring all links")
    found = [replace(each, rates=each.measure(), alone=rates) for each, rates in zip(tiers, alone, strict=True)]
    ranks.gather("ending the measurement")
    for each, rates in zip(found, alone, strict=True):
        logger.info(
            "rates to and from the %s tier with all %d ranks of this machine, GB/s: %.2f and %.2f; alone %.2f and %.2f",
            each.tier.name,
            len(ranks.ranks),
            *(rate / 1e9 for rate in (each.rates.write_bytes_per_second, each.rates.read_bytes_per_second)),
            *(rate / 1e9 for rate in (rates.write_bytes_per_second, rates.read_bytes_per_second)),
        )
    return found


def _shared(tier: OpenTier) -> tuple[planner.SharedRate, ...]:
    """Return the rate that the tier's two links share, if they slow each other down."""
    both = tier.rates.duplex_write_bytes_per_second + tier.rates.duplex_read_bytes_per_second
    links = tier.links()
    if both >= _INDEPENDENT * sum(link.bytes_per_second for link in links):
        return ()
    name = "drives" if tier.tier.name == "storage" else "host memory"
    return (planner.SharedRate(name=name, links=tuple(link.name for link in links), bytes_per_second=both),)
