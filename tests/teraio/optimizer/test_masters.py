"""Updates over fp32 masters: the same bits as the textbook loop, within the budget; gradient scalers, and what is refused."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

import teraio
from planner.errors import BudgetError, UnsupportedError
from runtime.cpu import CpuMemory
from runtime.paging import Pager, State
from teraio.distributed import LibraryCalls, ShardedParameters
from teraio.following import IterationObserver
from teraio.optimizer import SubgroupSizes
from teraio.optimizer.arithmetic import run_step
from teraio.optimizer.facts import owned_parameters
from teraio.optimizer.managed import ManagedOptimizers

from .managed_training import Start, Training
from .plain_training import (
    HALF,
    KIB,
    MASTER_OPTIMIZERS,
    WIDE,
    Textbook,
    differences,
    half_parameters,
    keeping,
    set_most_gradients,
    train_most,
)


def floor(training: Training, optimizer: Optimizer) -> int:
    """What the error of a budget that is too small names, before anything is changed."""
    set_most_gradients(training.parameters, 0)
    before = [p.detach().clone() for p in training.parameters]
    training.pager.account.budget_bytes = KIB
    with pytest.raises(BudgetError) as raised:
        optimizer.step()
    assert all(map(torch.equal, before, training.parameters))
    assert not any("master_param" in state for state in optimizer.state.values())
    return raised.value.smallest_bytes


@pytest.mark.parametrize(
    ("name", "dtype"), [("AdamW", HALF[1]), *((name, HALF[number % 2]) for number, name in enumerate(MASTER_OPTIMIZERS))]
)
def test_the_same_bits_as_the_textbook_loop(started: Start, name: str, dtype: torch.dtype) -> None:
    """At the floor; then at half as much again."""
    expected = Textbook(half_parameters(dtype, 3), MASTER_OPTIMIZERS[name]).train(12)
    for share in (1.0, 1.5) if name == "AdamW" else (1.0,):
        training = started(budget_bytes=None, parameters=half_parameters(dtype, 3))
        optimizer = keeping(MASTER_OPTIMIZERS[name](training.parameters))
        # What Adafactor makes in its first step is small and stays, unlike what is taken for granted before it exists.
        budget = int(share * floor(training, optimizer)) + (KIB if name == "Adafactor" else 0)
        training.pager.account.budget_bytes = budget
        train_most(training.parameters, optimizer, 12)
        assert differences(optimizer, expected) == []
        assert training.pager.account.peak_bytes <= budget
        assert any(block.state is State.OFFLOADED for block in training.states().values())
        training.steps.close()


def test_managed_and_not_by_turns(started: Start) -> None:
    """As when everything fits for a while; then `teraio.reset`."""
    training = started(budget_bytes=None, parameters=half_parameters(torch.bfloat16))
    optimizer = keeping(MASTER_OPTIMIZERS["AdamW"](training.parameters))
    for step in range(9):
        training.active = step % 3 != 1
        train_most(training.parameters, optimizer, 1, step)
    training.steps.close()
    train_most(training.parameters, optimizer, 3, 9)
    assert differences(optimizer, Textbook(half_parameters(torch.bfloat16), MASTER_OPTIMIZERS["AdamW"]).train(12)) == []


def test_user_code_that_writes_to_a_parameter(started: Start) -> None:
    """Where it does, the master takes the parameter's value; elsewhere it keeps its own."""
    training = started(budget_bytes=60 * KIB, parameters=half_parameters(torch.bfloat16))
    optimizer = keeping(torch.optim.AdamW(training.parameters))
    expected = Textbook(half_parameters(torch.bfloat16), torch.optim.AdamW).train(4)
    train_most(training.parameters, optimizer, 4)
    first, second, third = training.parameters[:3]
    first.data[3:5] = 0.25
    second.detach().view(torch.int16).numpy()[:] = 0x3F80  # 1.0
    third.data.neg_().neg_()
    expected.masters[0][3:5] = 0.25
    ones = expected.masters[1].bfloat16() == 1
    expected.masters[1][~ones] = 1
    train_most(training.parameters, optimizer, 2, 4)
    assert differences(optimizer, expected.train(2, 4)) == []


