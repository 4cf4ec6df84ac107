"""What a machine has opened for one runtime: its tiers, the mover between them, and how to close all of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

import planner
from planner.schema import WaitingTier
from runtime.device import Device
from runtime.execution import MeasuredMemory
from runtime.paging import Mover, Tier
from runtime.storage import Store
from runtime.transfer import Engine, LinkRates, OpenEngine, PathCandidate, StoragePath, choose_path, open_path
from teraio.options import Options

_known_paths: dict[object, tuple[str, LinkRates]] = {}
"""Chosen and measured once in a process: by the drives that the storage directories are on, and what else matters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenTier:
    """A lower tier. path: how blocks get there, in a word or two. moved_bytes, busy_seconds: by link, since the start."""

    tier: Tier
    rates: LinkRates
    path: str
    moved_bytes: Callable[[], Mapping[str, int]]
    busy_seconds: Callable[[], Mapping[str, float]]

    @classmethod
    def with_threads(cls, name: WaitingTier, store: Store, engine: Engine, rates: LinkRates, path: str) -> OpenTier:
        """A tier whose blocks are carried by the engine's threads."""
        return cls(
            tier=Tier(name=name, store=store, engine=engine),
            rates=rates,
            path=path,
            moved_bytes=lambda: {link: each.moved_bytes for link, each in engine.links.items()},
            busy_seconds=lambda: {link: each.busy_seconds for link, each in engine.links.items()},
        )

    def links(self) -> tuple[planner.Link, planner.Link]:
        """To the tier and back, for the trace."""
        name, rates = self.tier.name, self.rates
        return (
            planner.Link(
                from_tier="device",
                to_tier=name,
                path=self.path,
                bytes_per_second=rates.write_bytes_per_second,
                latency_seconds=rates.write_latency_seconds,
            ),
            planner.Link(
                from_tier=name,
                to_tier="device",
                path=self.path,
                bytes_per_second=rates.read_bytes_per_second,
                latency_seconds=rates.read_latency_seconds,
            ),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineTiers:
    """budget_bytes: the device budget, None where nothing limits it. mover: None where blocks have nowhere to go.

    memory: what stages allocate from, as far as it can be asked; measured_runs: how often a stage is measured there,
    None for always. shared: rates that links of different tiers have together. lift_limit: from now on the device may hold
    more than the budget, since all blocks come back. undo: closes all of it.
    """

    name: str
    device: Device
    device_memory_bytes: int
    memory: MeasuredMemory | None
    measured_runs: int | None = None
    budget_bytes: int | None
    mover: Mover | None
    tiers: Sequence[OpenTier] = ()
    shared: tuple[planner.SharedRate, ...] = ()
    trim: Callable[[], None] = field(default=lambda: None)
    lift_limit: Callable[[], None] = field(default=lambda: None)
    undo: ExitStack


def open_storage(
    options: Options, candidates: Sequence[PathCandidate], open_engine: OpenEngine, device: str, undo: ExitStack
) -> OpenTier:
    """The way to the drives that was asked for, or the fastest; measured once in a process."""
    forced = None if options.storage_path == "auto" else options.storage_path
    drives = tuple(path.stat().st_dev for path in options.storage if path.is_dir())  # opening tells what is missing
    key = device, drives, forced, options.checksums
    path: StoragePath
    if key in _known_paths:
        path = open_path(candidates, *_known_paths[key], open_engine=open_engine)
    else:
        path = choose_path(candidates, open_engine=open_engine, forced=forced)
        _known_paths[key] = path.name, path.rates
    undo.callback(path.store.close)
    undo.callback(path.engine.close)
    return OpenTier.with_threads("storage", path.store, path.engine, path.rates, path.name)
