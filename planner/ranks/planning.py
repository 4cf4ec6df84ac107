"""Plan the ranks of a machine as a whole: make plans in several ways, replay each set of plans together, keep the best."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from planner.errors import InfeasiblePlanError, PlanError
from planner.policies import plan
from planner.ranks.budgets import divided_budgets
from planner.ranks.shares import alone, with_fair_shares, with_what_others_leave
from planner.schema import Budgets, Node, Plan, Trace
from planner.simulator import NodeTimeline, Timeline, simulate_node

__all__ = ["NodePlans", "plan_node"]

_MAX_ROUNDS = 3
_BETTER = 0.999

Make = Callable[[Trace, Budgets, Sequence[Plan]], Plan]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodePlans:
    """Plans by rank, with the replay of all of them together, which is also what their predictions say.

    `way`: which plans these are. "apart": each rank planned for itself, as if nothing were shared; "fair shares": each with an
    equal share; "what others leave": each with what the others leave on average. `apart`: the replay together of plans of the
    first kind; None if the machine has no room for them. `alone_seconds`: by rank, the time that its own plan predicts.
    """

    plans: tuple[Plan, ...]
    timeline: NodeTimeline
    way: str
    apart: NodeTimeline | None
    alone_seconds: tuple[float, ...]


def plan_node(
    node: Node,
    traces: Sequence[Trace],
    budgets: Sequence[Budgets],
    *,
    make: Make | None = None,
    progress: Callable[[str], None] = lambda what: None,
) -> NodePlans:
    """Plan every rank of a machine for what the ranks share. `traces`, `budgets`: by rank; see `divided_budgets` for None.

    Each rank's plan is made for a share of what is shared, see `planner.ranks.shares`. All plans are judged together by
    `simulate_node`, and the set with the shortest iteration is returned. It is never slower than plans that the ranks make for
    themselves. Equal ranks get one plan, which is made once.

    make: makes the plan of one rank; its third argument are plans to start from. By default, `planner.plan` with its defaults.
    progress: is told what is done next. Takes two to five times as long as planning each distinct rank.

    Raises BudgetError, InfeasiblePlanError and OptionsError as `planner.plan` and `divided_budgets` do, and PlanError where the
    number of traces or budgets is not that of the ranks.
    """
    if not len(traces) == len(budgets) == node.ranks:
        raise PlanError(
            f"{node.name} has {node.ranks} ranks, found {len(traces)} traces and {len(budgets)} budgets: give one each"
        )
    search = _Search(node, traces, make or _plan)
    own = [alone(trace) for trace in traces]
    equal = divided_budgets(node, budgets)
    progress("planning each rank for itself")
    apart = search.planned(own, equal)
    search.judge("apart", apart)
    first = search.best
    shares = equal if _all_equal(own, equal) else divided_budgets(node, budgets, search.wants(own, budgets))
    if node.shared or shares != equal:
        progress("planning with fair shares")
        search.judge("fair shares", search.planned(with_fair_shares(node, traces), shares, apart))
        _look_at_others(search, shares, progress)
    return search.result(apart, None if first is None else first.timeline)


def _look_at_others(search: _Search, shares: Sequence[Budgets], progress: Callable[[str], None]) -> None:
    """Plan with what the others leave, as long as that makes the iteration shorter."""
    for _ in range(_MAX_ROUNDS if search.node.shared else 0):
        before = search.best
        if before is None:
            return
        progress("planning with what other ranks leave")
        traces = with_what_others_leave(search.node, search.traces, before.timeline)
        search.judge("what others leave", search.planned(traces, shares, before.plans))
        if search.best is None or search.best.cost[0] > before.cost[0] * _BETTER:
            return


def _plan(trace: Trace, budgets: Budgets, incumbents: Sequence[Plan]) -> Plan:
    return plan(trace, budgets, incumbents=incumbents)


def _all_equal(traces: Sequence[Trace], budgets: Sequence[Budgets]) -> bool:
    return len({(trace.fingerprint, each) for trace, each in zip(traces, budgets, strict=True)}) == 1


@dataclass(frozen=True, slots=True, kw_only=True)
class _Judged:
    """Plans with their replay. `cost`: the iteration's time; where that is equal, the time that all ranks need themselves."""

    way: str
    plans: tuple[Plan, ...]
    timeline: NodeTimeline
    cost: tuple[float, float]