@pytest.mark.parametrize("place", ["side by side", "odd offset", "transposed", "a few"])
def test_one_element_is_seen_wherever_the_parameter_lies(place: str) -> None:
    memory = torch.zeros(4 * 8 + 1, dtype=torch.bfloat16)
    tensor = {
        "side by side": memory[:32].view(4, 8),
        "odd offset": memory[1:].view(4, 8),
        "transposed": memory[:32].view(8, 4).t(),
        "a few": memory[:3],
    }[place]
    for changed in range(tensor.numel()):
        memory.zero_()
        parameter = nn.Parameter(tensor)
        optimizer = keeping(torch.optim.SGD([parameter], lr=1.0))
        parameter.grad = torch.full_like(parameter, -(2**-10))
        optimizer.step()
        index = divmod(changed, 8) if tensor.ndim == 2 else (changed,)
        parameter.data[index] = 3.0
        optimizer.step()
        found = optimizer.state[parameter]["master_param"]
        assert torch.equal(found.ne(2**-9).nonzero(), torch.tensor([index])) and found[index] == 3 + 2**-10


def test_a_parameter_that_has_overflowed() -> None:
    """Its master lives on: infinity is what it rounds to."""
    parameter = nn.Parameter(torch.tensor([65000.0, -65000.0, 1.0], dtype=torch.float16))
    optimizer = keeping(torch.optim.SGD([parameter], lr=1000.0))
    parameter.grad = torch.tensor([-1.0, 1.0, 0.0], dtype=torch.float16)
    for _ in range(2):
        optimizer.step()
    assert parameter.tolist() == [torch.inf, -torch.inf, 1.0]
    assert optimizer.state[parameter]["master_param"].tolist() == [66992.0, -66992.0, 1.0]  # 65000 is 64992 in fp16
    parameter.grad.neg_()
    for _ in range(2):
        optimizer.step()
    assert parameter.tolist() == [64992.0, -64992.0, 1.0]


# -- memory


@pytest.mark.parametrize(
    ("name", "count", "stale"),
    [
        ("AdamW", 1, True),
        ("AdamW fused amsgrad", 4, False),
        ("AdamW foreach", 4, True),
        ("SGD momentum", 4, False),
        ("Adafactor", 4, True),
        ("Muon", 1, False),
    ],
)
def test_an_update_allocates_no_more_than_was_reserved(memory: CpuMemory, name: str, count: int, stale: bool) -> None:
    """In its first step, and when user code has written to all parameters."""
    shapes = [(32, 16384), (64, 16384), (64, 16384), (64, 32768)]  # 1 MiB and more; narrow, as Muon multiplies by the transpose
    parameters = [nn.Parameter(torch.randn(shape).bfloat16()) for shape in shapes[:count]]
    optimizer = keeping(MASTER_OPTIMIZERS[name](parameters))
    pager = Pager(mover=None, budget_bytes=None)
    calls = LibraryCalls(pager, IterationObserver(pager), active=lambda: True, explained=lambda error: error)
    managed = ManagedOptimizers(pager, calls.observer, SubgroupSizes(), ShardedParameters(calls)).of(optimizer)
    for _ in range(1 + stale):
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, dtype=torch.bfloat16)
            parameter.data.mul_(1.5)
        subgroup = managed.subgroups.one(managed.pending_step(), range(count))
        memory.reset_peak()
        before = memory.allocated_bytes
        run_step(managed.renew(), owned_parameters(optimizer))
    taken = memory.peak_bytes - before
    scalars = 100 * count
    assert taken <= subgroup.workspace_bytes + scalars, f"{taken:,} bytes, reserved {subgroup.workspace_bytes:,}"
    assert taken >= 0.35 * subgroup.workspace_bytes, "what is reserved is for the worst case, but not for more"


# -- masters and what users put around a step: gradient scalers, which work, and what is refused


BUDGET = 14 * WIDE
OVERFLOWS = (0, 5)


