"""The linear program behind the lower bound, as far as it is built: its variables and rows.

Symbols: instants k; spans from k to k + 1 with τ_k seconds of stages and a stall δ_k; windows p; tiers t.

* O_{p,t,k}, I_{p,t,k} ∈ [0, 1]: the shares of the window's copy out and copy in that are done by k.
* d_{p,t} ∈ [0, 1]: the block is dropped, since a copy from an earlier window is still valid.
* g_{p,t} ∈ [0, 1]: the block goes out and in again between adjacent uses, for the copy that stays behind.
* R_{c,k} of what runs again: see `planner.bound.recompute`.
* h_g, U, O and I of updates on the host: see `planner.lp.host_updates`.
* a_{p,t,k} ∈ {0, 1}, only with whole blocks: the block is absent at k. Then d, g and the final O that later windows use are
  whole.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from planner.bound.windows import CopyClass, CopyWindow, Instants
from planner.lp import HostUpdateVariables, Program, Terms, Variable
from planner.problem import Problem, Route
from planner.schema import Link

__all__ = ["BoundModel", "CopyVariables", "add_use"]


@dataclass(slots=True, kw_only=True)
class BoundModel:
    """The program and the rows that every class adds terms to.

    By instant: `memory`, and `places` by tier. By span: `links`, by name of the link or shared rate. `whole`: blocks are absent
    as a whole or not at all. `stall`: None for a span that cannot stall. `again`: R of each class of recompute groups, by
    span.
    """

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


def add_use(problem: Problem, model: BoundModel, block_class: CopyClass, link: Link, span: int, step: Terms) -> None:
    """Add a step of a copy to the rows of its link and of the rates that the link shares."""
    seconds = _seconds(block_class, link)
    model.links[link.name][span] += [(variable, factor * seconds) for variable, factor in step]
    for number, shared in enumerate(problem.shared):
        if link.name in shared.seconds_per_byte:
            share = block_class.size_bytes * shared.seconds_per_byte[link.name]
            model.links[f"shared {number}"][span] += [(variable, factor * share) for variable, factor in step]


def _seconds(block_class: CopyClass, link: Link) -> float:
    """The least time that the class occupies a link: at the seconds per byte of its largest member."""
    return link.seconds(block_class.largest_bytes) * block_class.size_bytes / block_class.largest_bytes
