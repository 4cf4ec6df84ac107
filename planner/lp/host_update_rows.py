"""Variables and rows for optimizer subgroups that may update on the host.

The coarse program, by which `planner.ilp.coarse` decides, and the lower bound share them. Symbols: g subgroups that can update on
the host; k spans of time (segments, or the time between two instants).

* h_g ∈ {0, 1}: g updates on the host. U_{g,k}: the share of its update that is done by the end of span k; ascends to h_g.
* O_{g,k}: the share of its gradients that is copied out; I_{g,k}: the share of its parameters that is copied in. Both ascend to
  h_g.

If h_g, its states are absent all the time. Its parameters are absent between the uses around its stage, except for I; its
gradients are absent up to its stage, by O. The stage is shorter by its device_seconds. If not h_g, its blocks move like all
others. `TimeRows` count what updates and other copies take of links and the host's processor.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from planner.lp.host_update_windows import HostUpdateWindows, UpdateCopy
from planner.lp.program import Program, Terms, Variable, scaled, steps
from planner.problem import Problem, Route

PROCESSOR = "host processor"  # key of the host processor's rows among those of the links


@dataclass(slots=True, kw_only=True)
class _Curve:
    """A share of h that is done by the end of each span from `first` on. It is h itself after the last variable."""

    chosen: Variable
    first: int
    variables: list[Variable]

    def until(self, span: int, factor: float) -> Terms:
        """factor · the share by the end of a span."""
        position = span - self.first
        if position < 0:
            return []
        return [(self.variables[position] if position < len(self.variables) else self.chosen, factor)]


@dataclass(slots=True, kw_only=True)
class HostUpdateVariables:
    """The terms that one update on the host (or several alike) adds to the rows, by span. `count`: spans in an iteration.

    `absent`: bytes not on the device. `left`: the bytes of these that leave in the span. `busy`: seconds on links, by name, and
    on the PROCESSOR. `moved`: bytes on links. `late`: seconds of copies in that a stall must hold.
    """

    windows: HostUpdateWindows
    chosen: Variable
    count: int
    absent: dict[int, Terms] = field(default_factory=lambda: defaultdict(list))
    left: dict[int, Terms] = field(default_factory=lambda: defaultdict(list))
    busy: dict[str, dict[int, Terms]] = field(default_factory=lambda: defaultdict(lambda: defaultdict(list)))
    moved: dict[str, dict[int, Terms]] = field(default_factory=lambda: defaultdict(lambda: defaultdict(list)))
    late: dict[int, Terms] = field(default_factory=lambda: defaultdict(list))

    def add_steps(self, rows: dict[int, Terms], curve: _Curve, factor: float) -> None:
        """Add factor · each step of a curve to the rows of its spans."""
        for position, terms in steps([*curve.variables, curve.chosen]):
            rows[(curve.first + position) % self.count] += scaled(terms, factor)

    def copy(self, curve: _Curve, link: str, flow: UpdateCopy) -> None:
        """Add what crosses a link along the curve."""
        self.add_steps(self.busy[link], curve, flow.seconds)
        self.add_steps(self.moved[link], curve, float(flow.size_bytes))


def add_host_update(
    program: Program, windows: HostUpdateWindows, route: Route, *, count: int, whole: bool
) -> HostUpdateVariables:
    """Add the variables of one update, and the rows that concern only it. `count`: spans in an iteration.

    route: that of the host tier. whole: h is 0 or 1; otherwise it is any share.
    """
    update = HostUpdateVariables(windows=windows, chosen=program.variable(whole=whole), count=count)
    for k in range(count):
        update.absent[k].append((update.chosen, float(windows.held_bytes)))
    for k in windows.idle:
        update.absent[k % count].append((update.chosen, float(windows.idle_bytes)))
    done = _ascending(program, update.chosen, windows.first, windows.last)
    update.add_steps(update.busy[PROCESSOR], done, windows.host_seconds)
    for flow in windows.gradients:
        out = _ascending(program, update.chosen, flow.first, flow.last)
        _precede(program, out, done)
        update.copy(out, route.outward.name, flow)
        update.add_steps(update.left, out, float(flow.size_bytes))
        for k in flow.absent:
            update.absent[k % count] += out.until(k - 1, flow.size_bytes)
    for flow in windows.parameters:
        into = _ascending(program, update.chosen, flow.first, flow.last, late=not windows.at_instants)
        _precede(program, done, into)
        update.copy(into, route.inward.name, flow)
        if not windows.at_instants:
            last = [(update.chosen, flow.seconds), *((variable, -flow.seconds) for variable in into.variables[-1:])]
            update.late[flow.last % count] += last
        for k in flow.absent:
            back = into.until(k - windows.at_instants, -flow.size_bytes)
            update.absent[k % count] += [(update.chosen, float(flow.size_bytes)), *back]
    return update


def _ascending(program: Program, chosen: Variable, first: int, last: int, *, late: bool = False) -> _Curve:
    """A curve that ascends to h (`chosen`) in spans `first` to `last` − 1. late: the last step may be in the stall after them."""
    variables = [program.variable() for _ in range(first, last if late else last - 1)]
    program.ascend([*variables, chosen])
    return _Curve(chosen=chosen, first=first, variables=variables)


def _precede(program: Program, earlier: _Curve, later: _Curve) -> None:
    """later_k ≤ earlier_k. Both may be done in the same span: they can still be in order within it."""
    for position, variable in enumerate(later.variables):
        before = earlier.until(later.first + position, 1.0)
        if not before or before[0][0] != earlier.chosen:  # later ≤ h holds already
            program.at_least([*before, (variable, -1.0)], 0)


class TimeRows:
    """Rows of seconds by span: of each link, each rate that links share, and the host's processor.

    `named`: by name of the link, PROCESSOR, or "shared 0" and so on.
    """

    def __init__(self, problem: Problem, count: int) -> None:
        links = [link.name for route in problem.routes for link in (route.outward, route.inward)]
        self._shared = {f"shared {number}": limit for number, limit in enumerate(problem.shared)}
        names = (*links, *self._shared, PROCESSOR)
        self.named: dict[str, list[Terms]] = {name: [[] for _ in range(count)] for name in names}

    def add(self, link: str, span: int, step: Terms, *, seconds: float, size_bytes: int) -> None:
        """Add a step of a copy that takes `seconds` in all."""
        self._row(link, span).extend(scaled(step, seconds))
        self._share(link, span, step, size_bytes)

    def add_update(self, update: HostUpdateVariables) -> None:
        """Add what an update on the host takes."""
        for name, by_span in update.busy.items():
            for k, terms in by_span.items():
                self._row(name, k).extend(terms)
        for link, by_span in update.moved.items():
            for k, terms in by_span.items():
                self._share(link, k, terms, 1)

    def _share(self, link: str, span: int, moved: Terms, size_bytes: int) -> None:
        for name, seconds_per_byte in self._shared.items():
            if link in seconds_per_byte:
                self._row(name, span).extend(scaled(moved, size_bytes * seconds_per_byte[link]))

    def _row(self, name: str, span: int) -> Terms:
        return self.named[name][span % len(self.named[name])]


def add_chains(
    program: Program, updates: Sequence[HostUpdateVariables], stall: Sequence[Variable | None], seconds: Sequence[float]
) -> None:
    """h_g · seconds of a chain ≤ Σ τ_k − Σ h · device_seconds of the stages in k + Σ δ_k over its spans.

    Where spans are segments, the stall after them counts too. seconds: τ by span.
    """
    for update in updates:
        for chain in update.windows.chains:
            spans = [k % len(seconds) for k in chain.spans]  # a chain longer than an iteration has some spans twice
            behind = [] if update.windows.at_instants else [chain.spans.stop % len(seconds)]
            row: Terms = [(update.chosen, chain.seconds)]
            row += [(wait, -1.0) for k in (*spans, *behind) if (wait := stall[k]) is not None]
            times = Counter(spans)
            shorter = (each for each in updates if each.windows.span in times)
            row += [(each.chosen, each.windows.device_seconds * times[each.windows.span]) for each in shorter]
            program.at_most(row, sum(seconds[k] for k in spans))
