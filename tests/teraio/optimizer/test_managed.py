"""What is known of an optimizer: it keeps nothing alive, groups come back as they were, and cuts follow the sizes."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from teraio.optimizer.parameters import ParameterGroups, owned_parameters
from teraio.optimizer.subgroups import cut

from .managed_training import Start
from .plain_training import adamw, parameters_of, set_gradients, square_parameters, two_groups


def test_what_is_known_keeps_nothing_alive(started: Start) -> None:
    training = started(2, budget_bytes=None)
    optimizer = adamw(square_parameters(2))
    training.steps.manage(optimizer)
    parameters = parameters_of(optimizer)
    for parameter in parameters:
        training.pager.block_of(parameter, name="other", kind="parameter", user_visible=True)
    set_gradients(parameters, 0)
    optimizer.step()
    managed = training.steps.managed(optimizer)
    assert managed.adopted and managed.has_blocks and managed.optimizer is optimizer
    gone = [weakref.ref(optimizer), *(weakref.ref(p) for p in parameters), weakref.ref(optimizer.state[parameters[0]]["exp_avg"])]
    del optimizer, parameters, parameter
    gc.collect()
    assert [each() for each in gone] == [None] * 4
    with pytest.raises(ReferenceError):
        _ = managed.optimizer


def test_groups_that_are_narrowed_come_back_as_the_same_lists() -> None:
    parameters = square_parameters(5)
    optimizer = two_groups(torch.optim.SGD)(parameters)
    lists = [group["params"] for group in optimizer.param_groups]
    groups = ParameterGroups(optimizer)
    groups.narrow([range(1, 3), [0]])
    assert [[id(p) for p in group["params"]] for group in optimizer.param_groups] == [
        [id(p) for p in parameters[1:3]],
        [id(parameters[3])],
    ]
    groups.empty()
    assert all(owned.tensor.grad is None and not owned.tensor.requires_grad for owned in owned_parameters(optimizer))
    groups.restore()
    assert all(group["params"] is before for group, before in zip(optimizer.param_groups, lists, strict=True))
    assert [(owned.number, owned.group) for owned in owned_parameters(optimizer)] == [(0, 0), (1, 0), (2, 0), (3, 1), (4, 1)]


def test_where_parameters_are_cut() -> None:
    sizes = [[4, 4], [4, 4]]
    first, second = ((0, 2), (0, 0)), ((2, 2), (0, 2))
    assert list(cut(sizes, 8)) == [first, second]
    assert list(cut(sizes, 16)) == [((0, 2), (0, 2))]
    assert list(cut(sizes, 0)) == [((0, 1), (0, 0)), ((1, 2), (0, 0)), ((2, 2), (0, 1)), ((2, 2), (1, 2))]
    assert list(cut(sizes, 16, alone={1})) == [((0, 1), (0, 0)), ((1, 2), (0, 0)), second]
    assert list(cut(sizes, 0, joined={1})) == [first, ((2, 2), (0, 1)), ((2, 2), (1, 2))]
    assert list(cut(sizes, 8, joined={2})) == [((0, 2), (0, 1)), ((2, 2), (1, 2))]
    assert list(cut([[]], 8)) == []
