"""How fast devices are taken to be, and how long the stages of a GPU become by that."""

from __future__ import annotations

import pytest
import torch
from torch.fx import Graph

from teraio.stages.cost import CPU, gpu_speed, speed_of
from teraio.stages.cut import GPU_POLICY, CutPolicy, assign

ATEN = torch.ops.aten
H200 = ((9, 0), 132)


def products(count: int, rows: int, width: int, dtype: torch.dtype) -> Graph:
    """Return a chain of products of a matrix with square ones."""
    graph = Graph()

    def taken(name: str, *shape: int) -> torch.fx.Node:
        node = graph.placeholder(name)
        node.meta["val"] = torch.empty(shape, dtype=dtype, device="meta")
        return node

    weights = [taken(f"weight_{number}", width, width) for number in range(count)]
    x = taken("x", rows, width)
    for weight in weights:
        made = graph.call_function(ATEN.mm.default, (x, weight))
        made.meta["val"] = x.meta["val"]
        x = made
    graph.output((x,))
    return graph


def stages_of(graph: Graph, *, reduced: bool = False) -> int:
    return len(set(assign(graph, speed=gpu_speed(*H200, reduced=reduced), policy=GPU_POLICY).values()))


def test_stages_of_a_gpu_last_about_two_milliseconds() -> None:
    """A product of 8192 x 8192 x 8192 takes 1.85 ms in 16 bits on an H200, and 27 ms in 32 bits."""
    assert stages_of(products(64, 8192, 8192, torch.bfloat16)) == 32
    assert stages_of(products(64, 8192, 8192, torch.float32)) == 64
    assert stages_of(products(64, 8192, 8192, torch.float32), reduced=True) == 64
    assert 32 <= stages_of(products(256, 8192, 4096, torch.bfloat16)) <= 64


def test_a_short_graph_keeps_some_stages_but_not_below_half_a_millisecond() -> None:
    assert stages_of(products(64, 4096, 4096, torch.bfloat16)) == 22, "of 0.69 ms: three products of 0.23 ms each"
    assert stages_of(products(64, 1024, 1024, torch.bfloat16)) == 1, "0.23 ms in all"


DEVICES = [((7, 5), 40), ((8, 0), 108), ((9, 0), 114), ((10, 3), 160), ((12, 0), 170)]


@pytest.mark.parametrize(("capability", "multiprocessors"), DEVICES)
def test_unknown_devices_count_by_their_multiprocessors(capability: tuple[int, int], multiprocessors: int) -> None:
    speed, twice = (gpu_speed(capability, count * multiprocessors, reduced=False) for count in (1, 2))
    assert CPU.flops_per_second < speed.flops_per_second < speed.short_flops_per_second
    assert twice.short_flops_per_second == pytest.approx(2 * speed.short_flops_per_second)


def test_tensor_cores_multiply_numbers_of_32_bits_if_allowed() -> None:
    plain, reduced = (gpu_speed(*H200, reduced=each) for each in (False, True))
    assert plain.flops_per_second < reduced.flops_per_second == pytest.approx(reduced.short_flops_per_second / 2)


def test_the_speed_of_this_machine_is_not_measured() -> None:
    assert speed_of(torch.device("cpu")) is CPU
    assert CutPolicy().shortest(1.0) == pytest.approx(1 / 192) and CutPolicy().shortest(1e-3) == 1e-3
