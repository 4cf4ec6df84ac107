"""The policies by name, and `plan`, which has one signature for all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace

from planner.errors import BudgetError, InfeasiblePlanError, OptionsError, PlanError
from planner.ilp import MAX_INTEGER_STAGES
from planner.policies.keep_offload_recompute import best_recomputation, checkpointed
from planner.policies.optimise import Task, exact_with_starts, optimise
from planner.policies.predictions import cost_of, with_bound, with_lower_bound, with_predictions
from planner.policies.published import fixed_updates, g10_decisions, teraio_decisions, zero_infinity_decisions
from planner.problem import (
    DEFAULT_GAP,
    DEFAULT_THREADS,
    DEFAULT_TIME_LIMIT_SECONDS,
    DEFAULT_WRITE_WEIGHT,
    Decisions,
    LaidOut,
    Problem,
    SolverSettings,
    build_plan,
    folded,
    host_updatable,
    out_of_time,
    repeats_of,
    spelled_out,
    time_limit,
    without_collections,
    worst_of,
)
from planner.schedule import evict_furthest
from planner.schema import Budgets, Plan, Trace

_BOUND_SECONDS = 10.0  # of processor time, for the bound of a plan that is made
WHOLE_STAGES = 500  # longer iterations take so long to plan as a whole that less would be found
_SHORT_BORDER = 300  # stages of a border that is planned as well as a whole iteration: that takes some seconds
_AT_THE_BOUND = 1 + 1e-9  # a plan within this factor of the lower bound cannot be beaten

Policy = Callable[[Trace, Budgets, SolverSettings], Plan]


@without_collections()
def plan(
    trace: Trace,
    budgets: Budgets,
    *,
    policy: str = "ilp",
    time_limit_seconds: float = DEFAULT_TIME_LIMIT_SECONDS,
    gap: float = DEFAULT_GAP,
    threads: int = DEFAULT_THREADS,
    write_weight: float = DEFAULT_WRITE_WEIGHT,
    lower_bound: bool = True,
    incumbents: Sequence[Plan] = (),
) -> Plan:
    """Decide which blocks wait in which tier and when they move. The plan has been replayed in the simulator.

    `policy`: one of POLICIES, which `docs/policies.md` describes. `"ilp"` is the integer program, made exact: it decides what
    stays, what is offloaded and what is recomputed, and is never slower than `"offload-only"` or any of the HEURISTICS, nor, in
    iterations of up to 64 stages, than a fixed rule for updates; but for 1 %, which it may lose where it writes less to storage.

    `write_weight`: seconds of iteration time that one second of writing to storage is worth, since drives wear out. Up to its
    default, it only decides between plans that are no slower than every heuristic's. Unless it is 0, storage is not written for
    less than 1 % of the iteration while host memory has room. `gap`: the share of the objective by which
    the solver's solution may miss its bound. It concerns the coarse model only, and is of little use below that model's own
    error. `threads`: of the solver. `lower_bound`: compute `predicted.lower_bound_seconds`; otherwise it is 0, which may take
    less time. `incumbents`: plans for the same stages and blocks, such as those for smaller budgets or slower links. The fastest
    one is returned if the policy finds no faster plan, or none at all; so with plans for smaller budgets as incumbents, a larger
    budget never gives a slower plan. Without, it may, by its distance from the lower bound at the most. An incumbent keeps its
    own, smaller budgets where that makes it faster.

    Waits for the result: for at most `time_limit_seconds` of processor time, and some seconds more where stages are many, since
    the step that it is in then ends first. The plan is then the best so far, a greedy one at least, and `plan.solver.status`
    says "time limit". Its lower bound may take up to 10 s of processor time more. Mostly searches end before. What ends them is
    counted, so that a busy machine makes the same plans. Where passes of a long iteration repeat, one of them is planned:
    [Note: iterations that repeat] in `planner.problem.repeats`; the plans of this pass are compared with those of the HEURISTICS
    then, that of the whole iteration is not.

    Raises BudgetError (the budget is below what one stage needs, or with keep-all below everything), InfeasiblePlanError (the
    lower tiers are too small), UnsupportedError (`"host-updates"` and `"stride-2"`: nothing can update on the host),
    OptionsError (no such policy) and PlanError (the plan has numbers that are larger than a file may hold, such as the seconds
    that huge blocks take over a link of almost no rate). Never raises SolverError: where the solver fails, the plan is a greedy
    one and `plan.solver.status` says "failed".
    """
    if policy not in POLICIES:
        raise OptionsError(f"policy {policy!r} is not known; the policies are: {', '.join(POLICIES)}")
    settings = SolverSettings(time_limit_seconds=time_limit_seconds, gap=gap, threads=threads, write_weight=write_weight)
    with time_limit(time_limit_seconds):
        made = _no_slower_than(incumbents, trace, budgets, lambda: POLICIES[policy](trace, budgets, settings))
        if out_of_time():
            made = made.model_copy(update={"solver": made.solver.model_copy(update={"status": "time limit"})})
    with time_limit(_BOUND_SECONDS):
        made = with_lower_bound(made, trace, budgets, threads=threads) if lower_bound else with_bound(made, 0.0)
    fault = made.fault()
    if fault is not None:
        raise PlanError(
            f"this trace and these budgets give a plan that no file can hold, in {fault}: correct the sizes, times and rates of "
            "the trace, or the budgets"
        )
    return made.model_copy(update={"subgroup_bytes": trace.subgroup_bytes})


def _no_slower_than(incumbents: Sequence[Plan], trace: Trace, budgets: Budgets, make: Callable[[], Plan]) -> Plan:
    """Return the plan that `make` makes, or an incumbent where that is faster or no plan is made. Raises as `make` does."""
    # More memory, a larger tier or a faster link should give no slower plan.
    found = [made for incumbent in incumbents for made in _carried_over(trace, budgets, incumbent)]
    try:
        found.insert(0, make())
    except (BudgetError, InfeasiblePlanError):
        if not found:
            raise
    return min(found, key=_seconds)


def _seconds(plan: Plan) -> float:
    return plan.replayed.iteration_seconds


def _carried_over(trace: Trace, budgets: Budgets, incumbent: Plan) -> Iterator[Plan]:
    # A plan for smaller budgets is one for larger ones, too. With its own, its replay is the same: nothing is slower than that.
    tried = [budgets] + [incumbent.budgets] * (incumbent.budgets != budgets and _within(incumbent.budgets, budgets))
    for each in tried:
        given = incumbent.model_copy(update={"trace_fingerprint": trace.fingerprint, "budgets": each})
        try:
            problem, plan = _problem_of(trace, each, given)
            plan = plan.model_copy(update={"trace_fingerprint": problem.source.fingerprint})
            yield folded(trace, incumbent.recompute, with_predictions(problem, plan))
        except (BudgetError, InfeasiblePlanError, PlanError):
            continue


def _problem_of(trace: Trace, budgets: Budgets, plan: Plan) -> tuple[Problem, Plan]:
    """Return the problem with the plan's re-runs and updates on the host, and the plan for it."""
    derived, plan = spelled_out(trace, plan)
    return Problem.of(derived, budgets, plan.on_host), plan


