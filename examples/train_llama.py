"""Train a Llama with random weights on real text, with or without a memory budget.

    python -m examples.train_llama --size llama-3.2-1b --device cuda --dtype bfloat16 --memory-budget 12GiB --storage /mnt/nvme

    torchrun --nproc-per-node 2 -m examples.train_llama --fsdp --memory-budget 96MiB --storage /tmp

Token ids are bytes, so only 256 of a vocabulary of 128256 occur. That changes neither memory nor time, but the loss cannot be
compared with a loss over words.
"""

import dataclasses
import os
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import ValidationError
from rich.console import Console

from examples.llama import SIZES
from examples.report import mebibytes
from examples.sharding import ranks
from examples.training import Report, Setting, Step, Training
from planner.errors import TeraioError


def step_line(number: int, step: Step) -> str:
    """Return a line about one iteration: loss, speed, and the phase in which it began."""
    rate = step.tokens / step.seconds
    return f"{number:5d}  loss {step.loss:.4f}  {rate:10,.0f} tokens/s  {step.phase}".rstrip()


def summary(report: Report) -> str:
    """Return parameters, peaks and moved bytes as text."""
    lines = [f"{report.parameters / 1e6:,.1f} million parameters"]
    if report.peak_reserved_bytes is None:
        lines.append(f"peak resident set {mebibytes(report.peak_bytes)}, of it {mebibytes(report.rest_bytes)} not tensors")
    else:
        reserved = mebibytes(report.peak_reserved_bytes)
        lines.append(f"peak of allocated device memory {mebibytes(report.peak_bytes)}, of reserved {reserved}")
    if report.status is not None:
        budget_bytes = report.status["device_budget_bytes"]
        budget = "no budget" if budget_bytes is None else f"budget {mebibytes(budget_bytes)}"
        lines.append(f"teraio: {report.status['phase']}, {budget}, peak {mebibytes(report.status['device_peak_bytes'])}")
        lines += [f"  moved {link}: {mebibytes(size)}" for link, size in report.status["moved_bytes"].items()]
    return "\n".join(lines)


def setting_for(size: str, context: int | None, options: dict[str, Any], **fields: Any) -> Setting:
    """Return the setting for the named size. Raises typer.BadParameter for an unknown size or a wrong field."""
    if size not in SIZES:
        raise typer.BadParameter(f"no size {size!r}; there are {', '.join(SIZES)}")
    model = SIZES[size] if context is None else dataclasses.replace(SIZES[size], context=context)
    try:
        return Setting.model_validate({"model": model, "options": options, **fields})
    except ValidationError as error:
        raise typer.BadParameter("; ".join(f"{each['loc'][0]}: {each['msg']}" for each in error.errors())) from error


def main(
    size: Annotated[str, typer.Option(help=f"One of {', '.join(SIZES)}.")] = "tiny",
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    dtype: Annotated[str, typer.Option(help="Data type of the parameters: float32 or bfloat16.")] = "float32",
    batch: Annotated[int, typer.Option(help="Rows of text in each iteration.", min=1)] = 4,
    context: Annotated[int | None, typer.Option(help="Tokens in a row. Default: that of the size.", min=1)] = None,
    steps: Annotated[int, typer.Option(help="Iterations.", min=1)] = 20,
    memory_budget: Annotated[str | None, typer.Option(help='Device memory for teraio, such as "12GiB".')] = None,
    host_budget: Annotated[str | None, typer.Option(help="Host memory for tensors that are moved off the device.")] = None,
    storage: Annotated[list[Path] | None, typer.Option(help="Folder for spill files. May be repeated.")] = None,
    backend: Annotated[str, typer.Option(help="teraio, inductor or eager.")] = "teraio",
    codegen: Annotated[str | None, typer.Option(help="How teraio compiles stages: inductor (default) or eager.")] = None,
    fsdp: Annotated[bool, typer.Option("--fsdp", help="Shard over the ranks of torchrun; budgets are per rank.")] = False,
) -> None:
    """Train a Llama on the sources of Python's standard library. Exit status 1 if teraio raises an error."""
    folders = [str(path) for path in storage or ()]
    given = {"memory_budget": memory_budget, "host_budget": host_budget, "storage": folders, "codegen": codegen}
    options = {name: value for name, value in given.items() if value}
    if options and backend != "teraio":
        raise typer.BadParameter(f"{', '.join(options)}: only the backend teraio has these options, not {backend}")
    setting = setting_for(size, context, options, device=device, dtype=dtype, batch=batch, backend=backend, fsdp=fsdp)
    if fsdp and "LOCAL_RANK" not in os.environ:
        raise typer.BadParameter("--fsdp needs several ranks: torchrun --nproc-per-node 2 -m examples.train_llama --fsdp")
    with ranks(device) if fsdp else nullcontext(0) as rank:
        train(setting, steps, Console(highlight=False, markup=False, soft_wrap=True, quiet=rank > 0))


def train(setting: Setting, steps: int, console: Console) -> None:
    """Take so many steps and print a line for each, and the summary. Ends the process with status 1 if teraio raises an error."""
    try:
        training = Training(setting)
        for number in range(1, steps + 1):
            console.print(step_line(number, training.step()))
        console.print(summary(training.finish()))
    except TeraioError as error:
        typer.echo(f"{type(error).__name__}: {error}")
        sys.exit(1)


if __name__ == "__main__":
    typer.run(main)
