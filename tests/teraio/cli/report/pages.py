"""Plans for the hand-made traces."""

from __future__ import annotations

from pathlib import Path

import planner
from planner import Budgets, Trace

HAND = Path(__file__).parents[4] / "traces" / "hand"

PLANNED = [
    ("chain", 10),
    ("wrap", 20),
    ("recompute", 50),
    ("host_update", 40),
    ("user_code", 15),
    ("gradient_outlives_update", 15),
]
"""Traces with budgets at which something moves, runs again, or updates on the host."""


def planned(folder: Path, name: str, device_bytes: int) -> tuple[Path, Path]:
    """Return the file of a trace and of a plan for it."""
    trace = HAND / f"{name}.json"
    plan = folder / f"{name}.plan.json"
    planner.plan(Trace.load(trace), Budgets(device_bytes=device_bytes)).save(plan)
    return trace, plan
