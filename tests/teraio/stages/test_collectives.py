"""Collectives in graphs: their order does not depend on sizes, and each is waited for in the stage that launches it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.testing._internal.distributed.fake_pg import FakeStore

from teraio.stages import operators
from teraio.stages.cost import CPU
from teraio.stages.cut import CutPolicy, assign
from teraio.stages.operators import is_launch, is_wait, launch_of
from teraio.stages.prepare import wait_for_all
from teraio.stages.split import split

from .graphs import capture

collective = torch.ops._c10d_functional
FINE = CutPolicy(shortest_seconds=1e-9)
FINEST = CutPolicy(shortest_seconds=1e-9, far_above=1e-6)


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    """Two ranks, of which the other one does not exist."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


class Model(nn.Module):
    """[rows, 512] to the same, by `combine` and three weights."""

    def __init__(self, combine: Callable[[Model, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(512, 512, bias=False).requires_grad_(False) for _ in range(3))
        self.combine = combine

    def forward(self, x: Tensor) -> Tensor:
        return self.combine(self, x)


def reduced(x: Tensor, how: str) -> Tensor:
    return collective.all_reduce(x, how, dist.group.WORLD.group_name)


def two(model: Model, x: Tensor) -> Tensor:
    """The second collective could begin long before the first one."""
    early = model.first(x)
    total = collective.wait_tensor(reduced(model.second(early), "sum"))
    largest = collective.wait_tensor(reduced(early.relu(), "max"))
    return model.third(total) + largest


def overlapped(model: Model, x: Tensor) -> Tensor:
    """A collective runs while other work is done."""
    begun = reduced(model.first(x), "sum")
    other = torch.tanh(model.second(x).exp() + x.sin())
    return model.third(other) + collective.wait_tensor(begun)


def never_waited_for(model: Model, x: Tensor) -> Tensor:
    begun = reduced(model.first(x), "sum")
    return model.second(begun + 1)


def graph(combine: Callable[[Model, Tensor], Tensor], rows: int) -> GraphModule:
    (captured,) = capture(Model(combine), torch.randn(rows, 512), loss=False)
    return captured.fresh()


def order(module: GraphModule, stage_of: dict[Node, int]) -> list[str]:
    """What the collectives compute, in the order in which stages launch them."""
    subgraphs = split(module, stage_of)
    return [str(node.args[1]) for subgraph in subgraphs for node in subgraph.module.graph.nodes if is_launch(node)]


@pytest.mark.parametrize("policy", [FINE, FINEST])
def test_ranks_with_other_sizes_launch_collectives_in_the_same_order(policy: CutPolicy) -> None:
    orders = []
    for rows in (600, 500):  # results of more than 1 MiB, and of less
        module = graph(two, rows)
        stage_of = assign(module.graph, speed=CPU, policy=policy)
        assert len(set(stage_of.values())) >= 3
        orders.append(order(module, stage_of))
    assert orders == [["sum", "max"]] * 2


@pytest.mark.parametrize("policy", [FINE, FINEST])
def test_a_collective_is_waited_for_in_the_stage_that_launches_it(policy: CutPolicy) -> None:
    module = graph(overlapped, 600)
    stage_of = assign(module.graph, speed=CPU, policy=policy)
    (wait,) = (node for node in module.graph.nodes if is_wait(node))
    assert len(set(stage_of.values())) >= 3
    assert stage_of[wait] == stage_of[launch_of(wait)]
    assert stage_of[wait] < max(stage_of.values())


def test_what_is_not_waited_for_gets_a_wait() -> None:
    module = graph(never_waited_for, 16)
    assert not [node for node in module.graph.nodes if is_wait(node)]
    wait_for_all(module.graph)
    (wait,) = (node for node in module.graph.nodes if is_wait(node))
    assert is_launch(launch_of(wait))
    wait_for_all(module.graph)
    assert len([node for node in module.graph.nodes if is_wait(node)]) == 1


def test_the_result_of_a_wait_is_no_memory_of_its_own() -> None:
    (wait,) = (node for node in graph(overlapped, 16).graph.nodes if is_wait(node))
    assert operators.is_view(wait)