def _within(own: Budgets, given: Budgets) -> bool:
    pairs = ((own.host_bytes, given.host_bytes), (own.storage_bytes, given.storage_bytes))
    lower = all(most is None or (size is not None and size <= most) for size, most in pairs)
    return lower and own.device_bytes <= given.device_bytes


def _optimised(name: str, make: Callable[[Trace, Budgets, Task], Iterator[Plan]], *, by_a_rule: bool) -> Policy:
    """The policy whose plan is the last one that `make` yields. by_a_rule: or one by a fixed rule for updates."""

    def policy(trace: Trace, budgets: Budgets, settings: SolverSettings) -> Plan:
        task = Task(policy=name, settings=settings, rivals=tuple(HEURISTICS.values()))
        made = _by_pass(trace, budgets, replace(task, part=True), make)
        if made is None:
            *_, made = make(trace, budgets, task)
        return _or_by_a_rule(made, trace, budgets, settings) if by_a_rule else made

    return policy


def _by_pass(trace: Trace, budgets: Budgets, task: Task, make: Callable[[Trace, Budgets, Task], Iterator[Plan]]) -> Plan | None:
    """Return the fastest plan that `make` yields for one pass, once laid out over the whole iteration and made exact there.

    See [Note: iterations that repeat] in `planner.problem.repeats`. None for short iterations, for those in which nothing
    repeats, and where no plan fits the whole iteration.
    """
    repeats = repeats_of(trace) if len(trace.stages) > WHOLE_STAGES else None
    if repeats is None:
        return None
    found: list[Plan] = []
    with suppress(BudgetError, InfeasiblePlanError):
        for once in make(repeats.once, repeats.budgets(budgets), task):
            with suppress(BudgetError, InfeasiblePlanError, PlanError):
                found.append(_laid_out(LaidOut(repeats, once), trace, budgets, task).model_copy(update={"solver": once.solver}))
    return min(found, key=lambda made: cost_of(made, trace, task.settings.write_weight), default=None)


