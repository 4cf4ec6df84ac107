"""When the updates on the host and their copies may happen, in the spans of a linear program."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from planner.lp.host_update import HostUpdateWindows, UpdateChain, UpdateCopy
from planner.problem import (
    Problem,
    gradients,
    host_start,
    host_updatable,
    movable_blocks,
    next_user_stage,
    parameters,
    states,
    total_bytes,
)
from planner.schema import Block, Link, Subgroup

__all__ = ["SpanGrid", "host_update_candidates", "host_update_windows"]


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


def host_update_candidates(problem: Problem) -> tuple[Subgroup, ...]:
    """Return the subgroups that can update on the host and would each fit into the host tier alone."""
    route = next((route for route in problem.routes if route.tier == "host"), None)
    if route is None:
        return ()
    return tuple(
        subgroup
        for subgroup in host_updatable(problem.source)
        if route.budget_bytes is None or total_bytes(movable_blocks(problem.source, subgroup)) <= route.budget_bytes
    )


def host_update_windows(
    problem: Problem, grid: SpanGrid, subgroup: Subgroup, *, unit_seconds: float, window: int | None = None
) -> HostUpdateWindows:
    """Return the windows of one subgroup's update on the host.

    The problem's routes count time in `unit_seconds`, its trace in seconds. window: spans that each copy may choose from; None
    for all spans in which it could run.
    """
    trace, start = problem.trace, host_start(problem.trace, subgroup)
    begin, user = grid.update_begin(start), next_user_stage(trace, start)
    # The update ends before the next user code.
    border = None if user is None else max(begin + 1, grid.start_of(user))
    copies_in = _copies_in(problem, grid, subgroup, begin, window)
    needed = max(begin + 1, max(copy.last for copy in copies_in))
    last = needed if border is None else min(needed, border)
    copies_out = _copies_out(problem, grid, subgroup, last if window is None else border, window)
    host_seconds = (subgroup.host_seconds or 0.0) / unit_seconds
    return HostUpdateWindows(
        name=str(subgroup.id),
        span=grid.span_of(subgroup.stage),
        device_seconds=subgroup.device_seconds / unit_seconds,
        host_seconds=host_seconds,
        held_bytes=total_bytes(states(trace, subgroup)),
        host_bytes=total_bytes(movable_blocks(trace, subgroup)),
        first=begin,
        last=last,
        gradients=copies_out,
        parameters=copies_in,
        chains=_chains(begin, host_seconds, copies_out, copies_in, border),
        at_instants=grid.at_instants,
        idle=range(grid.start_of(subgroup.stage), grid.end_of(subgroup.stage) + 1) if grid.at_instants else range(0),
        idle_bytes=trace.stages[subgroup.stage].workspace_bytes if grid.at_instants else 0,
    )


def _copies_out(
    problem: Problem, grid: SpanGrid, subgroup: Subgroup, limit: int | None, window: int | None
) -> tuple[UpdateCopy, ...]:
    """The gradients, by the spans in which they can leave. `limit`: the end of these spans."""
    stages, link = problem.stage_count, problem.route("host").outward
    groups = _grouped(
        gradients(problem.trace, subgroup),
        lambda block: (_first_after(grid, _last_before(block, subgroup, stages)), grid.end_of(block.last_stage)),
    )
    copies = []
    for (first, gone), blocks in groups.items():
        ends = [end for end in (limit, None if window is None else first + window) if end is not None]
        copies.append(
            UpdateCopy(
                first=first,
                last=max(first + 1, min(ends)),
                absent=range(first + 1, gone + 1),
                size_bytes=total_bytes(blocks),
                seconds=_seconds(blocks, link),
            )
        )
    return tuple(copies)


def _copies_in(problem: Problem, grid: SpanGrid, subgroup: Subgroup, begin: int, window: int | None) -> tuple[UpdateCopy, ...]:
    """The parameters, by the spans in which they can come back. `begin`: the first span of the update."""
    stages, link = problem.stage_count, problem.route("host").inward
    groups = _grouped(
        parameters(problem.trace, subgroup),
        lambda block: (
            _first_after(grid, _last_before(block, subgroup, stages)),
            grid.start_of(_next_after(block, subgroup, stages)),
        ),
    )
    return tuple(
        UpdateCopy(
            first=max(begin, left if window is None else before - window),
            last=before,
            absent=range(left + grid.at_instants, before),
            size_bytes=total_bytes(blocks),
            seconds=_seconds(blocks, link),
        )
        for (left, before), blocks in groups.items()
    )


def _first_after(grid: SpanGrid, stage: int) -> int:
    """The first span in which a block can leave that the stage uses: a segment frees nothing that its own stages use."""
    return grid.end_of(stage) + (not grid.at_instants)


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


def _last_before(block: Block, subgroup: Subgroup, stages: int) -> int:
    """The block's last use before the update's stage; negative for one in the iteration before."""
    earlier = [use for use in block.uses if use < subgroup.stage]
    return earlier[-1] if earlier else block.uses[-1] - stages


def _next_after(block: Block, subgroup: Subgroup, stages: int) -> int:
    """The block's first use after the update's stage; numbered on for one in the next iteration."""
    later = [use for use in block.uses if use > subgroup.stage]
    return later[0] if later else block.uses[0] + stages


def _grouped(blocks: Iterable[Block], key: Callable[[Block], tuple[int, int]]) -> dict[tuple[int, int], list[Block]]:
    groups: dict[tuple[int, int], list[Block]] = {}
    for block in blocks:
        groups.setdefault(key(block), []).append(block)
    return groups


def _seconds(blocks: Iterable[Block], link: Link) -> float:
    return sum(link.seconds(block.size_bytes) for block in blocks)