class _Search:
    """The best plans so far. Each distinct problem of one rank is planned once."""

    def __init__(self, node: Node, traces: Sequence[Trace], make: Make) -> None:
        self.node, self.traces, self._make = node, traces, make
        self._made: dict[tuple[str, Budgets], Plan] = {}
        self._refusal: InfeasiblePlanError | None = None
        self.best: _Judged | None = None

    def planned(self, traces: Sequence[Trace], budgets: Sequence[Budgets], known: Sequence[Plan] = ()) -> tuple[Plan, ...]:
        """Return a plan for each rank, made for other rates or budgets. known: plans that are no worse to start from."""
        found = []
        for rank, (trace, each) in enumerate(zip(traces, budgets, strict=True)):
            key = (trace.fingerprint, each)
            if key not in self._made:
                self._made[key] = self._make(trace, each, known[rank : rank + 1])
            found.append(self._made[key])
        return tuple(found)

    def wants(self, traces: Sequence[Trace], budgets: Sequence[Budgets]) -> list[dict[str, int]]:
        """What each rank would hold in each tier if the others held nothing."""
        whole = [
            each.model_copy(
                update={
                    "host_bytes": self.node.host_memory_bytes if each.host_bytes is None else each.host_bytes,
                    "storage_bytes": self.node.storage_bytes if each.storage_bytes is None else each.storage_bytes,
                }
            )
            for each in budgets
        ]
        made = self.planned(traces, whole)
        return [dict(each.predicted.peak_bytes) if each.predicted else {"host": 0, "storage": 0} for each in made]

    def judge(self, way: str, plans: Sequence[Plan]) -> None:
        """Replay the plans together. They are the best if nothing was faster so far."""
        carried = tuple(
            each.model_copy(update={"trace_fingerprint": trace.fingerprint})
            for each, trace in zip(plans, self.traces, strict=True)
        )
        try:
            timeline = simulate_node(self.node, self.traces, carried)
        except InfeasiblePlanError as error:
            self._refusal = self._refusal or error
            return
        cost = (timeline.iteration_seconds, sum(timeline.own_seconds(rank) for rank in range(self.node.ranks)))
        if self.best is None or cost < self.best.cost:
            self.best = _Judged(way=way, plans=carried, timeline=timeline, cost=cost)

    def result(self, apart: Sequence[Plan], together: NodeTimeline | None) -> NodePlans:
        """Return the best plans; their predictions are what they do together. Raises InfeasiblePlanError if none fit."""
        if self.best is None:
            assert self._refusal is not None  # otherwise there would be plans
            raise self._refusal
        alone_seconds = tuple(_seconds(each) for each in apart)
        bounds = [each.predicted.lower_bound_seconds if each.predicted else 0.0 for each in apart]
        plans = map(_with_timeline, self.traces, self.best.plans, self.best.timeline.ranks, bounds)
        return NodePlans(
            plans=tuple(plans), timeline=self.best.timeline, way=self.best.way, apart=together, alone_seconds=alone_seconds
        )


def _seconds(made: Plan) -> float:
    assert made.predicted is not None  # every plan is replayed
    return made.predicted.iteration_seconds


def _with_timeline(trace: Trace, made: Plan, timeline: Timeline, bound: float) -> Plan:
    """Return the plan with predictions from the replay together. bound: what holds for the rank alone holds here too."""
    assert made.predicted is not None  # every plan is replayed
    return made.model_copy(
        update={
            "predicted": made.predicted.model_copy(
                update={
                    "iteration_seconds": timeline.iteration_seconds,
                    "ideal_seconds": trace.ideal_seconds,
                    "lower_bound_seconds": bound,
                    "stall_seconds": timeline.stall_seconds,
                    "peak_bytes": timeline.peak_bytes,
                    "moved_bytes": timeline.moved_bytes,
                    "storage_written_bytes": timeline.storage_written_bytes,
                }
            )
        }
    )
