"""When optimizer subgroups that update on the host may do so, with like ones put together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from planner.problem import (
    Problem,
    gradients,
    host_bytes,
    host_start,
    movable_blocks,
    next_user_stage,
    parameters,
    states,
    total_bytes,
)
from planner.schema import Block, Link, Subgroup


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateCopy:
    """Blocks that cross one link for an update on the host, in spans `first` to `last` − 1.

    `absent`: the spans or instants where they count as absent: gradients by the share that has left, parameters except for the
    share that is back.
    """

    first: int
    last: int
    absent: range
    size_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateChain:
    """Copies and an update that follow one another within `spans`, and the `seconds` that they take together."""

    spans: range
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class HostUpdateWindows:
    """When updates on the host and their copies may happen, in spans numbered on over the iteration's end.

    `subgroups`: those that update; for several, sizes and times are sums. The update takes `host_seconds` in spans `first` to
    `last` − 1. `span`: that of its stage, which is shorter by `device_seconds`. `held_bytes`: size of the states. `host_bytes`:
    size of all its blocks. `idle`: where the stage's workspace of `idle_bytes` is not needed. `chains`: what must follow one
    another.

    `at_instants`: `absent` and `idle` count instants (k is the beginning of span k), and parameters are back at the end of their
    last span. Otherwise they count whole spans, and a parameter may come in during the stall at the beginning of span `last`.
    """

    subgroups: tuple[int, ...]
    span: int
    device_seconds: float
    host_seconds: float
    held_bytes: int
    host_bytes: int
    first: int
    last: int
    gradients: tuple[UpdateCopy, ...]
    parameters: tuple[UpdateCopy, ...]
    chains: tuple[UpdateChain, ...]
    at_instants: bool
    idle: range = range(0)
    idle_bytes: int = 0


class SpanGrid(Protocol):
    """How a program divides an iteration into spans of time: by segments of stages, or by instants.

    Stages and spans are numbered on over the iteration's end. `at_instants`: span k begins at instant k, and memory is counted at
    instants; else spans are segments, and memory is counted over each whole segment.
    """

    @property
    def at_instants(self) -> bool: ...

    def span_of(self, stage: int) -> int:
        """Return the span in which the stage starts."""

    def start_of(self, stage: int) -> int:
        """Return the end (exclusive) of the spans for what must be done when the stage starts."""

    def end_of(self, stage: int) -> int:
        """Return the span in which the stage ends."""

    def update_begin(self, stage: int) -> int:
        """Return the first span in which an update can run that may begin when the stage is reached."""


def host_update_classes(
    problem: Problem,
    grid: SpanGrid,
    subgroups: Iterable[Subgroup],
    *,
    apart: bool,
    window: int | None = None,
) -> tuple[HostUpdateWindows, ...]:
    """Return the windows of updates on the host. Like subgroups, with equal windows and proportional sizes, are one class.

    A class has one h, the mean of its members' by size. Times are in the problem's unit.
    apart: all are kept apart. window: spans that each copy may choose from; None for all spans in which it could run.
    """
    alike: dict[tuple[object, ...], list[HostUpdateWindows]] = defaultdict(list)
    for subgroup in subgroups:
        each = _windows(problem, grid, subgroup, window)
        key = (subgroup.id,) if apart else (*_update_likeness(each), _pattern(problem, grid, subgroup))
        alike[key].append(each)
    return tuple(_together(members) for members in alike.values())


def _windows(problem: Problem, grid: SpanGrid, subgroup: Subgroup, window: int | None) -> HostUpdateWindows:
    """Those of one subgroup's update."""
    trace, start, stages, host = problem.trace, host_start(problem.trace, subgroup), problem.stage_count, problem.route("host")
    begin, user = grid.update_begin(start), next_user_stage(trace, start)
    # The update ends before the next user code.
    border = None if user is None else max(begin + 1, grid.start_of(user))

    def left(block: Block) -> int:
        # After its last use before the update, perhaps in the iteration before. A segment frees nothing that its own stages use.
        last = max((use for use in block.uses if use < subgroup.stage), default=block.uses[-1] - stages)
        return grid.end_of(last) + (not grid.at_instants)

    def coming_in(block: Block) -> tuple[int, int, int, int]:
        following = min((use for use in block.uses if use > subgroup.stage), default=block.uses[0] + stages)
        away, back = left(block), grid.start_of(following)
        return max(begin, away if window is None else back - window), back, away + grid.at_instants, back

    copies_in = _copies(parameters(trace, subgroup), host.inward, coming_in)
    needed = max(begin + 1, max(copy.last for copy in copies_in))
    last = needed if border is None else min(needed, border)

    def going_out(block: Block) -> tuple[int, int, int, int]:
        away = left(block)
        end = last if window is None else away + window
        end = end if border is None else min(end, border)
        return away, max(away + 1, end), away + 1, grid.end_of(block.last_stage) + 1

    copies_out = _copies(gradients(trace, subgroup), host.outward, going_out)
    host_seconds = (subgroup.host_seconds or 0.0) / problem.unit_seconds
    return HostUpdateWindows(
        subgroups=(subgroup.id,),
        span=grid.span_of(subgroup.stage),
        device_seconds=subgroup.device_seconds / problem.unit_seconds,
        host_seconds=host_seconds,
        held_bytes=total_bytes(states(trace, subgroup)),
        host_bytes=host_bytes(trace, subgroup),
        first=begin,
        last=last,
        gradients=copies_out,
        parameters=copies_in,
        chains=_chains(begin, host_seconds, copies_out, copies_in, border),
        at_instants=grid.at_instants,
        idle=range(grid.start_of(subgroup.stage), grid.end_of(subgroup.stage) + 1) if grid.at_instants else range(0),
        idle_bytes=trace.stages[subgroup.stage].workspace_bytes if grid.at_instants else 0,
    )


