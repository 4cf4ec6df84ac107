"""Training under budgets of 70, 50 and 30 % of the unconstrained peak, with recomputation or without, on drives of several rates.

Beside it, torch.utils.checkpoint with as few checkpointed layers as fit, compiled by Inductor, which needs no drive.
"""

from collections.abc import Mapping
from statistics import median

from benchmarks.budgets import AIMS, budgeted, layers_to_checkpoint, start
from benchmarks.results import Figure
from benchmarks.slow_drive import RATE
from benchmarks.turns import Scale, ratios, spread, take_turns, tensor_peak, workers
from examples.training import Report, Setting

DRIVES: Mapping[str, float | None] = {"drive": None, "1 GB/s": 1e9, "0.5 GB/s": 0.5e9}
"""Rates of each direction; None: the drive as it is."""
WAYS = {"recompute": "auto", "offload only": "off"}

Measured = tuple[tuple[Figure, ...], dict[str, list[float]]]


def measure(scale: Scale) -> Measured:
    """Measure all drives. Variants of one drive and budget take turns with the unconstrained training and checkpointing."""
    peak_bytes = tensor_peak(scale.setting(), "peak", scale.output)
    least_bytes = tensor_peak(scale.setting("inductor", checkpointed_layers=scale.layers), "peak checkpointed", scale.output)
    figures = [Figure(name="tensors' peak, unconstrained", value=peak_bytes / 2**20, unit="MiB")]
    seconds: dict[str, list[float]] = {}
    for percent in AIMS:
        budget_bytes = peak_bytes * percent // 100
        layers = layers_to_checkpoint(peak_bytes, least_bytes, budget_bytes, scale.layers)
        note = f"{layers} of {scale.layers} layers" + (", over the budget all the same" if least_bytes > budget_bytes else "")
        for drive, rate in DRIVES.items():
            settings = variants(scale, budget_bytes, layers)
            taken, notes = run(scale, {f"{name} {percent} % {drive}": each for name, each in settings.items()}, rate)
            seconds |= taken
            figures += rows(taken, {**notes, f"checkpoint {percent} % {drive}": note}, f"{percent} % {drive}")
    return tuple(figures), seconds


def variants(scale: Scale, budget_bytes: int, layers: int) -> dict[str, Setting]:
    """Return what is compared under one budget, by name."""
    plain = budgeted(scale, budget_bytes)
    named = {way: plain.model_copy(update={"options": {**plain.options, "recompute": value}}) for way, value in WAYS.items()}
    return {"unconstrained": scale.setting(), **named, "checkpoint": scale.setting("inductor", checkpointed_layers=layers)}


def run(scale: Scale, settings: dict[str, Setting], rate: float | None) -> tuple[dict[str, list[float]], dict[str, str]]:
    """Return seconds per iteration and notes, by variant."""
    environment = None if rate is None else {RATE: str(rate)}
    program = "examples.worker" if rate is None else "benchmarks.slow_drive"
    notes: dict[str, str] = {}
    with workers(settings, scale.output, environment, program) as running:
        ready = dict(running)
        for name, worker in running.items():
            ready, notes[name] = start(ready, name, worker, "")
        taken = take_turns(ready, scale.rounds)
        for name, worker in ready.items():
            notes[name] = "; ".join(filter(None, (notes[name], recomputed(worker.finish()))))
    return {name: [step.seconds for step in steps] for name, steps in taken.items()}, notes


def recomputed(report: Report) -> str:
    """Say how much ran again in the last iteration."""
    status = report.status or {}
    count = status.get("recomputed_stages", 0)
    return f"{count} stages recomputed, {status['recomputed_bytes'] / 2**20:.0f} MiB" if count else ""


def rows(taken: dict[str, list[float]], notes: dict[str, str], where: str) -> list[Figure]:
    """Return the throughput of each way relative to that without a budget."""
    base, figures = taken.get(f"unconstrained {where}"), []
    for way in (*WAYS, "checkpoint"):
        name, value = f"{way} {where}", None
        note = notes.get(name, "")
        if base is not None and name in taken:
            by_round = ratios(base, taken[name])
            value, note = median(by_round), "; ".join(filter(None, (note, spread(by_round))))
        figures.append(Figure(name=name, value=value, unit="", note=note))
    return figures
