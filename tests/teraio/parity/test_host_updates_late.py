"""Updates on the host's processor that fail, come late or do not come to pass."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from planner.errors import StorageError
from runtime.paging import Pager
from teraio.following import IterationObserver
from teraio.optimizer import OptimizerFacts, subgroup_steps
from teraio.optimizer.host import HostUpdate, HostUpdates
from teraio.profiling import Iteration

from .optimizers import Case, Run, one, train, unmanaged
from .test_host_updates import HOST_BYTES, check_close, counted, on_host, plan_for, updates

__all__ = ["counted"]


def test_an_error_of_the_update_reaches_the_training_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(make=one(torch.optim.AdamW), steps=12)

    def fail(self: object, *_: object) -> None:
        raise StorageError("no such luck")

    monkeypatch.setattr(HostUpdate, "update", fail)
    with pytest.raises(StorageError, match="no such luck"):
        on_host(case, tmp_path)


def test_updates_that_wait_for_others_keep_what_they_wait_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters are asked for back when the plan expects them to be updated, which may be too early."""
    run, begin = HostUpdate.run, HostUpdates.begin
    begun, done = [], []

    def slow(self: HostUpdate, *args: Any) -> float | None:
        time.sleep(0.01)
        done.append(run(self, *args))
        return done[-1]

    def noting(self: HostUpdates, *args: Any) -> HostUpdate | None:
        update = begin(self, *args)
        begun.append(update is not None)
        return update

    monkeypatch.setattr(HostUpdate, "run", slow)
    monkeypatch.setattr(HostUpdates, "begin", noting)
    case = Case(make=one(torch.optim.AdamW), steps=12, layers=4)
    expected, found = on_host(case, tmp_path, policy="stride-2")
    check_close(found, expected)
    assert sum(begun) > 12 and len(done) == sum(begun) and None not in done


def test_a_step_that_fails_leaves_no_update_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that have not begun never do; and the next steps go on, on the host."""
    run, submit, acquire = HostUpdate.run, ThreadPoolExecutor.submit, Pager.acquire
    running: set[int] = set()
    begun: list[int] = []
    left: list[tuple[int, int]] = []
    steps = [0]

    def beginning(*args: Any) -> Any:
        begun.append(steps[0])
        return submit(*args)

    def slow(self: HostUpdate, *args: Any) -> float | None:
        running.add(id(self))
        time.sleep(0.01)
        try:
            return run(self, *args)
        finally:
            running.discard(id(self))

    def failing(self: Pager, blocks: Any, new_bytes: int, what: str, **others: Any) -> None:
        if what == "optimizer/subgroup.1" and begun.count(steps[0]) > 1 and not left:
            raise KeyboardInterrupt
        acquire(self, blocks, new_bytes, what, **others)

    def step(run: Run, x: Tensor, index: int) -> None:
        steps[0] = index
        run.backward(x)
        try:
            run.optimizers[0].step()
        except KeyboardInterrupt:
            left.append((len(running), len(updates)))
            time.sleep(0.1)
            left.append((len(running), len(updates)))
        run.optimizers[0].zero_grad()

    monkeypatch.setattr(HostUpdate, "run", slow)
    monkeypatch.setattr(ThreadPoolExecutor, "submit", beginning)
    monkeypatch.setattr(Pager, "acquire", failing)
    case = Case(make=one(torch.optim.AdamW), step=step, steps=12, layers=4)
    expected = unmanaged(case, tmp_path)
    budget = int(0.6 * expected.status.device_peak_bytes)
    plan = plan_for(case, tmp_path, budget, policy="stride-2")
    updates.clear()
    left.clear()  # the run that the plan was made from may have had a step that fails as well
    train(case, tmp_path, {"memory_budget": budget, "host_budget": HOST_BYTES, "profile_iterations": 1, "plan": plan})
    assert left, "a step has failed"
    assert left[0] == left[1] and left[0][0] == 0
    assert len(updates) > left[1][1]


def test_waiting_for_an_update_is_no_work_of_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, ends = HostUpdate.run, IterationObserver.iteration_ends
    waited = []

    def slow(self: HostUpdate, *args: Any) -> float | None:
        time.sleep(0.02)
        return run(self, *args)

    def ending(self: IterationObserver) -> Iteration:
        iteration = ends(self)
        count = sum(stage.on_host for stage in iteration.stages)
        if count:
            waited.append((iteration.waited_seconds, count))
        return iteration

    monkeypatch.setattr(HostUpdate, "run", slow)
    monkeypatch.setattr(IterationObserver, "iteration_ends", ending)
    on_host(Case(make=one(torch.optim.AdamW), steps=10), tmp_path)
    assert waited and all(seconds > 0.01 * count for seconds, count in waited)


def test_blocks_that_do_not_get_there_update_on_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if that turns out late; and not only once."""
    case = Case(make=one(torch.optim.AdamW), steps=12)
    ends, run_step = IterationObserver.iteration_ends, subgroup_steps.run_step
    refused, seconds = [], []

    def refuse(self: Any, blocks: Any) -> None:
        refused.append(len(blocks))

    def slow(facts: OptimizerFacts) -> None:
        run_step(facts)
        if any(parameter.numel() for group in facts.optimizer.param_groups for parameter in group["params"]):
            time.sleep(0.005)

    def ending(self: IterationObserver) -> Iteration:
        iteration = ends(self)
        seconds.append([stage.seconds for stage in iteration.stages if stage.elements])
        return iteration

    monkeypatch.setattr("runtime.paging.around.Lending.lend_memory", refuse)
    monkeypatch.setattr(subgroup_steps, "run_step", slow)
    monkeypatch.setattr(IterationObserver, "iteration_ends", ending)
    expected, found = on_host(case, tmp_path)
    assert refused and not updates
    assert min(seconds[-1]) > 0.005, "what the device did in the end is measured as ever"
    assert all(torch.equal(a, b) for a, b in zip(found.values, expected.values, strict=True)), "the same bits then"
