"""Updates by slices: the same bits as plain PyTorch under a budget that parameter, gradient and states do not fit in."""

from __future__ import annotations

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
    train,
)

pytestmark = pytest.mark.usefixtures("one_compute_thread")


# -- the same bits


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
