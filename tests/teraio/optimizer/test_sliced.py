"""Updates by slices: the same bits as plain PyTorch under a budget that parameter, gradient and states do not fit in."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from runtime.paging import State

from .managed_training import StartTiered, check_sliced
from .plain_training import (
    LARGE,
    STATE_OPTIMIZERS,
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", STATE_OPTIMIZERS)
def test_every_optimizer(started_tiered: StartTiered, name: str, dtype: torch.dtype) -> None:
    """In 16 bits vectorised loops round otherwise than what they leave over, so that slices must leave over the same."""
    if name == "SGD fused" and dtype is torch.bfloat16:
        name = "SGD momentum"  # the fused one begins with a buffer of arbitrary bits
    shape = (1553, 257) if dtype is torch.float32 else (1553, 514)
    training = started_tiered(parameters=large_parameters(dtype, shape))
    optimizer = STATE_OPTIMIZERS[name](training.parameters)
    train(optimizer, 4)
    check_sliced(
        training, {"AdamW amsgrad": 3, "RMSprop": 3, "SGD momentum": 1, "SGD fused": 1, "Adagrad": 1, "ASGD": 1}.get(name, 2)
    )
    assert not differing(everything(optimizer), plain(4, large_parameters(dtype, shape), STATE_OPTIMIZERS[name]))


@pytest.mark.parametrize(
    ("drives", "host", "checked"),
    [(1, "no host tier", False), (3, "no host tier", True), (2, "a host tier for one state", False), (0, "host only", True)],
)
def test_every_tier(started_tiered: StartTiered, drives: int, host: str, checked: bool) -> None:
    """Over many steps; both states in one tier, or one in each. checked: by checksums and in the debug mode."""
    host_bytes = {"no host tier": 0, "a host tier for one state": LARGE * 5 // 2, "host only": 4 * LARGE}[host]
    training = started_tiered(drives=drives, host_bytes=host_bytes, debug=checked, checksums=checked)
    optimizer = adamw(training.parameters)
    train(optimizer, 25)
    check_sliced(training, 2)
    expected = {"no host tier": {"storage"}, "host only": {"host"}}.get(host, {"host", "storage"})
    assert {block.tier for block in training.states().values()} == expected
    for tier in expected:
        engine = training.tiers[tier].threads()  # type: ignore[index]
        assert engine.read_link.moved_bytes > 24 * LARGE and engine.write_link.moved_bytes > 25 * LARGE
    assert not differing(everything(optimizer), plain(25, large_parameters(), adamw))


def test_plain_sgd_has_temporaries_by_slices(started_tiered: StartTiered) -> None:
    """It has no states, but copies of the gradient, which the budget has no room for."""

    def sgd(parameters: list[nn.Parameter]) -> Optimizer:
        return torch.optim.SGD(parameters, lr=0.1, weight_decay=0.1)

    training = started_tiered()
    optimizer = sgd(training.parameters)
    train(optimizer, 3)
    check_sliced(training, 0)
    assert not optimizer.state and not differing(everything(optimizer), plain(3, large_parameters(), sgd))


def test_a_parameter_in_another_order_than_its_elements(started_tiered: StartTiered) -> None:
    """Its gradient and states have the same strides."""

    def parameters() -> list[nn.Parameter]:
        made = large_parameters(shape=(16, 3, 91, 97))
        made[1] = nn.Parameter(made[1].detach().to(memory_format=torch.channels_last))
        return made

    training = started_tiered(parameters=parameters())
    optimizer = adamw(training.parameters)
    train(optimizer, 3)
    check_sliced(training, 2)
    state = optimizer.state[training.parameters[1]]["exp_avg"]
    assert state.stride() == training.parameters[1].stride() != training.parameters[1].contiguous().stride()
    assert not differing(everything(optimizer), plain(3, parameters(), adamw))


def test_a_state_that_comes_later(started_tiered: StartTiered) -> None:
    def run(parameters: list[nn.Parameter]) -> Optimizer:
        optimizer = torch.optim.SGD(parameters, lr=0.1, weight_decay=0.1)
        train(optimizer, 2)
        optimizer.param_groups[0]["momentum"] = 0.9
        train(optimizer, 2, first=2)
        return optimizer

    training = started_tiered()
    optimizer = run(training.parameters)
    check_sliced(training, 1)
    assert not differing(everything(optimizer), everything(run(large_parameters())))


def test_counters_stay_what_user_code_holds(started_tiered: StartTiered) -> None:
    training = started_tiered()
    optimizer = adamw(training.parameters)
    train(optimizer, 1)
    held = optimizer.state[training.parameters[1]]["step"]
    train(optimizer, 2, first=1)
    assert float(held) == 3 and optimizer.state[training.parameters[1]]["step"] is held


@pytest.mark.parametrize("name", ["AdamW", "AdamW fused", "RMSprop", "SGD momentum"])
def test_on_several_threads(started_tiered: StartTiered, name: str) -> None:
    """In 32 bits what loops leave over at the end of a thread's share is rounded as the rest is."""
    torch.set_num_threads(3)
    training = started_tiered()
    optimizer = STATE_OPTIMIZERS[name](training.parameters)
    train(optimizer, 3)
    assert training.states() and not differing(everything(optimizer), plain(3, large_parameters(), STATE_OPTIMIZERS[name]))


