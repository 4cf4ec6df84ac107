"""Train a GPT on real text in two processes, one without a memory limit and one with half of that memory, and compare them.

    python -m examples.train_text

AdamW keeps two states of the size of each parameter. They count in both peaks and move like all other blocks. When the second
training follows its plan, both take turns, so that a busy machine slows both down alike; these turns are compared.

All files are in one folder: compiled code, spilled blocks while they are needed, trace, plan and the plan's page. The exit
status is 0 only if both runs have the same losses, bytes were moved, and the second run stayed within half of the first peak.
"""

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from examples.gpt import GPTConfig
from examples.report import Run, faults, losses_table, mebibytes, speed_line, summary_table
from examples.training import Setting, Step
from examples.worker import EXACT_MEMORY, ROOT, Worker, WorkerFailed

RESERVE_BYTES = 96 << 20
"""Memory that only the second run needs: the solver of the plan, threads and queues of the engine."""

PEAK_STEPS = 3
"""After these, a training has reached its peak: the optimizer's states are there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """A training in a process of its own, the steps that it took, and its line on the screen."""

    name: str
    worker: Worker
    progress: Progress
    task: int
    steps: list[Step] = field(default_factory=list)
    turns: list[Step] = field(default_factory=list)

    def step(self, total: int | None = None) -> Step:
        """Take a step. total: how many it will have taken at the end, if that is known."""
        step = self.worker.step()
        self.steps.append(step)
        resident = mebibytes(step.resident_bytes["VmRSS"])
        last = f"loss {step.loss:.4f}  {step.seconds:5.1f} s  {resident} resident  {step.phase}"
        self.progress.update(self.task, advance=1, total=total, last=last)  # type: ignore[arg-type]
        return step

    def come_to_plan(self, at_most: int) -> None:
        """Take steps until one follows the plan, or that many."""
        while len(self.steps) < at_most and self.step().phase != "planned":
            if self.steps[-1].phase == "planning":
                self.worker.wait_for_plan()

    def finish(self) -> Run:
        """End the training and return what it was like."""
        return Run(name=self.name, steps=tuple(self.steps), turns=tuple(self.turns), report=self.worker.finish())


@contextmanager
def running(setting: Setting, name: str, folder: Path, progress: Progress) -> Iterator[Running]:
    """Train in a process of its own within the block. Steps raise WorkerFailed if it ends early."""
    log = folder / f"{name.replace(' ', '-')}.log"
    temporary = folder / "temporary"  # Inductor keeps headers there, wherever its cache folder is
    temporary.mkdir(parents=True, exist_ok=True)
    environment = {"TMPDIR": str(temporary), "TORCHINDUCTOR_CACHE_DIR": str(temporary / "compiled")}
    with Worker(setting, log, {**EXACT_MEMORY, **environment}) as worker:
        yield Running(name=name, worker=worker, progress=progress, task=progress.add_task(name, total=None, last="compiling"))


def take_turns(first: Running, second: Running, rounds: int) -> None:
    """Let each training take two steps in turn. The second one counts; the first finds caches as the other training left them."""
    total = len(first.steps) + 2 * rounds
    for _ in range(rounds):
        for each in (first, second):
            each.step(total)
            each.turns.append(each.step(total))


def device_budget(peak: Step) -> int:
    """Return the budget that keeps the process within half of this peak; 0 or less if there is none.

    A budget counts tensors, but the peak is that of the process. So its other memory is subtracted.
    """
    return peak.resident_bytes["VmHWM"] // 2 - rest_bytes(peak) - RESERVE_BYTES


def rest_bytes(peak: Step) -> int:
    """Return what the process took beside its tensors when both were at their peak."""
    return peak.resident_bytes["VmHWM"] - peak.device_peak_bytes


def explain(peak: Step, budget_bytes: int, console: Console) -> None:
    """Print how the budget of the second run is computed."""
    resident, rest = peak.resident_bytes["VmHWM"], mebibytes(rest_bytes(peak))
    half = mebibytes(resident // 2)
    console.print(
        f"The resident set peaked at {mebibytes(resident)}: parameters, gradients, AdamW's states, activations; beside tensors "
        f"it has {rest}.\nFor a peak of {half} at most, tensors get a budget of {half} - {rest} - {mebibytes(RESERVE_BYTES)} "
        f"(reserve) = [bold]{mebibytes(budget_bytes)}[/bold].",
        highlight=False,
    )


def show(first: Run, second: Run, seconds: float, console: Console) -> None:
    """Print the tables and the paths of the files."""
    console.print(losses_table(first, second))
    console.print(summary_table(first, second))
    status = second.report.status or {}
    console.print(f"trace: {status.get('trace_path')}\nplan:  {status.get('plan_path')}", highlight=False, soft_wrap=True)
    phases = [step.phase for step in second.steps]
    followed = f"{phases.count('planned')} of {len(phases)} iterations followed the plan"
    console.print(f"{followed}; {seconds:.0f} s in all", highlight=False)


def both(setting: Setting, at_most: int, rounds: int, output: Path, console: Console) -> tuple[Run, Run]:
    """Train without a budget, then with the budget that follows from the first peak, then both in turns. Raises WorkerFailed."""
    columns = (
        TextColumn("{task.description:<18}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[last]}"),
    )
    with Progress(*columns, console=console) as progress, running(setting, "all the memory", output, progress) as first:
        for _ in range(PEAK_STEPS):
            first.step()
        budget_bytes = device_budget(first.steps[-1])
        if budget_bytes <= 0:
            sys.exit("too small a model: beside its tensors the process takes more than half of the peak")
        explain(first.steps[-1], budget_bytes, console)
        options = {
            **setting.options,
            "memory_budget": budget_bytes,
            "storage": str(output),
            "trace_out": str(output / "trace.json"),
            "plan_out": str(output / "plan.json"),
            "plan_cache": "off",  # nothing outside of the folder
            "tiles": "off",  # the stages of the first run, so that losses are the same to the last bit
        }
        limited = setting.model_copy(update={"options": options})
        with running(limited, "half the memory", output, progress) as second:
            second.come_to_plan(at_most)
            while len(first.steps) < len(second.steps):
                first.step()
            take_turns(first, second, rounds)
            return first.finish(), second.finish()


def write_page(output: Path) -> Path:
    """Write the page of the plan that the second run followed. Raises CalledProcessError with what the command said."""
    page = output / "report.html"
    files = [output / "plan.json", "--trace", output / "trace.json", "-o", page]
    command = [sys.executable, "-m", "teraio.cli", "report", *map(str, files), "--points", "3"]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    return page


def main(
    iterations: Annotated[
        int, typer.Option(help="Iterations of each run before turns, at most: until there is a plan.", min=3)
    ] = 24,
    rounds: Annotated[int, typer.Option(help="Turns of each run, of two iterations.", min=1)] = 4,
    layers: Annotated[int, typer.Option(help="Transformer layers.")] = 12,
    batch: Annotated[int, typer.Option(help="Rows of text in each iteration.")] = 8,
    output: Annotated[Path, typer.Option(help="Folder for all files.")] = Path("demo-output"),
) -> None:
    """Train a GPT on the sources of Python's standard library, with all the memory and with half of it."""
    console = Console() if sys.stdout.isatty() else Console(width=120)
    output = output.resolve()
    started = time.perf_counter()
    setting = Setting(model=GPTConfig(layers=layers), batch=batch, deterministic=True)
    console.print(
        "What this shows: with half of the memory that a training takes by itself, it has the same losses, because what is idle "
        "waits in files. The last line says what that costs.",
        highlight=False,
    )
    try:
        first, second = both(setting, iterations, rounds, output, console)
    except WorkerFailed as failure:
        console.print(str(failure), style="red", markup=False, highlight=False)
        sys.exit(1)
    show(first, second, time.perf_counter() - started, console)
    found = faults(first, second)
    for fault in found:
        console.print(f"[red]failed:[/red] {fault}", highlight=False)
    if found:
        sys.exit(1)
    console.print(f"page:  {write_page(output)}", highlight=False, soft_wrap=True)
    console.print(f"[green]same losses, half the memory, {speed_line(first, second)}[/green]", highlight=False)


if __name__ == "__main__":
    typer.run(main)
