"""Build the linear program behind the lower bound, one function for each constraint family.

For why it is a bound, see `docs/lower-bound.md`.

Symbols: instants k; spans from k to k + 1 with τ_k seconds of stages and a stall δ_k; windows p; tiers t.

* O_{p,t,k}, I_{p,t,k} ∈ [0, 1]: the shares of the window's copy out and copy in that are done by k.
* d_{p,t} ∈ [0, 1]: the block is dropped, since a copy from an earlier window is still valid.
* g_{p,t} ∈ [0, 1]: the block goes out and in again between adjacent uses, for the copy that stays behind.
* R_{c,k} ∈ [0, 1]: how much of the recompute groups of class c runs again in span k; d_c: the seconds of all of them.
* h_g, U, O and I of updates on the host: see `planner.lp.host_update_rows`.
* a_{p,t,k} ∈ {0, 1}, only with whole blocks: the block is absent at k. Then d, g and the final O that later windows use are
  whole.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf

from planner.bound.classes import RerunClass
from planner.bound.windows import CopyClass, CopyWindow, Instants
from planner.lp import (
    HostUpdateVariables,
    HostUpdateWindows,
    Program,
    Terms,
    TimeRows,
    Variable,
    add_chains,
    add_host_update,
    steps,
)
from planner.problem import Problem, Route
from planner.schema import Link


@dataclass(slots=True, kw_only=True)
class BoundModel:
    """The program and the rows that every class adds terms to.

    By instant: `memory`, and `places` by tier. By span: `time`. `whole`: blocks are absent as a whole or not at all. `stall`:
    None for a span that cannot stall. `again`: R of each class of recompute groups, by span.
    """

    problem: Problem
    program: Program
    instants: Instants
    whole: bool
    stall: list[Variable | None]
    memory: list[Terms]
    time: TimeRows
    places: dict[str, list[Terms]]
    updates: list[HostUpdateVariables] = field(default_factory=list)
    again: list[dict[int, Variable]] = field(default_factory=list)

    def variable(self, *, whole: bool = False) -> Variable:
        """Add a share in [0, 1]. `whole`: it is 0 or 1 where the model is one of whole blocks."""
        return self.program.variable(whole=whole and self.whole)

    def times(self, window: CopyWindow, position: int) -> int:
        """Return how often an instant at a position of `inside` counts for a window."""
        return max(len(same) for same in self.instants.alike) if position in window.passes else window.count

    def share(self, size_bytes: int) -> float:
        """Return what so many bytes count in the rows of memory and places."""
        return size_bytes / self.problem.byte_scale


@dataclass(slots=True, kw_only=True)
class CopyVariables:
    """Variables of one class, window and tier. `out[i]` and `into[i]` are for instant `window.inside[i]`.

    `found`: d. Where the window holds all passes that repeat, the steps in one pass are those of all of them together: what is
    done by an instant there lies between what is done before and after these passes.
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
        return self.left(len(self.out) - 1)


def add_use(model: BoundModel, block_class: CopyClass, link: Link, window: CopyWindow, position: int, step: Terms) -> None:
    """Add a step of a copy to the rows of its link and of the rates that the link shares."""
    size, largest = block_class.size_bytes, block_class.largest_bytes
    least = link.seconds(largest) * size / largest  # that it occupies the link: at the seconds per byte of its largest member
    model.time.add(link.name, window.spans[position], step, seconds=least * window.count, size_bytes=size * window.count)


def add_reruns(model: BoundModel, classes: Sequence[RerunClass]) -> None:
    """Add R: Σ_k R_{c,k} ≤ 1, and Σ_c d_c R_{c,k} ≤ δ_k, since re-runs take time beyond the stages."""
    taken: dict[int, Terms] = defaultdict(list)
    for each in classes:
        shares = {k: model.variable(whole=True) for k in sorted(each.spans) if model.stall[k] is not None}
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
    """Add the updates on the host to all rows, and their chains."""
    scale = model.problem.byte_scale
    for update in model.updates:
        for k, terms in update.absent.items():
            model.memory[k] += [(variable, size / scale) for variable, size in terms]
        model.time.add_update(update)
        for row in model.places["host"]:
            row.append((update.chosen, update.windows.host_bytes / scale))
    stalls = [model.stall[model.instants.like(k)] for k in range(len(model.instants))]
    add_chains(model.program, model.updates, stalls, model.instants.span_seconds)


def add_memory(model: BoundModel) -> None:
    """live_k − Σ size · absent_k ≤ budget, at instants where live_k exceeds the budget. Like instants are added up."""
    over = model.instants.over(model.problem.budgets.device_bytes)
    for same in model.instants.alike:
        if same[0] in over:
            model.program.at_least(_together(model.memory, same), model.share(over[same[0]]))


def _together(rows: Sequence[Terms], same: range) -> Terms:
    return [term for k in same for term in rows[k]]


