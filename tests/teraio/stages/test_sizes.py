"""Sizes that are read off tensors are computed from those among the inputs instead, so that graphs can be cut."""

from __future__ import annotations

import functools

import pytest
import torch

from teraio.stages.cut import can_cut
from teraio.stages.operators import is_read_off
from teraio.stages.prepare import compute_sizes

from .graphs import Captured, ConvNet, capture, clones, images


@functools.cache
def convolutions_of_any_size() -> list[Captured]:
    return capture(ConvNet(), images(4), images(6), dynamic=True)


@pytest.mark.parametrize("index", [0, 1])
def test_batch_norm_of_any_size(index: int) -> None:
    captured = convolutions_of_any_size()[index]
    changed = captured.fresh()
    if index == 0:
        assert can_cut(changed.graph), "or this test shows nothing"
    compute_sizes(changed.graph)
    changed.graph.lint()
    assert can_cut(changed.graph) is None and not any(map(is_read_off, changed.graph.nodes))
    for arguments, expected in zip(captured.arguments, captured.results, strict=True):
        with torch.no_grad():
            found = torch.fx.Interpreter(changed).run(*clones(arguments))
        for one, other in zip(found, expected, strict=True):
            assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other
