"""Stages that run again under the pager: what is dropped comes back the same, and what goes wrong leaves all as it was."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.autograd.graph import save_on_cpu

from planner.errors import BudgetError, UnsupportedError
from runtime.execution import Program, Reruns, Stage, WorkspaceMeter
from runtime.paging import Block, State

from ..memory_mover import Bench
from .programs import WIDTH, Recorder, filled, managed, program, stage


class Passes:
    """A forward pass: 0 -> 1 = 0 + 1 -> 2 = 1 * 2 -> 3 = 2 * 3; and its backward pass, which reads 1 and 3, then 2.

    The results 1 and 3 are saved; 2 is an intermediate that only a re-run of the last stage needs.
    """

    def __init__(self, budget: int | None = None, *, kept: tuple[int, ...] = (0, 2)) -> None:
        self.bench = Bench(budget)
        self.recorder = Recorder(kept=kept)
        self.runs: list[str] = []
        self.input = filled(3)
        self.fails: Exception | None = None
        self.saved: list[torch.Tensor] = []

    def noted(self, name: str, run: Callable[..., torch.Tensor]) -> Callable[..., tuple[torch.Tensor]]:
        def noting(*values: torch.Tensor) -> tuple[torch.Tensor]:
            self.runs.append(name)
            if self.fails is not None:
                raise self.fails
            return (run(*values),)

        return noting

    def forward_program(self) -> Program:
        return program(
            stage("add", self.noted("add", lambda a: a + 1), (0,), (1,), frees=(0,)),
            stage("double", self.noted("double", lambda a: a * 2), (1,), (2,)),
            stage("triple", self.noted("triple", lambda a: a * 3), (2,), (3,), frees=(2,)),
            stage("sum", self.noted("sum", lambda a: a.sum()[None].expand(WIDTH // 4).clone()), (3,), (4,)),
            inputs=1,
            results=(4, 1, 3),
        )

    def forward(self) -> None:
        _, *self.saved = managed(self.forward_program(), [self.input], self.bench, self.recorder)

    def backward(self) -> list[float]:
        """Return the value of 1 + 3, as the backward pass sees them."""
        made = backward_program(stage("both", lambda a, b: (a + b,), (0, 1), (2,), frees=(0, 1)))
        (total,) = managed(made, list(self.saved), self.bench, self.recorder)
        return sorted(set(total.tolist()))

    def blocks(self) -> list[Block]:
        found = [self.bench.pager.known_block(tensor) for tensor in self.saved]
        return [block for block in found if block is not None]

    def drop(self, *, expect: bool = True) -> None:
        for block in self.blocks():
            self.bench.pager.drop(block)
            assert (block.state is State.DROPPED) == expect


def backward_program(*stages: Stage) -> Program:
    made = program(*(dataclasses.replace(each, phase="backward") for each in stages), inputs=2, results=(2,))
    return dataclasses.replace(made, identity="b", phase="backward")


def passed(**settings: Any) -> Passes:
    passes = Passes(**settings)
    passes.forward()
    return passes


@pytest.mark.parametrize("due", [False, True], ids=["where it is needed", "where the plan says so"])
def test_what_was_dropped_is_recomputed(due: bool) -> None:
    passes = passed()
    before = passes.bench.pager.account.used_bytes
    passes.drop()
    assert passes.bench.pager.account.used_bytes == before - 2 * WIDTH
    passes.runs.clear()
    if due:
        passes.recorder.due = {passes.recorder.reached: passes.blocks()}
    assert passes.backward() == [4 + 24]
    assert passes.runs == ["add", "triple"], "what is between them was held"
    assert [again.name for again in passes.recorder.again] == ["add", "triple"]


def test_where_the_plan_has_it_nothing_is_kept_any_longer() -> None:
    passes = passed()
    passes.recorder.due = {passes.recorder.reached: passes.blocks()}
    assert passes.backward() == [28] and not passes.recorder.again
    passes.drop(expect=False)


@pytest.mark.parametrize("why", ["its stage is not kept", "user code can see it", "hooks of saved tensors see it"])
def test_what_is_not_dropped(why: str) -> None:
    passes = Passes(kept=() if why == "its stage is not kept" else (0, 2))
    with save_on_cpu() if why == "hooks of saved tensors see it" else contextlib.nullcontext():
        passes.forward()
    if why == "user code can see it":
        passes.bench.pager.show_to_user(passes.blocks())
    passes.drop(expect=False)


@pytest.mark.parametrize("how", ["version", "slot"])
def test_an_input_that_was_changed_is_an_error(how: str) -> None:
    passes = passed()
    passes.drop()
    if how == "version":
        passes.input.add_(1)
    else:
        block = passes.bench.pager.known_block(passes.input)
        assert block is not None
        passes.bench.pager.lending.lend([block])
        passes.bench.pager.lending.give_back([block])
    message = "add cannot run again: its input slot0 was changed in place after the forward pass"
    with pytest.raises(UnsupportedError, match=message):
        passes.backward()
    assert all(block.state is State.DROPPED and not block.pins for block in passes.blocks())
    assert passes.bench.pager.account.reserved_bytes == 0


def test_sources_change_under_the_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads of copies forget dead blocks meanwhile, and let go of their sources."""
    field, held = Block.source, []
    passes = Passes()

    def change(block: Block, source: object) -> None:
        held.append(passes.bench.condition._is_owned())
        field.__set__(block, source)

    monkeypatch.setattr(Block, "source", property(field.__get__, change))
    passes.forward()
    passes.drop()
    assert passes.backward() == [28]
    assert len(held) > 4 and all(held)


