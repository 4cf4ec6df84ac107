"""The opened tiers of a machine: device, lower tiers, the mover between them, and how to close everything."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial

import planner
from planner.schema import WaitingTier
from runtime.device import Device
from runtime.execution import MeasuredMemory
from runtime.paging import Mover, Tier
from runtime.storage import Store
from runtime.transfer import Engine, LinkRates, OpenEngine, PathCandidate, StoragePath, choose_path, open_path
from teraio.machine.reserve import Allocator, Reserve
from teraio.options import Options

_IO_THREADS = 4
"""I/O threads for each direction of a drive, of all ranks together."""


def io_threads(options: Options) -> int:
    """Return how many I/O threads this rank has for each direction of a drive."""
    return max(_IO_THREADS // options.local_ranks, 1)


@dataclass(slots=True)
class MeasuredPaths:
    """What was measured of this machine, so that each path is measured only once in a process.

    storage: name and rates of the path that was chosen, by the drives of the storage directories and by the options that matter.
    host: rates of copies in main memory; None before they are measured.
    """

    storage: dict[Hashable, tuple[str, LinkRates]] = field(default_factory=dict)
    host: LinkRates | None = None


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


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineTiers:
    """The device, its lower tiers and what belongs to them, opened for one training run.

    budget_bytes: the device budget; None if there is no limit. mover: None if there is no lower tier.
    memory: the memory that stages allocate from; None if it cannot be measured. measured_runs: in how many of its runs a stage is
    measured there; None for all. tiers: the lower tiers, fastest first. shared: rates that links of different tiers share.
    allocator: counts what it takes from the device; None on the CPU.
    reserve: what blocks leave to the gaps between them, where an allocator needs that; see `Reserve`.
    trim: frees memory that is kept for reuse and exceeds what the budget leaves. lift_limit: allows the device to hold more than
    the budget, for the end, when all blocks come back. undo: closes everything.
    """

    name: str
    device: Device
    device_memory_bytes: int
    memory: MeasuredMemory | None
    measured_runs: int | None = None
    budget_bytes: int | None = None
    mover: Mover | None
    tiers: Sequence[OpenTier] = ()
    shared: tuple[planner.SharedRate, ...] = ()
    reserve: Reserve | None = None
    allocator: Allocator | None = None
    trim: Callable[[], None] = field(default=lambda: None)
    lift_limit: Callable[[], None] = field(default=lambda: None)
    undo: ExitStack


def open_storage(
    options: Options,
    candidates: Sequence[PathCandidate],
    open_engine: OpenEngine,
    device: str,
    measured: MeasuredPaths,
    undo: ExitStack,
) -> OpenTier:
    """Open the path to the drives that the options ask for, or the fastest one. Measures it unless `measured` knows it.

    undo: gets the calls that close the tier. Raises UnsupportedError, StorageError, StorageFullError.
    """
    forced = None if options.storage_path == "auto" else options.storage_path
    drives = tuple(path.stat().st_dev for path in options.storage if path.is_dir())  # a missing one is reported when it is opened
    key = device, drives, forced, options.checksums
    if options.unlink_spill_files:
        candidates = [replace(each, open=partial(_open_unlinked, each)) for each in candidates]
    path: StoragePath
    if key in measured.storage:
        path = open_path(candidates, *measured.storage[key], open_engine=open_engine)
    else:
        path = choose_path(candidates, open_engine=open_engine, forced=forced)
        measured.storage[key] = path.name, path.rates
    undo.callback(path.store.close)
    undo.callback(path.engine.close)
    return OpenTier.with_threads("storage", path.store, path.engine, path.rates, path.name)


def _open_unlinked(candidate: PathCandidate) -> Store:
    store = candidate.open()
    store.unlink()
    return store
