"""Where iterations end."""

from __future__ import annotations

import torch
from torch import nn
from torch.optim import SGD

from teraio.profiling import IterationBorder


def weight() -> nn.Parameter:
    return nn.Parameter(torch.zeros(2))


def ends(border: IterationBorder, *steps: torch.optim.Optimizer) -> list[bool]:
    return [border.ends_with(optimizer) for optimizer in steps]


def test_the_first_optimizer_ends_iterations() -> None:
    border, generator, critic = IterationBorder(), SGD([weight()]), SGD([weight()])
    assert ends(border, generator, *[critic] * 5, generator) == [True, *[False] * 5, True]


def test_an_optimizer_that_is_no_longer_used() -> None:
    border, first, other = IterationBorder(), SGD([weight()]), SGD([weight()])
    assert ends(border, first, *[other] * 7) == [True, *[False] * 5, True, True]


def test_an_optimizer_that_is_gone() -> None:
    """The one that replaces it ends iterations from its first step on, whatever its address is."""
    border, parameter = IterationBorder(), weight()
    assert ends(border, SGD([parameter])) == [True]
    second = SGD([parameter])
    assert ends(border, second, second) == [True, True]


def test_an_optimizer_over_the_same_parameters_that_somebody_still_holds() -> None:
    border, parameter = IterationBorder(), weight()
    first, second = SGD([parameter]), SGD([parameter, weight()])
    assert ends(border, first, first, second, second, second) == [True, True, False, True, True]


def test_two_that_alternate_over_the_same_parameters() -> None:
    border, parameter = IterationBorder(), weight()
    first, second = SGD([parameter]), SGD([parameter])
    assert ends(border, *[first, second] * 4) == [True, False] * 4


def test_an_optimizer_for_each_parameter() -> None:
    """Each steps once in an iteration, in hooks of the backward pass or in a loop: none of them takes over."""
    border, optimizers = IterationBorder(), [SGD([weight()]) for _ in range(12)]
    assert ends(border, *optimizers * 7) == [True, *[False] * 11] * 7


# -- without steps


def passes(border: IterationBorder, count: int, *, left: bool = False, graphs: tuple[str, ...] = ("model",)) -> list[bool]:
    """For each pass of forward graphs, and backward graphs after them, whether an iteration ended before its first graph."""
    found = []
    for _ in range(count):
        ended = [border.ends_before(graph, gradients_left=lambda: left) for graph in graphs]
        assert not any(ended[1:])
        found.append(ended[0])
        border.backward_begins()
    return found


def test_passes_end_iterations_where_nothing_steps() -> None:
    border = IterationBorder()
    assert border.waiting_for is not None and border.waiting_for.endswith("(0 passes so far)")
    assert passes(border, 7, graphs=("first", "second")) == [False] * 4 + [True] * 3
    assert border.waiting_for is None


def test_passes_that_leave_gradients_may_have_one_update() -> None:
    border = IterationBorder()
    assert passes(border, 40, left=True) == [False] * 32 + [True] * 8


def infer(border: IterationBorder, count: int) -> list[bool]:
    """For each inference pass of two graphs, whether an iteration ended before it."""
    found = []
    for _ in range(count):
        ended, never = [border.ends_before(graph, inference=True, gradients_left=lambda: False) for graph in ("first", "second")]
        assert not never
        found.append(ended)
    return found


def test_evaluation_ends_nothing_where_the_model_trains() -> None:
    border = IterationBorder()
    assert not any(border.ends_before("model", gradients_left=lambda: False) for _ in range(9))
    assert not any(infer(border, 40))


def test_passes_of_inference_end_iterations_where_nothing_trains() -> None:
    border, optimizer = IterationBorder(), SGD([weight()])
    assert infer(border, 35) == [False] * 32 + [True] * 3 and border.waiting_for is None
    assert passes(border, 7) == [False] * 4 + [True] * 3, "it was an evaluation"
    assert not any(infer(border, 40))
    assert ends(border, optimizer) == [True] and not any(infer(border, 40))


def test_several_ends_make_one() -> None:
    border, optimizer = IterationBorder(), SGD([weight()])
    assert ends(border, optimizer) == [True]
    border.period = 3
    assert ends(border, *[optimizer] * 6) == [False, False, True] * 2
    assert [border.tell() for _ in range(4)] == [False, False, True, False]
    border.period = 1
    assert border.tell()


def test_a_first_graph_that_never_runs_again() -> None:
    """It was compiled for one batch size, say."""
    border = IterationBorder()
    assert passes(border, 1, graphs=("first shape",)) == [False]
    assert passes(border, 12) == [False] * 8 + [True] * 4, "five others, and four to be sure"


def test_steps_take_over_from_passes_and_the_user_from_both() -> None:
    border, optimizer = IterationBorder(), SGD([weight()])
    assert passes(border, 5)[-1]
    assert ends(border, optimizer) == [True] and not any(passes(border, 9))
    border.tell()
    assert ends(border, optimizer) == [False] and not any(passes(border, 9)) and border.waiting_for is None
