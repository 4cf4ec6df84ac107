"""Train a GPT on real text twice, without a memory limit and with half of that memory, and compare the runs.

    python -m examples.train_text

AdamW keeps two states of the size of each parameter. They count in both peaks and move like all other blocks.

The exit status is 0 only if both runs have the same losses, bytes were moved, and the second run stayed within half of the first
peak.
"""

import sys
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from examples.gpt import GPTConfig
from examples.report import Run, faults, losses_table, mebibytes, summary_table
from examples.training import Setting
from examples.worker import EXACT_MEMORY, Worker, WorkerFailed

RESERVE_BYTES = 96 << 20
"""Memory that only the second run needs: the solver of the plan, threads and queues of the engine."""


def train(setting: Setting, name: str, iterations: int, folder: Path, console: Console) -> Run:
    """Train in a process of its own and show the progress. Raises WorkerFailed if that process ends early."""
    columns = (
        TextColumn("{task.description:<18}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[last]}"),
    )
    log = folder / f"{name.replace(' ', '-')}.log"
    steps = []
    with Progress(*columns, console=console) as progress, Worker(setting, log, EXACT_MEMORY) as worker:
        task = progress.add_task(name, total=iterations, last="compiling")
        for _ in range(iterations):
            step = worker.step()
            steps.append(step)
            resident = mebibytes(step.resident_bytes["VmRSS"])
            last = f"loss {step.loss:.4f}  {step.seconds:5.1f} s  {resident} resident  {step.phase}"
            progress.update(task, advance=1, last=last)
        return Run(name=name, steps=tuple(steps), report=worker.finish())


def device_budget(first: Run) -> int:
    """Return the budget that keeps the process within half of the peak of `first`; 0 or less if there is none.

    A budget counts tensors, but the peak is that of the process. So its other memory is subtracted.
    """
    return first.report.peak_bytes // 2 - first.report.rest_bytes - RESERVE_BYTES


def explain(first: Run, budget_bytes: int, console: Console) -> None:
    """Print how the budget of the second run is computed."""
    report = first.report
    half, rest = mebibytes(report.peak_bytes // 2), mebibytes(report.rest_bytes)
    console.print(
        f"The resident set peaked at {mebibytes(report.peak_bytes)}: parameters, gradients, AdamW's states "
        f"({mebibytes(report.state_bytes)}), activations; without tensors it takes {rest}.\n"
        f"For a peak of {half} at most, tensors get a budget of {half} - {rest} - {mebibytes(RESERVE_BYTES)} "
        f"(reserve) = [bold]{mebibytes(budget_bytes)}[/bold].",
        highlight=False,
    )


def show(first: Run, second: Run, seconds: float, console: Console) -> None:
    """Print the tables and the paths of the files."""
    console.print(losses_table(first, second))
    console.print(summary_table(first, second))
    status = second.report.status or {}
    console.print(f"trace: {status.get('trace_path')}\nplan:  {status.get('plan_path')}", highlight=False)
    phases = [step.phase for step in second.steps]
    followed = f"{phases.count('planned')} of {len(phases)} iterations followed the plan"
    console.print(f"{followed}; {seconds:.0f} s in all", highlight=False)


def both(first_setting: Setting, iterations: int, output: Path, console: Console) -> tuple[Run, Run]:
    """Train without a budget, then with the budget that follows from the first peak. Raises WorkerFailed."""
    first = train(first_setting, "all the memory", iterations, output, console)
    budget_bytes = device_budget(first)
    if budget_bytes <= 0:
        sys.exit("too small a model: without its tensors the process takes more than half of the peak")
    explain(first, budget_bytes, console)
    options = {
        "memory_budget": budget_bytes,
        "storage": str(output),
        "trace_out": str(output / "trace.json"),
        "plan_out": str(output / "plan.json"),
    }
    limited = first_setting.model_copy(update={"options": options})
    return first, train(limited, "half the memory", iterations, output, console)


def main(
    iterations: Annotated[int, typer.Option(help="Iterations of each run.", min=2)] = 14,
    layers: Annotated[int, typer.Option(help="Transformer layers.")] = 12,
    batch: Annotated[int, typer.Option(help="Rows of text in each iteration.")] = 8,
    output: Annotated[Path, typer.Option(help="Folder for all files.")] = Path("demo-output"),
) -> None:
    """Train a GPT on the sources of Python's standard library, with all the memory and with half of it."""
    console = Console() if sys.stdout.isatty() else Console(width=120)
    output = output.resolve()
    started = time.perf_counter()
    setting = Setting(model=GPTConfig(layers=layers), batch=batch, deterministic=True)
    try:
        first, second = both(setting, iterations, output, console)
    except WorkerFailed as failure:
        console.print(str(failure), style="red", markup=False, highlight=False)
        sys.exit(1)
    show(first, second, time.perf_counter() - started, console)
    found = faults(first, second)
    for fault in found:
        console.print(f"[red]failed:[/red] {fault}", highlight=False)
    if found:
        sys.exit(1)
    speed = first.seconds_per_iteration / second.seconds_per_iteration
    console.print(f"[green]same losses, half the memory, {speed:.0%} of the speed[/green]", highlight=False)


if __name__ == "__main__":
    typer.run(main)
