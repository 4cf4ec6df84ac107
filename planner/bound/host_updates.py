"""The updates on the host that the lower bound considers, with like ones put together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from planner.bound.windows import Instants
from planner.lp import HostUpdateWindows, UpdateChain, UpdateCopy, host_update_windows
from planner.problem import Problem, movable_blocks, total_bytes
from planner.schema import Subgroup

__all__ = ["UpdateClass", "update_classes"]


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateClass:
    """Subgroups with equal windows and proportional sizes. Their h is the mean of the members' h by size; `windows` has their
    sums.
    """

    subgroups: tuple[int, ...]
    windows: HostUpdateWindows


def update_classes(problem: Problem, instants: Instants, *, apart: bool, unit_seconds: float) -> tuple[UpdateClass, ...]:
    """Return all subgroups that can update on the host. Like ones form one class, unless all are kept `apart`.

    `unit_seconds`: the unit in which the problem's routes count time.
    """
    groups: dict[tuple[object, ...], list[tuple[Subgroup, HostUpdateWindows]]] = {}
    for subgroup in problem.may_update_on_host:
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
    """The instants between which each block is used, with its share of the bytes. Copies are put into classes by these."""
    blocks = movable_blocks(problem.trace, subgroup)
    total = total_bytes(blocks)
    uses = ((tuple((instants.end_of(use), instants.start_of(use)) for use in block.uses), block.size_bytes) for block in blocks)
    return tuple(sorted((places, round(size / total, 9)) for places, size in uses))


def _likeness(windows: HostUpdateWindows) -> tuple[object, ...]:
    """A key that is equal for subgroups that one sum of variables can stand for.

    Their sizes are proportional, and no workspace counts. Their times need only be close: the class counts the least of the
    host's times and the most of the device's (`_together`).
    """
    copies = (*windows.gradients, *windows.parameters)
    places = (*(chain.spans for chain in windows.chains), *((copy.first, copy.last, copy.absent) for copy in copies))
    shares = tuple(round(size / windows.host_bytes, 9) for size in (windows.held_bytes, *(f.size_bytes for f in copies)))
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

    def copies(kind: str) -> tuple[UpdateCopy, ...]:
        alike = zip(*(getattr(member, kind) for member in members), strict=True)
        return tuple(
            UpdateCopy(
                first=same[0].first,
                last=same[0].last,
                absent=same[0].absent,
                size_bytes=sum(copy.size_bytes for copy in same),
                seconds=min(copy.seconds / copy.size_bytes for copy in same) * sum(copy.size_bytes for copy in same),
            )
            for same in alike
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
        gradients=copies("gradients"),
        parameters=copies("parameters"),
        chains=tuple(
            UpdateChain(spans=same[0].spans, seconds=min(chain.seconds for chain in same))
            for same in zip(*(member.chains for member in members), strict=True)
        ),
        at_instants=True,
    )
