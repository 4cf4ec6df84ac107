"""Opens the machine of a training run: budgets first, then the tiers that the options allow, then the rates of their links."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

import torch

from planner.errors import UnsupportedError
from teraio.machine.budgets import resolve_budgets, seen_by_ranks
from teraio.machine.cpu import open_cpu
from teraio.machine.cuda import open_cuda
from teraio.machine.machine import Machine, OpenTier, Shared
from teraio.options import Options
from teraio.ranks import RankGroup

logger = logging.getLogger("teraio")


def open_machine(options: Options, device: torch.device, shared: Shared | None = None, ranks: RankGroup | None = None) -> Machine:
    """Resolve the budgets, open the lower tiers if the options ask for any, and measure their links.

    shared: by all machines of the process; None: with no other one. ranks: those of this machine that open theirs at the same
    time: they divide what the machine has, and links are measured once more, by one rank after the other and then by all
    together. Plans use the last rates.
    Raises OptionsError, UnsupportedError for devices that are neither CPU nor GPU, StorageError, StorageFullError, RankError.
    """
    shared = shared or Shared()
    kind = "rocm" if device.type == "cuda" and torch.version.hip else device.type  # PyTorch for AMD's GPUs calls them "cuda"
    if kind not in ("cpu", "cuda"):
        raise UnsupportedError(f"teraio does not know devices of type {kind!r}; train on cpu or cuda, an NVIDIA GPU")
    budgets = resolve_budgets(options, *seen_by_ranks(options, device, ranks))
    if device.type == "cpu":
        opened = open_cpu(options, budgets, shared)
    else:
        opened = open_cuda(options, budgets, device, shared)
    if ranks is None:
        return opened
    try:
        return replace(opened, tiers=_measured_by_all(opened.tiers, ranks))
    except BaseException:
        opened.close()
        raise


def _measured_by_all(tiers: Sequence[OpenTier], ranks: RankGroup) -> list[OpenTier]:
    """Return the tiers with the rates that all ranks reach when they copy at the same time, and those of each rank alone."""
    with ranks.turn("measuring its links alone"):
        alone = [each.measure() for each in tiers]
    ranks.gather("measuring all links")
    found = [replace(each, rates=each.measure(), alone=rates) for each, rates in zip(tiers, alone, strict=True)]
    ranks.gather("ending the measurement")
    for each, rates in zip(found, alone, strict=True):
        logger.info(
            "the %s tier with all %d ranks of this machine %s; alone it %s", each.tier.name, len(ranks.ranks), each.rates, rates
        )
    return found
