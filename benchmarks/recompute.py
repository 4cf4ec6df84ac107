"""Training under budgets of 70, 50 and 30 % of the unconstrained peak, with recomputation or without, on drives of several rates.

Beside it, torch.utils.checkpoint with as few checkpointed layers as fit, compiled by Inductor, which needs no drive. All
trainings under one budget take turns, together with the unconstrained one and with checkpointing; these two stay for all budgets.
"""

from collections.abc import Mapping
from contextlib import ExitStack
from statistics import median

from benchmarks.budgets import AIMS, budgeted, layers_to_checkpoint, start
from benchmarks.results import Figure
from benchmarks.slow_drive import RATE
from benchmarks.turns import Scale, ratios, spread, take_turns, tensor_peak, workers
from examples.training import Report, Setting
from examples.worker import Worker

DRIVES: Mapping[str, float | None] = {"the drive": None, "1 GB/s": 1e9, "0.5 GB/s": 0.5e9, "0.25 GB/s": 0.25e9}
"""Rates of each direction; None: the drive as it is. A slow processor needs a slow drive to be held up by it."""
WAYS = {"recompute": "auto", "offload only": "off"}
FREE = "unconstrained"

Measured = tuple[tuple[Figure, ...], dict[str, list[float]]]
Started = tuple[dict[str, Worker], dict[str, str]]
"""Workers that are ready, and notes, by name."""


def measure(scale: Scale) -> Measured:
    """Measure all budgets and drives with a small model, since there are many trainings. It needs its layers: at 30 %, one of few
    would not fit."""
    scale = scale.with_small_layers()
    peak_bytes = tensor_peak(scale.setting(), "peak", scale.output)
    least_bytes = tensor_peak(scale.setting("inductor", checkpointed_layers=scale.layers), "peak checkpointed", scale.output)
    shape = f"{scale.layers} layers of width {scale.width}, {scale.batch} rows of {scale.context} tokens"
    figures = [Figure(name="tensors' peak, unconstrained", value=peak_bytes / 2**20, unit="MiB", note=shape)]
    seconds: dict[str, list[float]] = {}
    layers = {
        percent: layers_to_checkpoint(peak_bytes, least_bytes, peak_bytes * percent // 100, scale.layers) for percent in AIMS
    }
    alone = {by_hand(count): scale.setting("inductor", checkpointed_layers=count) for count in layers.values()}
    with ExitStack() as stack:
        beside, notes = started(stack, scale, {FREE: scale.setting(), **alone})
        for percent in AIMS:
            budget_bytes, hand = peak_bytes * percent // 100, by_hand(layers[percent])
            taken, told = under_budget(scale, budget_bytes, {name: beside[name] for name in (FREE, hand) if name in beside})
            over = "over the budget all the same" if least_bytes > budget_bytes else ""
            told[hand] = joined(over, notes[hand])
            figures += rows(taken, told, hand, percent)
            seconds |= {f"{percent} %: {name}": each for name, each in taken.items()}
    return tuple(figures), seconds


def by_hand(layers: int) -> str:
    """Return the name of the training with so many checkpointed layers."""
    return f"checkpoint of {layers} layers"


def under_budget(scale: Scale, budget_bytes: int, beside: dict[str, Worker]) -> tuple[dict[str, list[float]], dict[str, str]]:
    """Train both ways on each drive, in turns with the workers `beside`. Return seconds per iteration, and notes, by name."""
    limited: dict[str, Worker] = {}
    notes: dict[str, str] = {}
    with ExitStack() as stack:
        for drive, rate in DRIVES.items():
            ready, told = started(stack, scale, ways(scale, budget_bytes, drive), rate)
            limited, notes = limited | ready, notes | told
        steps = take_turns({**beside, **limited}, scale.rounds)
        taken = {name: [step.seconds for step in each] for name, each in steps.items()}
        for name, worker in limited.items():
            notes[name] = joined(notes[name], summary(worker.finish(), median(taken[name])))
    return taken, notes


def ways(scale: Scale, budget_bytes: int, drive: str) -> dict[str, Setting]:
    """Return the trainings under a budget that are compared on one drive, by name."""
    plain = budgeted(scale, budget_bytes)
    options = {way: {**plain.options, "recompute": value} for way, value in WAYS.items()}
    return {f"{way}, {drive}": plain.model_copy(update={"options": each}) for way, each in options.items()}


def started(stack: ExitStack, scale: Scale, settings: dict[str, Setting], rate: float | None = None) -> Started:
    """Start workers, which end with `stack`, and warm them up. rate: of their drives; None: as they are."""
    environment = None if rate is None else {RATE: str(rate)}
    program = "examples.worker" if rate is None else "benchmarks.slow_drive"
    begun = stack.enter_context(workers(settings, scale.output, environment, program))
    ready, notes = begun, dict[str, str]()
    for name, worker in begun.items():
        ready, notes[name] = start(ready, name, worker, "")
    return ready, notes


def summary(report: Report, seconds: float) -> str:
    """Say what was predicted, and how much ran again in the last iteration."""
    status = report.status or {}
    predicted, count = status.get("predicted_iteration_seconds"), status.get("recomputed_stages", 0)
    return joined(
        f"predicted {predicted:.2f} s, measured {seconds:.2f} s" if predicted else "",
        f"{count} stages recomputed, {status['recomputed_bytes'] / 2**20:.0f} MiB" if count else "",
    )


def joined(*notes: str) -> str:
    """Join those notes that say something."""
    return "; ".join(filter(None, notes))


def rows(taken: dict[str, list[float]], notes: dict[str, str], hand: str, percent: int) -> list[Figure]:
    """Return the throughput of each training under a budget relative to that without one."""
    base, figures = taken.get(FREE), []
    for name in [hand, *(f"{way}, {drive}" for drive in DRIVES for way in WAYS)]:
        value, note = None, notes.get(name, "")
        if base is not None and name in taken:
            by_round = ratios(base, taken[name])
            value, note = median(by_round), joined(note, spread(by_round))
        figures.append(Figure(name=f"{percent} %: {name}", value=value, unit="", note=note))
    return figures
