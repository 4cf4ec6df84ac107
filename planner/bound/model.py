"""The program behind the lower bound, one function per constraint family; why it is a bound: `planner.bound.lower_bound`.

Symbols: instants k; spans from k to k + 1 with τ_k seconds of stages and a stall δ_k; windows p; tiers t.

* O_{p,t,k}, I_{p,t,k} ∈ [0, 1]: shares of the time of the window's copy out and in that have passed by k.
* d_{p,t} ∈ [0, 1]: the block is dropped, since a copy of an earlier window is still valid.
* g_{p,t} ∈ [0, 1]: out and in again between adjacent uses, for the copy that stays behind.
* h_g, U, O and I of updates on the host: see `planner.lp.host_update`.
* a_{p,t,k} ∈ {0, 1}, only with whole blocks: absent at k. Then d, g and the final O that later windows use are whole.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

import pulp

from planner.bound.host_updates import UpdateClass
from planner.bound.windows import CopyClass, CopyWindow, Instants
from planner.lp import PROCESSOR, HostUpdateVariables, Terms, UpdateChain, add_host_update, add_row, linear
from planner.problem import Problem, Route
from planner.schema import Link

__all__ = ["build_bound"]


@dataclass(slots=True, kw_only=True)
class _Model:
    """Rows that every class adds to: by instant (memory, places by tier) or by span (links and what they share, by name)."""

    program: pulp.LpProblem
    instants: Instants
    whole: bool
    stall: list[pulp.LpVariable | None]
    memory: list[Terms]
    places: dict[str, list[Terms]] = field(default_factory=dict)
    links: dict[str, list[Terms]] = field(default_factory=dict)
    updates: list[HostUpdateVariables] = field(default_factory=list)
    kept: pulp.LpVariable | None = None

    def variable(self, name: str, *, whole: bool = False) -> pulp.LpVariable:
        """A share in [0, 1]; `whole`: 0 or 1 where the model is one of whole blocks."""
        return self.program.add_variable(name, 0, 1, pulp.LpBinary if whole and self.whole else pulp.LpContinuous)

    def add(self, terms: Terms, sense: int, right: float) -> None:
        """Σ terms (sense) right."""
        add_row(self.program, terms, sense, right)


@dataclass(slots=True, kw_only=True)
class CopyVariables:
    """One class, window and tier. `out[i]` and `into[i]` are for instant `window.begin` + 1 + i."""

    block_class: CopyClass
    window: CopyWindow
    route: Route
    name: str
    found: pulp.LpVariable | None
    out: list[pulp.LpVariable]
    into: list[pulp.LpVariable]

    def left(self, position: int) -> Terms:
        """d + O: the share that lies in the tier, by position in `out`."""
        found: Terms = [] if self.found is None else [(self.found, 1.0)]
        return found + [(variable, 1.0) for variable in self.out[position:][:1]]

    @property
    def waiting(self) -> Terms:
        """d + O at the window's end: what must come in again."""
        return self.left(len(self.out) - 1) if self.out else self.left(0)


def build_bound(
    problem: Problem,
    instants: Instants,
    classes: tuple[CopyClass, ...],
    updates: tuple[UpdateClass, ...],
    *,
    whole: bool,
) -> pulp.LpProblem:
    """min Σ δ_k − Σ h_g · device_seconds of g, over all that every plan fulfils.

    `whole`: every class is one block, which is absent as a whole or not at all (an integer program).
    """
    program = pulp.LpProblem("bound", pulp.LpMinimize)
    model = _Model(
        program=program,
        instants=instants,
        whole=whole,
        stall=[program.add_variable(f"stall_{k}", lowBound=0) if can else None for k, can in enumerate(instants.can_stall)],
        memory=[[] for _ in instants.positions],
    )
    for route in problem.routes:
        model.places[route.tier] = [[] for _ in instants.positions]
        for link in (route.outward, route.inward):
            model.links[link.name] = [[] for _ in instants.positions]
    for number in range(len(problem.shared)):
        model.links[f"shared {number}"] = [[] for _ in instants.positions]
    model.updates = [
        add_host_update(program, each.windows, problem.route("host"), count=len(instants), whole=whole) for each in updates
    ]
    cost: Terms = [(stall, 1.0) for stall in model.stall if stall is not None]
    cost += [(update.chosen, -update.windows.device_seconds) for update in model.updates]
    program.setObjective(linear(cost))
    for number, block_class in enumerate(classes):
        _add_class(problem, model, str(number), block_class)
    _add_updates(problem, model)
    _add_memory(problem, model)
    _add_places(problem, model)
    _add_link_time(model)
    return program


