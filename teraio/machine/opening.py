"""Opens the machine of a training run: budgets first, then the tiers that the options allow, then the rates of their links."""

from __future__ import annotations

import logging
import platform
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

import psutil
import torch

from planner.errors import UnsupportedError
from runtime.cpu import CheckedCpuMover, CpuMemory, CpuMover, system_tells
from runtime.device import CpuDevice
from runtime.paging import Mover, StorageOwnership, Tiers
from runtime.storage import HostStore
from runtime.transfer import Engine, cpu_candidates
from teraio.machine.budgets import ResolvedBudgets, resolve_budgets, seen_by_ranks
from teraio.machine.cuda import open_cuda
from teraio.machine.machine import Machine, OpenTier, Shared, io_threads, open_storage
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


# -- training on CPU: main memory under a budget is the device, a second pool and files are the lower tiers

_HOST_THREADS = 2  # threads for copies in main memory; a few threads use all that the memory bus can carry


def open_cpu(options: Options, budgets: ResolvedBudgets, shared: Shared) -> Machine:
    """Open the tiers that the options ask for. Raises UnsupportedError, StorageError, StorageFullError.

    shared: is filled with what is measured here.
    """
    with ExitStack() as undo:
        tiers: list[OpenTier] = []
        if budgets.host is not None:
            pool = HostStore(budgets.host)
            undo.callback(pool.close)
            engine = Engine(pool, tier="host", threads=_HOST_THREADS, checksums=options.checksums)
            undo.callback(engine.close)
            shared.host = shared.host or engine.measure()
            tiers.append(OpenTier.with_threads("host", pool, engine, shared.host, "copies by threads"))
        if options.storage:
            candidates = cpu_candidates(options.storage, budget_bytes=budgets.storage)
            open_engine = partial(
                Engine,
                checksums=options.checksums,
                unchanged=True,
                threads=io_threads(options),
                stuck_after_seconds=options.storage_timeout,
            )
            tiers.append(open_storage(options, candidates, open_engine, "cpu", shared, undo))
        memory = CpuMemory()  # after the tiers, so that measuring them leaves no free pages in its pool
        mover = _open_mover(options, memory, tiers, shared.ownership, undo) if tiers else None
        undo.callback(memory.stand_back)
        opened = Machine(
            name=f"{platform.node()} cpu",
            device=CpuDevice(memory.trim),
            device_memory_bytes=psutil.virtual_memory().total,
            budgets=budgets,
            memory=memory,
            mover=mover,
            tiers=tiers,
            trim=lambda: memory.trim(budgets.device - memory.allocated_bytes) if budgets.device is not None else None,
            undo=undo.pop_all(),
        )
    return opened


def _open_mover(
    options: Options, memory: CpuMemory, opened: list[OpenTier], ownership: StorageOwnership, undo: ExitStack
) -> Mover:
    tiers = Tiers([each.tier for each in opened], ownership=ownership, mapped=not _can_keep_slots(options))
    undo.callback(tiers.close)
    mover = CpuMover(memory, tiers, poison=options.debug)
    checks = options.checksums or options.debug
    return CheckedCpuMover(mover, memory, debug=options.debug) if checks else mover


def _can_keep_slots(options: Options) -> bool:
    """Whether all blocks can be checked, if the options ask for it. Logs a warning if not."""
    if not options.checksums and not options.debug:
        return False
    if not (tells := system_tells()):
        logger.warning(
            "no byte of parameters, gradients and optimizer states is checked by checksums or debug here, only activations are: "
            "your code can write to the others while they wait, and /proc/self/pagemap of this system does not tell which pages "
            "it wrote"
        )
    return tells