def add_places(model: BoundModel) -> None:
    """Σ size · (d + O_k) + Σ host_bytes of g · h_g ≤ the lower tier's budget.

    A copy has its place from its start until the block dies. Blocks of updates on the host have theirs for good.
    """
    for route in model.problem.routes:
        for same in model.instants.alike:
            row = _together(model.places[route.tier], same)
            if row and route.budget_bytes is not None:
                model.program.at_most(row, len(same) * model.share(route.budget_bytes))


def add_link_time(model: BoundModel) -> None:
    """Σ seconds · ΔO_k ≤ τ_k − Σ h_g · device_seconds of its stage, if in k, + δ_k, and the same for I.

    A link carries one block at a time, the host's processor one update. Links that share a rate carry their bytes together.
    """
    saved: dict[int, Terms] = defaultdict(list)
    for update in model.updates:
        saved[update.windows.span].append((update.chosen, update.windows.device_seconds))
    for rows in model.time.named.values():
        for same in model.instants.alike:
            row, stall = _together(rows, same), model.stall[same[0]]
            if row:
                wait: Terms = [] if stall is None else [(stall, -1.0)]
                less = [term for k in same for term in saved[k]]
                model.program.at_most([*row, *less, *wait], sum(model.instants.span_seconds[k] for k in same))


def build_bound(
    problem: Problem,
    instants: Instants,
    classes: tuple[CopyClass, ...],
    updates: tuple[HostUpdateWindows, ...],
    reruns: tuple[RerunClass, ...],
    *,
    whole: bool,
) -> Program:
    """Build min Σ δ_k − Σ h_g · device_seconds of g, under constraints that every plan meets.

    `whole`: every class is one block, which is absent as a whole or not at all. The program is then an integer program.
    """
    program = Program()
    model = BoundModel(
        problem=problem,
        program=program,
        instants=instants,
        whole=whole,
        stall=[None] * len(instants),
        memory=[[] for _ in instants.positions],
        time=TimeRows(problem, len(instants)),
        places={route.tier: [[] for _ in instants.positions] for route in problem.routes},
    )
    for same in instants.alike:
        model.stall[same[0]] = program.variable(inf) if instants.can_stall[same[0]] else None
    model.updates = [add_host_update(program, each, problem.route("host"), count=len(instants), whole=whole) for each in updates]
    add_reruns(model, reruns)
    cost: Terms = [(stall, 1.0) for stall in model.stall if stall is not None]
    cost += [(update.chosen, -update.windows.device_seconds) for update in model.updates]
    program.minimise(cost)
    for block_class in classes:
        _add_class(model, block_class)
    add_updates(model)
    add_memory(model)
    add_places(model)
    add_link_time(model)
    return program


def _add_class(model: BoundModel, block_class: CopyClass) -> None:
    """Σ_t d_{p,t} + O_{p,t,end} ≤ 1 (− h_g at the update's own stage), and the other rows of the class."""
    made: dict[str, Terms] = {route.tier: [] for route in model.problem.routes}
    chosen: Terms = []
    kept: Variable | None = None
    if block_class.update is not None:
        chosen = [(model.updates[block_class.update].chosen, 1.0)]
        made["host"] += chosen  # the update writes a valid copy of a parameter there
        if block_class.persistent and not block_class.read_only:
            kept = model.variable()  # x: the block's place in the host tier for good, beyond what its update there takes
            for row in model.places["host"]:
                row.append((kept, model.share(block_class.size_bytes)))
    final = len(block_class.windows) - 1
    for rank, window in enumerate(block_class.windows):
        waiting: Terms = []
        absent = _made_anew(model, block_class, window)
        for route in model.problem.routes:
            if window.adjacent:
                made[route.tier].append((_add_adjacent(model, block_class, window, route), float(window.count)))
                continue
            copies = _copies(model, block_class, window, route, first=rank == 0, last=rank == final)
            _add_order(model, copies, made[route.tier])
            _add_shares(model, copies, absent)
            around = window.around_update and not window.visited
            _add_place(model, copies, kept, chosen, around=around)
            waiting += copies.waiting
            made[route.tier] += [(variable, float(window.count)) for variable in copies.out[-1:]]
        _add_absent(model, block_class, window, absent)
        own = chosen if window.around_update else []
        if window.visited:
            continue  # between the uses by stages that run again, the block may wait in several tiers
        if waiting and (len(waiting) > 1 or own):
            model.program.at_most([*waiting, *own], 1)


def _made_anew(model: BoundModel, block_class: CopyClass, window: CopyWindow) -> list[Terms]:
    """Σ R_c over the spans of the window from k on, by instant k inside it: the share that is absent until it is made anew."""
    if block_class.rerun is None or (window.final and not window.visited):
        return [[] for _ in window.inside]
    shares = model.again[block_class.rerun]
    return [[(shares[later], 1.0) for later in window.inside[n:] if later in shares] for n in range(len(window.inside))]