def test_a_scaler_of_gradients(started_tiered: StartTiered) -> None:
    """It tells fused optimizers its scale, and which steps to leave out: the first, and one when there are states."""

    def run(parameters: list[nn.Parameter]) -> tuple[Optimizer, float]:
        optimizer = torch.optim.AdamW(parameters, lr=0.01, fused=True)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        for step in range(5):
            set_gradients(parameters, step)
            if step in (0, 2):
                parameters[1].grad[0, 0] = torch.inf  # type: ignore[index]
            scaler.scale(torch.ones(1))
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        return optimizer, scaler.get_scale()

    training = started_tiered()
    optimizer, scale = run(training.parameters)
    expected, expected_scale = run(large_parameters())
    check_sliced(training, 2)
    assert scale == expected_scale == 1.0 and float(optimizer.state[training.parameters[1]]["step"]) == 3
    assert not differing(everything(optimizer), everything(expected))


# -- whole blocks before and after


def test_states_that_are_on_the_device(started_tiered: StartTiered) -> None:
    """They leave first; and come back as what they are."""
    training = started_tiered()
    optimizer = adamw(training.parameters)
    train(optimizer, 2)
    training.pager.bring_back_all()
    assert all(block.state is State.ON_DEVICE for block in training.states().values())
    train(optimizer, 2, first=2)
    assert all(block.state is State.OFFLOADED for block in training.states().values())
    training.pager.bring_back_all()
    assert not differing(everything(optimizer), plain(4, large_parameters(), adamw))


def test_user_code_reads_and_writes_states(started_tiered: StartTiered) -> None:
    def run(parameters: list[nn.Parameter]) -> Optimizer:
        optimizer = adamw(parameters)
        for step in range(4):
            train(optimizer, 1, first=step)
            for parameter in parameters:
                optimizer.state[parameter]["exp_avg"].mul_(0.5)
        return optimizer

    training = started_tiered(checksums=True, debug=True)
    optimizer = run(training.parameters)
    check_sliced(training, 2)
    assert not differing(everything(optimizer), everything(run(large_parameters())))


@pytest.mark.parametrize("saved_by", ["teraio", "plain PyTorch"])
def test_saved_and_resumed(started_tiered: StartTiered, tmp_path: Path, saved_by: str) -> None:
    """By the one, and gone on with by the other; through a file, whose content comes back in memory that cannot leave."""

    def save(parameters: list[nn.Parameter]) -> Optimizer:
        optimizer = adamw(parameters)
        train(optimizer, 2)
        torch.save({"parameters": parameters, "optimizer": optimizer.state_dict()}, tmp_path / "checkpoint")
        return optimizer

    def resume(parameters: list[nn.Parameter]) -> Optimizer:
        content = torch.load(tmp_path / "checkpoint", weights_only=True)
        with torch.no_grad():
            for parameter, loaded in zip(parameters, content["parameters"], strict=True):
                parameter.copy_(loaded)
        optimizer = adamw(parameters)
        optimizer.load_state_dict(content["optimizer"])
        train(optimizer, 3, first=2)
        return optimizer

    if saved_by == "teraio":
        training = started_tiered()
        optimizer = save(training.parameters)
        check_sliced(training, 2)
        training.steps.close()
        del optimizer
        optimizer = resume(large_parameters())
    else:
        save(large_parameters())
        training = started_tiered()
        optimizer = resume(training.parameters)
        check_sliced(training, 2)
    assert not differing(everything(optimizer), plain(5, large_parameters(), adamw))
