"""The machine of a training run: its device, its lower tiers, the links between them, and how to close everything."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

import planner
from planner.errors import StorageFullError
from planner.schema import WaitingTier
from runtime.device import Device
from runtime.execution import MeasuredMemory
from runtime.paging import Mover, StorageOwnership, Tier
from runtime.storage import HostStore, Store
from runtime.transfer import Engine, LinkRates, OpenEngine, PathCandidate, StoragePath, choose_path, open_path
from teraio.machine.budgets import ResolvedBudgets
from teraio.options import Options

logger = logging.getLogger("teraio")


# Two links are independent if together they carry at least this share of the sum of what each carries alone.
_INDEPENDENT = 0.95
_IO_THREADS = 4  # I/O threads for each direction of a drive, of all ranks together


def io_threads(options: Options) -> int:
    """Return how many I/O threads this rank has for each direction of a drive."""
    return max(_IO_THREADS // options.local_ranks, 1)


@dataclass(slots=True)
class Shared:
    """What the machines of a process share: paths, each measured only once, and which mover owns which storage.

    storage: name and rates of the path that was chosen, by the drives of the storage directories and by the options that matter.
    host: rates of copies in main memory; None before they are measured.
    """

    storage: dict[Hashable, tuple[str, LinkRates]] = field(default_factory=dict)
    host: LinkRates | None = None
    ownership: StorageOwnership = field(default_factory=StorageOwnership)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenTier:
    """An open lower tier.

    path: how blocks are copied there, in a word or two. measure: measures the rates again, which waits for that.
    alone: rates while the other ranks of the machine were idle, where `rates` are those with all busy.
    moved_bytes, busy_seconds: return the totals since the start, by link.
    """

    tier: Tier
    rates: LinkRates
    path: str
    measure: Callable[[], LinkRates]
    alone: LinkRates | None = None
    moved_bytes: Callable[[], Mapping[str, int]]
    busy_seconds: Callable[[], Mapping[str, float]]

    @classmethod
    def with_threads(cls, name: WaitingTier, store: Store, engine: Engine, rates: LinkRates, path: str) -> OpenTier:
        """Return a tier whose blocks are copied by the threads of `engine`."""
        return cls(
            tier=Tier(name=name, store=store, engine=engine),
            rates=rates,
            path=path,
            measure=engine.measure,
            moved_bytes=lambda: {link: each.moved_bytes for link, each in engine.links.items()},
            busy_seconds=lambda: {link: each.busy_seconds for link, each in engine.links.items()},
        )

    def links(self) -> tuple[planner.Link, planner.Link]:
        """Return the link to the tier and the link back, for the trace."""
        name, rates, alone = self.tier.name, self.rates, self.alone
        return (
            planner.Link(
                from_tier="device",
                to_tier=name,
                path=self.path,
                bytes_per_second=rates.write_bytes_per_second,
                latency_seconds=rates.write_latency_seconds,
                alone_bytes_per_second=None if alone is None else alone.write_bytes_per_second,
            ),
            planner.Link(
                from_tier=name,
                to_tier="device",
                path=self.path,
                bytes_per_second=rates.read_bytes_per_second,
                latency_seconds=rates.read_latency_seconds,
                alone_bytes_per_second=None if alone is None else alone.read_bytes_per_second,
            ),
        )

    def shared_rates(self) -> tuple[planner.SharedRate, ...]:
        """Return the rate that its two links share, if they slow each other down."""
        both = self.rates.duplex_write_bytes_per_second + self.rates.duplex_read_bytes_per_second
        links = self.links()
        if both >= _INDEPENDENT * sum(link.bytes_per_second for link in links):
            return ()
        name = "drives" if self.tier.name == "storage" else "host memory"
        return (planner.SharedRate(name=name, links=tuple(link.name for link in links), bytes_per_second=both),)


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The device, its lower tiers and what belongs to them, opened for one training run.

    mover: None if there is no lower tier. memory: the memory that stages allocate from; None if it cannot be measured.
    measured_runs: in how many of its runs a stage is measured there; None for all. tiers: the lower tiers, fastest first.
    bus: rates that links of different tiers share. reserved_bytes: returns what an allocator has taken from the device, handed
    out or not; None on the CPU.
    trim: frees memory that is kept for reuse and exceeds what the budget leaves; for a time when no block is away.
    free_bytes: returns what the device has free, whatever the budget; 0 where nobody needs more than the budget at the end.
    lift_limit: allows the device to hold more than the budget, for the end. described: takes the place of what is measured.
    undo: closes everything.
    """

    name: str
    device: Device
    device_memory_bytes: int
    budgets: ResolvedBudgets
    memory: MeasuredMemory | None
    measured_runs: int | None = None
    mover: Mover | None
    tiers: Sequence[OpenTier] = ()
    bus: tuple[planner.SharedRate, ...] = ()
    reserved_bytes: Callable[[], int | None] = lambda: None
    trim: Callable[[], None] = lambda: None
    free_bytes: Callable[[], int] = lambda: 0
    lift_limit: Callable[[], None] = lambda: None
    described: planner.Hardware | None = None
    undo: ExitStack

    @property
    def host_bytes(self) -> int | None:
        """Capacity of the host tier; None if there is no host tier."""
        return next((each.tier.store.capacity_bytes for each in self.tiers if each.tier.name == "host"), None)

    @contextlib.contextmanager
    def host_scratch(self, size_bytes: int) -> Iterator[int | None]:
        """Reserve memory of the host tier within the block. Gives its address, or None if no contiguous range is large enough.

        Waits for the device: copies of the block that had the memory before may still use it (rule 7).
        """
        store = next((each.tier.store for each in self.tiers if each.tier.name == "host"), None)
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

    def ensure_room(self, size_bytes: int) -> None:
        """Reserve room in the spill files for what the host tier cannot hold of `size_bytes`. Raises StorageFullError."""
        missing = size_bytes - (self.host_bytes or 0)
        if not self.tiers or missing <= 0:
            return
        last = self.tiers[-1]
        last.tier.store.ensure_capacity(missing if last.tier.name == "storage" else size_bytes)

    def hardware(self) -> planner.Hardware:
        """Return capacities and measured link rates, for the trace."""
        if self.described is not None:
            return self.described
        tiers = self.tiers
        storage = sum(each.tier.store.limit_bytes for each in tiers if each.tier.name == "storage")
        return planner.Hardware(
            name=self.name,
            device_memory_bytes=self.device_memory_bytes,
            host_memory_bytes=self.host_bytes or 0,
            storage_bytes=storage,
            links=tuple(link for each in tiers for link in each.links()),
            shared=(*(rate for each in tiers for rate in each.shared_rates()), *self.bus),
        )

    def used_bytes(self) -> dict[str, int]:
        """Return the bytes of the slots in each lower tier that has any."""
        used = {each.tier.name: each.tier.store.used_bytes for each in self.tiers}
        return {name: size_bytes for name, size_bytes in used.items() if size_bytes}

    def moved_bytes(self) -> dict[str, int]:
        """Return the bytes moved since the start, by link."""
        return {link: size for each in self.tiers for link, size in each.moved_bytes().items()}

    def busy_seconds(self) -> dict[str, float]:
        """Return the seconds in which each link was copying since the start, by link."""
        return {link: seconds for each in self.tiers for link, seconds in each.busy_seconds().items()}

    def close(self) -> None:
        """Stop the I/O threads, free the host tier and remove the spill files. A failure of one does not keep the others.

        Waits until copies in flight have ended. Raises StorageError if a drive no longer answers.
        """
        self.undo.close()


def open_storage(
    options: Options, candidates: Sequence[PathCandidate], open_engine: OpenEngine, device: str, shared: Shared, undo: ExitStack
) -> OpenTier:
    """Open the path to the drives that the options ask for, or the fastest one. Measures it unless `shared` knows it.

    undo: gets the calls that close the tier. Raises UnsupportedError, StorageError, StorageFullError.
    """
    forced = None if options.storage_path == "auto" else options.storage_path
    drives = tuple(path.stat().st_dev for path in options.storage if path.is_dir())  # a missing one is reported when it is opened
    key = device, drives, forced, options.checksums
    path: StoragePath
    if key in shared.storage:
        path = open_path(candidates, *shared.storage[key], open_engine=open_engine)
    else:
        path = choose_path(candidates, open_engine=open_engine, forced=forced)
        shared.storage[key] = path.name, path.rates
    undo.callback(path.store.close)
    undo.callback(path.engine.close)
    return OpenTier.with_threads("storage", path.store, path.engine, path.rates, path.name)
