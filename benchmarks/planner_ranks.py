"""Several GPUs of one machine: what sharing costs, and what planning together gains over each rank planning for itself."""

import sys
import time
from collections.abc import Iterator, Sequence

from benchmarks.nodes import TRAININGS, NodeTraining
from benchmarks.results import Figure
from benchmarks.turns import Scale
from planner import Budgets, NodePlans, Plan, Trace, plan, plan_node


def measure(scale: Scale) -> tuple[tuple[Figure, ...], dict[str, list[float]]]:
    """Return, by training, times of an iteration: alone, planned apart, planned together. Takes half an hour.

    The results so far are in `planner_ranks.tsv` in the output folder.
    """
    samples: dict[str, list[float]] = {}
    figures: list[Figure] = []
    with (scale.output / "planner_ranks.tsv").open("w") as log:
        for training in TRAININGS:
            began = time.perf_counter()
            found = outcome(training)
            samples[training.name] = seconds_of(training, found)
            figures += figures_of(training, found, time.perf_counter() - began)
            print(training.name, found.way, *samples[training.name], sep="\t", file=log, flush=True)
            print(f"  {figures[-1].name}: {figures[-1].value} ({figures[-1].note})", file=sys.stderr, flush=True)
    return tuple(figures), samples


def outcome(training: NodeTraining) -> NodePlans:
    """Plan a training. Both tiers of all ranks are what the machine has."""
    return plan_node(training.node, training.traces(), training.budgets(), make=_make)


def _make(trace: Trace, budgets: Budgets, known: Sequence[Plan]) -> Plan:
    key = (trace.fingerprint, budgets)
    if key not in _made:
        _made[key] = plan(trace, budgets, incumbents=known, lower_bound=False)
    return _made[key]


_made: dict[tuple[str, Budgets], Plan] = {}
"""Machines have many plans in common, such as those that ranks make for themselves."""


def seconds_of(training: NodeTraining, found: NodePlans) -> list[float]:
    """Return the seconds of an iteration: without waiting, alone, planned apart, planned together; each of the slowest rank."""
    ideal = max(trace.ideal_seconds for trace in training.traces())
    apart = found.timeline.iteration_seconds if found.apart is None else found.apart.iteration_seconds
    return [ideal, max(found.alone_seconds), apart, found.timeline.iteration_seconds]


def figures_of(training: NodeTraining, found: NodePlans, planning_seconds: float) -> Iterator[Figure]:
    """Yield what sharing costs and what planning together gains."""
    ideal, alone, apart, together = seconds_of(training, found)
    times = f"without waiting {ideal:.2f} s, alone {alone:.2f}, apart {apart:.2f}, together {together:.2f} ({found.way})"
    yield Figure(name=f"{training.name}: together / alone", value=together / alone, unit="", note=times)
    note = f"planned in {planning_seconds:.0f} s"
    yield Figure(name=f"{training.name}: apart / together", value=apart / together, unit="", aim=">= 1.0", note=note)
