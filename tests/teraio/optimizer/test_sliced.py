"""Updates by slices: the bits of plain PyTorch under budgets that states do not fit in; room, and errors.

On a device with streams: `../machine/test_cuda.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from planner.errors import BudgetError, StorageFullError, StorageIOError
from runtime.paging import State
from runtime.storage import HostStore, align_up
from teraio.machine import ResolvedBudgets
from teraio.optimizer.subgroup_steps import SlicedUpdate
from teraio.options import Options
from teraio.planning import BackgroundPlanner

from .managed_training import StartTiered, check_sliced
from .plain_training import (
    LARGE,
    MIB,
    STATE_OPTIMIZERS,
    Make,
    adamw,
    differing,
    everything,
    large_parameters,
    plain,
    set_gradients,
    train,
)

pytestmark = pytest.mark.usefixtures("one_compute_thread")


# -- the same bits


@pytest.mark.parametrize(
    ("drives", "host", "checked"), [(3, "no host tier", True), (2, "a host tier for one state", False), (0, "host only", False)]
)
def test_every_tier(started_tiered: StartTiered, drives: int, host: str, checked: bool) -> None:
    """Both states in one tier, or one in each. checked: by checksums and in the debug mode."""
    host_bytes = {"no host tier": 0, "a host tier for one state": LARGE * 5 // 2, "host only": 4 * LARGE}[host]
    training = started_tiered(drives=drives, host_bytes=host_bytes, debug=checked, checksums=checked)
    optimizer = adamw(training.parameters)
    train(optimizer, 8)
    check_sliced(training, 2)
    expected = {"no host tier": {"storage"}, "host only": {"host"}}.get(host, {"host", "storage"})
    assert {block.tier for block in training.states().values()} == expected
    for tier in expected:
        engine = training.tiers[tier].threads()  # type: ignore[index]
        assert engine.read_link.moved_bytes > 7 * LARGE and engine.write_link.moved_bytes > 8 * LARGE
    assert not differing(everything(optimizer), plain(8, large_parameters(), adamw))


def sgd(parameters: list[nn.Parameter]) -> Optimizer:
    """It has no states, but copies of the gradient, which the budget has no room for."""
    return torch.optim.SGD(parameters, lr=0.1, weight_decay=0.1)


def in_another_order() -> list[nn.Parameter]:
    """Gradient and states have the strides of the parameter, which are not in the order of its elements."""
    made = large_parameters(shape=(16, 3, 91, 97))
    made[1] = nn.Parameter(made[1].detach().to(memory_format=torch.channels_last))
    return made


@pytest.mark.parametrize(
    ("make", "parameters", "states", "threads"),
    [
        (sgd, large_parameters, 0, 1),
        (adamw, in_another_order, 2, 1),
        # In 32 bits what loops leave over at the end of a thread's share is rounded as the rest is.
        (STATE_OPTIMIZERS["AdamW"], large_parameters, 2, 3),
        (STATE_OPTIMIZERS["AdamW fused"], large_parameters, 2, 3),
    ],
)
def test_kinds_of_updates(
    started_tiered: StartTiered, make: Make, parameters: Callable[[], list[nn.Parameter]], states: int, threads: int
) -> None:
    torch.set_num_threads(threads)
    training = started_tiered(parameters=parameters())
    optimizer = make(training.parameters)
    train(optimizer, 1)
    held = optimizer.state[training.parameters[1]].get("step")
    train(optimizer, 2, first=1)
    check_sliced(training, states)
    assert held is None or float(held) == 3 and optimizer.state[training.parameters[1]]["step"] is held, "the user's, too"
    for value in optimizer.state[training.parameters[1]].values():
        assert value is None or value.ndim == 0 or value.stride() == training.parameters[1].stride()
    assert not differing(everything(optimizer), plain(3, parameters(), make))


# -- whole blocks before and after


def test_states_that_are_on_the_device(started_tiered: StartTiered) -> None:
    """They leave first; and come back as what they are."""
    training = started_tiered()
    optimizer = adamw(training.parameters)
    train(optimizer, 2)
    training.pager.closing.bring_back()
    assert all(block.state is State.ON_DEVICE for block in training.states().values())
    train(optimizer, 2, first=2)
    assert all(block.state is State.OFFLOADED for block in training.states().values())
    training.pager.closing.bring_back()
    assert not differing(everything(optimizer), plain(4, large_parameters(), adamw))


# -- what room they take, which updates are cut, what a trace says of them


def test_the_smallest_budget_is_parameter_gradient_and_some_slices(started_tiered: StartTiered) -> None:
    """And works; without slices it would be six times the parameter, with the temporaries of its update."""
    training = started_tiered(budget_bytes=MIB)
    optimizer = adamw(training.parameters)
    set_gradients(training.parameters, 0)
    with pytest.raises(BudgetError, match=r"stage 'optimizer/subgroup.1' needs") as raised:
        optimizer.step()
    assert not optimizer.state and all(block.pins == 0 for block in training.pager.blocks)
    smallest = raised.value.smallest_bytes
    assert 2 * LARGE < smallest < 2.3 * LARGE
    training.pager.account.budget_bytes = smallest - 1
    with pytest.raises(BudgetError):
        optimizer.step()
    training.pager.account.budget_bytes = smallest
    train(optimizer, 3)
    check_sliced(training, 2)
    assert not differing(everything(optimizer), plain(3, large_parameters(), adamw))


@pytest.mark.parametrize("name", STATE_OPTIMIZERS)
def test_an_update_takes_no_more_than_its_workspace(
    started_tiered: StartTiered, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the first step, and later ones; and makes the bits of the plain one."""
    training = started_tiered()
    optimizer = STATE_OPTIMIZERS[name](training.parameters)
    taken: list[int] = []
    run = SlicedUpdate.run

    def measured(update: SlicedUpdate) -> None:
        training.memory.reset_peak()
        before = training.memory.allocated_bytes
        run(update)
        taken.append(training.memory.peak_bytes - before)

    monkeypatch.setattr(SlicedUpdate, "run", measured)
    train(optimizer, 2)
    reserved = [
        stage.workspace_bytes for each in training.iterations for stage in each.stages if stage.name == "optimizer/subgroup.1"
    ]
    assert len(taken) == len(reserved) == 2
    assert all(0 < size <= limit <= LARGE / 4 for size, limit in zip(taken, reserved, strict=True)), (taken, reserved)
    assert all(block.state is State.OFFLOADED for block in training.states().values())
    assert not differing(everything(optimizer), plain(2, large_parameters(), STATE_OPTIMIZERS[name]))


