"""The integer program over coarse time, as far as it is built: its variables, and the rows of what all blocks compete for.

These are links, shared rates, lower tiers, the host's processor, and what re-runs need. Symbols as in `planner.ilp.formulation`;
of re-runs: c classes of like recompute groups; κ(c) the segment in which they run again, which is as late as possible; d_c the
seconds of all their re-runs; r_c ∈ [0, 1] how many of them run again. A block is either recomputed or offloaded in the period
that ends with the re-run, or neither.

What a re-run reads must be there. A block that is idle then is not away to the extent that the re-run happens (it could go and
come twice; the exact stage sees that), unless a re-run no later makes it. A block that would be dead by then lives on.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from math import inf

from planner.ilp.classes import BlockClass, ClassPeriod, GroupClass, Segment
from planner.lp import PROCESSOR, HostUpdateVariables, Program, Terms, TimeRows, Variable, add_chains, steps
from planner.problem import Problem, Route


@dataclass(slots=True, kw_only=True)
class PeriodVariables:
    """Variables of one class, period and tier. `out[i]` and `into[i]` are for segment `begin` + 1 + i.

    Copies out happen in the first few segments of a period, and copies in in the last few. After its window, one variable of
    `out` stands for all further segments; before its window, `into` has None, which stands for zero. Nothing comes in during a
    final period. `chosen`: y; `found`: d, see `planner.ilp.formulation`.
    """

    block_class: BlockClass
    period: ClassPeriod
    route: Route
    chosen: Variable
    found: Variable | None
    out: list[Variable]
    into: list[Variable | None]

    @property
    def out_seconds(self) -> float:
        """Time on the link to copy the class out."""
        return self.block_class.seconds(self.route.outward)

    @property
    def in_seconds(self) -> float:
        """Time on the link to copy the class in."""
        return 0.0 if self.period.final else self.block_class.seconds(self.route.inward)

    def absent(self, position: int) -> Terms:
        """O_{k−1} + d − I_k: the share that is away in segment k = `begin` + 1 + position."""
        into = self.into[position]
        terms: Terms = [] if into is None else [(into, -1.0)]
        if self.out and position > 0:
            terms.append((self.out[position - 1], 1.0))
        if self.found is not None:
            terms.append((self.found, 1.0))
        return terms

    @property
    def steps_in(self) -> list[Variable | None]:
        """The share that is back by the end of each segment from `begin` + 1 on."""
        return [] if self.period.final else [*self.into, self.chosen]


@dataclass(slots=True, kw_only=True)
class CoarseModel:
    """The program, and the variables that a solution is read from. `stall`, `leaving` and `unplaced` are by segment.

    The routes of `problem`, segments and updates count time in the problem's unit.

    `asked`: what it was built from, besides the problem. `build_seconds`: what building it took.

    `time`, `visible`: what links, shared rates and the processor do, in all and for blocks that user code can reach. `reruns`:
    classes of recompute groups; empty where nothing may run again. `again`: r of each class, the share of its groups
    that run again.
    """

    problem: Problem
    program: Program
    asked: Hashable
    segments: tuple[Segment, ...]
    stall: list[Variable]
    leaving: list[Variable]
    unplaced: list[Variable]
    time: TimeRows
    visible: TimeRows
    periods: list[PeriodVariables] = field(default_factory=list)
    updates: list[HostUpdateVariables] = field(default_factory=list)
    reruns: Sequence[GroupClass] = ()
    again: list[Variable] = field(default_factory=list)
    build_seconds: float = 0.0

    def by_period(self) -> list[list[PeriodVariables]]:
        """Return the entries of `periods` by class and period: one for each tier."""
        tiers = len(self.problem.routes)
        return [self.periods[first : first + tiers] for first in range(0, len(self.periods), tiers)]

    def add_time_limit(self, name: str) -> None:
        """Add Σ row_k ≤ τ_k − Σ_g h_g · device_seconds of its stage, if in k, + Σ_c r_c · d_c, if in k, + δ_k.

        `name`: of the row in `time`: a link, the processor or a shared rate.
        """
        for k, (segment, row) in enumerate(zip(self.segments, self.time.named[name], strict=True)):
            if row:
                saved = [(u.chosen, u.windows.device_seconds) for u in self.updates if u.windows.span == k]
                again = [(r, -each.seconds) for each, r in zip(self.reruns, self.again, strict=True) if each.end == k]
                self.program.at_most([*row, *saved, *again, (self.stall[k], -1.0)], segment.seconds)

    def within_stall(self, k: int, row: Terms) -> None:
        """Add row ≤ δ_k."""
        if row:
            self.program.at_most([*row, (self.stall[k], -1.0)], 0)


def add_time(model: CoarseModel) -> None:
    """Count what copies and updates take, in all and of blocks that user code can reach."""
    users = any(segment.user for segment in model.segments)
    for entry in model.periods:
        for rows in (model.time, model.visible) if users and entry.block_class.user_visible else (model.time,):
            for link, curve, seconds in (
                (entry.route.outward, entry.out, entry.out_seconds),
                (entry.route.inward, entry.steps_in, entry.in_seconds),
            ):
                for position, step in steps(curve):
                    k, size = entry.period.begin + 1 + position, entry.block_class.size_bytes
                    rows.add(link.name, k, step, seconds=seconds, size_bytes=size)
    for update in model.updates:
        model.time.add_update(update)
        if users:
            model.visible.add_update(update)


def add_link_time(model: CoarseModel, route: Route) -> None:
    """Σ seconds · ΔO_k ≤ τ_k + δ_k and Σ seconds · ΔI_k ≤ τ_k + δ_k. The share that comes in at b itself: ≤ δ_b."""
    late: list[Terms] = [[] for _ in model.segments]
    for entry in model.periods:
        if entry.route.tier == route.tier and not entry.period.final:
            last = entry.into[-1]
            assert last is not None  # the window is never empty
            late[entry.period.end % len(late)] += [(entry.chosen, entry.in_seconds), (last, -entry.in_seconds)]
    for update in model.updates if route.tier == "host" else ():
        for k, terms in update.late.items():
            late[k] += terms
    model.add_time_limit(route.outward.name)
    model.add_time_limit(route.inward.name)
    for k, row in enumerate(late):
        model.within_stall(k, row)


def add_user_code(model: CoarseModel, route: Route) -> None:
    """Σ seconds · ΔO_k ≤ δ_k and Σ seconds · ΔI_k ≤ δ_k in segments of user code, for blocks that user code can reach.

    Such copies must end before user code starts, see [Note: user code] in `planner.problem.host_updates`.
    """
    for k in (k for k, segment in enumerate(model.segments) if segment.user):
        for link in (route.outward, route.inward):
            model.within_stall(k, model.visible.named[link.name][k])


def add_updates(model: CoarseModel) -> None:
    """y_{p,t} ≤ 1 − h_g for blocks of g, in periods that begin or end with its update and in all tiers other than host.

    The host's processor: Σ host_seconds · ΔU_k ≤ τ_k + δ_k. The chains, whose members follow one another: `add_chains`.
    """
    problem = model.problem
    stages = [{problem.trace.subgroups[number].stage for number in update.windows.subgroups} for update in model.updates]
    for entry in model.periods:
        number = entry.block_class.update
        if number is None:
            continue
        period = problem.periods[entry.period.indices[0]]
        touched = {period.after} if period.final else {period.after, period.before % problem.stage_count}
        if touched & stages[number] or entry.route.tier != "host":
            model.program.at_most([(entry.chosen, 1.0), (model.updates[number].chosen, 1.0)], 1)
    model.add_time_limit(PROCESSOR)
    add_chains(model.program, model.updates, model.stall, [segment.seconds for segment in model.segments])


def add_capacity(model: CoarseModel, route: Route) -> None:
    """Σ size · z_{c,t} ≤ budget_t at every segment in which the copy can exist, with z_{c,t} ≥ y_{p,t}.

    z_{c,host} ≥ h_g for the persistent blocks of g; the other blocks of g count with h_g itself.
    """
    if route.budget_bytes is None:
        return
    scale = float(max(route.budget_bytes, 1))
    rows: list[Terms] = [[] for _ in model.segments]
    by_class: dict[tuple[int, ...], list[PeriodVariables]] = defaultdict(list)
    for entry in model.periods:
        if entry.route.tier == route.tier:
            by_class[entry.block_class.blocks].append(entry)
    kept: dict[int, int] = defaultdict(int)
    updates = model.updates if route.tier == "host" else []
    for entries in by_class.values():
        place = model.program.variable()
        for entry in entries:
            model.program.at_least([(place, 1.0), (entry.chosen, -1.0)], 0)
        block_class = entries[0].block_class
        if block_class.persistent and block_class.update is not None and updates:
            kept[block_class.update] += block_class.size_bytes
            model.program.at_least([(place, 1.0), (updates[block_class.update].chosen, -1.0)], 0)
        for k in range(len(rows)) if block_class.persistent else block_class.segments:
            rows[k].append((place, block_class.size_bytes / scale))
    for number, update in enumerate(updates):
        rest = update.windows.host_bytes - kept[number]
        for each in rows:
            each.append((update.chosen, rest / scale))
    model.program.levels(rows, [route.budget_bytes / scale] * len(rows))


def reruns_in(model: CoarseModel, entry: PeriodVariables) -> list[int]:
    """Return the class of re-runs, if there is one, that makes the blocks of `entry` anew in its period."""
    number = entry.block_class.rerun
    if number is None or not entry.period.begin < model.reruns[number].end <= entry.period.end:
        return []
    return [number]


def add_rerun_memory(model: CoarseModel, rows: list[Terms]) -> None:
    """− Σ size · r_c in the segments between last use and κ(c); + Σ held bytes · r_c; + w_k, where w_κ(c) ≥ room of c · r_c."""
    scale = model.problem.byte_scale
    for entry, *_ in model.by_period():
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


def add_rerun_reads(model: CoarseModel) -> None:
    """Σ_t (O_{κ−1} + d − I_κ) + r_c · (the share of the blocks that c reads) ≤ 1, for periods around κ(c)."""
    count = len(model.segments)
    readers: dict[int, list[int]] = defaultdict(list)
    for number, each in enumerate(model.reruns):
        for block in each.reads:
            readers[block].append(number)
    for entries in model.by_period() if readers else ():
        period, block_class = entries[0].period, entries[0].block_class
        read: dict[int, int] = defaultdict(int)
        for block in block_class.blocks:
            for number in readers.get(block, ()):
                read[number] += model.problem.trace.blocks[block].size_bytes
        for number, size in read.items():
            for k in (model.reruns[number].end, model.reruns[number].end + count):
                if period.begin < k < period.end:
                    absent = [term for entry in entries for term in entry.absent(k - period.begin - 1)]
                    model.program.at_most([*absent, (model.again[number], size / block_class.size_bytes)], 1)
