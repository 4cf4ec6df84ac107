"""Rows of the coarse program for forward stages that run again in the backward pass.

Symbols: c classes of like recompute groups (equal layers are one class, as far as they are in the same segments); κ(c) the
segment in which they run again, which is as late as possible; d_c the seconds of all their re-runs; r_c ∈ [0, 1] how many of them
run again. A block is either made anew or offloaded in the period that ends with the re-run, or neither.

What a re-run reads must be there. A block that is idle then is not away to the extent that the re-run happens (it could go and
come twice; the exact stage sees that), unless a re-run no later makes it anew. A block that would be dead by then lives on.
"""

from __future__ import annotations

from collections import defaultdict
from math import inf

from planner.ilp.model import CoarseModel, PeriodVariables
from planner.lp import Terms, Variable
from planner.problem import TIE_WEIGHT, Problem

__all__ = ["add_rerun_memory", "add_rerun_reads", "rerun_cost", "reruns_in"]


def rerun_cost(model: CoarseModel) -> Terms:
    """Σ d_c r_c · (1 + ε): of equal plans, the one that runs less again wins."""
    return [(share, each.seconds * (1 + TIE_WEIGHT)) for each, share in zip(model.reruns, model.again, strict=True)]


def reruns_in(model: CoarseModel, entry: PeriodVariables) -> list[int]:
    """Return the class of re-runs, if there is one, that makes the blocks of `entry` anew in its period."""
    number = entry.block_class.rerun
    if number is None or not entry.period.begin < model.reruns[number].end <= entry.period.end:
        return []
    return [number]


def add_rerun_memory(model: CoarseModel, rows: list[Terms], scale: float) -> None:
    """− Σ size · r_c in the segments between last use and κ(c); + Σ held bytes · r_c; + w_k, where w_κ(c) ≥ room of c · r_c."""
    seen: set[tuple[int, ...]] = set()
    for entry in model.periods:
        if entry.period.indices in seen:
            continue  # one entry for each tier
        seen.add(entry.period.indices)
        for number in reruns_in(model, entry):
            for k in range(entry.period.begin + 1, model.reruns[number].end):
                rows[k].append((model.again[number], -entry.block_class.size_bytes / scale))
    room: dict[int, Variable] = {}
    for each, share in zip(model.reruns, model.again, strict=True):
        for k, size in each.held_bytes.items():
            rows[k].append((share, size / scale))
        if not each.room_bytes:
            continue
        if each.end not in room:
            room[each.end] = model.program.variable(inf)
            rows[each.end].append((room[each.end], 1.0))
        model.program.at_least([(room[each.end], 1.0), (share, -each.room_bytes / scale)], 0)


def add_rerun_reads(problem: Problem, model: CoarseModel) -> None:
    """Σ_t (O_{κ−1} + d − I_κ) + r_c · (the share of the blocks that c reads) ≤ 1, for periods around κ(c)."""
    count = len(model.segments)
    readers: dict[int, list[int]] = defaultdict(list)
    for number, each in enumerate(model.reruns):
        for block in each.reads:
            readers[block].append(number)
    by_period: dict[tuple[int, ...], list[PeriodVariables]] = defaultdict(list)
    for entry in model.periods if readers else ():
        by_period[entry.period.indices].append(entry)
    for entries in by_period.values():
        period, block_class = entries[0].period, entries[0].block_class
        read: dict[int, int] = defaultdict(int)
        for block in block_class.blocks:
            for number in readers.get(block, ()):
                read[number] += problem.trace.blocks[block].size_bytes
        for number, size in read.items():
            for k in (model.reruns[number].end, model.reruns[number].end + count):
                if period.begin < k < period.end:
                    absent = [term for entry in entries for term in entry.absent(k - period.begin - 1)]
                    model.program.at_most([*absent, (model.again[number], size / block_class.size_bytes)], 1)
