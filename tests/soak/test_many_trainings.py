"""Trainings one after the other in one process: what the process holds stays the same."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch

import teraio

from ..thoroughness import by_profile
from ..training import MIB, forget
from .twins import Holdings, Model, rows

KINDS: list[tuple[dict[str, Any], type[torch.optim.Optimizer]]] = [
    ({"memory_budget": 14 * MIB, "storage": True}, torch.optim.AdamW),
    ({"memory_budget": 16 * MIB, "host_budget": 32 * MIB}, torch.optim.AdamW),
    ({"memory_budget": 12 * MIB, "storage": True, "checksums": True}, torch.optim.SGD),
    ({"memory_budget": 18 * MIB, "storage": True, "host_budget": 8 * MIB}, torch.optim.Adam),
    ({"memory_budget": 14 * MIB, "storage": True}, torch.optim.AdamW),
]
TRAININGS = by_profile(ci=10, long=50)
WARM_UP = by_profile(ci=1, long=2) * len(KINDS)
ITERATIONS = 8
MORE_ITERATIONS = 8
"""Taken until the plan is followed: on a disturbed machine, more iterations are profiled."""
GROWTH_BYTES = 24 * MIB
"""The resident set may grow by so much after the warm-up. PyTorch itself keeps some 0.3 MiB of each compilation."""

pytestmark = [
    pytest.mark.usefixtures("fine_and_quick"),
    *([pytest.mark.planning_process] if by_profile(ci=False, long=True) else []),
]


def train(number: int, folder: Path) -> tuple[float, int]:
    """Train a new model with options of its own. Return the median seconds of an iteration, and the bytes on disk meanwhile."""
    options, kind = KINDS[number % len(KINDS)]
    given = {**options, "storage": str(folder)} if "storage" in options else options
    torch.manual_seed(number)
    model = teraio.compile(Model(), **given, codegen="eager")
    optimizer = kind(model.parameters(), lr=1e-3)
    seconds = []
    for step in range(ITERATIONS + MORE_ITERATIONS):
        if step >= ITERATIONS and teraio.status()[0].phase == "planned":
            break
        began = time.perf_counter()
        model(rows(step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - began)
        assert teraio.wait_for_plan(300)
    (status,) = teraio.status()
    assert status.phase == "planned" and sum(status.moved_bytes.values()) > 0
    return median(seconds), Holdings.now(folder).disk_bytes


def test_many_trainings(tmp_path: Path, report: Callable[..., None]) -> None:
    after: list[Holdings] = []
    seconds, disk_bytes = [], []
    for number in range(TRAININGS):
        found = train(number, tmp_path)
        forget()
        gc.collect()
        after.append(Holdings.now(tmp_path))
        seconds.append(found[0])
        disk_bytes.append(found[1])

    for number in range(WARM_UP - 1, TRAININGS, len(KINDS)):
        latest = median(seconds[number + 1 - len(KINDS) : number + 1])
        report(**{f"after_training_{number + 1}": f"{after[number]}; an iteration took {latest * 1000:.0f} ms"})
    report(most_on_disk_while_training=f"{max(disk_bytes) / MIB:.0f} MiB")
    first, last = after[WARM_UP - 1], after[-1]
    assert last.resident_bytes < first.resident_bytes + GROWTH_BYTES
    assert (last.descriptors, last.threads, last.children) == (first.descriptors, first.threads, first.children)
    assert all(holdings.disk_bytes == 0 for holdings in after)
