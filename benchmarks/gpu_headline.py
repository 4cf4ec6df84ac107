"""The first figures: a Llama at 50 % and 30 % of its unconstrained peak with host memory, compared with Inductor.

Three trainings, which the other parts share.
"""

from collections.abc import Iterator

from benchmarks.alone import Missing, Runner
from benchmarks.gpu_budgets import budget_figures, budgeted, sizes, unconstrained
from benchmarks.results import Figure

PERCENTS = (50, 30)
TIERS = "host"


def measure(runner: Runner) -> tuple[Figure, ...]:
    """Return all figures of the first size."""
    return tuple(_of_size(runner, sizes(runner.scale)[0]))


def _of_size(runner: Runner, size: str) -> Iterator[Figure]:
    base, peak, figures = unconstrained(runner, size)
    yield from figures
    if isinstance(peak, Missing):
        return
    for percent in PERCENTS:
        outcome = budgeted(runner, size, peak, percent, TIERS)
        yield from budget_figures(f"{size}, {percent} %, {TIERS}", outcome, peak * percent // 100, base)
