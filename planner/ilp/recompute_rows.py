"""Rows of the coarse program for forward stages that run again in the backward pass.

Symbols: c classes of like recompute groups (equal layers are one class, as far as they are in the same segments); κ(c) the
segment in which they run again, which is as late as possible; d_c the seconds of all their re-runs; r_c ∈ [0, 1] how many of them
run again. A block is either made anew or offloaded in the period that ends with the re-run, or neither.

What a re-run reads is not in the rows. In a model of layers it is needed close to the re-run anyway, or it is made anew by
another re-run there; the exact stage (`planner.policies.recompute`) sees the rest.
"""

from __future__ import annotations

import pulp

from planner.ilp.model import CoarseModel, PeriodVariables
from planner.lp import Terms, add_row
from planner.problem import TIE_WEIGHT

__all__ = ["add_rerun_memory", "rerun_cost", "reruns_in"]


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
    room: dict[int, pulp.LpVariable] = {}
    for each, share in zip(model.reruns, model.again, strict=True):
        for k, size in each.held_bytes.items():
            rows[k].append((share, size / scale))
        if not each.room_bytes:
            continue
        if each.end not in room:
            room[each.end] = model.program.add_variable(f"room_{each.end}", lowBound=0)
            rows[each.end].append((room[each.end], 1.0))
        add_row(model.program, [(room[each.end], 1.0), (share, -each.room_bytes / scale)], pulp.LpConstraintGE, 0)