@pytest.mark.parametrize(
    ("name", "dtype", "managed", "clipped"),
    [
        ("AdamW", torch.float16, True, False),
        ("AdamW fused amsgrad", torch.bfloat16, False, False),
        ("AdamW fused amsgrad", torch.float16, True, False),
        ("SGD momentum", torch.bfloat16, False, False),
        ("Adafactor", torch.float16, True, False),
        # By the user; in bf16: PyTorch unscales no gradients in fp16.
        *((name, torch.bfloat16, True, True) for name in ("AdamW", "SGD fused")),
    ],
)
def test_a_gradient_scaler(started: Start, name: str, dtype: torch.dtype, managed: bool, clipped: bool) -> None:
    """Gradients are unscaled in fp32. Steps that overflow change nothing, the very first one among them."""
    training = started(budget_bytes=BUDGET, parameters=half_parameters(dtype))
    training.active = managed
    optimizer, scaler = keeping(MASTER_OPTIMIZERS[name](training.parameters)), torch.amp.GradScaler("cpu", 8.0, growth_interval=3)
    scaler.scale(torch.zeros(()))  # as a loop has it after its backward pass
    expected = Textbook(half_parameters(dtype), MASTER_OPTIMIZERS[name])
    for step in range(12):
        scale = scaler.get_scale()
        set_most_gradients(training.parameters, step, scale)
        if step in OVERFLOWS:
            training.parameters[1].grad[3, 3] = torch.inf  # type: ignore[index]
        if clipped:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(training.parameters, 1.0)
        scaler.step(optimizer)
        scaler.update()
        assert (scaler.get_scale() < scale) == (step in OVERFLOWS)
        if step not in OVERFLOWS:
            set_most_gradients(expected.parameters, step, 1.0 if clipped else scale)
            if clipped:
                nn.utils.clip_grad_norm_(expected.parameters, 1.0)
            expected.step(1.0 if clipped else 1 / scale)
    assert differences(optimizer, expected) == []
    assert not hasattr(optimizer, "grad_scale") and not hasattr(optimizer, "found_inf")
    if managed:
        assert any(block.state is State.OFFLOADED for block in training.states().values())
        assert training.pager.account.peak_bytes <= BUDGET


def test_a_copy_of_an_optimizer_has_to_be_given_again() -> None:
    """With its parameters, as for the best weights so far."""
    parameters = half_parameters(torch.bfloat16)
    optimizer = keeping(torch.optim.AdamW(parameters))
    train_most(parameters, optimizer, 3)
    copied, copies = copy.deepcopy((optimizer, parameters))
    keeping(copied)
    train_most(copies, copied, 3, 3)
    assert differences(copied, Textbook(half_parameters(torch.bfloat16), torch.optim.AdamW).train(6)) == []
    assert differences(optimizer, Textbook(half_parameters(torch.bfloat16), torch.optim.AdamW).train(3)) == []


# -- what is refused


def differentiable(parameters: list[nn.Parameter]) -> Optimizer:
    return torch.optim.SGD(parameters, differentiable=True)


def hooked(parameters: list[nn.Parameter]) -> Optimizer:
    optimizer = torch.optim.AdamW(parameters)
    optimizer.register_step_pre_hook(lambda *_: None)
    return optimizer


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (torch.optim.LBFGS, "LBFGS cannot be updated over fp32 copies: its update is not known to treat each parameter by it"),
        (differentiable, "SGD cannot be updated over fp32 copies: it is differentiable"),
        (hooked, "there are step hooks besides teraio's; use an optimizer of torch.optim that updates each parameter by itself"),
    ],
)
def test_optimizers_that_cannot_be_updated_by_parts(make: Callable[..., Optimizer], reason: str) -> None:
    """When they are given, and then nothing has changed."""
    optimizer = make(half_parameters(torch.bfloat16))
    with pytest.raises(UnsupportedError, match=reason):
        teraio.manage_optimizer(optimizer, master_weights=True)
    assert not hasattr(optimizer, "_step_supports_amp_scaling")
    assert not optimizer._optimizer_load_state_dict_pre_hooks and len(optimizer._optimizer_step_pre_hooks) == (make is hooked)


@pytest.mark.parametrize("managed", [True, False])
@pytest.mark.parametrize("how", ["post hook", "global hook"])
def test_steps_that_cannot_be_run_by_parts(started: Start, managed: bool, how: str) -> None:
    """When they are called; they change nothing, and the next step works."""
    training = started(budget_bytes=None, parameters=half_parameters(torch.bfloat16))
    optimizer = keeping(torch.optim.AdamW(training.parameters))
    train_most(training.parameters, optimizer, 2)
    training.active = managed
    before = [p.detach().clone() for p in training.parameters]
    set_most_gradients(training.parameters, 2)
    with contextlib.ExitStack() as hooks:
        if how == "post hook":
            hooks.callback(optimizer.register_step_post_hook(lambda *_: None).remove)
        else:
            hooks.callback(register_optimizer_step_post_hook(lambda *_: None).remove)
        with pytest.raises(UnsupportedError, match="there are step hooks"):
            optimizer.step()
    assert all(map(torch.equal, before, training.parameters))
    assert all(block.pins == 0 for block in training.pager.blocks)
    optimizer.step()
    assert differences(optimizer, Textbook(half_parameters(torch.bfloat16), torch.optim.AdamW).train(3)) == []