@pytest.mark.parametrize("why", ["the gradient has other strides", "states share memory", "it is Adafactor"])
def test_what_cannot_be_cut_is_refused_before_anything_changes(started_tiered: StartTiered, why: str) -> None:
    training = started_tiered()
    kind = torch.optim.Adafactor if why == "it is Adafactor" else torch.optim.AdamW
    optimizer = kind(training.parameters)
    large = training.parameters[1]
    set_gradients(training.parameters, 0)
    if why == "the gradient has other strides":
        large.grad = torch.zeros_like(large.t().contiguous()).t()
    if why == "states share memory":
        both = torch.zeros(2, *large.shape)
        optimizer.state[large] = {"step": torch.tensor(0.0), "exp_avg": both[0], "exp_avg_sq": both[1]}
        del both
    before = everything(optimizer)
    with pytest.raises(BudgetError, match="optimizer/subgroup.1"):
        optimizer.step()
    assert not differing(everything(optimizer), before)


def test_the_trace_has_no_states_that_stay_away(started_tiered: StartTiered) -> None:
    training = started_tiered()
    optimizer = adamw(training.parameters)
    train(optimizer, 3)
    profile = training.profile()
    trace = profile.trace
    assert {block.name for block in trace.blocks} >= {"p1", "optimizer/gradient.1"}
    assert not any(block.kind == "optimizer_state" and block.size_bytes == LARGE for block in trace.blocks)
    (stage,) = [stage for stage in trace.stages if stage.name == "optimizer/subgroup.1"]
    assert 0 < stage.workspace_bytes < LARGE / 4 and stage.duration_seconds > 0
    (subgroup,) = [each for each in trace.subgroups if each.stage == stage.id]
    assert subgroup.elements == LARGE // 4 and len(subgroup.blocks) == 2
    machine = SimpleNamespace(host_bytes=None, budgets=ResolvedBudgets(storage=100 * MIB))
    background = BackgroundPlanner(Options(), machine, training.pager)  # type: ignore[arg-type]
    assert background.budgets(profile).storage_bytes == 100 * MIB - 2 * align_up(LARGE)


# -- errors


class Failing:
    """Fails the piece after `good` ones."""

    def __init__(self, move: Callable[..., None], good: int) -> None:
        self.move, self.left = move, good

    def __call__(self, slot: Any, piece: Any, address: int) -> None:
        self.left -= 1
        if self.left < 0:
            raise StorageIOError(path="f", block=slot.name, errno=5, action="test")
        self.move(slot, piece, address)


@pytest.mark.parametrize(("link", "good"), [("read_link", 0), ("read_link", 40), ("write_link", 9)])
def test_a_failed_copy_reaches_the_step(started_tiered: StartTiered, link: str, good: int) -> None:
    """With a note if something was updated by then. Nothing stays lent, and all can still be brought back."""
    training = started_tiered()
    optimizer = adamw(training.parameters)
    train(optimizer, 2)
    before = everything(optimizer)
    each = getattr(training.tiers["storage"].threads(), link)
    move, each._move = each._move, Failing(each._move, good)
    set_gradients(training.parameters, 2)
    with pytest.raises(StorageIOError, match="block 'optimizer/p1.exp_avg") as raised:
        optimizer.step()
    each._move = move
    assert all(block.state is not State.UPDATING and block.pins == 0 for block in training.pager.blocks)
    changed = differing(everything(optimizer), before)
    notes = getattr(raised.value, "__notes__", [])
    assert ("1" in changed) == bool(notes), "the large parameter has changed"
    assert not notes or "slices of the parameter whose update failed are done" in notes[0]
    assert notes or link == "read_link" and good == 0
    training.pager.closing.bring_back()


def test_no_room_for_new_states(started_tiered: StartTiered) -> None:
    """In the first step: nothing of the parameter has changed, and the step can be made once there is room."""
    training = started_tiered(drives=0, host_bytes=LARGE + MIB // 2)
    optimizer = adamw(training.parameters)
    set_gradients(training.parameters, 0)
    before = training.parameters[1].detach().clone()
    with pytest.raises(StorageFullError, match="raise host_budget"):
        optimizer.step()
    assert torch.equal(training.parameters[1], before) and not optimizer.state.get(training.parameters[1])
    assert all(block.state is not State.UPDATING for block in training.pager.blocks)
    store = training.tiers["host"].store
    assert isinstance(store, HostStore) and store.used_bytes <= LARGE + MIB // 2
