"""Where optimizer subgroups update: their part of the linear programs, of the coarse one and of the lower bound.

Symbols: g subgroups that can update on the host; k spans of time (segments, or what lies between instants).

* h_g ∈ {0, 1}: g updates on the host. U_{g,k}: share of its update done by the end of span k, ascending to h_g.
* O_{g,k}: share of its gradients copied out, I_{g,k} of its parameters copied in; both ascend to h_g.

With h_g its states are absent all the time, its parameters between the uses around its stage but for I, its gradients
up to its stage by O; the stage gets shorter by its device_seconds. With 1 − h_g its blocks move like all others.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import pulp

from planner.lp.rows import Terms, add_row
from planner.problem import Route

__all__ = ["PROCESSOR", "UpdateChain", "UpdateCopy", "HostUpdateVariables", "HostUpdateWindows", "add_host_update"]

PROCESSOR = "host processor"


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateCopy:
    """Blocks that cross one link for an update on the host, in spans `first` to `last` − 1.

    `absent`: where they count as absent, gradients by what has left before, parameters but for what is back.
    """

    first: int
    last: int
    absent: range
    size_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateChain:
    """Things that follow one another in these spans, and what they take in all."""

    spans: range
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class HostUpdateWindows:
    """When all that belongs to an update on the host may happen, in spans numbered on over the iteration's end.

    The update takes `host_seconds` in spans `first` to `last` − 1. `span`: that of the stage, which gets shorter by
    `device_seconds`. `held_bytes`: states. `host_bytes`: all of its blocks. `idle`: where the stage's workspace of
    `idle_bytes` is not needed. `chains`: of the last gradients out, the update and the first parameters in; and of the first
    two up to the next user code. `at_instants`: `absent` means instants (k is
    the beginning of span k), and parameters are back at the end of their last span; else it means whole spans, and a
    parameter may come in during the stall at the beginning of span `last`.
    """

    name: str
    span: int
    device_seconds: float
    host_seconds: float
    held_bytes: int
    host_bytes: int
    first: int
    last: int
    gradients: tuple[UpdateCopy, ...]
    parameters: tuple[UpdateCopy, ...]
    chains: tuple[UpdateChain, ...]
    at_instants: bool
    idle: range = range(0)
    idle_bytes: int = 0


@dataclass(slots=True, kw_only=True)
class HostUpdateVariables:
    """What the update of one subgroup (or of several alike) on the host adds to the rows, by span.

    `absent`: bytes not on the device. `left`: of these, what has left in the span. `busy`: seconds on links, by name, and
    on the PROCESSOR. `moved`: bytes on links. `late`: seconds of copies in that a stall must hold.
    """

    windows: HostUpdateWindows
    chosen: pulp.LpVariable
    absent: dict[int, Terms] = field(default_factory=lambda: defaultdict(list))
    left: dict[int, Terms] = field(default_factory=lambda: defaultdict(list))
    busy: dict[str, dict[int, Terms]] = field(default_factory=lambda: defaultdict(lambda: defaultdict(list)))
    moved: dict[str, dict[int, Terms]] = field(default_factory=lambda: defaultdict(lambda: defaultdict(list)))
    late: dict[int, Terms] = field(default_factory=lambda: defaultdict(list))


def add_host_update(
    program: pulp.LpProblem, windows: HostUpdateWindows, route: Route, *, count: int, whole: bool
) -> HostUpdateVariables:
    """The variables of one update and the rows that concern it alone; `count`: spans in an iteration.

    route: the host tier's. whole: h is 0 or 1, else any share.
    """
    kind = pulp.LpBinary if whole else pulp.LpContinuous
    update = HostUpdateVariables(windows=windows, chosen=program.add_variable(f"h_{windows.name}", 0, 1, cat=kind))
    for k in range(count):
        update.absent[k].append((update.chosen, float(windows.held_bytes)))
    for k in windows.idle:
        update.absent[k % count].append((update.chosen, float(windows.idle_bytes)))
    curves = _Curves(program, update, count)
    done = curves.make("u", windows.first, windows.last)
    curves.work(done, PROCESSOR, windows.host_seconds)
    for number, flow in enumerate(windows.gradients):
        out = curves.make(f"o{number}", flow.first, flow.last)
        curves.precede(out, done)
        curves.copy(out, route.outward.name, flow)
        for k, terms in curves.steps(out, float(flow.size_bytes)):
            update.left[k] += terms
        for k in flow.absent:
            update.absent[k % count] += out.until(k - 1, flow.size_bytes)
    for number, flow in enumerate(windows.parameters):
        into = curves.make(f"i{number}", flow.first, flow.last, late=not windows.at_instants)
        curves.precede(done, into)
        curves.copy(into, route.inward.name, flow)
        if not windows.at_instants:
            update.late[flow.last % count] += curves.steps(into, flow.seconds)[-1][1]
        for k in flow.absent:
            back = into.until(k - windows.at_instants, -flow.size_bytes)
            update.absent[k % count] += [(update.chosen, float(flow.size_bytes)), *back]
    return update


@dataclass(slots=True, kw_only=True)
class _Curve:
    """A share of h by the end of each span from `first` on; h itself once the variables are used up."""

    chosen: pulp.LpVariable
    first: int
    variables: list[pulp.LpVariable]

    def until(self, span: int, factor: float) -> Terms:
        """factor · the share by the end of a span."""
        position = span - self.first
        if position < 0:
            return []
        return [(self.variables[position] if position < len(self.variables) else self.chosen, factor)]


class _Curves:
    """Makes the curves of one update, and adds them to its rows."""

    def __init__(self, program: pulp.LpProblem, update: HostUpdateVariables, count: int) -> None:
        self._program, self._update, self._count = program, update, count

    def make(self, name: str, first: int, last: int, *, late: bool = False) -> _Curve:
        """Ascending in spans `first` to `last` − 1; late: the last step may follow in the stall after these."""
        ends = range(first, last if late else last - 1)
        names = [f"{name}_{self._update.windows.name}_{k}" for k in ends]
        variables = [self._program.add_variable(each, 0, 1) for each in names]
        for lower, upper in pairwise([*variables, self._update.chosen]):
            self._at_least_zero([(upper, 1.0), (lower, -1.0)])
        return _Curve(chosen=self._update.chosen, first=first, variables=variables)

    def precede(self, earlier: _Curve, later: _Curve) -> None:
        """later_k ≤ earlier_k: what is done in the same span may still be in order."""
        for position, variable in enumerate(later.variables):
            before = earlier.until(later.first + position, 1.0)
            if not before or before[0][0] is not self._update.chosen:  # later ≤ h holds already
                self._at_least_zero([*before, (variable, -1.0)])

    def work(self, curve: _Curve, name: str, seconds: float) -> None:
        """Seconds that the steps of the curve take on a link or the processor."""
        for k, terms in self.steps(curve, seconds):
            self._update.busy[name][k] += terms

    def copy(self, curve: _Curve, link: str, flow: UpdateCopy) -> None:
        """What crosses a link along the curve."""
        self.work(curve, link, flow.seconds)
        for k, terms in self.steps(curve, float(flow.size_bytes)):
            self._update.moved[link][k] += terms

    def steps(self, curve: _Curve, factor: float) -> list[tuple[int, Terms]]:
        """factor · what the curve ascends by, with the span (within the iteration)."""
        found: list[tuple[int, Terms]] = []
        previous: pulp.LpVariable | None = None
        for position, variable in enumerate([*curve.variables, curve.chosen]):
            terms: Terms = [(variable, factor)]
            if previous is not None:
                terms.append((previous, -factor))
            found.append(((curve.first + position) % self._count, terms))
            previous = variable
        return found

    def _at_least_zero(self, terms: Sequence[tuple[pulp.LpVariable, float]]) -> None:
        add_row(self._program, terms, pulp.LpConstraintGE, 0)
