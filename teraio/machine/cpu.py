"""Opens the tiers for training on CPU: main memory under a budget is the device, a second pool and files are the lower tiers."""

from __future__ import annotations

import logging
import platform
from contextlib import ExitStack
from typing import Literal

import psutil

from planner.errors import OptionsError, UnsupportedError
from runtime.cpu import CheckedCpuMover, CpuMemory, CpuMover, system_tells
from runtime.device import CpuDevice
from runtime.paging import Mover, StorageOwnership, Tiers
from runtime.storage import HostStore, Store
from runtime.system import host_limits
from runtime.transfer import Engine, cpu_candidates
from teraio.machine.tiers import MachineTiers, MeasuredPaths, OpenTier, io_threads, open_storage
from teraio.options import Options, Share

_log = logging.getLogger("teraio")

_RESERVE = 0.1
"""Share of the available memory that is left free if the options give no budget."""
_HOST_THREADS = 2
"""Threads for copies in main memory; a few threads use all that the memory bus can carry."""


def open_cpu(options: Options, measured: MeasuredPaths, ownership: StorageOwnership) -> MachineTiers:
    """Open the tiers that the options ask for. Raises OptionsError, UnsupportedError, StorageError, StorageFullError.

    measured: is filled with what is measured here. ownership: shared by all movers of the process.
    """
    if options.memory_budget is not None and options.host_budget is None and not options.storage:
        raise OptionsError(
            "option memory_budget: there is no lower tier, so nothing can move to keep this budget; give storage (directories on "
            "drives), host_budget (a pool of main memory) or both"
        )
    with ExitStack() as undo:
        tiers = list(_open_tiers(options, measured, undo))
        memory = CpuMemory()  # after the tiers, so that measuring them leaves no free pages in its pool
        budget = _budget(options) if tiers else None
        mover = _open_mover(options, memory, tiers, ownership, undo) if tiers else None
        undo.callback(memory.stand_back)
        opened = MachineTiers(
            name=f"{platform.node()} cpu",
            device=CpuDevice(memory.trim),
            device_memory_bytes=psutil.virtual_memory().total,
            memory=memory,
            budget_bytes=budget,
            mover=mover,
            tiers=tiers,
            trim=lambda: memory.trim(budget - memory.allocated_bytes) if budget is not None else None,
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
        _log.warning(
            "no byte of parameters, gradients and optimizer states is checked by checksums or debug here, only activations are: "
            "your code can write to the others while they wait, and /proc/self/pagemap of this system does not tell which pages "
            "it wrote"
        )
    return tells


def _budget(options: Options) -> int:
    """Return the bytes that the options give training. Raises UnsupportedError.

    Of the machine's memory, only what the control groups of this process allow is available.
    """
    if isinstance(options.memory_budget, int):
        return options.memory_budget
    available = min(limit.available_bytes for limit in host_limits())
    if isinstance(options.memory_budget, Share):
        return int((available + psutil.Process().memory_info().rss) * options.memory_budget.fraction)
    budget = int(available * (1 - _RESERVE)) - (options.host_budget or 0)
    if budget <= 0:
        raise UnsupportedError(
            f"host_budget of {options.host_budget:,} bytes leaves nothing of the memory that is available; lower it, "
            "or give a memory_budget"
        )
    return budget


def _open_tiers(options: Options, measured: MeasuredPaths, undo: ExitStack) -> list[OpenTier]:
    tiers = []
    if options.host_budget is not None:
        tiers.append(_open_host(options.host_budget, options, measured, undo))
    if options.storage:
        unchanged: bool | Literal["verify"] = "verify" if options.debug else True

        def open_engine(store: Store) -> Engine:
            return Engine(
                store,
                checksums=options.checksums,
                unchanged=unchanged,
                threads=io_threads(options),
                stuck_after_seconds=options.storage_timeout,
            )

        candidates = cpu_candidates(options.storage, budget_bytes=options.storage_budget)
        tiers.append(open_storage(options, candidates, open_engine, "cpu", measured, undo))
    return tiers


def _open_host(size_bytes: int, options: Options, measured: MeasuredPaths, undo: ExitStack) -> OpenTier:
    store = HostStore(size_bytes)
    undo.callback(store.close)
    engine = Engine(store, tier="host", threads=_HOST_THREADS, checksums=options.checksums)
    undo.callback(engine.close)
    if measured.host is None:
        measured.host = engine.measure()
    return OpenTier.with_threads("host", store, engine, measured.host, "copies by threads")
