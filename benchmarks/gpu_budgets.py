"""A Llama under budgets relative to its unconstrained peak, with each choice of tiers, compared with other ways to save memory.

The unconstrained peak is that of Inductor. If Inductor does not fit the device, it is computed from teraio's trace.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import torch

from benchmarks.alone import LlamaScale, Missing, Outcome, Run, Runner, speed
from benchmarks.budgets import layers_to_checkpoint
from benchmarks.results import Figure
from benchmarks.variants import peak_bytes
from examples.llama import SIZES

PERCENTS = (50, 30, 70, 100)
"""In the order of the runs. The most important come first, because there may not be time for all."""
TIERS = ("host and storage", "host", "storage")
DEFAULT_SIZE = {"cuda": "llama-3.2-1b", "cpu": "tiny"}
GIB = 2**30


def measure(runner: Runner) -> tuple[Figure, ...]:
    """Return all figures of all sizes."""
    return tuple(figure for size in sizes(runner.scale) for figure in _of_size(runner, size))


def sizes(scale: LlamaScale) -> tuple[str, ...]:
    """Return the sizes of the scale, or the default one if it has none."""
    return scale.sizes or (DEFAULT_SIZE[scale.device],)


def _of_size(runner: Runner, size: str) -> Iterator[Figure]:
    base, peak, figures = unconstrained(runner, size)
    yield from figures
    if isinstance(peak, Missing):
        return
    for percent in PERCENTS:
        for tiers in TIERS:
            outcome = budgeted(runner, size, peak, percent, tiers)
            yield from budget_figures(f"{size}, {percent} %, {tiers}", outcome, peak * percent // 100, base)
        if percent < 100:
            yield from _checkpointed(runner, size, peak, percent, base)
        if percent == PERCENTS[1]:
            name = f"{size}, eager, save_on_cpu"
            saved = runner.run(name, runner.scale.setting(size, "eager", save_on_cpu=True))
            yield from plain_figures(name, saved, base)
            yield from plain_figures(f"{size}, eager", runner.plain(size, "eager"), base)


def unconstrained(runner: Runner, size: str) -> tuple[Outcome, int | Missing, tuple[Figure, ...]]:
    """Return the training by plain Inductor, the peak bytes without a budget, and the figures of both."""
    base, peak = runner.plain(size, "inductor"), unconstrained_peak(runner, size)
    name, figures = f"{size}: unconstrained peak", plain_figures(f"{size}, Inductor", base, base)
    if isinstance(peak, Missing):
        return base, peak, (*figures, Figure(name=name, value=None, unit="", note=peak.reason))
    return base, peak, (*figures, Figure(name=name, value=peak / GIB, unit="GiB"))


def unconstrained_peak(runner: Runner, size: str) -> int | Missing:
    """Return the peak bytes of the training without a budget."""
    base = runner.plain(size, "inductor")
    if isinstance(base, Run):
        return base.peak_bytes
    if runner.scale.device == "cuda":
        room, _ = torch.cuda.mem_get_info()
    else:
        room = psutil.virtual_memory().available
    options = options_for(room * 9 // 10, room, TIERS[0], runner.scale.output)
    probe = runner.run(f"{size}, nearly all memory", runner.scale.setting(size, options=options))
    if isinstance(probe, Run) and probe.trace is not None:
        return peak_bytes(probe.trace)
    why = probe.reason if isinstance(probe, Missing) else "no trace was written"
    return Missing(reason=f"Inductor: {base.reason}; teraio: {why}")


def budgeted(runner: Runner, size: str, peak: int | Missing, percent: int, tiers: str) -> Outcome:
    """Train under `percent` of `peak`. Missing if `peak` is."""
    if isinstance(peak, Missing):
        return peak
    options = options_for(peak * percent // 100, peak, tiers, runner.scale.output)
    return runner.run(f"{size}, {percent} %, {tiers}", runner.scale.setting(size, options=options))


def options_for(budget: int, peak: int, tiers: str, folder: Path) -> dict[str, Any]:
    """Return teraio's options. The host tier alone holds the whole training; beside storage, a quarter of its peak."""
    options: dict[str, Any] = {"memory_budget": budget}
    if "host" in tiers:
        wanted = peak // 4 if "storage" in tiers else peak * 5 // 4  # slots are rounded up
        options["host_budget"] = min(wanted, psutil.virtual_memory().total * 3 // 4)
    if "storage" in tiers:
        options["storage"] = str(folder)
    return options


def _checkpointed(runner: Runner, size: str, peak: int, percent: int, base: Outcome) -> Iterator[Figure]:
    """Yield the figures of checkpointing with the fewest layers that fit, estimated from the savings of all layers."""
    layers, limit = SIZES[size].layers, peak * percent // 100
    name = f"{size}, {percent} %, checkpointing"
    every = runner.run(f"{size}, checkpointing {layers}", runner.scale.setting(size, "inductor", checkpointed_layers=layers))
    if isinstance(every, Missing):
        yield speed(name, every)
        return
    count = layers_to_checkpoint(peak, every.peak_bytes, limit, layers)
    setting = runner.scale.setting(size, "inductor", checkpointed_layers=count)
    outcome = runner.run(f"{size}, checkpointing {count}", setting)
    yield from budget_figures(f"{name} {count} of {layers} layers", outcome, limit, base)


def plain_figures(name: str, outcome: Outcome, base: Outcome) -> Iterator[Figure]:
    """Yield speed and peak of a training without a budget."""
    yield speed(name, outcome, base)
    if isinstance(outcome, Run):
        yield Figure(name=f"{name}: peak", value=outcome.peak_bytes / GIB, unit="GiB", note=_reserved(outcome))


def budget_figures(name: str, outcome: Outcome, limit: int, base: Outcome) -> Iterator[Figure]:
    """Yield speed and peak over budget; for teraio also stall, bound over measured time, and the traffic of each link."""
    yield speed(name, outcome, base)
    if isinstance(outcome, Missing):
        return
    yield peak_figure(name, outcome, limit)
    reserved = outcome.report.peak_reserved_bytes
    if reserved is not None:
        yield Figure(name=f"{name}: reserved / budget", value=reserved / limit, unit="", note=_reserved(outcome))
    if outcome.report.status is not None:
        yield _stall(name, outcome)
        yield _of_the_bound(name, outcome)
        yield from traffic(name, outcome)


def peak_figure(name: str, run: Run, limit: int) -> Figure:
    """Return the peak over the budget. On the CPU, a host tier is memory of the process, too: only teraio's own count tells."""
    peak, name = run.peak_bytes, f"{name}: peak / budget"
    if run.report.status is None:
        return Figure(name=name, value=peak / limit, unit="", aim="<= 1", note=f"{peak / GIB:.3f} of {limit / GIB:.3f} GiB")
    own = run.report.status["device_peak_bytes"]
    if run.report.peak_reserved_bytes is None and "device->host" in run.moved_bytes:
        note = f"{own / GIB:.3f} of {limit / GIB:.3f} GiB by teraio's own count; {peak / GIB:.3f} with the host tier"
        return Figure(name=name, value=own / limit, unit="", aim="<= 1", note=note)
    note = f"{peak / GIB:.3f} of {limit / GIB:.3f} GiB, {own / GIB:.3f} by teraio's own count"
    return Figure(name=name, value=peak / limit, unit="", aim="<= 1", note=note)


def _reserved(run: Run) -> str:
    reserved = run.report.peak_reserved_bytes
    return "" if reserved is None else f"reserved {reserved / GIB:.3f} GiB"


def _stall(name: str, run: Run) -> Figure:
    """Return the measured time minus that of the stages alone."""
    ideal = (run.report.status or {}).get("ideal_iteration_seconds")
    stall = None if ideal is None else run.seconds - ideal
    note = "teraio has measured no iteration" if ideal is None else f"of {run.seconds:.4g} s an iteration"
    return Figure(name=f"{name}: stall", value=stall, unit="s", note=note)


def _of_the_bound(name: str, run: Run) -> Figure:
    """Return the lower bound of all plans over the measured time."""
    aim, name = ">= 0.95", f"{name}: bound / measured"
    if run.phase != "planned" or run.plan is None or run.plan.predicted is None:
        return Figure(name=name, value=None, unit="", aim=aim, note=f"no plan was followed: {run.phase}")
    bound, predicted = run.plan.predicted.lower_bound_seconds, run.plan.predicted.iteration_seconds
    note = f"bound {bound:.4g} s, predicted {predicted:.4g} s"
    return Figure(name=name, value=bound / run.seconds, unit="", aim=aim, note=note)


def traffic(name: str, run: Run) -> Iterator[Figure]:
    """Yield the use of each link: its bytes per iteration over those that it could copy in that time."""
    rates = {} if run.trace is None else {link.name: link.bytes_per_second for link in run.trace.hardware.links}
    for link, size in run.moved_bytes.items():
        rate = rates.get(link)
        note = f"{size / GIB:.3f} GiB an iteration"
        if rate is not None:
            note += f" at {rate / 1e9:.3g} GB/s"
        used = None if rate is None else size / (rate * run.seconds)
        yield Figure(name=f"{name}: use of {link}", value=used, unit="", note=note)
