"""What a trace can recompute and what a plan recomputes, also as JSON."""

from __future__ import annotations

from collections.abc import Iterable

import planner
from planner.schema import FrozenModel, WaitingTier

__all__ = ["NotRecomputedSummary", "RecomputeSummary", "RerunSummary", "summarise_groups", "summarise_reruns"]


class RerunSummary(FrozenModel):
    """A forward stage that the plan runs again, just before stage `at` of the trace. All but the first two need the trace.

    `seconds`: what the re-run takes. `size_bytes`: of the blocks that it makes. `copy_seconds`: what copying these out and in
    again would take on the links of the fastest tier, if nothing else used them; None if no tier can be used.
    """

    group: int
    at: int
    stage: int | None
    stage_name: str | None
    at_name: str | None
    size_bytes: int | None
    seconds: float | None
    copy_seconds: float | None


class NotRecomputedSummary(FrozenModel):
    """Forward stages that cannot run again for one reason. `example`: the name of the first."""

    reason: str
    stages: int
    example: str


class RecomputeSummary(FrozenModel):
    """The recompute groups of a trace: how many, the blocks that they make, the time that all of them take.

    `copy_seconds`: as in RerunSummary, for all of them.
    """

    groups: int
    size_bytes: int
    seconds: float
    copy_seconds: float | None
    not_recomputed: tuple[NotRecomputedSummary, ...]


def summarise_reruns(plan: planner.Plan, trace: planner.Trace | None) -> tuple[RerunSummary, ...]:
    """Return the re-runs of the plan, in order."""
    return tuple(_rerun(each, trace) for each in plan.recompute)


def summarise_groups(trace: planner.Trace) -> RecomputeSummary:
    """Return what the trace can recompute, and what not."""
    reasons: dict[str, list[int]] = {}
    for entry in trace.not_recomputed:
        reasons.setdefault(entry.reason, []).append(entry.stage)
    blocks = [trace.blocks[number] for group in trace.recompute for number in group.blocks]
    return RecomputeSummary(
        groups=len(trace.recompute),
        size_bytes=sum(block.size_bytes for block in blocks),
        seconds=sum(group.duration_seconds for group in trace.recompute),
        copy_seconds=_copy_seconds(trace, blocks),
        not_recomputed=tuple(
            NotRecomputedSummary(reason=reason, stages=len(stages), example=trace.stages[stages[0]].name)
            for reason, stages in sorted(reasons.items(), key=lambda entry: -len(entry[1]))
        ),
    )


def _rerun(each: planner.Recompute, trace: planner.Trace | None) -> RerunSummary:
    if trace is None:
        unknown = dict.fromkeys(("stage", "stage_name", "at_name", "size_bytes", "seconds", "copy_seconds"))
        return RerunSummary(group=each.group, at=each.at, **unknown)
    group = trace.recompute[each.group]
    blocks = [trace.blocks[number] for number in group.blocks]
    return RerunSummary(
        group=each.group,
        at=each.at,
        stage=group.stage,
        stage_name=trace.stages[group.stage].name,
        at_name=trace.stages[each.at].name,
        size_bytes=sum(block.size_bytes for block in blocks),
        seconds=group.duration_seconds,
        copy_seconds=_copy_seconds(trace, blocks),
    )


def _copy_seconds(trace: planner.Trace, blocks: Iterable[planner.Block]) -> float | None:
    """The time of copying `blocks` out and in, for the tier where that is shortest; None if there is none."""
    tiers: tuple[WaitingTier, ...] = ("host", "storage")
    sizes = [block.size_bytes for block in blocks]
    times = []
    for tier in tiers:
        out, back = trace.hardware.link("device", tier), trace.hardware.link(tier, "device")
        if out is not None and back is not None:
            times.append(sum(out.seconds(size) + back.seconds(size) for size in sizes))
    return min(times, default=None)
