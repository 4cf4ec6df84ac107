"""The integer program over coarse time, as far as it is built: the program and its variables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from planner.ilp.classes import BlockClass, ClassPeriod, GroupClass, Segment
from planner.lp import HostUpdateVariables, Program, Terms, Variable
from planner.problem import Problem, Route

__all__ = ["CoarseModel", "PeriodVariables"]


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

    The routes of `problem`, segments and updates count time in the same unit; the unit of the trace does not matter.

    `reruns`: classes of recompute groups; empty where nothing may run again. `again`: r of each class, the share of its groups
    that run again.
    """

    problem: Problem
    program: Program
    segments: tuple[Segment, ...]
    stall: list[Variable]
    leaving: list[Variable]
    unplaced: list[Variable]
    periods: list[PeriodVariables] = field(default_factory=list)
    updates: list[HostUpdateVariables] = field(default_factory=list)
    reruns: Sequence[GroupClass] = ()
    again: list[Variable] = field(default_factory=list)

    @property
    def on_host(self) -> dict[int, Variable]:
        """h of each subgroup (id) that may update on the host."""
        return {int(update.windows.name): update.chosen for update in self.updates}

    def rows(self) -> list[Terms]:
        """Return an empty row for each segment."""
        return [[] for _ in self.segments]

    def add_time_limit(self, rows: Sequence[Terms], name: str = "") -> None:
        """Add Σ row_k ≤ τ_k − Σ_g h_g · device_seconds of its stage, if in k, + Σ_c r_c · d_c, if in k, + δ_k.

        `name`: a link, or the host's processor.
        """
        for k, segment in enumerate(self.segments):
            row = rows[k] + [term for update in self.updates for term in update.busy[name][k]]
            if row:
                saved = [(u.chosen, u.windows.device_seconds) for u in self.updates if u.windows.span == k]
                again = [(r, -each.seconds) for each, r in zip(self.reruns, self.again, strict=True) if each.end == k]
                self.program.at_most([*row, *saved, *again, (self.stall[k], -1.0)], segment.seconds)
