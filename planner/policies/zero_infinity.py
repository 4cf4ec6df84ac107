"""ZeRO-Infinity's fixed schedule: everything is offloaded and comes back one layer ahead."""

from __future__ import annotations

from planner.problem import Decision, Decisions, Problem, TierCapacity, layer_of
from planner.schedule import evict_furthest, prefetch_from
from planner.schema import WaitingTier

__all__ = ["zero_infinity_decisions"]


def zero_infinity_decisions(problem: Problem) -> Decisions:
    """Offload every block after every use, and prefetch the blocks of a layer while the layer before it runs.

    A layer is a run of stages whose names begin alike, see `planner.problem.layer_of`; other stages are layers of their
    own. Model and optimizer states go to storage, activations to host memory. A block goes to the other tier where its own is
    missing or full, and stays if neither has room. A block whose next use is in the same layer or the next one stays too. A
    prefetch without room starts later.

    Source: Rajbhandari et al., ZeRO-Infinity: Breaking the GPU Memory Wall for Extreme Scale Deep Learning (SC 2021): all states
    on NVMe, activation checkpoints in CPU memory, overlap-centric prefetching along the traced order of layers.
    """
    numbers, first_of = _layers(problem)
    room = TierCapacity(problem, {})
    decisions: Decisions = {}
    ahead: dict[int, int] = {}
    stages, layers = problem.stage_count, len(first_of)
    for index, period in enumerate(problem.periods):
        needed_in = numbers[period.before % stages] + period.before // stages * layers
        if not period.final and needed_in - numbers[period.after] <= 1:
            continue
        kind = problem.trace.blocks[period.block].kind
        wanted: WaitingTier = "host" if kind == "activation" else "storage"
        tiers = sorted((route.tier for route in problem.routes), key=lambda tier: tier != wanted)
        tier = next((tier for tier in tiers if room.fits(index, tier)), None)
        if tier is None:
            continue
        room.take(index, tier)
        decisions[index] = Decision(tier=tier, leave=period.after, start=period.before)
        turns, layer = divmod(needed_in - 1, layers)
        ahead[index] = max(first_of[layer] + turns * stages, period.after + 1)
    feasible = evict_furthest(problem, decisions, early=True)
    return prefetch_from(problem, feasible, ahead)


def _layers(problem: Problem) -> tuple[list[int], list[int]]:
    """Return the layer of every stage, and the first stage of every layer."""
    numbers: list[int] = []
    first_of: list[int] = []
    last = ""
    for number, stage in enumerate(problem.trace.stages):
        name = layer_of(stage.name) or f"stage {number}"
        if name != last:
            first_of.append(number)
            last = name
        numbers.append(len(first_of) - 1)
    return numbers, first_of
