"""What the lower bound looks at of updates on the host: when all that belongs to them may happen, rounded outward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from planner.bound.windows import Instants
from planner.lp import HostUpdateWindows, UpdateChain, UpdateCopy, host_update_candidates, host_update_windows
from planner.problem import Problem, movable_blocks, total_bytes
from planner.schema import Subgroup

__all__ = ["UpdateClass", "update_classes"]


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateClass:
    """Subgroups with equal windows and proportional sizes: h is their mean by size. `windows` has their sums."""

    subgroups: tuple[int, ...]
    windows: HostUpdateWindows


def update_classes(problem: Problem, instants: Instants, *, apart: bool, unit_seconds: float) -> tuple[UpdateClass, ...]:
    """All subgroups that can update on the host; like ones are put together, unless all are to be kept `apart`.

    `unit_seconds`: what routes count time in.
    """
    groups: dict[tuple[object, ...], list[tuple[Subgroup, HostUpdateWindows]]] = {}
    for subgroup in host_update_candidates(problem):
        windows = host_update_windows(problem, instants, subgroup, unit_seconds=unit_seconds)
        key: tuple[object, ...] = (subgroup.id,)
        if not apart:
            key = (*_likeness(windows), _pattern(problem, instants, subgroup))
        groups.setdefault(key, []).append((subgroup, windows))
    return tuple(
        UpdateClass(
            subgroups=tuple(subgroup.id for subgroup, _ in members),
            windows=_together(f"update{number}", [windows for _, windows in members]),
        )
        for number, members in enumerate(groups.values())
    )


def _pattern(problem: Problem, instants: Instants, subgroup: Subgroup) -> tuple[object, ...]:
    """Between which instants each block is used, with its share of the bytes: copies are classed by these."""
    blocks = movable_blocks(problem.trace, subgroup)
    total = total_bytes(blocks)
    uses = ((tuple((instants.end_of(use), instants.start_of(use)) for use in block.uses), block.size_bytes) for block in blocks)
    return tuple(sorted((places, round(size / total, 9)) for places, size in uses))


def _likeness(windows: HostUpdateWindows) -> tuple[object, ...]:
    """Equal for subgroups of which one sum of variables stands for all.

    Their sizes are proportional, and no workspace counts. Times need not be, only near: the class counts the least of
    the host's and the most of the device's (`_together`).
    """
    flows = (*windows.gradients, *windows.parameters)
    places = (*(chain.spans for chain in windows.chains), *((flow.first, flow.last, flow.absent) for flow in flows))
    shares = tuple(round(size / windows.host_bytes, 9) for size in (windows.held_bytes, *(f.size_bytes for f in flows)))
    times = tuple(f"{seconds / windows.host_bytes:.1e}" for seconds in (windows.device_seconds, windows.host_seconds))
    split = len(windows.gradients)
    if windows.idle and windows.idle_bytes:
        return (windows.name,)
    return windows.span, windows.first, windows.last, split, places, shares, times


def _together(name: str, members: Sequence[HostUpdateWindows]) -> HostUpdateWindows:
    first = members[0]
    if len(members) == 1:
        return replace(first, name=name)
    total = sum(member.host_bytes for member in members)

    def flows(kind: str) -> tuple[UpdateCopy, ...]:
        parts = zip(*(getattr(member, kind) for member in members), strict=True)
        return tuple(
            UpdateCopy(
                first=same[0].first,
                last=same[0].last,
                absent=same[0].absent,
                size_bytes=sum(flow.size_bytes for flow in same),
                seconds=min(flow.seconds / flow.size_bytes for flow in same) * sum(flow.size_bytes for flow in same),
            )
            for same in parts
        )

    return HostUpdateWindows(
        name=name,
        span=first.span,
        device_seconds=max(member.device_seconds / member.host_bytes for member in members) * total,
        host_seconds=min(member.host_seconds / member.host_bytes for member in members) * total,
        held_bytes=sum(member.held_bytes for member in members),
        host_bytes=total,
        first=first.first,
        last=first.last,
        gradients=flows("gradients"),
        parameters=flows("parameters"),
        chains=tuple(
            UpdateChain(spans=same[0].spans, seconds=min(chain.seconds for chain in same))
            for same in zip(*(member.chains for member in members), strict=True)
        ),
        at_instants=True,
    )
