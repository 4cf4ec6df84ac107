"""What a replay needs to know of the trace alone, by stage. Planning replays many plans for the same trace."""

from __future__ import annotations

from dataclasses import dataclass

from planner.problem import device_iteration, gradients, user_stages
from planner.schema import Trace

__all__ = ["Layout", "layout_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """What each stage of `trace`, the device's part of the iteration, uses, makes, writes and ends, and the bytes that it needs.

    `read_only`: persistent blocks that nothing writes. `user_stages`: stages of user code. `visible`: blocks that user code can
    reach; empty if there are no such stages.
    """

    trace: Trace
    inputs: tuple[tuple[int, ...], ...]
    born: tuple[tuple[int, ...], ...]
    dying: tuple[tuple[int, ...], ...]
    written: tuple[tuple[int, ...], ...]
    need_bytes: tuple[int, ...]
    read_only: frozenset[int]
    user_stages: frozenset[int]
    visible: frozenset[int]


def layout_of(source: Trace, on_host: frozenset[int]) -> Layout:
    """Return the layout of what is left for the device when the subgroups `on_host` (ids) update on the host.

    It is worked out once for each trace and set of subgroups.
    """
    return source.once((layout_of, on_host), lambda: _laid_out(source, on_host))


def _laid_out(source: Trace, on_host: frozenset[int]) -> Layout:
    trace, user = device_iteration(source, on_host), frozenset(user_stages(source))
    consumed = {block.id for number in on_host for block in gradients(source, source.subgroups[number])}
    inputs: list[list[int]] = [[] for _ in trace.stages]
    born: list[list[int]] = [[] for _ in trace.stages]
    dying: list[list[int]] = [[] for _ in trace.stages]
    written: list[list[int]] = [[] for _ in trace.stages]
    need_bytes = [stage.workspace_bytes for stage in trace.stages]
    for block in trace.blocks:
        for stage in block.uses:
            if not block.persistent and stage == block.uses[0]:
                born[stage].append(block.id)
                need_bytes[stage] += block.size_bytes
            else:
                inputs[stage].append(block.id)
        for stage in block.writes:
            written[stage].append(block.id)
        if not block.persistent and block.id not in consumed:  # an update on the host ends those
            dying[block.last_stage].append(block.id)
    return Layout(
        trace=trace,
        inputs=tuple(map(tuple, inputs)),
        born=tuple(map(tuple, born)),
        dying=tuple(map(tuple, dying)),
        written=tuple(map(tuple, written)),
        need_bytes=tuple(need_bytes),
        read_only=frozenset(block.id for block in source.blocks if block.persistent and not block.writes),
        user_stages=user,
        visible=frozenset(block.id for block in source.blocks if user and block.user_visible),
    )
