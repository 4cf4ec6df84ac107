"""The linear program behind the lower bound, as far as it is built: its variables, and the rows of what all classes compete for.

Symbols: instants k; spans from k to k + 1 with τ_k seconds of stages and a stall δ_k; windows p; tiers t.

* O_{p,t,k}, I_{p,t,k} ∈ [0, 1]: the shares of the window's copy out and copy in that are done by k.
* d_{p,t} ∈ [0, 1]: the block is dropped, since a copy from an earlier window is still valid.
* g_{p,t} ∈ [0, 1]: the block goes out and in again between adjacent uses, for the copy that stays behind.
* R_{c,k} ∈ [0, 1]: how much of the recompute groups of class c runs again in span k; d_c: the seconds of all of them.
* h_g, U, O and I of updates on the host: see `planner.lp.host_updates`.
* a_{p,t,k} ∈ {0, 1}, only with whole blocks: the block is absent at k. Then d, g and the final O that later windows use are
  whole.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from planner.bound.classes import RerunClass
from planner.bound.windows import CopyClass, CopyWindow, Instants
from planner.lp import PROCESSOR, HostUpdateVariables, Program, Terms, UpdateChain, Variable
from planner.problem import Problem, Route
from planner.schema import Link

__all__ = [
    "BoundModel",
    "CopyVariables",
    "add_link_time",
    "add_memory",
    "add_places",
    "add_reruns",
    "add_updates",
    "add_use",
]


@dataclass(slots=True, kw_only=True)
class BoundModel:
    """The program and the rows that every class adds terms to.

    By instant: `memory`, and `places` by tier. By span: `links`, by name of the link or shared rate. `whole`: blocks are absent
    as a whole or not at all. `stall`: None for a span that cannot stall. `again`: R of each class of recompute groups, by
    span.
    """

    problem: Problem
    program: Program
    instants: Instants
    whole: bool
    stall: list[Variable | None]
    memory: list[Terms]
    places: dict[str, list[Terms]] = field(default_factory=dict)
    links: dict[str, list[Terms]] = field(default_factory=dict)
    updates: list[HostUpdateVariables] = field(default_factory=list)
    again: list[dict[int, Variable]] = field(default_factory=list)

    def variable(self, *, whole: bool = False) -> Variable:
        """Add a share in [0, 1]. `whole`: it is 0 or 1 where the model is one of whole blocks."""
        return self.program.variable(whole=whole and self.whole)

    def share(self, size_bytes: int) -> float:
        """Return what so many bytes count in the rows of memory and places."""
        return size_bytes / self.problem.byte_scale


@dataclass(slots=True, kw_only=True)
class CopyVariables:
    """Variables of one class, window and tier. `out[i]` and `into[i]` are for instant `window.begin` + 1 + i.

    `found`: d.
    """

    block_class: CopyClass
    window: CopyWindow
    route: Route
    found: Variable | None
    out: list[Variable]
    into: list[Variable]

    def left(self, position: int) -> Terms:
        """d + O at one position of `out`: the share that lies in the tier."""
        found: Terms = [] if self.found is None else [(self.found, 1.0)]
        return found + [(variable, 1.0) for variable in self.out[position:][:1]]

    @property
    def waiting(self) -> Terms:
        """d + O at the window's end: the share that must come in again."""
        return self.left(len(self.out) - 1) if self.out else self.left(0)


def add_use(model: BoundModel, block_class: CopyClass, link: Link, span: int, step: Terms) -> None:
    """Add a step of a copy to the rows of its link and of the rates that the link shares."""
    seconds = _seconds(block_class, link)
    model.links[link.name][span] += [(variable, factor * seconds) for variable, factor in step]
    for number, shared in enumerate(model.problem.shared):
        if link.name in shared.seconds_per_byte:
            share = block_class.size_bytes * shared.seconds_per_byte[link.name]
            model.links[f"shared {number}"][span] += [(variable, factor * share) for variable, factor in step]


def _seconds(block_class: CopyClass, link: Link) -> float:
    """The least time that the class occupies a link: at the seconds per byte of its largest member."""
    return link.seconds(block_class.largest_bytes) * block_class.size_bytes / block_class.largest_bytes


def add_reruns(model: BoundModel, classes: Sequence[RerunClass]) -> None:
    """Add R: Σ_k R_{c,k} ≤ 1, and Σ_c d_c R_{c,k} ≤ δ_k, since re-runs take time beyond the stages."""
    taken: dict[int, Terms] = defaultdict(list)
    for each in classes:
        spans = {k % len(model.instants) for k in each.spans}
        shares = {k: model.variable(whole=True) for k in sorted(spans) if model.stall[k] is not None}
        model.again.append(shares)
        if len(shares) > 1:
            model.program.at_most([(share, 1.0) for share in shares.values()], 1)
        for k, share in shares.items():
            taken[k].append((share, each.seconds))
    for k, terms in taken.items():
        stall = model.stall[k]
        assert stall is not None  # otherwise nothing runs again there
        model.program.at_most([*terms, (stall, -1.0)], 0)


def add_updates(model: BoundModel) -> None:
    """Add the updates on the host to all rows, and the processor's own: Σ host_seconds · ΔU_k ≤ τ_k + δ_k."""
    problem, scale = model.problem, model.problem.byte_scale
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


def add_memory(model: BoundModel) -> None:
    """live_k − Σ size · absent_k ≤ budget, at instants where live_k exceeds the budget."""
    budget = model.problem.budgets.device_bytes
    for live, row in zip(model.instants.live_bytes, model.memory, strict=True):
        if live > budget:
            model.program.at_least(row, model.share(live - budget))


def add_places(model: BoundModel) -> None:
    """Σ size · (d + O_k) + Σ host_bytes of g · h_g ≤ the lower tier's budget.

    A copy has its place from its start until the block dies. Blocks of updates on the host have theirs for good.
    """
    for route in model.problem.routes:
        for row in model.places[route.tier]:
            if row and route.budget_bytes is not None:
                model.program.at_most(row, model.share(route.budget_bytes))


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
