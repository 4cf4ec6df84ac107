"""What the device, the lower tiers, the links and the host's processor can take: rows of the lower bound's program.

Symbols as in `planner.bound.model`.
"""

from __future__ import annotations

from collections import defaultdict

from planner.bound.model import BoundModel
from planner.lp import PROCESSOR, HostUpdateVariables, Terms, UpdateChain, byte_scale
from planner.problem import Problem

__all__ = ["add_link_time", "add_memory", "add_places", "add_updates"]


def add_updates(problem: Problem, model: BoundModel) -> None:
    """Add the updates on the host to all rows, and the processor's own: Σ host_seconds · ΔU_k ≤ τ_k + δ_k."""
    scale = byte_scale(problem)
    processor = model.links.setdefault(PROCESSOR, [[] for _ in model.instants.positions])
    for update in model.updates:
        for k, terms in update.absent.items():
            model.memory[k] += [(variable, size / scale) for variable, size in terms]
        for name, by_span in update.busy.items():
            rows = processor if name == PROCESSOR else model.links[name]
            for k, terms in by_span.items():
                rows[k] += terms
        for number, shared in enumerate(problem.shared):
            for name, seconds in shared.seconds_per_byte.items():
                for k, terms in update.moved[name].items():
                    row = model.links[f"shared {number}"][k]
                    row += [(variable, size * seconds) for variable, size in terms]
        for chain in update.windows.chains:
            _add_chain(model, update, chain)
        for row in model.places["host"]:
            row.append((update.chosen, update.windows.host_bytes / scale))


def _add_chain(model: BoundModel, update: HostUpdateVariables, chain: UpdateChain) -> None:
    """h_g · seconds of the chain ≤ Σ τ_k − Σ h · device_seconds of the stages in k + Σ δ_k over its spans."""
    spans = [k % len(model.instants) for k in chain.spans]  # a chain longer than an iteration has some spans twice
    row: Terms = [(update.chosen, chain.seconds)]
    row += [(stall, -1.0) for k in spans if (stall := model.stall[k]) is not None]
    row += [(each.chosen, each.windows.device_seconds * spans.count(each.windows.span)) for each in model.updates]
    model.program.at_most(row, sum(model.instants.span_seconds[k] for k in spans))


def add_memory(problem: Problem, model: BoundModel) -> None:
    """live_k − Σ size · absent_k ≤ budget, at instants where live_k exceeds the budget."""
    budget = problem.budgets.device_bytes
    for live, row in zip(model.instants.live_bytes, model.memory, strict=True):
        if live > budget:
            model.program.at_least(row, (live - budget) / byte_scale(problem))


def add_places(problem: Problem, model: BoundModel) -> None:
    """Σ size · (d + O_k) + Σ host_bytes of g · h_g ≤ the lower tier's budget.

    A copy has its place from its start until the block dies. Blocks of updates on the host have theirs for good.
    """
    for route in problem.routes:
        for row in model.places[route.tier]:
            if row and route.budget_bytes is not None:
                model.program.at_most(row, route.budget_bytes / byte_scale(problem))


def add_link_time(model: BoundModel) -> None:
    """Σ seconds · ΔO_k ≤ τ_k − Σ h_g · device_seconds of its stage, if in k, + δ_k, and the same for I.

    A link carries one block at a time. Links that share a rate carry their bytes together.
    """
    saved: dict[int, Terms] = defaultdict(list)
    for update in model.updates:
        saved[update.windows.span].append((update.chosen, update.windows.device_seconds))
    for rows in model.links.values():
        for k, (row, seconds, stall) in enumerate(zip(rows, model.instants.span_seconds, model.stall, strict=True)):
            if row:
                wait: Terms = [] if stall is None else [(stall, -1.0)]
                model.program.at_most([*row, *saved[k], *wait], seconds)
