"""Files of the hand-made traces, of plans for them, and of what a test makes."""

from __future__ import annotations

import json
import re
from pathlib import Path

from planner import Budgets, Plan, Trace, plan

from ..planner.traces import HAND, hand

TRACES = HAND.parent
CHAIN = hand("chain")
"""Three layers: with 20 bytes one activation moves, with less than 10 there is no plan."""


def file_of(name: str) -> Path:
    """The file of a hand-made trace."""
    return HAND / f"{name}.json"


CHAIN_FILE = file_of("chain")


def planned(folder: Path, name: str, device_bytes: int) -> Path:
    """The file of a plan for a hand-made trace."""
    path = folder / f"{name}.plan.json"
    plan(hand(name), Budgets(device_bytes=device_bytes)).save(path)
    return path


def saved(folder: Path, traced: Trace, made: Plan | None = None) -> tuple[Path, Path]:
    """The files of a trace and of a plan for it, if there is one."""
    traced.save(folder / "trace.json")
    if made is not None:
        made.save(folder / "plan.json")
    return folder / "trace.json", folder / "plan.json"


# -- what the command line prints, taken apart; and files that are changed a little


def fact(output: str, name: str) -> str:
    """The value that stands beside `name`."""
    found = re.findall(rf"^{re.escape(name)} +(.*)$", output, re.MULTILINE)
    assert len(found) == 1, f"{name!r} occurs {len(found)} times in:\n{output}"
    return str(found[0])


def has_line(output: str, pattern: str) -> bool:
    """Whether a whole line is so."""
    return re.search(f"^{pattern}$", output, re.MULTILINE) is not None


def edited(path: Path, **changes: object) -> Path:
    """The JSON file again beside it, with some fields replaced."""
    copy = path.parent / f"edited.{path.name}"
    copy.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return copy
