"""Training under budgets of 70, 50 and 30 % of the unconstrained peak: speed, resident set, prediction.

The unconstrained peak is that of the tensors: the resident peak of the process without its other memory. Each budget is compared
with torch.utils.checkpoint, compiled by Inductor, with as few checkpointed layers as fit.
"""

from dataclasses import dataclass
from math import ceil
from statistics import median
from typing import Any

from benchmarks.results import Figure
from benchmarks.turns import Scale, ratios, spread, take_turns, tensor_peak, warm_up, workers
from examples.training import Report, Setting
from examples.worker import Worker, WorkerFailed

AIMS = {70: ">= 0.97", 50: ">= 0.95", 30: ">= 0.90"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """The measurements, by variant. seconds: of the counted steps. notes: phases and failures."""

    peak_bytes: int
    budget_bytes: dict[str, int]
    checkpointed_layers: dict[str, int]
    seconds: dict[str, list[float]]
    reports: dict[str, Report]
    notes: dict[str, str]

    def median_seconds(self, variant: str) -> float | None:
        """Return the median seconds per iteration of a variant; None if it did not run."""
        return median(self.seconds[variant]) if variant in self.seconds else None


def sweep(scale: Scale) -> Sweep:
    """Run every variant, in turns."""
    peak_bytes = tensor_peak(scale.setting(), "peak", scale.output)
    least = scale.setting("inductor", checkpointed_layers=scale.layers)
    least_bytes = tensor_peak(least, "peak checkpointed", scale.output)
    settings, budget_bytes, layers, notes = {"unconstrained": scale.setting()}, {}, {}, {}
    for percent in AIMS:
        name, other = f"teraio {percent} %", f"checkpoint {percent} %"
        budget_bytes[name] = peak_bytes * percent // 100
        settings[name] = budgeted(scale, budget_bytes[name])
        layers[other] = layers_to_checkpoint(peak_bytes, least_bytes, budget_bytes[name], scale.layers)
        settings[other] = scale.setting("inductor", checkpointed_layers=layers[other])
        notes[other] = f"{layers[other]} of {scale.layers} layers"
        if least_bytes > budget_bytes[name]:
            notes[other] += ", over the budget all the same"
    with workers(settings, scale.output) as running:
        ready = dict(running)
        for name, worker in running.items():
            ready, notes[name] = start(ready, name, worker, notes.get(name, ""))
        taken = take_turns(ready, scale.rounds)
        reports = {name: worker.finish() for name, worker in ready.items()}
    seconds = {name: [step.seconds for step in steps] for name, steps in taken.items()}
    return Sweep(
        peak_bytes=peak_bytes,
        budget_bytes=budget_bytes,
        checkpointed_layers=layers,
        seconds=seconds,
        reports=reports,
        notes=notes,
    )


def budgeted(scale: Scale, budget_bytes: int) -> Setting:
    """Return the training under a budget, with its files in the output folder."""
    options: dict[str, Any] = {"memory_budget": budget_bytes, "storage": str(scale.output)}
    return scale.setting().model_copy(update={"options": options})


def start(ready: dict[str, Worker], name: str, worker: Worker, note: str) -> tuple[dict[str, Worker], str]:
    """Warm `worker` up until it follows its plan. Return the workers that are ready, without it if it ended, and a note."""
    try:
        phase = warm_up(worker, 6)  # one compiles, four are profiled
    except WorkerFailed as failure:
        return {other: kept for other, kept in ready.items() if other != name}, failure.reason
    worker.reset_peak()
    return ready, "; ".join(part for part in (note, phase) if part)


def layers_to_checkpoint(peak_bytes: int, least_bytes: int, budget_bytes: int, layers: int) -> int:
    """Return the fewest layers to checkpoint so that the budget suffices, if each saves the same; all if none suffice."""
    if budget_bytes >= peak_bytes:
        return 0
    saved_bytes = (peak_bytes - least_bytes) / layers
    if saved_bytes <= 0:
        return layers
    return min(layers, ceil((peak_bytes - budget_bytes) / saved_bytes))


def throughput(measured: Sweep) -> tuple[Figure, ...]:
    """Return the throughput under each budget relative to that without one, for teraio and for checkpointing."""
    base = measured.median_seconds("unconstrained")
    figures = [
        Figure(name="unconstrained", value=base, unit="s"),
        Figure(name="tensors' peak, unconstrained", value=measured.peak_bytes / 2**20, unit="MiB"),
    ]
    for percent, aim in AIMS.items():
        for kind, aimed in (("teraio", aim), ("checkpoint", "")):
            name = f"{kind} {percent} %"
            value, note = None, measured.notes[name]
            if name in measured.seconds and "unconstrained" in measured.seconds:
                by_round = ratios(measured.seconds["unconstrained"], measured.seconds[name])
                value, note = median(by_round), f"{note}; {spread(by_round)}"
            figures.append(Figure(name=name, value=value, unit="", aim=aimed, note=note))
    return tuple(figures)


def resident_set(measured: Sweep) -> tuple[Figure, ...]:
    """Return the resident peak of the tensors, as the system counts it, over the budget."""
    figures = []
    for percent in AIMS:
        budget_bytes = measured.budget_bytes[f"teraio {percent} %"]
        for kind in ("teraio", "checkpoint"):
            report = measured.reports.get(f"{kind} {percent} %")
            if report is None:
                continue
            tensors_bytes = report.peak_bytes - report.rest_bytes
            sizes = (report.peak_bytes, report.rest_bytes, budget_bytes)
            peak, rest, limit = (f"{size_bytes / 2**20:.0f} MiB" for size_bytes in sizes)
            note = f"peak {peak}, of it {rest} not tensors; budget {limit}"
            value = tensors_bytes / budget_bytes
            figures.append(Figure(name=f"{kind} {percent} %, peak / budget", value=value, unit="", note=note))
    return tuple(figures)


def prediction(measured: Sweep) -> tuple[Figure, ...]:
    """Return the relative error of the predicted iteration time."""
    figures = []
    for percent in AIMS:
        name = f"teraio {percent} %"
        report = measured.reports.get(name)
        predicted = report.status["predicted_iteration_seconds"] if report and report.status else None
        seconds = measured.median_seconds(name)
        value = abs(predicted / seconds - 1) if predicted and seconds else None
        note = measured.notes[name]
        if value is not None:
            note = f"predicted {predicted:.2f} s, measured {seconds:.2f} s"
        name = f"{percent} %, error of prediction"
        figures.append(Figure(name=name, value=value, unit="", aim="<= 0.05", note=note))
    return tuple(figures)
