"""When updates on the host and their copies may happen, in the coarse program's segments and the bound's instants."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from planner.lp.host_update import HostUpdateWindows, UpdateChain, UpdateCopy
from planner.lp.segments import Segment
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
from planner.schema import Block, Subgroup

__all__ = ["host_update_candidates", "chains_of", "grouped", "last_before", "next_after", "segment_windows"]


def host_update_candidates(problem: Problem) -> tuple[Subgroup, ...]:
    """Subgroups that can update on the host, where each of them would fit into the host tier by itself."""
    route = next((route for route in problem.routes if route.tier == "host"), None)
    if route is None:
        return ()
    return tuple(
        subgroup
        for subgroup in host_updatable(problem.source)
        if route.budget_bytes is None or total_bytes(movable_blocks(problem.source, subgroup)) <= route.budget_bytes
    )


def segment_windows(
    problem: Problem, segments: Sequence[Segment], subgroup: Subgroup, *, unit_seconds: float, window: int
) -> HostUpdateWindows:
    """In segments; each flow gets at most `window` of them.

    The problem's routes count time in `unit_seconds`, its trace in seconds.
    """
    segment_of = [number for number, s in enumerate(segments) for _ in range(s.first, s.last + 1)]
    trace, stages, route = problem.trace, len(segment_of), problem.route("host")

    def place(stage: int) -> int:
        return segment_of[stage % stages] + stage // stages * len(segments)

    span, begin = place(subgroup.stage), place(host_start(trace, subgroup))
    user = next_user_stage(trace, host_start(trace, subgroup))
    border = None if user is None else max(begin + 1, place(user))  # the update ends before it
    out = grouped(
        gradients(trace, subgroup),
        lambda block: (place(last_before(block, subgroup, stages)), place(block.last_stage)),
    )
    back = grouped(
        parameters(trace, subgroup),
        lambda block: (place(last_before(block, subgroup, stages)), place(next_after(block, subgroup, stages))),
    )
    flows_out = tuple(
        UpdateCopy(
            first=after + 1,
            last=after + 1 + window if border is None else max(after + 2, min(after + 1 + window, border)),
            absent=range(after + 2, gone + 1),
            size_bytes=total_bytes(blocks),
            seconds=sum(route.outward.seconds(block.size_bytes) for block in blocks),
        )
        for (after, gone), blocks in out.items()
    )
    flows_in = tuple(
        UpdateCopy(
            first=max(begin, before - window),
            last=before,
            absent=range(after + 1, before),
            size_bytes=total_bytes(blocks),
            seconds=sum(route.inward.seconds(block.size_bytes) for block in blocks),
        )
        for (after, before), blocks in back.items()
    )
    host_seconds = (subgroup.host_seconds or 0.0) / unit_seconds
    needed = max(begin + 1, max(flow.last for flow in flows_in))
    chains = chains_of(begin, host_seconds, flows_out, flows_in, border)
    return HostUpdateWindows(
        name=str(subgroup.id),
        span=span,
        device_seconds=subgroup.device_seconds / unit_seconds,
        host_seconds=host_seconds,
        held_bytes=total_bytes(states(trace, subgroup)),
        host_bytes=total_bytes(movable_blocks(trace, subgroup)),
        first=begin,
        last=needed if border is None else min(needed, border),
        gradients=flows_out,
        parameters=flows_in,
        chains=chains,
        at_instants=False,
    )


def chains_of(
    begin: int, host_seconds: float, gradients: Sequence[UpdateCopy], parameters: Sequence[UpdateCopy], border: int | None
) -> tuple[UpdateChain, ...]:
    """What must follow one another: the gradients that can leave last, the update (from span `begin` on), and the
    parameters that are needed first. And the first two, before span `border`, if there is one."""
    first, before = max([(flow.first, flow.seconds) for flow in gradients], default=(begin, 0.0))
    last, after = min((flow.last, -flow.seconds) for flow in parameters)
    if first < begin:
        first, before = begin, 0.0
    whole = UpdateChain(spans=range(first, last), seconds=before + host_seconds - after)
    return (whole,) if border is None else (whole, UpdateChain(spans=range(first, border), seconds=before + host_seconds))


def last_before(block: Block, subgroup: Subgroup, stages: int) -> int:
    """The block's last use before the update's, in the iteration before if need be."""
    earlier = [use for use in block.uses if use < subgroup.stage]
    return earlier[-1] if earlier else block.uses[-1] - stages


def next_after(block: Block, subgroup: Subgroup, stages: int) -> int:
    """The block's first use after the update's, in the next iteration if need be."""
    later = [use for use in block.uses if use > subgroup.stage]
    return later[0] if later else block.uses[0] + stages


def grouped(blocks: Iterable[Block], key: Callable[[Block], tuple[int, ...]]) -> dict[tuple[int, ...], list[Block]]:
    """Blocks by key, in order."""
    groups: dict[tuple[int, ...], list[Block]] = {}
    for block in blocks:
        groups.setdefault(key(block), []).append(block)
    return groups