def _copies(blocks: Iterable[Block], link: Link, spans: Callable[[Block], tuple[int, int, int, int]]) -> tuple[UpdateCopy, ...]:
    """The copies of the blocks over the link: one for blocks with the same spans.

    spans: `first`, `last`, and from where to where the block is `absent`.
    """
    groups: dict[tuple[int, int, int, int], list[Block]] = defaultdict(list)
    for block in blocks:
        groups[spans(block)].append(block)
    copies = []
    for (first, last, *ends), members in groups.items():
        size, seconds = total_bytes(members), sum(link.seconds(block.size_bytes) for block in members)
        copies.append(UpdateCopy(first=first, last=last, absent=range(*ends), size_bytes=size, seconds=seconds))
    return tuple(copies)


def _chains(
    begin: int, host_seconds: float, copies_out: Sequence[UpdateCopy], copies_in: Sequence[UpdateCopy], border: int | None
) -> tuple[UpdateChain, ...]:
    """What must follow one another, from the first span to the last.

    One chain: the gradients that can leave last, the update (from span `begin` on), and the parameters that are needed first.
    Another one, if user code follows at span `border`: the gradients and the update must end before it.
    """
    first, before = max([(copy.first, copy.seconds) for copy in copies_out], default=(begin, 0.0))
    last, after = min((copy.last, -copy.seconds) for copy in copies_in)
    if first < begin:
        first, before = begin, 0.0
    whole = UpdateChain(spans=range(first, last), seconds=before + host_seconds - after)
    if border is None:
        return (whole,)
    return whole, UpdateChain(spans=range(first, border), seconds=before + host_seconds)


def _pattern(problem: Problem, grid: SpanGrid, subgroup: Subgroup) -> tuple[object, ...]:
    """The spans between which each block is used, with its share of the bytes. Copies are put into classes by these."""
    blocks = movable_blocks(problem.trace, subgroup)
    total = total_bytes(blocks)
    uses = ((tuple((grid.end_of(use), grid.start_of(use)) for use in block.uses), block.size_bytes) for block in blocks)
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
        return windows.subgroups
    return windows.span, windows.first, windows.last, split, places, shares, times


def _together(members: Sequence[HostUpdateWindows]) -> HostUpdateWindows:
    first = members[0]
    if len(members) == 1:
        return first
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
        subgroups=tuple(number for member in members for number in member.subgroups),
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
