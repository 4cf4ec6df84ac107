"""Inputs of varying length on the command line: which lengths there are, and what a plan takes at each of them."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from math import prod
from pathlib import Path

import planner
from planner.errors import FileFormatError, OptionsError
from planner.problem import live_bytes
from planner.schema import printable, told
from teraio.cli.output import Column, Data, Facts, Table, data_of, format_seconds, iteration_time, rate_columns

_MOST = 64  # lengths that are planned for
_SHOWN = 8  # lengths at which a trace is shown
_LARGEST_FILE = 1 << 20


def length_range(text: str | None) -> tuple[int, int] | None:
    """Return the shortest and the longest length of a text such as "128:2048"; None for None. Raises OptionsError."""
    found = None if text is None else re.fullmatch("([0-9]{1,9}):([0-9]{1,9})", text)
    if text is not None and found is None:
        raise OptionsError(f"option --lengths: found {printable(text, most=40)!r}, wanted SHORTEST:LONGEST, such as 128:2048")
    return None if found is None else (int(found[1]), int(found[2]))


def histogram(text: str) -> dict[int, float]:
    """Return lengths and how often each occurs: of a list such as "128,512,2048", each once, or of a file.

    A file has lines with a length and how often it occurs, once where that is left out. Raises OptionsError, FileFormatError.
    """
    if re.fullmatch("[0-9]{1,9}(,[0-9]{1,9})*", text):
        counts = {int(each): 1.0 for each in text.split(",")}
    elif os.path.isfile(text):
        counts = _in_file(Path(text))
    else:
        raise OptionsError(
            f"option --lengths: found {printable(text, most=60)!r}, neither a file nor a list of lengths such as 128,512,2048"
        )
    if len(counts) > _MOST:
        raise OptionsError(
            f"option --lengths: found {len(counts):,} lengths, at most {_MOST} are planned for; round them up to some of them"
        )
    return counts


def _in_file(path: Path) -> dict[int, float]:
    try:
        with path.open("rb") as stream:
            lines = stream.read(_LARGEST_FILE).decode().splitlines()
    except (OSError, ValueError) as error:
        raise FileFormatError(f"{path}: cannot be read as a histogram of lengths: {error}") from error
    counts: dict[int, float] = {}
    for number, line in enumerate(lines, 1):
        found = re.fullmatch(r"\s*([0-9]{1,9})(?:[\s,;]+([0-9]{1,12}(?:\.[0-9]{1,12})?))?\s*", line)
        if found is None:
            raise FileFormatError(
                f"{path}: line {number} is {printable(line, most=40)!r}, wanted a length and how often it occurs, such as 512 7"
            )
        length = int(found[1])
        counts[length] = counts.get(length, 0.0) + float(found[2] or 1)
    if not any(counts.values()):
        raise FileFormatError(f"{path}: no length is in it; give lines with a length and how often it occurs")
    return counts


# -- a plan at each length


def lengths_of_plan(plan: planner.Plan, trace: planner.Trace | None, counts: dict[int, float] | None = None) -> list[Data]:
    """Return what a plan takes at each length, the longest first; empty where it is for one length only.

    `sizes`: None where it is not known which the longest is. `moves`: how many are made. `skipped`: re-runs. counts: how often
    each length occurs.
    """
    if not plan.shorter or plan.predicted is None:
        return []
    longest = None if trace is None or trace.lengths is None else trace.lengths.highest
    rows = [(longest, plan.predicted, len(plan.moves), 0)]
    for each in plan.shorter:
        moves = len(each.moves) or len(plan.moves) - len(each.left_out)
        rows.append((each.sizes, each.predicted, moves, len(each.skipped)))
    whole = sum(counts.values()) if counts else 0.0
    return [
        {
            "sizes": sizes,
            "share": counts.get(sizes[0] if sizes else 0, 0.0) / whole if counts else None,
            "predicted": data_of(predicted),
            "waits_seconds": max(predicted.iteration_seconds - predicted.ideal_seconds - predicted.recompute_seconds, 0.0),
            "peak_bytes": predicted.peak_bytes.get("device"),
            "moves": moves,
            "skipped": skipped,
            "work": _work(trace, sizes),
        }
        for sizes, predicted, moves, skipped in rows
    ]


def _work(trace: planner.Trace | None, sizes: tuple[int, ...] | None) -> Data | None:
    if trace is None or trace.work is None or trace.lengths is None or sizes is None:
        return None
    return data_of(trace.work.at(prod(sizes) / prod(trace.lengths.highest)))


def lengths_table(rows: Sequence[Data]) -> Table:
    """Return time, waits and peak against the length."""
    counted = {">of the batches": lambda row: f"{row['share']:.1%}"} if any(row["share"] is not None for row in rows) else {}
    columns: dict[str, Column] = {
        ">length": lambda row: "the longest" if row["sizes"] is None else told(row["sizes"]),
        **counted,
        ">iteration": "predicted.iteration_seconds",
        ">without waiting": "predicted.ideal_seconds",
        ">waits": "waits_seconds",
        ">peak of device": "peak_bytes",
        ">moves": "moves",
        **({">re-runs skipped": "skipped"} if any(row["skipped"] for row in rows) else {}),
        **rate_columns(rows[0]["work"] if rows else None),
    }
    return Table(title="by the length of inputs", columns=columns, rows=rows)


def lengths_facts(rows: Sequence[Data]) -> list[Facts]:
    """Return the mean over all batches, where it is known how often each length occurs."""
    if not any(row["share"] for row in rows):
        return []
    mean, ideal = (sum(row["share"] * row["predicted"][name] for row in rows) for name in ("iteration_seconds", "ideal_seconds"))
    return [Facts({"iteration, mean over the lengths": iteration_time(mean, None), "without waiting": format_seconds(ideal)})]


# -- a trace at each length


def lengths_of_trace(trace: planner.Trace) -> list[Data]:
    """Return time, peak and floor of a trace at some lengths, the longest first; empty where it is of one length."""
    lengths = trace.lengths
    if lengths is None:
        return []
    longest, shortest = lengths.highest[0], lengths.lowest[0]
    shown = {round(longest - (longest - shortest) * number / (_SHOWN - 1)) for number in range(_SHOWN)}
    found = [(length, trace.at(length)) for length in sorted(shown, reverse=True)]
    return [
        {
            "length": length,
            "ideal_seconds": each.ideal_seconds,
            "peak_bytes": max(live_bytes(each)),
            "floor_bytes": planner.floor(each)[0],
        }
        for length, each in found
    ]
