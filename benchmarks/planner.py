"""Cost and quality of planning for generated iterations: seconds, memory, time over the bound, errors of the profile."""

import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from math import log
from pathlib import Path
from statistics import mean

from benchmarks.machines import H100_NVL, H100_NVL_TF32
from benchmarks.planning import planned_apart
from benchmarks.results import Figure
from benchmarks.transformer_trace import WORKLOADS
from benchmarks.turns import Scale
from benchmarks.variants import budgets_for, peak_bytes, with_errors
from planner import InfeasiblePlanError, Trace, plan, simulate

DEPTHS = (8, 16, 32, 64)
SEEDS = range(5)
LARGEST_ERROR = 0.25

Samples = dict[str, list[float]]
Found = Iterator[tuple[Figure, Samples]]


def measure(scale: Scale) -> tuple[tuple[Figure, ...], Samples]:
    """Return all figures, the slowest last. Each is printed to standard error as soon as it is known.

    Traces and plans are written to a temporary folder in the output folder. Raises PlanningFailed and the errors of `plan`.
    """
    figures: list[Figure] = []
    samples: Samples = {}
    with tempfile.TemporaryDirectory(prefix="planner-", dir=scale.output) as folder:
        for part in (_small, _depths, _profile_errors, _large):
            for figure, raw in part(Path(folder)):
                print(f"  {figure.name}: {figure.value} {figure.unit} ({figure.note})", file=sys.stderr, flush=True)
                figures.append(figure)
                samples |= raw
    return tuple(figures), samples


def _small(folder: Path) -> Found:
    """Llama-3-8B on a 94 GB GPU, in fp32 and in TF32, where arithmetic is seven times as fast."""
    workload = WORKLOADS["Llama-3-8B"]
    yield from _planning("Llama-3-8B", workload.trace(H100_NVL), "<= 10", folder)
    yield from _planning("Llama-3-8B, TF32", workload.trace(H100_NVL_TF32), "<= 10", folder)


def _large(folder: Path) -> Found:
    """Llama-3-70B on a 94 GB GPU."""
    yield from _planning("Llama-3-70B", WORKLOADS["Llama-3-70B"].trace(H100_NVL), "<= 60", folder)


def _planning(name: str, trace: Trace, seconds_aim: str, folder: Path) -> Found:
    planned = planned_apart(trace, trace.hardware.device_memory_bytes, folder)
    share = trace.hardware.device_memory_bytes / peak_bytes(trace)
    what = f"{len(trace.stages)} stages, {len(trace.blocks)} blocks, budget {share:.0%} of the peak"
    seconds = [planned.plan_seconds, planned.build_seconds, planned.solve_seconds, planned.simulate_seconds]
    yield (
        Figure(
            name=f"{name}: planning",
            value=planned.seconds,
            unit="s",
            aim=seconds_aim,
            note=f"{what}; build {planned.build_seconds:.1f} s, solve {planned.solve_seconds:.1f} s ({planned.status})",
        ),
        {f"{name}: plan, build, solve, simulate seconds": seconds},
    )
    yield Figure(name=f"{name}: peak memory", value=planned.process_bytes / 2**30, unit="GiB", aim="<= 1"), {}
    yield (
        Figure(
            name=f"{name}: iteration / bound",
            value=planned.over_bound,
            unit="",
            aim="<= 1.03",
            note=f"{planned.iteration_seconds:.3f} s; over ideal {planned.iteration_seconds / planned.ideal_seconds:.4f}",
        ),
        {},
    )


def _depths(folder: Path) -> Found:
    """Planning time by depth, at half of each peak. The number of segments in the integer program does not depend on depth."""
    workload = WORKLOADS["Llama-3-8B"]
    seconds = []
    for layers in DEPTHS:
        trace = replace(workload, model=replace(workload.model, layers=layers)).trace(H100_NVL)
        planned = planned_apart(trace, peak_bytes(trace) * 0.5, folder)
        seconds.append(planned.seconds)
        note = f"solve {planned.solve_seconds:.1f} s ({planned.status}); iteration / bound {planned.over_bound:.4f}"
        yield Figure(name=f"{layers} layers: planning", value=planned.seconds, unit="s", note=note), {}
    yield (
        Figure(
            name="growth of planning time with layers",
            value=growth_exponent(DEPTHS, seconds),
            unit="",
            aim="<= 1",
            note="x in seconds ~ layers^x, least squares; 1 is linear",
        ),
        {"planning seconds by layers": seconds},
    )
    steps = [after / before for before, after in pairwise(seconds)]
    note = f"each step: {', '.join(f'{step:.2f}' for step in steps)}; 2 is linear"
    yield Figure(name="... largest growth where layers double", value=max(steps), unit="", aim="<= 2", note=note), {}


def growth_exponent(sizes: tuple[int, ...], seconds: list[float]) -> float:
    """Return the slope of log(seconds) over log(sizes), by least squares."""
    across, up = [log(size) for size in sizes], [log(value) for value in seconds]
    middle, height = mean(across), mean(up)
    covariance = sum((x - middle) * (y - height) for x, y in zip(across, up, strict=True))
    return covariance / sum((x - middle) ** 2 for x in across)


def _profile_errors(folder: Path) -> Found:
    """The time of a plan whose stage times are wrong, over that of a plan for the right times."""
    trace = WORKLOADS["Llama-3-8B"].trace(H100_NVL)
    budgets = budgets_for(trace, trace.hardware.device_memory_bytes)
    made = plan(trace, budgets)
    ratios: list[float] = []
    failed = 0
    for seed in SEEDS:
        actual = with_errors(trace, seed=seed, largest=LARGEST_ERROR)
        informed = plan(actual, budgets)
        try:
            carried_out = simulate(actual, made.model_copy(update={"trace_fingerprint": actual.fingerprint}))
        except InfeasiblePlanError:
            failed += 1
            continue
        ratios.append(carried_out.iteration_seconds / simulate(actual, informed).iteration_seconds)
    note = f"{len(ratios)} seeds" + (f" from {min(ratios):.4f} to {max(ratios):.4f}" if ratios else "")
    name = f"stage times off by ±{LARGEST_ERROR:.0%}: time / informed plan's"
    value = mean(ratios) if ratios else None
    yield Figure(name=name, value=value, unit="", note=note), {"time under profile error / informed plan's": ratios}
    yield Figure(name="... plans that could not be carried out", value=failed, unit="", aim="<= 0"), {}