def _add_class(problem: Problem, model: _Model, name: str, block_class: CopyClass) -> None:
    """Σ_t d_{p,t} + O_{p,t,end} ≤ 1 (− h_g at the update's own stage), and all else of the class."""
    made: dict[str, Terms] = {route.tier: [] for route in problem.routes}
    chosen: Terms = []
    if block_class.update is not None:
        chosen = [(model.updates[block_class.update].chosen, 1.0)]
        made["host"] += chosen  # the update leaves a valid copy of a parameter there
        model.kept = _add_kept(problem, model, name, block_class, chosen[0][0]) if block_class.persistent else None
    final = len(block_class.windows) - 1
    for rank, window in enumerate(block_class.windows):
        waiting: Terms = []
        for route in problem.routes:
            label = f"{name}_{rank}_{route.tier}"
            if window.adjacent:
                made[route.tier].append((_add_adjacent(problem, model, label, block_class, window, route), 1.0))
                continue
            copies = _copies(model, label, block_class, window, route, first=rank == 0, last=rank == final)
            _add_order(model, copies, made[route.tier])
            _add_shares(problem, model, copies)
            waiting += copies.waiting
            made[route.tier] += [(variable, 1.0) for variable in copies.out[-1:]]
        own = chosen if rank in block_class.around_update else []
        if waiting and (len(waiting) > 1 or own):
            model.add([*waiting, *own], pulp.LpConstraintLE, 1)


def _add_kept(problem: Problem, model: _Model, name: str, block_class: CopyClass, chosen: pulp.LpVariable) -> pulp.LpVariable:
    """z ≥ h, z ≥ d + O of every window in the host tier: persistent blocks of an update keep their one place for good."""
    kept = model.variable(f"z_{name}")
    model.add([(kept, 1.0), (chosen, -1.0)], pulp.LpConstraintGE, 0)
    for row in model.places["host"]:
        row.append((kept, block_class.size_bytes / _scale(problem)))
    return kept


def _copies(
    model: _Model, label: str, block_class: CopyClass, window: CopyWindow, route: Route, *, first: bool, last: bool
) -> CopyVariables:
    # A copy out that ends after the last instant inside serves later windows only.
    ends = [] if block_class.read_only else [*window.inside] + ([] if last else [window.end])
    return CopyVariables(
        block_class=block_class,
        window=window,
        route=route,
        name=label,
        found=model.variable(f"d_{label}", whole=True) if block_class.read_only or not first else None,
        out=[model.variable(f"o_{label}_{k}", whole=k == window.end) for k in ends],
        into=[] if window.final else [model.variable(f"i_{label}_{k}") for k in window.inside],
    )


def _add_adjacent(
    problem: Problem, model: _Model, label: str, block_class: CopyClass, window: CopyWindow, route: Route
) -> pulp.LpVariable:
    """(seconds out + seconds in) · g ≤ δ: one after the other, and the next stage waits for both."""
    made = model.variable(f"g_{label}", whole=True)
    span = window.begin % len(model.instants)
    stall = model.stall[span]
    assert stall is not None  # what lies between two stages lies in no stage's run
    smallest = block_class.smallest_bytes
    both = route.outward.seconds(smallest) + route.inward.seconds(smallest)
    model.add([(made, both), (stall, -1.0)], pulp.LpConstraintLE, 0)
    for link in (route.outward, route.inward):
        _add_use(problem, model, block_class, link, span, [(made, 1.0)])
    return made


def _add_order(model: _Model, copies: CopyVariables, made: Terms) -> None:
    """O and I ascend; I ≤ d + O_end; d ≤ Σ O_end + g over the earlier windows (`made`), read_only blocks apart."""
    for variables in (copies.out, copies.into):
        for before, after in zip(variables, variables[1:], strict=False):
            model.add([(after, 1.0), (before, -1.0)], pulp.LpConstraintGE, 0)
    if copies.into:
        model.add([*copies.waiting, (copies.into[-1], -1.0)], pulp.LpConstraintGE, 0)
    if copies.found is not None and not copies.block_class.read_only:
        minus = [(variable, -factor) for variable, factor in made]
        model.add([(copies.found, 1.0), *minus], pulp.LpConstraintLE, 0)


def _add_shares(problem: Problem, model: _Model, copies: CopyVariables) -> None:
    """What the class adds to the rows: absent d + O_k − I_k (whole: a_k, at most that), steps of O and I."""
    count, window = len(model.instants), copies.window
    share = copies.block_class.size_bytes / _scale(problem)
    for position, k in enumerate(window.inside):
        left = copies.left(position)
        absent = [*left, *((variable, -1.0) for variable in copies.into[position:][:1])]
        if model.whole:
            away = model.variable(f"a_{copies.name}_{k}", whole=True)
            model.add([*absent, (away, -1.0)], pulp.LpConstraintGE, 0)
            absent = [(away, 1.0)]
        model.memory[k % count] += [(variable, factor * share) for variable, factor in absent]
        if copies.block_class.update is None or copies.route.tier != "host":
            model.places[copies.route.tier][k % count] += [(variable, share) for variable, _ in left]
        elif model.kept is not None:
            model.add([(model.kept, 1.0), *((variable, -1.0) for variable, _ in left)], pulp.LpConstraintGE, 0)
    out: list[Terms] = [[(variable, 1.0)] for variable in copies.out]
    into: list[Terms] = [[(variable, 1.0)] for variable in copies.into]
    _add_steps(problem, model, copies, copies.route.outward, out)
    if not window.final:
        _add_steps(problem, model, copies, copies.route.inward, [*into, copies.waiting])


