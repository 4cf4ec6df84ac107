"""Estimate the seconds of a graph node from its floating-point operations, its bytes, and a device's speed.

They decide where graphs are cut and how stages are named. Measured times replace the estimates everywhere else: what is measured
varies, so that each run would have other stages, which no plan from a file fits. So speeds are constants, too.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.fx import Node
from torch.utils.flop_counter import flop_registry

from teraio.stages import operators as ops

_log = logging.getLogger("teraio")

_ARITHMETIC, _TRAFFIC = 0.6, 0.8  # the share of the data sheet's figures that kernels reach


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """What kernels reach. flops_per_second: with numbers of 32 bits and more; short: of 16 bits and less."""

    flops_per_second: float
    short_flops_per_second: float
    bytes_per_second: float


@dataclass(frozen=True, slots=True)
class _DataSheet:
    """A GPU. flops: per second with 32 bits; short: dense, with 16 bits."""

    capability: tuple[int, int]
    multiprocessors: int
    flops: float
    short: float
    bytes_per_second: float


SpeedOf = Callable[[torch.device], Speed]  # says how fast a device is

_H200 = _DataSheet((9, 0), 132, 67e12, 989e12, 4.8e12)
# By NVIDIA's data sheets, ascending. Others count as the one before them, and by their number of multiprocessors.
_KNOWN = (
    _DataSheet((7, 0), 80, 15.7e12, 125e12, 0.9e12),  # V100
    _DataSheet((7, 5), 40, 8.1e12, 65e12, 0.32e12),  # T4
    _DataSheet((8, 0), 108, 19.5e12, 312e12, 2.0e12),  # A100
    _DataSheet((8, 6), 84, 37.4e12, 150e12, 0.7e12),  # A40
    _DataSheet((8, 9), 142, 91.6e12, 362e12, 0.86e12),  # L40S
    _H200,
    _DataSheet((10, 0), 148, 75e12, 2250e12, 8.0e12),  # B200
    _DataSheet((12, 0), 170, 104.8e12, 209.5e12, 1.79e12),  # RTX 5090
)

# One or two cores. With more, stages are shorter than wanted, and the smallest budget stays as low.
CPU = Speed(flops_per_second=1e11, short_flops_per_second=1e11, bytes_per_second=1e10)


def speed_of(device: torch.device) -> Speed:
    """Return the speed of a CPU or GPU. Never measures, never waits."""
    if device.type == "cpu":
        return CPU
    if device.type != "cuda" or not torch.cuda.is_available():
        return gpu_speed(_H200.capability, _H200.multiprocessors, reduced=False)
    found = torch.cuda.get_device_properties(device)
    return gpu_speed((found.major, found.minor), found.multi_processor_count, reduced=reduces_products())


def reduces_products() -> bool:
    """Return whether products of 32 bits on a GPU take the tensor cores, by TF32."""
    return bool(torch.backends.cuda.matmul.fp32_precision == "tf32")


def gpu_speed(capability: tuple[int, int], multiprocessors: int, *, reduced: bool) -> Speed:
    """Return the speed of a GPU. reduced: see `reduces_products`."""
    sheet = next((each for each in reversed(_KNOWN) if each.capability <= capability), _KNOWN[0])
    share = multiprocessors / sheet.multiprocessors
    flops = max(sheet.flops, sheet.short / 2) if reduced else sheet.flops
    return Speed(
        flops_per_second=_ARITHMETIC * share * flops,
        short_flops_per_second=_ARITHMETIC * share * sheet.short,
        bytes_per_second=_TRAFFIC * share * sheet.bytes_per_second,
    )


def is_heavy(node: Node) -> bool:
    """Return whether `node` is a matmul, a convolution or attention: a kernel of its own, and the place of a cut."""
    return flops(node) > 0


def flops(node: Node) -> float:
    """Return the floating-point operations of a matmul, a convolution or attention; 0 for every other node."""
    target, arguments, named = ops.unwrapped(node)
    if not isinstance(target, torch._ops.OpOverload) or not (_is_attention(target) or target._overloadpacket in flop_registry):
        return 0.0
    args, kwargs = torch.fx.node.map_arg((tuple(arguments), dict(named)), lambda source: source.meta.get("val"))
    return operator_flops(target, cast(Any, args), cast(Any, kwargs), node.meta.get("val"))


def operator_flops(target: torch._ops.OpOverload, arguments: Sequence[Any], named: Mapping[str, Any], result: Any) -> float:
    """Return the floating-point operations of one call of an operator. arguments, named, result: fake tensors, and others.

    By PyTorch's formulas. An operator whose formula fails counts two operations for each element of its results.
    """
    # Those for attention in PyTorch 2.11 refuse fewer heads of keys than of queries, and do not know the CPU's kernel.
    if _is_attention(target):
        return _attention_flops(ops.base_name(target), arguments)
    formula = flop_registry.get(target._overloadpacket)
    if formula is None:
        return 0.0
    try:
        return float(ops.known_size(cast(Any, formula)(*arguments, **named, out_val=result)))
    except Exception as error:  # an estimate must not stop training, and formulas fail in ways of their own
        _log.debug("PyTorch cannot count the operations of %s: %r", target, error)
        # So that it still has arithmetic, and is the place of a cut.
        return 2.0 * sum(ops.known_size(t.numel()) for t in ops.fake_tensors(result))


def _is_attention(target: torch._ops.OpOverload) -> bool:
    return ops.base_name(target).startswith("_scaled_dot_product")


def _attention_flops(name: str, arguments: Sequence[Any]) -> float:
    """Return the operations of fused attention."""
    backward = "backward" in name  # it has the gradient of the results as its first argument
    query, key = arguments[backward : backward + 2]
    # Each query head meets all keys: scores, and their product with the values.
    forward = 4.0 * math.prod(ops.known_size(s) for s in query.shape) * ops.known_size(key.shape[-2])
    return 2.5 * forward if backward else forward  # the backward pass makes the scores again, and four products


def seconds(node: Node, speed: Speed) -> float:
    """Return the estimated duration of `node`, by a simple roofline model."""
    if node.op != "call_function" or ops.is_view(node) or ops.is_getitem(node):
        return 0.0
    touched = ops.output_bytes(node) + sum(ops.output_bytes(n) for n in node.all_input_nodes)
    rate = speed.short_flops_per_second if ops.precision(ops.tensors_at(node)).itemsize <= 2 else speed.flops_per_second
    return max(flops(node) / rate, touched / speed.bytes_per_second)