def _laid_out(whole: LaidOut, trace: Trace, budgets: Budgets, task: Task) -> Plan:
    """Return the plan for `trace` that is laid out."""
    long = len(whole.border.stages) > _SHORT_BORDER
    border = optimise(Problem.of(whole.border, budgets), replace(task, draft=long, part=long))
    problem = Problem.of(whole.trace, budgets, border.on_host)
    best = exact_with_starts(problem, whole.decisions(problem, border), task.settings.write_weight)
    made = best.plan.model_copy(update={"policy": task.policy})
    return folded(trace, whole.recompute, with_predictions(problem, made, best.timeline))


def _offload_only(trace: Trace, budgets: Budgets, task: Task) -> Iterator[Plan]:
    yield optimise(Problem.of(trace, budgets), task)


def _or_by_a_rule(made: Plan, trace: Trace, budgets: Budgets, settings: SolverSettings) -> Plan:
    """Return `made`; in short iterations, the plan by a fixed rule for updates where that is faster."""
    if len(trace.stages) > MAX_INTEGER_STAGES or settings.write_weight > DEFAULT_WRITE_WEIGHT or not host_updatable(trace):
        return made
    bound = made.replayed.lower_bound_seconds
    if _seconds(made) <= bound * _AT_THE_BOUND or out_of_time():
        return made
    found = [made]
    for rule in RULES.values():
        with suppress(BudgetError, InfeasiblePlanError):  # no plan without re-runs, or no room in the host tier
            found.append(rule(trace, budgets, settings))
    best = min(found, key=_seconds)
    return made if best is made else with_bound(best, bound).model_copy(update={"policy": made.policy})


def _fixed_updates(name: str, *, step: int | None) -> Policy:
    """The policy in which every `step`-th subgroup updates on the host; none for None."""

    def policy(trace: Trace, budgets: Budgets, settings: SolverSettings) -> Plan:
        problem = Problem.of(trace, budgets)
        on_host = () if step is None else fixed_updates(name, problem, step)
        rivals = () if on_host else tuple(HEURISTICS.values())  # rivals update on the device
        return optimise(problem, Task(policy=name, settings=settings, rivals=rivals, on_host=on_host))

    return policy


def _heuristic(name: str, decide: Callable[[Problem], Decisions]) -> Policy:
    def policy(trace: Trace, budgets: Budgets, settings: SolverSettings) -> Plan:
        problem = Problem.of(trace, budgets)
        return with_predictions(problem, build_plan(problem, decide(problem), policy=name))

    return policy


def _keep_all(trace: Trace, budgets: Budgets, settings: SolverSettings) -> Plan:
    problem = Problem.of(trace, budgets)
    if not problem.everything_fits:
        (smallest, worst), why = worst_of(problem.live_bytes), "as this policy lets nothing leave"
        name = trace.stages[worst].name
        raise BudgetError(smallest_bytes=smallest, budget_bytes=budgets.device_bytes, stage=name, why=why)
    return with_predictions(problem, build_plan(problem, {}, policy="keep-all"))


HEURISTICS: dict[str, Callable[[Problem], Decisions]] = {
    "teraio": teraio_decisions,
    "g10": g10_decisions,
    "zero-infinity": zero_infinity_decisions,
    "belady": lambda problem: evict_furthest(problem, {}, early=False),
}
# Where updates run is fixed.
RULES: dict[str, Policy] = {
    "device-updates": _fixed_updates("device-updates", step=None),
    "host-updates": _fixed_updates("host-updates", step=1),
    "stride-2": _fixed_updates("stride-2", step=2),
}
POLICIES: dict[str, Policy] = {
    "ilp": _optimised("ilp", best_recomputation, by_a_rule=True),
    "offload-only": _optimised("offload-only", _offload_only, by_a_rule=True),
    "checkpoint": _optimised("checkpoint", checkpointed, by_a_rule=False),
    **{name: _heuristic(name, decide) for name, decide in HEURISTICS.items()},
    "keep-all": _keep_all,
    **RULES,
}
