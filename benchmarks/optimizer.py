"""AdamW with its states on the drives, under 30 % of the unconstrained peak: the step interleaved, or layer by layer.

The model is a small Llama whose memory is nearly all parameters, gradients and states. Five trainings take turns on the CPU:
* plain Inductor,
* teraio without a budget,
* teraio under the budget, with updates in the optimizer step,
* teraio under the budget, with updates inside the backward pass,
* the same stages layer by layer: each subgroup is loaded, updated and written back before the next (`benchmarks.layer_by_layer`).

The unconstrained peak is computed from teraio's trace of the training without a budget: parameters, gradients, states,
activations and workspace of its fullest stage, without memory that an allocator keeps for reuse.

[Note: Hidden copies]
A copy is hidden while the training thread computes. hidden = 1 - exposed / busy, for each link. busy: seconds in which the link
copied something. exposed: the part of them in which the training thread waited for copies or for room, of any link. "in all" uses
the sums over the links. "in all, or behind the other link" is 1 - waited / busy. waited: seconds in which the training thread
waited, counted once. All are sums over whole iterations.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

from benchmarks.layer_by_layer import layer_by_layer
from benchmarks.results import Figure
from benchmarks.turns import Scale, ratios, spread, take_turns, warm_up, workers
from benchmarks.variants import budgets_for, peak_bytes
from examples.llama import LlamaConfig
from examples.training import Report, Setting, Step
from examples.worker import EXACT_MEMORY, Worker
from planner import Trace

MODEL = LlamaConfig(layers=6, width=1024, heads=16, key_value_heads=8, feed_forward=2816, vocabulary=256, tied=True, context=128)
"""71 million parameters. The smallest matrix has 1 MiB, and so has the residual stream of BATCH rows: all blocks but the weights
of norms move. Smaller blocks would stay, and would lie in the heap of the C library, which keeps freed memory."""
BATCH = 2
PERCENT = 30
TOLERANCE = 1e-4
"""Relative tolerance of Inductor's losses after some 20 iterations. It fuses whole graphs and so adds in another order."""
WARM_STEPS = 9
"""One compiles, four are profiled. Before updates move into the backward pass, three iterations are watched."""
MIB = 2**20

INDUCTOR, FREE, PLANNED, SERIAL = "Inductor", "teraio, no budget", f"teraio, {PERCENT} %", f"layer by layer, {PERCENT} %"
OVERLAPPED = f"teraio, {PERCENT} %, overlap_step"


class LossesDiffer(Exception):
    """Trainings have different losses. The message says which, in which iteration, and the losses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One training. steps: those that are counted. before: the step before the first turn. report: at its end.

    The counters of links in steps are sums since the start. From `before` to the last step they cover `turns_steps` iterations.
    """

    before: Step
    steps: Sequence[Step]
    turns_steps: int
    phase: str
    report: Report

    @property
    def seconds(self) -> list[float]:
        """Seconds of the counted iterations."""
        return [step.seconds for step in self.steps]

    @property
    def optimizer_seconds(self) -> list[float]:
        """Seconds of the optimizer steps in the counted iterations."""
        return [step.optimizer_seconds for step in self.steps]

    def counted(self, name: str) -> dict[str, float]:
        """Return `moved_bytes`, `busy_seconds` or `exposed_seconds` per iteration, by link."""
        before, after = getattr(self.before, name), getattr(self.steps[-1], name)
        return {link: (value - before.get(link, 0)) / self.turns_steps for link, value in after.items()}


def measure(
    scale: Scale, model: LlamaConfig = MODEL, options: Mapping[str, Any] | None = None
) -> tuple[tuple[Figure, ...], dict[str, list[float]]]:
    """Return all figures, and the seconds of iterations and steps by variant. options: of teraio, besides budget and files.

    Raises LossesDiffer, WorkerFailed, TeraioError.
    """
    plain = Setting(model=model, batch=BATCH, deterministic=True, fused=True, options=dict(options or {}))
    peak, measured = trained(scale, plain)
    same_losses(measured)
    sizes = (
        Figure(name="unconstrained peak", value=peak / MIB, unit="MiB", note=_of_parameters(measured)),
        Figure(name="budget", value=budget_of(peak) / MIB, unit="MiB"),
    )
    samples = {f"{name}, iteration": each.seconds for name, each in measured.items()}
    samples |= {f"{name}, optimizer step": each.optimizer_seconds for name, each in measured.items()}
    return (*sizes, *figures(measured, budget_of(peak))), samples


