"""What is known of an optimizer: it keeps nothing alive, groups come back as they were, and cuts follow the sizes."""

from __future__ import annotations

import gc
import weakref

import pytest

from teraio.optimizer.subgroups import cut

from .managed_training import Start
from .plain_training import adamw, parameters_of, set_gradients, square_parameters


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


def test_where_parameters_are_cut() -> None:
    def subgroups(size_bytes: int, **more: set[int]) -> list[list[int]]:
        return [list(numbers) for numbers in cut([4, 4, 4, 4], size_bytes, **more)]

    assert subgroups(8) == [[0, 1], [2, 3]]
    assert subgroups(16) == [[0, 1, 2, 3]]
    assert subgroups(0) == [[0], [1], [2], [3]]
    assert subgroups(16, alone={1}) == [[0], [1], [2, 3]]
    assert subgroups(0, joined={1}) == [[0, 1], [2], [3]]
    assert subgroups(8, joined={2}) == [[0, 1, 2], [3]]
    assert list(cut([], 8)) == []
