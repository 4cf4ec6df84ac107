"""Idle time of the device in an iteration: with Inductor, and with teraio without and with a budget."""

from benchmarks.alone import Missing, Outcome, Runner
from benchmarks.gpu_budgets import PERCENTS, TIERS, budgeted, sizes, unconstrained_peak
from benchmarks.results import Figure


def measure(runner: Runner) -> tuple[Figure, ...]:
    """Return, for every size, the seconds of an iteration in which the profiler did not see the device compute."""
    figures = []
    for size in sizes(runner.scale):
        outcomes = {f"{size}, {backend}": runner.plain(size, backend) for backend in ("inductor", "teraio")}
        peak = unconstrained_peak(runner, size)
        for tiers in TIERS:
            outcomes[f"{size}, {PERCENTS[0]} %, {tiers}"] = budgeted(runner, size, peak, PERCENTS[0], tiers)
        figures += [idle(name, outcome) for name, outcome in outcomes.items()]
    return tuple(figures)


def idle(name: str, outcome: Outcome) -> Figure:
    """Return the seconds of an iteration in which the device was idle. The profiled step may be a little slower than others."""
    name = f"{name}: idle"
    if isinstance(outcome, Missing):
        return Figure(name=name, value=None, unit="", note=outcome.reason)
    if outcome.busy_seconds is None:
        return Figure(name=name, value=None, unit="", note="the profiler saw nothing on the device")
    seconds = max(0.0, outcome.seconds - outcome.busy_seconds)
    return Figure(name=name, value=seconds, unit="s", note=f"{seconds / outcome.seconds:.1%} of {outcome.seconds:.4g} s")