def trained(scale: Scale, plain: Setting) -> tuple[int, dict[str, Measured]]:
    """Warm all five trainings up, let them take turns, and return the unconstrained peak and their measurements.

    They start one after the other: the budget follows from the trace of the training without one, and the training layer by layer
    follows a plan for the trace of the training under the same budget. Plans are not corrected, because the pauses between turns
    would count as waiting.
    """
    folder, program = scale.output, "benchmarks.layer_by_layer"
    free, limited, plan = (folder / f"optimizer-{what}.json" for what in ("unconstrained", "trace", "plan"))
    for path in (free, limited, plan):
        path.unlink(missing_ok=True)
    settings = {
        INDUCTOR: plain.model_copy(update={"backend": "inductor", "options": {}}),
        FREE: _with(plain, trace_out=free),
    }
    with workers(settings, folder) as running:
        phases = {name: warm_up(worker, WARM_STEPS) for name, worker in running.items()}
        peak = peak_bytes(Trace.load(free))
        budget = budget_of(peak)
        under_budget = _with(plain, memory_budget=budget, storage=folder, replan=False)
        planned = {PLANNED: _with(under_budget, trace_out=limited), OVERLAPPED: _with(under_budget, overlap_step=True)}
        with workers(planned, folder, EXACT_MEMORY) as second:
            phases[PLANNED] = warm_up(second[PLANNED], WARM_STEPS)
            phases[OVERLAPPED] = warm_up(second[OVERLAPPED], WARM_STEPS)
            trace = Trace.load(limited)
            layer_by_layer(trace, budgets_for(trace, budget)).save(plan)
            serial = _with(plain, memory_budget=budget, storage=folder, plan=plan)
            with workers({SERIAL: serial}, folder, EXACT_MEMORY, program) as third:
                phases[SERIAL] = warm_up(third[SERIAL], WARM_STEPS)
                return peak, in_turns({**running, **second, **third}, phases, scale.rounds)


def budget_of(peak: int) -> int:
    """Return the budget for this unconstrained peak."""
    return peak * PERCENT // 100


def _with(plain: Setting, **options: bool | int | Path) -> Setting:
    named = {name: str(value) if isinstance(value, Path) else value for name, value in options.items()}
    return plain.model_copy(update={"options": {**plain.options, **named}})


def in_turns(running: Mapping[str, Worker], phases: Mapping[str, str], rounds: int, turn: int = 3) -> dict[str, Measured]:
    """Let warm workers take `rounds` turns of `turn` steps each, end them, and return the measurements."""
    for worker in running.values():
        worker.reset_peak()
    before = {name: worker.step() for name, worker in running.items()}
    taken = take_turns(running, rounds, turn)
    return {
        name: Measured(
            before=before[name], steps=taken[name], turns_steps=rounds * turn, phase=phases[name], report=worker.finish()
        )
        for name, worker in running.items()
    }


def same_losses(measured: Mapping[str, Measured]) -> None:
    """Raise LossesDiffer unless teraio's losses are equal bit for bit, and Inductor's within TOLERANCE."""
    base = measured[FREE].steps
    for name, each in measured.items():
        tolerance = TOLERANCE if name == INDUCTOR else 0.0
        for number, (one, other) in enumerate(zip(base, each.steps, strict=True), start=1):
            if not abs(one.loss - other.loss) <= tolerance * abs(one.loss):
                raise LossesDiffer(f"counted iteration {number}: {FREE} has loss {one.loss!r}, {name} {other.loss!r}")


