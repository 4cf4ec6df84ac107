"""Stages come from Inductor's cache when a training starts again, also on another machine. Their kernels need no C++ compiler."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_cache

from ...training import begin, forget, mean_square_step, unequal


@pytest.fixture
def empty_cache() -> Iterator[None]:
    with fresh_cache():
        yield


class Product(nn.Module):
    """Two matrix products with a view between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 32, bias=False), nn.Linear(16, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).view(-1, 16))


def start(backend: str = "teraio") -> tuple[Counter[str], list[torch.Tensor]]:
    """Train for a step. Returns what Inductor counted, and the weights afterwards."""
    counters.clear()
    options: Any = {"codegen": "inductor"} if backend == "teraio" else {}
    training = begin(Product, lambda module: [torch.optim.SGD(module.parameters(), lr=0.1)], options)
    if backend != "teraio":
        training.model = torch.compile(training.module, backend=backend)
    mean_square_step(training, torch.ones(4, 16))
    values = list(training.finish().values())
    return Counter(counters["inductor"]), values


def test_a_second_start_compiles_no_stage(empty_cache: None) -> None:
    cold, wanted = start()
    assert cold["fxgraph_cache_miss"] >= 2 and cold["fxgraph_cache_bypass"] == 0
    warm, found = start()
    assert warm["fxgraph_cache_miss"] == 0 and warm["fxgraph_cache_hit"] == cold["fxgraph_cache_miss"] + cold["fxgraph_cache_hit"]
    assert not unequal(found, wanted)


def test_artifacts_carry_stages_to_another_machine() -> None:
    with fresh_cache():
        _, wanted = start()
        saved = torch.compiler.save_cache_artifacts()
        assert saved is not None
    with fresh_cache():
        torch.compiler.load_cache_artifacts(saved[0])
        warm, found = start()
    assert warm["fxgraph_cache_miss"] == 0 and warm["fxgraph_cache_hit"] >= 2
    assert not unequal(found, wanted)
    forget()


@pytest.mark.long
def test_stages_and_graphs_of_inductor_do_not_share_entries(empty_cache: None) -> None:
    """The same graph compiled as a whole need not keep the strides of its outputs."""
    start("inductor")
    assert start()[0]["fxgraph_cache_hit"] == 0
