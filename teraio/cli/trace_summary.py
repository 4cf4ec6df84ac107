"""The result of `teraio inspect TRACE`: a trace in numbers, also as JSON."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

import planner
from planner.problem import BlockActivity, block_activities, host_updatable, live_bytes, live_bytes_by_kind, mean_active_fraction
from planner.schema import BlockKind, FrozenModel, Phase
from teraio.cli.recompute_summary import RecomputeSummary, summarise_groups

__all__ = ["BlockSummary", "TraceSummary", "idlest_blocks", "summarise_trace"]


class PhaseSummary(FrozenModel):
    """All stages of one phase."""

    phase: Phase
    stages: int
    duration_seconds: float


class KindSummary(FrozenModel):
    """All blocks of one kind. `movable_bytes`: bytes of the blocks that may leave the device."""

    kind: BlockKind
    blocks: int
    size_bytes: int
    movable_bytes: int


class StageSummary(FrozenModel):
    """One stage. `live_bytes`: bytes on the device while it runs if no block ever leaves, with the workspace.

    `bytes_by_kind`: the same by kind of block, without the workspace. `collective_seconds`: see `planner.Stage`.
    """

    id: int
    name: str
    phase: Phase
    duration_seconds: float
    collective_seconds: float
    workspace_bytes: int
    live_bytes: int
    bytes_by_kind: dict[BlockKind, int]


class BlockSummary(planner.Block):
    """One block and its use in an iteration that never waits.

    `active_fraction`: share of the iteration time in which a stage uses it. `idle_seconds`: length of all its inactive periods.
    `longest_idle_seconds`: length of the longest. `clean`: whether no stage writes it, so that it needs no copy out.
    """

    active_fraction: float
    idle_seconds: float
    longest_idle_seconds: float
    clean: bool


class UpdateSummary(FrozenModel):
    """The optimizer subgroups that can be updated in one place, and the time of all these updates there."""

    where: Literal["device", "host"]
    subgroups: int
    elements: int
    seconds: float


class TraceSummary(FrozenModel):
    """A trace. `collective_seconds`: the part of `ideal_seconds` in collectives.

    `floor_bytes`, `floor_stage`: the smallest device budget that works, and the stage that needs it.

    `peak_bytes`, `peak_stage`: the most bytes on the device if no block ever leaves, and the stage in which that is.
    `mean_active_fraction`: average share of the movable bytes that is in use. `updates`: on the device (all subgroups), then on
    the host; empty without subgroups. `recompute`: what can run again. `blocks`: largest first.
    """

    name: str
    created_by: str
    fingerprint: str
    hardware: planner.Hardware
    ideal_seconds: float
    collective_seconds: float
    peak_bytes: int
    peak_stage: str
    floor_bytes: int
    floor_stage: str
    mean_active_fraction: float
    phases: tuple[PhaseSummary, ...]
    kinds: tuple[KindSummary, ...]
    updates: tuple[UpdateSummary, ...]
    recompute: RecomputeSummary
    stages: tuple[StageSummary, ...]
    blocks: tuple[BlockSummary, ...]


def summarise_trace(trace: planner.Trace) -> TraceSummary:
    """Return the trace in numbers."""
    live = live_bytes(trace)
    peak_stage = max(range(len(live)), key=live.__getitem__)
    floor_bytes, floor_stage = planner.floor(trace)
    kinds = live_bytes_by_kind(trace)
    blocks = [_block(block, found) for block, found in zip(trace.blocks, block_activities(trace), strict=True)]
    return TraceSummary(
        name=trace.name,
        created_by=trace.created_by,
        fingerprint=trace.fingerprint,
        hardware=trace.hardware,
        ideal_seconds=trace.ideal_seconds,
        collective_seconds=sum(stage.collective_seconds for stage in trace.stages),
        peak_bytes=live[peak_stage],
        peak_stage=trace.stages[peak_stage].name,
        floor_bytes=floor_bytes,
        floor_stage=trace.stages[floor_stage].name,
        mean_active_fraction=mean_active_fraction(trace),
        phases=tuple(_phases(trace.stages)),
        kinds=tuple(_kinds(trace.blocks)),
        updates=_updates(trace),
        recompute=summarise_groups(trace),
        stages=tuple(
            StageSummary(
                **dict(stage),
                live_bytes=live[stage.id],
                bytes_by_kind={kind: sizes[stage.id] for kind, sizes in kinds.items()},
            )
            for stage in trace.stages
        ),
        blocks=tuple(sorted(blocks, key=lambda block: (-block.size_bytes, block.id))),
    )


def idlest_blocks(blocks: Sequence[BlockSummary]) -> list[BlockSummary]:
    """Return the movable blocks that are idle for some time, sorted by size times length of the longest inactive period."""
    idle = [block for block in blocks if block.movable and block.size_bytes and block.longest_idle_seconds]
    return sorted(idle, key=lambda block: -block.size_bytes * block.longest_idle_seconds)


def _block(block: planner.Block, found: BlockActivity) -> BlockSummary:
    return BlockSummary(
        **block.model_dump(),
        active_fraction=found.active_fraction,
        idle_seconds=found.idle_seconds,
        longest_idle_seconds=found.longest_idle_seconds,
        clean=found.clean,
    )


def _phases(stages: Iterable[planner.Stage]) -> Iterable[PhaseSummary]:
    by_phase: dict[Phase, list[planner.Stage]] = {}
    for stage in stages:
        by_phase.setdefault(stage.phase, []).append(stage)
    for phase, members in by_phase.items():
        seconds = sum(stage.duration_seconds for stage in members)
        yield PhaseSummary(phase=phase, stages=len(members), duration_seconds=seconds)


def _kinds(blocks: Iterable[planner.Block]) -> Iterable[KindSummary]:
    by_kind: dict[BlockKind, list[planner.Block]] = {}
    for block in blocks:
        by_kind.setdefault(block.kind, []).append(block)
    for kind, members in by_kind.items():
        yield KindSummary(
            kind=kind,
            blocks=len(members),
            size_bytes=sum(block.size_bytes for block in members),
            movable_bytes=sum(block.size_bytes for block in members if block.movable),
        )


def _updates(trace: planner.Trace) -> tuple[UpdateSummary, ...]:
    if not trace.subgroups:
        return ()
    on_host = host_updatable(trace)
    return (
        UpdateSummary(
            where="device",
            subgroups=len(trace.subgroups),
            elements=sum(subgroup.elements for subgroup in trace.subgroups),
            seconds=sum(subgroup.device_seconds for subgroup in trace.subgroups),
        ),
        UpdateSummary(
            where="host",
            subgroups=len(on_host),
            elements=sum(subgroup.elements for subgroup in on_host),
            seconds=sum(subgroup.host_seconds or 0.0 for subgroup in on_host),  # none of them is None
        ),
    )
