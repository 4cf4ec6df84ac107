"""The updates on the host and the recompute groups that the lower bound considers, with like ones put together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from planner.bound.windows import Instants
from planner.lp import HostUpdateWindows, UpdateCopy, host_update_windows
from planner.problem import Problem, made_bytes, movable_blocks, total_bytes
from planner.schema import RecomputeGroup, Subgroup, Trace


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
            key = (*_update_likeness(windows), _pattern(problem, instants, subgroup))
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


def _update_likeness(windows: HostUpdateWindows) -> tuple[object, ...]:
    """A key that is equal for subgroups that one sum of variables can stand for: their sizes are proportional."""
    copies = (*windows.gradients, *windows.parameters)
    places = (*(chain.spans for chain in windows.chains), *((copy.first, copy.last, copy.absent) for copy in copies))
    shares = tuple(round(size / windows.host_bytes, 9) for size in (windows.held_bytes, *(f.size_bytes for f in copies)))
    # Need only be close: the class counts the least of the host's times and the most of the device's.
    times = tuple(f"{seconds / windows.host_bytes:.1e}" for seconds in (windows.device_seconds, windows.host_seconds))
    split = len(windows.gradients)
    if windows.idle and windows.idle_bytes:  # workspace is no share of the bytes
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
            replace(
                same[0],
                size_bytes=(size := sum(copy.size_bytes for copy in same)),
                seconds=min(copy.seconds / copy.size_bytes for copy in same) * size,
            )
            for same in alike
        )

    return replace(
        first,
        name=name,
        device_seconds=max(member.device_seconds / member.host_bytes for member in members) * total,
        host_seconds=min(member.host_seconds / member.host_bytes for member in members) * total,
        held_bytes=sum(member.held_bytes for member in members),
        host_bytes=total,
        gradients=copies("gradients"),
        parameters=copies("parameters"),
        chains=tuple(
            replace(same[0], seconds=min(chain.seconds for chain in same))
            for same in zip(*(member.chains for member in members), strict=True)
        ),
        idle=range(0),  # only of a subgroup alone
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RerunClass:
    """Groups (ids) whose blocks have the same windows, and sizes and times in the same proportions.

    `spans`: those in which one of them may run again. `seconds`: at most those of all their re-runs.
    """

    groups: tuple[int, ...]
    spans: frozenset[int]
    seconds: float


def rerun_classes(problem: Problem, instants: Instants, *, apart: bool, unit_seconds: float) -> tuple[RerunClass, ...]:
    """Return the groups of the trace; like ones form one class, unless all are kept `apart`. Times are in `unit_seconds`."""
    found: dict[tuple[object, ...], list[RecomputeGroup]] = {}
    latest = _latest_places(problem.source)
    for group in problem.source.recompute:
        if made_bytes(problem.source, group):
            key = (group.id,) if apart else _rerun_likeness(problem.source, instants, group)
            found.setdefault(key, []).append(group)
    classes = []
    for groups in found.values():
        sizes = [made_bytes(problem.source, group) for group in groups]
        per_byte = min(group.duration_seconds / size for group, size in zip(groups, sizes, strict=True))
        spans = (_spans(problem.source, instants, group, latest[group.id]) for group in groups)
        classes.append(
            RerunClass(
                groups=tuple(group.id for group in groups),
                spans=frozenset(instants.like(k) for each in spans for k in each),
                seconds=per_byte * sum(sizes) / unit_seconds,
            )
        )
    return tuple(classes)


def _spans(trace: Trace, instants: Instants, group: RecomputeGroup, last: int) -> range:
    """The spans in which a group may run again: before the first backward stage after its own at the earliest, before stage
    `last` at the latest.
    """
    later = range(group.stage + 1, last + 1)
    first = next((stage for stage in later if trace.stages[stage].phase == "backward"), None)
    return range(0) if first is None else range(instants.end_of(first - 1), instants.start_of(last))


def _latest_places(trace: Trace) -> dict[int, int]:
    """By group, the last stage before which it may run again: the last use of what it makes, by a stage or by a re-run."""
    places: dict[int, int] = {}
    read: dict[int, int] = {}  # by block, until when a group that reads it may run again
    for group in sorted(trace.recompute, key=lambda group: -group.stage):
        places[group.id] = max(max(trace.blocks[block].uses[-1], read.get(block, 0)) for block in group.blocks)
        for block in group.reads:
            read[block] = max(places[group.id], read.get(block, 0))
    return places


def visits(trace: Trace) -> dict[int, list[range]]:
    """Return, by block that some group reads, ranges of stages before which such a group may run again.

    A group runs again after its stage, and not after the last use of what it makes.
    """
    latest = _latest_places(trace)
    found: dict[int, list[range]] = {}
    for group in trace.recompute:
        for block in group.reads:
            found.setdefault(block, []).append(range(group.stage + 1, latest[group.id] + 1))
    return found


def _rerun_likeness(trace: Trace, instants: Instants, group: RecomputeGroup) -> tuple[object, ...]:
    """Equal for groups whose blocks fall into the same classes, each with the same share of the group's bytes."""

    def ends_by(stage: int) -> int:
        return instants.like(instants.start_of(stage) - 1)

    size = made_bytes(trace, group)
    blocks = []
    for number in group.blocks:
        block = trace.blocks[number]
        uses = tuple(
            (instants.like(instants.end_of(use)), ends_by(use), use in block.writes, use + 1 in block.uses) for use in block.uses
        )
        dies = None if block.dies_after is None else (ends_by(block.dies_after + 1), block.dies_after - block.uses[-1] > 1)
        blocks.append((uses, str(dies), round(block.size_bytes / size, 9)))
    # Their times need only be close, since the least of them counts.
    return (*sorted(blocks), f"{group.duration_seconds / size:.1e}")
