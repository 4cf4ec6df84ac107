"""How many floating-point operations a node is estimated to need."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx import Graph, Node
from torch.utils.flop_counter import bmm_flop, flop_registry

from teraio.stages import cost
from teraio.stages.cost import CPU
from teraio.stages.kernels import operator_kernel

ATEN = torch.ops.aten
BATCH, HEADS, QUERIES, KEYS, WIDTH = 2, 8, 16, 32, 4
FORWARD = 2 * 2 * BATCH * HEADS * QUERIES * KEYS * WIDTH
"""Scores of all query heads, and their product with the values: two operations each for a multiplication and an addition."""


def shape(*sizes: int) -> torch.Tensor:
    return torch.empty(sizes, device="meta")


def called(operator: Any, *arguments: torch.Tensor, result: Any = None) -> Node:
    """Return a node that calls `operator`."""
    graph = Graph()
    nodes = []
    for number, value in enumerate(arguments):
        nodes.append(graph.placeholder(f"input_{number}"))
        nodes[-1].meta["val"] = value
    node = graph.call_function(operator, tuple(nodes))
    node.meta["val"] = arguments[0] if result is None else result
    return node


def formula_of_2_11(*names: str) -> Callable[..., int]:
    """Return PyTorch 2.11's formula for attention, which allows no grouped queries. names: of the arguments before the keys."""

    def formula(*arguments: Any, out_val: Any = None, **_: Any) -> int:
        query, key, value = (tensor.shape for tensor in arguments[len(names) - 1 :][:3])
        b, h, s_q, d_q = query
        _b2, _h2, s_k, _d2 = key
        _b3, _h3, _s3, d_v = value
        if not b == _b2 == _b3 or not h == _h2 == _h3 or not d_q == _d2 or not s_k == _s3:
            raise AssertionError("sdpa_flop_count: query/key/value shapes are incompatible")
        return bmm_flop((b * h, s_q, d_q), (b * h, d_q, s_k)) + bmm_flop((b * h, s_q, s_k), (b * h, s_k, d_v))

    return formula


FUSED = ("flash_attention", "cudnn_attention", "efficient_attention", "flash_attention_for_cpu")


@pytest.mark.parametrize("key_heads", [HEADS, HEADS // 4, 1])
@pytest.mark.parametrize("kernel", FUSED)
def test_attention_is_counted_from_the_query_heads(kernel: str, key_heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    forward = getattr(ATEN, f"_scaled_dot_product_{kernel}").default
    backward = getattr(ATEN, f"_scaled_dot_product_{kernel}_backward").default
    monkeypatch.setitem(flop_registry, forward._overloadpacket, formula_of_2_11("query"))
    monkeypatch.setitem(flop_registry, backward._overloadpacket, formula_of_2_11("grad_out", "query"))
    query, key = shape(BATCH, HEADS, QUERIES, WIDTH), shape(BATCH, key_heads, KEYS, WIDTH)
    assert cost.flops(called(forward, query, key, key)) == FORWARD
    assert cost.flops(called(backward, query, query, key, key)) == 2.5 * FORWARD


def test_attention_of_several_results_is_arithmetic_with_a_duration() -> None:
    query, key = shape(BATCH, HEADS, QUERIES, WIDTH), shape(BATCH, 1, KEYS, WIDTH)
    results = (query, shape(BATCH, HEADS, QUERIES))
    node = called(ATEN._scaled_dot_product_flash_attention.default, query, key, key, result=results)
    assert cost.seconds(node, CPU) > 0


def test_an_operator_whose_formula_fails_still_has_arithmetic(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> int:
        raise AssertionError("unknown shapes")

    monkeypatch.setitem(flop_registry, ATEN.mm, fails)
    assert cost.flops(called(ATEN.mm.default, shape(3, 5), shape(5, 7), result=shape(3, 7))) == 2 * 3 * 7


def test_a_product_is_counted_by_pytorch_and_other_operators_have_no_arithmetic() -> None:
    assert cost.flops(called(ATEN.mm.default, shape(3, 5), shape(5, 7), result=shape(3, 7))) == 2 * 3 * 5 * 7
    assert cost.flops(called(ATEN.add.Tensor, shape(3, 5), shape(3, 5))) == 0


def test_attention_outside_of_graphs_is_counted_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = ATEN._scaled_dot_product_flash_attention.default
    monkeypatch.setitem(flop_registry, forward._overloadpacket, formula_of_2_11("query"))
    query, key = shape(BATCH, HEADS, QUERIES, WIDTH), shape(BATCH, 1, KEYS, WIDTH)
    kernel = operator_kernel(forward, {"query": query, "key": key, "value": key}, (shape(BATCH, HEADS, QUERIES, WIDTH),))
    assert kernel is not None and kernel.flops == FORWARD
