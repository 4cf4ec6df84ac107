"""A Llama whose optimizer states do not fit the device: policies that decide where updates run and when states move.

The budget is 30 % of the unconstrained peak, with host memory for the rest. The first training makes its plan while it runs, and
writes a trace. From that trace each policy makes a plan offline for the same budgets, which another training follows (option
`plan`). "stride-2" is the fixed stride of Deep Optimizer States (Maurya et al., Middleware 2024): every second subgroup is
updated on the device, the others on the host.
"""

from collections.abc import Iterator
from statistics import median
from typing import Any

from benchmarks.alone import Missing, Outcome, Runner, speed
from benchmarks.gpu_budgets import GIB, budgeted, options_for, peak_figure, sizes, traffic, unconstrained_peak
from benchmarks.results import Figure
from benchmarks.variants import budgets_for
from planner import TeraioError, Trace, plan

POLICIES = ("ilp", "stride-2", "host-updates", "device-updates")
"""In the order of the runs; teraio's own comes first."""
PERCENT = 30
"""AdamW's states alone are more than a third of a Llama's memory. Also one of PERCENTS in `gpu_budgets`, to share a training."""
TIERS = "host"


def measure(runner: Runner) -> tuple[Figure, ...]:
    """Return all figures of all sizes."""
    return tuple(figure for size in sizes(runner.scale) for figure in _of_size(runner, size))


def _of_size(runner: Runner, size: str) -> Iterator[Figure]:
    plain, peak = runner.plain(size, "inductor"), unconstrained_peak(runner, size)
    budgeted_run = budgeted(runner, size, peak, PERCENT, TIERS)
    if isinstance(peak, Missing) or isinstance(budgeted_run, Missing) or budgeted_run.trace is None:
        reasons = [each.reason for each in (peak, budgeted_run) if isinstance(each, Missing)]
        yield Figure(name=f"{size}: trace", value=None, unit="", note=(reasons or ["no trace was written"])[0])
        return
    budget = peak * PERCENT // 100
    yield _states(size, budgeted_run.trace, budget)
    yield from policy_figures(f"{size}, planned while it trains", budgeted_run, plain, budget)
    options = options_for(budget, peak, TIERS, runner.scale.output)
    for policy in POLICIES:
        outcome = followed(runner, size, policy, budgeted_run.trace, options)
        yield from policy_figures(f"{size}, {policy}", outcome, plain, budget)


def _states(size: str, trace: Trace, budget: int) -> Figure:
    states = sum(block.size_bytes for block in trace.blocks if block.kind == "optimizer_state")
    note = f"{states / GIB:.3f} GiB; the budget is {budget / GIB:.3f} GiB"
    return Figure(name=f"{size}: states / budget", value=states / budget, unit="", note=note)


def followed(runner: Runner, size: str, policy: str, trace: Trace, options: dict[str, Any]) -> Outcome:
    """Train with `options` and the plan of `policy` for `trace`. Missing if the plan or the training is refused."""
    try:
        made = plan(trace, budgets_for(trace, options["memory_budget"]), policy=policy)
    except TeraioError as error:
        return Missing(reason=f"no plan: {type(error).__name__}: {error}")
    path = runner.scale.output / f"{size}-{policy}.json"
    made.save(path)
    setting = runner.scale.setting(size, options={**options, "plan": str(path)})
    return runner.run(f"{size}, {policy}", setting)


def policy_figures(name: str, outcome: Outcome, base: Outcome, limit: int) -> Iterator[Figure]:
    """Yield speed, seconds of the optimizer step, peak over budget and traffic of each link, or why there are none."""
    yield speed(name, outcome, base)
    if isinstance(outcome, Missing):
        return
    seconds = median(step.optimizer_seconds for step in outcome.steps)
    updates = outcome.plan.updates if outcome.plan is not None else ()
    on_host = sum(update.where == "host" for update in updates)
    count = len(outcome.trace.subgroups) if outcome.trace is not None else 0
    note = f"{on_host} of {count} subgroups update on the host"
    yield Figure(name=f"{name}: optimizer step", value=seconds, unit="s", note=note)
    yield peak_figure(name, outcome, limit)
    yield from traffic(name, outcome)
