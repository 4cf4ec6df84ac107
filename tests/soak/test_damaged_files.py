"""Thousands of damaged trace and plan files through the commands: each is refused with a clean error, or can be worked with."""

from __future__ import annotations

import contextlib
import io
import json
import random
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from planner import Budgets, TeraioError, Trace, floor, plan
from planner.policies import POLICIES
from planner.problem import DEFAULT_GAP, DEFAULT_WRITE_WEIGHT
from teraio.cli import commands

from ..thoroughness import by_profile
from .damage import damaged
from .process import MIB, Holdings

FILES = by_profile(ci=600, long=10_000)
HAND = sorted((Path(__file__).parents[2] / "traces" / "hand").glob("*.json"))
SOLVER = {"time_limit": 2.0, "gap": DEFAULT_GAP, "threads": 1, "write_weight": DEFAULT_WRITE_WEIGHT}
MEMORY_BYTES = 512 * MIB
"""The resident set may be so much larger after a file than before the first one."""


def contents(folder: Path) -> list[tuple[Any, Any, Path, Path, int]]:
    """For each hand-made trace: it, a plan for it, the files of both, and the device budget of the plan."""
    found = []
    for path in HAND:
        trace = Trace.load(path)
        device_bytes, _ = floor(trace)
        made = plan(trace, Budgets(device_bytes=device_bytes), time_limit_seconds=5)
        made.save(saved := folder / f"{path.stem}.plan.json")
        content = json.loads(path.read_text())
        content.pop("fingerprint", None)  # else every change is refused for it
        found.append((content, made.model_dump(mode="json"), path, saved, device_bytes))
    return found


def commands_for(
    file: Path, is_trace: bool, trace: Path, made: Path, device_bytes: int, chance: random.Random
) -> list[Callable[[], None]]:
    """What is done with a damaged file; `trace` and `made` are whole ones that belong to it."""
    as_json = chance.random() < 0.3
    if not is_trace:
        return [
            lambda: commands.inspect([file], as_json=as_json),
            lambda: commands.inspect([file], trace=trace, as_json=as_json),
            lambda: commands.simulate([trace, file], as_json=as_json),
        ]
    device = str(chance.choice((device_bytes, device_bytes * 2, 1, 10**15)))
    policy = chance.choice(list(POLICIES))
    return [
        lambda: commands.inspect([file], as_json=as_json),
        lambda: commands.plan(traces=[file], device=device, policy=policy, as_json=as_json, **SOLVER),
        lambda: commands.simulate([file, made], as_json=as_json),
    ]


def outcome(command: Callable[[], None]) -> str:
    """Run it without showing what it prints. Return the name of the clean error, or "done"."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        try:
            command()
        except TeraioError as error:
            assert str(error)
            return type(error).__name__
    return "done"


def test_damaged_files(tmp_path: Path, report: Callable[..., None]) -> None:
    chance = random.Random(by_profile(ci=1, long=2))
    whole = contents(tmp_path)
    before = most = Holdings.now(tmp_path)
    outcomes: Counter[str] = Counter()
    slowest = (0.0, "")
    for number in range(FILES):
        trace, made, trace_path, plan_path, device_bytes = chance.choice(whole)
        is_trace = number % 2 == 0
        raw = damaged(trace if is_trace else made, chance)
        file = tmp_path / "damaged.json"
        file.write_bytes(raw)
        for command in commands_for(file, is_trace, trace_path, plan_path, device_bytes, chance):
            began = time.perf_counter()
            try:
                outcomes[outcome(command)] += 1
            except BaseException:
                report(file=number, from_file=trace_path.name, content=raw[:5000])
                raise
            slowest = max(slowest, (time.perf_counter() - began, f"file {number}, from {trace_path.name}"))
        if number % 100 == 0:
            now = Holdings.now(tmp_path)
            most = max(most, now, key=lambda holdings: holdings.resident_bytes)
    report(files=FILES, commands=sum(outcomes.values()), outcomes=dict(outcomes), slowest_seconds=slowest)
    report(before=before, with_the_most_memory=most, after=(after := Holdings.now(tmp_path)))
    assert outcomes["done"] > FILES // 10 and outcomes["TraceError"] > FILES // 10 and outcomes["PlanError"] > FILES // 10
    assert most.resident_bytes < before.resident_bytes + MEMORY_BYTES
    assert (after.descriptors, after.children) == (before.descriptors, before.children)
