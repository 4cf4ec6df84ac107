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