def figures(measured: Mapping[str, Measured], budget: int) -> Iterator[Figure]:
    """Yield times, their ratios by round, peaks over the budget, traffic, and the share of copies that is hidden."""
    for name, each in measured.items():
        note = "; ".join(filter(None, [each.phase, f"{len(each.steps)} iterations"]))
        yield Figure(name=f"{name}: iteration", value=median(each.seconds), unit="s", note=note)
        yield Figure(name=f"{name}: optimizer step", value=median(each.optimizer_seconds), unit="s")
    for over, under, aim in (
        (FREE, INDUCTOR, ""),
        (PLANNED, FREE, ""),
        (SERIAL, FREE, ""),
        (PLANNED, SERIAL, "<= 1"),
        (OVERLAPPED, SERIAL, "<= 1"),
    ):
        yield from _ratio(f"{over} / {under}", measured[over], measured[under], aim)
    for name in (PLANNED, OVERLAPPED, SERIAL):
        yield _predicted(name, measured[name])
        yield _peak(name, measured[name].report, budget)
        yield from traffic(name, measured[name])


def _ratio(name: str, over: Measured, under: Measured, aim: str) -> Iterator[Figure]:
    iterations = ratios(over.seconds, under.seconds)
    steps = ratios(over.optimizer_seconds, under.optimizer_seconds)
    yield Figure(name=f"{name}: iteration", value=median(iterations), unit="", aim=aim, note=spread(iterations))
    yield Figure(name=f"{name}: optimizer step", value=median(steps), unit="", aim=aim, note=spread(steps))


def _predicted(name: str, each: Measured) -> Figure:
    """Return predicted over measured seconds. The prediction lets copies overlap, which they do not layer by layer."""
    seconds, name = median(each.seconds), f"{name}: predicted / measured"
    predicted = (each.report.status or {})["predicted_iteration_seconds"]
    if predicted is None:
        return Figure(name=name, value=None, unit="", note="no plan was followed")
    note = f"{predicted:.4g} of {seconds:.4g} s an iteration"
    return Figure(name=name, value=predicted / seconds, unit="", note=note)


def _of_parameters(measured: Mapping[str, Measured]) -> str:
    """Return the number of parameters and their bytes: parameter, gradient and two states of AdamW in fp32, four bytes each."""
    parameters = measured[FREE].report.parameters
    return f"{parameters / 1e6:.1f} million parameters: with gradients and states {16 * parameters / MIB:.0f} MiB"


def _peak(name: str, report: Report, budget: int) -> Figure:
    resident = report.peak_bytes - report.rest_bytes
    peak = (report.status or {})["device_peak_bytes"]
    note = f"by teraio's own count; the process, less what it takes without tensors: {resident / budget:.3f}"
    return Figure(name=f"{name}: peak / budget", value=peak / budget, unit="", aim="<= 1", note=note)


def traffic(name: str, each: Measured) -> Iterator[Figure]:
    """Yield the bytes per iteration of each link, and the share of copies that is hidden, see [Note: Hidden copies]."""
    moved, busy, exposed = (each.counted(what) for what in ("moved_bytes", "busy_seconds", "exposed_seconds"))
    for link, size in moved.items():
        note = f"an iteration; the link is busy for {busy[link]:.3g} s"
        yield Figure(name=f"{name}: moved {link}", value=size / MIB, unit="MiB", note=note)
        yield hidden(f"{name}: hidden {link}", exposed.get(link, 0.0), busy[link])
    yield hidden(f"{name}: hidden in all", sum(exposed.values()), sum(busy.values()))
    waited = mean(step.late_seconds for step in each.steps)
    yield hidden(f"{name}: hidden in all, or behind the other link", waited, sum(busy.values()))


def hidden(name: str, exposed_seconds: float, busy_seconds: float) -> Figure:
    """Return 1 - exposed / busy, without a value if nothing was copied."""
    if not busy_seconds:
        return Figure(name=name, value=None, unit="", note="nothing was copied")
    note = f"waited during {exposed_seconds:.3g} of {busy_seconds:.3g} s an iteration"
    return Figure(name=name, value=1 - exposed_seconds / busy_seconds, unit="", note=note)
