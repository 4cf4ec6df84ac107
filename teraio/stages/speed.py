"""How fast a device computes and moves its memory, as far as that is known without measuring.

Only the places of cuts depend on it: a stage should last as long as wanted. The numbers are constants. What is measured varies,
so that each run would have other stages, which no plan from a file fits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

_ARITHMETIC, _TRAFFIC = 0.6, 0.8
"""The share of the data sheet's figures that kernels reach."""


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


SpeedOf = Callable[[torch.device], Speed]
"""Says how fast a device is."""

_H200 = _DataSheet((9, 0), 132, 67e12, 989e12, 4.8e12)
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
"""By NVIDIA's data sheets, ascending. Others count as the one before them, and by their number of multiprocessors."""

CPU = Speed(flops_per_second=1e11, short_flops_per_second=1e11, bytes_per_second=1e10)
"""One or two cores. With more, stages are shorter than wanted, and the smallest budget stays as low."""


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