def test_a_stage_that_fails_can_be_repeated() -> None:
    passes = passed()
    passes.drop()
    passes.fails = RuntimeError("out of luck")
    with pytest.raises(RuntimeError, match="out of luck"):
        passes.backward()
    assert all(block.state is State.DROPPED and not block.pins for block in passes.blocks())
    passes.fails = None
    assert passes.backward() == [28]


def test_a_stage_that_does_not_fit_again_stays_dropped() -> None:
    passes = passed()
    passes.drop()
    passes.bench.pager.account.budget_bytes = WIDTH
    with pytest.raises(BudgetError, match="recompute/"):
        passes.backward()
    passes.bench.pager.account.budget_bytes = None
    assert passes.backward() == [28]


@pytest.mark.parametrize("base", ["held", "gone"])
def test_views_of_what_was_saved_are_restored_as_they_were(base: str) -> None:
    """A re-run reads what autograd holds by size, stride and offset. It does not keep it alive."""
    passes = Passes(kept=(2,))
    seen: list[tuple[Any, ...]] = []

    def look(view: torch.Tensor) -> tuple[torch.Tensor]:
        seen.append((view.tolist(), view.stride(), view.storage_offset()))
        return (view.reshape(-1).repeat(8)[: WIDTH // 4].clone(),)

    forward = program(
        stage("base", lambda a: (a + torch.arange(WIDTH // 4),), (0,), (1,)),
        stage("view", lambda a: (a.view(2, -1).t()[1:],), (1,), (2,)),
        stage("look", look, (2,), (3,), frees=(2,)),
        inputs=1,
        results=(0, 1, 3),
    )
    _, *passes.saved = managed(forward, [passes.input], passes.bench, passes.recorder)
    dropped = passes.blocks()[1]
    passes.bench.pager.drop(dropped)
    if base == "held":
        passes.backward()
        assert len(seen) == 2 and seen[0] == seen[1] and dropped.state is State.ON_DEVICE
        return
    del passes.saved[0]
    reruns = Reruns(passes.bench.pager, passes.recorder, WorkspaceMeter(None))
    with pytest.raises(UnsupportedError, match="its input slot2 is gone"):
        reruns.make_anew([dropped])
