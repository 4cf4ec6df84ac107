"""Find the blocks of a trace from an earlier run in an iteration of this run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

import planner
from runtime.device import MIN_MOVED_BYTES
from runtime.paging import Block
from teraio.profiling.iteration import Iteration
from teraio.profiling.profiler import FIXED_NAME, Profile

_Signature = tuple[str, str, int, bool, tuple[int, ...]]
"""Name, kind, bytes, whether it can move, and the stages that use it."""


def recognise(trace: planner.Trace, iteration: Iteration, *, fixed_bytes: int) -> Profile | None:
    """Return `trace` as the profile of `iteration`; None unless this ran the same stages over the same blocks.

    Stages are the same by position, name and phase, blocks by name, kind, size and the stages that use them; times do not count.
    In its first iteration an optimizer makes the states that it reads later on: it uses them all the same. fixed_bytes: what
    stays on the device without being a block; may differ by less than the smallest block that moves.
    """
    if [(s.name, s.phase) for s in iteration.stages] != [(s.name, s.phase) for s in trace.stages]:
        return None
    wanted: dict[_Signature, list[int]] = defaultdict(list)
    fixed = 0
    for each in trace.blocks:
        if each.name == FIXED_NAME:
            fixed += each.size_bytes
            continue
        used = _without_user_code(each.uses, trace.stages)
        wanted[each.name, each.kind, each.size_bytes, each.movable, used].append(each.id)
    if abs(fixed - fixed_bytes) >= MIN_MOVED_BYTES:
        return None
    ids: dict[Block, int] = {}
    for block, uses in _uses(iteration).items():
        same = wanted.get((block.name, block.kind, block.size_bytes, block.span is not None, uses))
        if not same:
            return None
        ids[block] = same.pop(0)
    return None if any(wanted.values()) else Profile(trace=trace, iteration=iteration, ids=ids)


def _uses(iteration: Iteration) -> dict[Block, tuple[int, ...]]:
    """Return the stages that use each block, in the order of their first use."""
    found: dict[Block, list[int]] = {}
    for position, stage in enumerate(iteration.stages):
        for block in dict.fromkeys((*stage.read, *stage.made, *stage.written)):
            found.setdefault(block, []).append(position)
    return {block: tuple(positions) for block, positions in found.items()}


def _without_user_code(uses: Iterable[int], stages: Sequence[planner.Stage]) -> tuple[int, ...]:
    """Return the uses by stages that were recorded. A trace adds the user code that makes inputs and reads outputs."""
    return tuple(use for use in uses if stages[use].phase != "user")
