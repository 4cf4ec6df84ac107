"""The commands about machines: what a step would need of one (capture), what would help (advise), what this one has (doctor).

`capture` and `doctor` need torch, which is imported when they run.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

import planner
from planner.problem import SolverSettings
from teraio.cli import arguments, output
from teraio.cli.advice import Adviser, Case, Unit
from teraio.cli.arguments import AsJson, Device, Host, Rows, Storage, with_solver_options
from teraio.cli.lengths import length_range
from teraio.cli.output import Column, Data, Facts, Page, Table, in_asked_unit, show_or_print, working, write_file
from teraio.cli.trace_summary import sliced_floor, summarise_trace, tiles_of, trace_page
from teraio.options import require_directory


def capture(
    target: Annotated[
        str,
        typer.Argument(metavar="MODULE:FUNCTION", help="A function that makes a training and returns a function for one step."),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="Where to write the trace.")],
    hardware: Annotated[
        str, typer.Option(help="A known machine (h100, h200, a100, rtx4090, rtx5090, laptop) or a file that describes one.")
    ] = "h100",
    name: Annotated[str | None, typer.Option(help="Name of the trace.", show_default="that of the function")] = None,
    subgroup: Annotated[
        str | None, typer.Option(help="How much of the optimizer is updated at once, such as 256MiB.", show_default="chosen")
    ] = None,
    tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens of a step, to show them a second.", show_default="none")
    ] = None,
    samples: Annotated[int | None, typer.Option(min=1, help="The same for samples, such as images.", show_default="none")] = None,
    lengths: Annotated[
        str | None,
        typer.Option(
            metavar="SHORTEST:LONGEST",
            help="A range of lengths, such as 128:2048: the function for one step takes a length.",
            show_default="the step takes nothing",
        ),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(
            help="The memory budget that the graphs are compiled for, such as 24GB: what is too large for it runs in tiles.",
            show_default="none",
        ),
    ] = None,
    as_json: AsJson = False,
    rows: Rows = 10,
) -> None:
    """Capture a training step for a machine without running it: no memory, no GPU.

    Needs torch.
    """
    require_directory("--output", output.parent)
    size = None if subgroup is None else arguments.size("--subgroup", subgroup)
    budget = None if device is None else arguments.size("--device", device)
    between = length_range(lengths)
    with working("capturing"):
        training = _function_of(target)
        from teraio.capturing import capture as capture_trace

        trace = capture_trace(
            training,
            hardware=hardware,
            name=name,
            subgroup_bytes=size,
            tokens=tokens,
            samples=samples,
            lengths=between,
            device_bytes=budget,
        )
    write_file(output, trace.text())
    summary = summarise_trace(trace)
    memory = in_asked_unit(budget or trace.hardware.device_memory_bytes).replace(" ", "")
    told = {"written": str(output), "next": f"teraio advise {output} --device {memory}"}
    show_or_print(summary, [*trace_page(summary, rows), Facts(told)], as_json=as_json)


def _function_of(target: str) -> Callable[[], Any]:
    """Import the function that a text such as "examples.captures:llama" names; modules of the current directory are found."""
    module_name, _, function_name = target.partition(":")
    if not module_name or not function_name:
        raise planner.OptionsError(f"capture: found {target!r}, wanted MODULE:FUNCTION, such as examples.captures:llama_3_8b")
    sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise planner.OptionsError(f"capture: {error}; run the command in the directory that has the module") from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise planner.OptionsError(
            f"capture: module {module_name} ({getattr(module, '__file__', None)}) has no function {function_name!r}"
        )
    return function  # type: ignore[no-any-return]


@with_solver_options
def advise(
    traces: Annotated[
        list[Path], typer.Argument(metavar="TRACE...", help="A trace file; for a step of a size, several of one training.")
    ],
    device: Device,
    host: Host = None,
    storage: Storage = None,
    tokens_per_step: Annotated[
        int | None, typer.Option(min=1, help="Find how to divide a step of so many tokens into passes.", show_default="none")
    ] = None,
    samples_per_step: Annotated[
        int | None, typer.Option(min=1, help="The same for samples, such as images.", show_default="none")
    ] = None,
    drives: Annotated[int, typer.Option(min=1, help="Number of drives behind the storage tier of the trace.")] = 1,
    plans: Annotated[Path | None, typer.Option(help="Directory for the traces and plans behind each line.")] = None,
    as_json: AsJson = False,
    *,
    settings: SolverSettings,
) -> None:
    """Say whether TRACE fits, how fast it is, what holds it up, and what would change that.

    Tried are more memory, one more drive, a larger batch, more accumulation; with --tokens-per-step, all
    microbatches that the traces have, pass by pass and layer by layer. Exit code 1 if it does not fit.
    """
    if plans is not None:
        require_directory("--plans", plans)
    if tokens_per_step is not None and samples_per_step is not None:
        raise planner.OptionsError("found --tokens-per-step and --samples-per-step; give one of them")
    unit: Unit = "tokens" if samples_per_step is None else "samples"
    step = tokens_per_step or samples_per_step
    if step is None and len(traces) > 1:
        raise planner.OptionsError(f"found {len(traces)} traces, wanted one; several are for --tokens-per-step")
    loaded = [planner.Trace.load(trace) for trace in traces]

    def keep(case: Case, made: planner.Plan) -> None:
        if plans is not None:
            name = case.what.replace(" ", "-").translate({ord(each): None for each in "%,"})
            write_file(plans / f"{name}.trace.json", case.trace.text())
            write_file(plans / f"{name}.plan.json", made.text())

    budgets = arguments.budgets(arguments.size("--device", device), host, storage)
    with working("planning") as progress:
        adviser = Adviser(settings=settings, drives=drives, progress=progress, made=keep)
        if step is None:
            data = output.data_of(adviser.advise(loaded[0], budgets)) | {"tiles": tiles_of(loaded[0])}
        else:
            data = output.data_of(adviser.divide(loaded, budgets, step=step, unit=unit))
    show_or_print(data, _advice_page(data) if step is None else _geometry_page(data), as_json=as_json)
    if data["answers"][0]["predicted"] is None:
        raise typer.Exit(1)


def _geometry_page(advice: Data) -> Page:
    """Show each way to divide the step, the fastest first."""
    answers = advice["answers"]
    best = answers[0]
    fits = best["what"] if best["predicted"] else f"nothing: {arguments.as_options(best['reason'])}"
    overview = {"trace": advice["trace_name"], **output.budget_facts(best["budgets"]), "fastest": fits}
    columns: dict[str, Column] = {
        "passes x microbatch": "what",
        "fits": _fits,
        ">a step": "predicted.iteration_seconds",
        ">without waiting": "ideal_seconds",
        **output.rate_columns(best["work"]),
        ">smallest device budget": "floor_bytes",
        ">with updates in slices": sliced_floor,
        ">peak if nothing moves": "peak_bytes",
        **{f">moved {link}": _moved(link) for link in (best["predicted"] or {"moved_bytes": ()})["moved_bytes"]},
        "held up by": _held_up,
        ">recomputed": lambda answer: answer["predicted"] and output.some_seconds(answer["predicted"].get("recompute_seconds")),
    }
    page: list[Table | Facts | str] = [Facts(overview), Table(columns=columns, rows=answers)]
    if any(answer["geometry"]["order"] == "layer by layer" for answer in answers):
        page.append(
            "layer by layer: each layer runs for all passes before the next one does. teraio never reorders a step, so the "
            "training loop must do that; predicted only, without what the loop does between layers."
        )
    return page


def _moved(link: str) -> Column:
    return lambda answer: answer["predicted"] and output.format_bytes(answer["predicted"]["moved_bytes"].get(link, 0))


def _advice_page(advice: Data) -> Page:
    """Show what was asked for, then each change beside it."""
    asked = advice["answers"][0]

    overview = {
        "trace": advice["trace_name"],
        **output.budget_facts(asked["budgets"]),
        "smallest device budget": output.exact_bytes(asked["floor_bytes"]),
        "with updates in slices": sliced_floor(asked),
        "in tiles": advice["tiles"]["words"],
        "peak if nothing moves": output.exact_bytes(asked["peak_bytes"]),
        "does it fit": asked["fit"] if asked["predicted"] else f"{asked['fit']}: {arguments.as_options(asked['reason'])}",
        "what holds it up": _held_up(asked),
    }
    columns: dict[str, Column] = {
        "case": "what",
        "fits": _fits,
        ">iteration": "predicted.iteration_seconds",
        ">without waiting": lambda answer: answer["predicted"] and output.format_seconds(answer["ideal_seconds"]),
        ">speed": lambda answer: "" if answer["speed"] is None else f"{answer['speed']:.2f}x",
        **output.rate_columns(asked["work"]),
        "held up by": _held_up,
        ">recomputed": lambda answer: answer["predicted"] and output.some_seconds(answer["predicted"].get("recompute_seconds")),
        ">written a day": _written,
    }
    return Facts(overview), Table(columns=columns, rows=advice["answers"])


def _fits(answer: Data) -> str:
    return f"{answer['fit']}, best within --time-limit" if answer["limited"] else str(answer["fit"])


def _held_up(answer: Data) -> str:
    return answer["holds_up"] or ("computation" if answer["predicted"] else "")


def _written(answer: Data) -> str:
    if not answer["predicted"]:
        return ""
    return output.format_bytes(answer["written_bytes_per_day"]) if answer["written_bytes_per_day"] else "nothing"


def doctor(
    storage: Annotated[list[Path] | None, typer.Option(help="A directory for spill files. May be repeated.")] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.", show_default="cuda where there is a GPU")] = "",
    hardware_out: Annotated[
        Path | None, typer.Option(help="Where to write a description of this machine, for capture. Measures for half a minute.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Look at this machine: software, memory, drives.

    Says what is missing or slow, what follows, and what to do. Needs torch. Exit code 1 if something is missing.
    """
    if hardware_out is not None:
        require_directory("--hardware-out", hardware_out.parent)
    import torch

    from teraio.cli.doctor import examine, measured_machine

    chosen = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if chosen not in ("cpu", "cuda"):
        raise planner.OptionsError(f"option --device: found {device!r}, wanted cpu or cuda")
    where, directories = torch.device(chosen), storage or []
    with working("looking at this machine"):
        found = examine(directories, where)
        if hardware_out is not None:
            write_file(hardware_out, measured_machine(directories, where).model_dump_json(by_alias=True, indent=1) + "\n")
    styles = {"ok": "green", "note": "", "slow": "yellow", "missing": "bold red"}
    columns: dict[str, Column] = {
        "looked at": "what",
        "": lambda finding: Text(finding["verdict"], style=styles[finding["verdict"]]),
        "found": "found",
        "what follows": "effect",
        "what to do": "remedy",
    }
    data = output.data_of(found)
    page: list[Table | Facts] = [Table(columns=columns, rows=data["findings"])]
    if hardware_out is not None:
        page.append(Facts({"written": str(hardware_out), "for": f"teraio capture --hardware {hardware_out}"}))
    show_or_print(data, page, as_json=as_json)
    if not found.healthy:
        raise typer.Exit(1)