def _copies(
    model: BoundModel, block_class: CopyClass, window: CopyWindow, route: Route, *, first: bool, last: bool
) -> CopyVariables:
    # A copy out that ends after the last instant inside the window helps later windows only.
    wholes = [] if block_class.read_only else [False for _ in window.inside] + ([] if last else [True])
    return CopyVariables(
        block_class=block_class,
        window=window,
        route=route,
        found=model.variable(whole=True) if block_class.read_only or not first or window.count > 1 else None,
        out=[model.variable(whole=whole) for whole in wholes],
        into=[] if window.final else [model.variable() for _ in window.inside],
    )


def _add_adjacent(model: BoundModel, block_class: CopyClass, window: CopyWindow, route: Route) -> Variable:
    """(seconds out + seconds in) · g ≤ δ: the copies follow one another, and the next stage waits for both."""
    made = model.variable(whole=True)
    span = window.spans[0]
    stall = model.stall[span]
    assert stall is not None  # a span between two stages can stall
    smallest = block_class.smallest_bytes
    both = route.outward.seconds(smallest) + route.inward.seconds(smallest)
    model.program.at_most([(made, both), (stall, -1.0)], 0)
    for link in (route.outward, route.inward):
        add_use(model, block_class, link, window, 0, [(made, 1.0)])
    return made


def _add_order(model: BoundModel, copies: CopyVariables, made: Terms) -> None:
    """O and I ascend; I ≤ d + O_end; d ≤ Σ O_end + g over the earlier windows (`made`), except for read_only blocks, and
    for windows that repeat."""
    model.program.ascend(copies.out)
    model.program.ascend(copies.into)
    if copies.into:
        model.program.at_least([*copies.waiting, (copies.into[-1], -1.0)], 0)
    if copies.found is not None and not copies.block_class.read_only and copies.window.count == 1:
        minus = [(variable, -factor) for variable, factor in made]
        model.program.at_most([(copies.found, 1.0), *minus], 0)


def _add_absent(model: BoundModel, block_class: CopyClass, window: CopyWindow, absent: list[Terms]) -> None:
    """Add what is absent to the memory rows. At most all of the block: e_k ≤ 1, where several things may make it absent."""
    several = block_class.rerun is not None or (window.visited and len(model.problem.routes) > 1)
    for position, (k, terms) in enumerate(zip(window.inside, absent, strict=True)):
        if several and terms:
            most = model.variable()
            model.program.at_least([*terms, (most, -1.0)], 0)
            terms = [(most, 1.0)]
        share = model.share(block_class.size_bytes) * model.times(window, position)
        model.memory[k] += [(variable, factor * share) for variable, factor in terms]


def _add_shares(model: BoundModel, copies: CopyVariables, gone: list[Terms]) -> None:
    """Add d + O_k − I_k (with whole blocks: a_k, at most that) to `gone`, and the steps of O and I to the rows."""
    window = copies.window
    for position, terms in enumerate(gone):
        before, after = (window.passes[0], window.passes.stop) if position in window.passes else (position, position)
        absent = [*copies.left(min(after, len(copies.out) - 1)), *((variable, -1.0) for variable in copies.into[before:][:1])]
        if model.whole:
            away = model.variable(whole=True)
            model.program.at_least([*absent, (away, -1.0)], 0)
            absent = [(away, 1.0)]
        terms += absent
    for position, step in steps(copies.out):
        add_use(model, copies.block_class, copies.route.outward, window, position, step)
    if not window.final:
        last = [*copies.waiting, *((variable, -1.0) for variable in copies.into[-1:])]
        for position, step in (*steps(copies.into), (len(copies.into), last)):
            add_use(model, copies.block_class, copies.route.inward, window, position, step)


def _add_place(model: BoundModel, copies: CopyVariables, kept: Variable | None, chosen: Terms, *, around: bool) -> None:
    """Count d + O_k in the tier's rows. A persistent block of an update has one place in the host tier: x ≥ d + O_end − h."""
    if copies.block_class.update is not None and copies.route.tier == "host":
        # Around the update's stage, a block moves only if not h, so that both count in full. For other windows of other blocks,
        # nothing counts beyond h.
        if kept is not None:
            minus = [(variable, -factor) for variable, factor in copies.waiting]
            model.program.at_least([(kept, 1.0), *minus, *([] if around else chosen)], 0)
            return
        if not around:
            return
    share = model.share(copies.block_class.size_bytes)
    window = copies.window
    for position, k in enumerate(window.inside):
        first = window.passes[0] if position in window.passes else position
        times = model.times(window, position)
        model.places[copies.route.tier][k] += [(variable, share * times) for variable, _ in copies.left(first)]