def _add_steps(problem: Problem, model: _Model, copies: CopyVariables, link: Link, cumulative: list[Terms]) -> None:
    before: Terms = []
    for span, terms in enumerate(cumulative, start=copies.window.begin):
        step = terms + [(variable, -factor) for variable, factor in before]
        _add_use(problem, model, copies.block_class, link, span % len(model.instants), step)
        before = terms


def _add_use(problem: Problem, model: _Model, block_class: CopyClass, link: Link, span: int, step: Terms) -> None:
    """What a step of a copy takes of the link's time, and of what it shares with others."""
    seconds = _seconds(block_class, link)
    model.links[link.name][span] += [(variable, factor * seconds) for variable, factor in step]
    for number, shared in enumerate(problem.shared):
        if link.name in shared.links:
            share = block_class.size_bytes / shared.bytes_per_second
            model.links[f"shared {number}"][span] += [(variable, factor * share) for variable, factor in step]


def _seconds(block_class: CopyClass, link: Link) -> float:
    """Time that the class occupies a link, at the least: at the seconds per byte of its largest member."""
    return link.seconds(block_class.largest_bytes) * block_class.size_bytes / block_class.largest_bytes


def _scale(problem: Problem) -> float:
    """Bytes are counted in shares of the budget, so that the numbers stay near one."""
    return float(max(problem.budgets.device_bytes, 1))


def _add_updates(problem: Problem, model: _Model) -> None:
    """What updates on the host add to all rows; and the processor's: Σ host_seconds · ΔU_k ≤ τ_k + δ_k."""
    scale = _scale(problem)
    processor = model.links.setdefault(PROCESSOR, [[] for _ in model.instants.positions])
    for update in model.updates:
        for k, terms in update.absent.items():
            model.memory[k] += [(variable, size / scale) for variable, size in terms]
        for name, by_span in update.busy.items():
            rows = processor if name == PROCESSOR else model.links[name]
            for k, terms in by_span.items():
                rows[k] += terms
        for number, shared in enumerate(problem.shared):
            for name in shared.links:
                for k, terms in update.moved[name].items():
                    row = model.links[f"shared {number}"][k]
                    row += [(variable, size / shared.bytes_per_second) for variable, size in terms]
        for chain in update.windows.chains:
            _add_chain(model, update, chain)
    limit = next((route.budget_bytes for route in problem.routes if route.tier == "host"), None)
    if model.updates and limit is not None:
        held: Terms = [(update.chosen, update.windows.host_bytes / scale) for update in model.updates]
        model.add(held, pulp.LpConstraintLE, limit / scale)


def _add_chain(model: _Model, update: HostUpdateVariables, chain: UpdateChain) -> None:
    """h_g · seconds of the chain ≤ Σ τ_k − Σ h · device_seconds of the stages in k + Σ δ_k over its spans."""
    spans = [k % len(model.instants) for k in chain.spans]  # some twice, if it is longer than an iteration
    row: Terms = [(update.chosen, chain.seconds)]
    row += [(stall, -1.0) for k in spans if (stall := model.stall[k]) is not None]
    row += [(each.chosen, each.windows.device_seconds * spans.count(each.windows.span)) for each in model.updates]
    model.add(row, pulp.LpConstraintLE, sum(model.instants.span_seconds[k] for k in spans))


def _add_memory(problem: Problem, model: _Model) -> None:
    """live_k − Σ size · absent_k ≤ budget, where live_k exceeds it."""
    budget = problem.budgets.device_bytes
    for live, row in zip(model.instants.live_bytes, model.memory, strict=True):
        if live > budget:
            model.add(row, pulp.LpConstraintGE, (live - budget) / _scale(problem))


def _add_places(problem: Problem, model: _Model) -> None:
    """Σ size · (d + O_k) ≤ the lower tier's budget: a copy has its place from its begin to the block's end."""
    for route in problem.routes:
        for row in model.places[route.tier]:
            if row and route.budget_bytes is not None:
                model.add(row, pulp.LpConstraintLE, route.budget_bytes / _scale(problem))


def _add_link_time(model: _Model) -> None:
    """Σ seconds · ΔO_k ≤ τ_k − Σ h_g · device_seconds of its stage, if in k, + δ_k, and the same for I.

    A link carries one block at a time; what links share, they carry together.
    """
    saved: dict[int, Terms] = defaultdict(list)
    for update in model.updates:
        saved[update.windows.span].append((update.chosen, update.windows.device_seconds))
    for rows in model.links.values():
        for k, (row, seconds, stall) in enumerate(zip(rows, model.instants.span_seconds, model.stall, strict=True)):
            if row:
                wait: Terms = [] if stall is None else [(stall, -1.0)]
                model.add([*row, *saved[k], *wait], pulp.LpConstraintLE, seconds)
