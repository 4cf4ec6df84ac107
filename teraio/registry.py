"""The runtimes of this process: one for every distinct set of options and device."""

from __future__ import annotations

import contextlib
import logging
import threading
import weakref
from collections.abc import Iterable, Iterator

import torch
from torch.optim import Optimizer

from planner.errors import UnsupportedError
from teraio.optimizer import keep_masters
from teraio.options import Options
from teraio.status import Status
from teraio.training_run import TrainingRun

_lock = threading.Lock()
_runtimes: dict[tuple[Options, torch.device], TrainingRun] = {}
_optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
"""Those that the user has asked to be managed, also by runtimes that come later."""


def _show_messages() -> None:
    """teraio says in a few lines what it does; where the program has set up logging, that decides instead."""
    logger = logging.getLogger("teraio")
    if not logger.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("teraio: %(message)s"))
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)


def runtime_for(options: Options, device: torch.device) -> TrainingRun:
    """The runtime for these options; models that are compiled with equal options share one budget and one timeline."""
    with _lock:
        key = (options, device)
        if key not in _runtimes:
            _show_messages()
            _runtimes[key] = TrainingRun(options, device)
            for optimizer in _optimizers:
                _runtimes[key].manage_optimizer(optimizer)
        return _runtimes[key]


def forget_unused() -> None:
    """Close runtimes under which nothing has run, such as one whose budget was refused."""
    with _lock:
        unused = {key: runtime for key, runtime in _runtimes.items() if runtime.unused}
        for key in unused:
            del _runtimes[key]
    for runtime in unused.values():
        runtime.close()


def status() -> tuple[Status, ...]:
    """What every runtime of this process is doing, in order of creation. Never blocks."""
    with _lock:
        return tuple(runtime.status() for runtime in _runtimes.values())


def wait_for_plan(timeout_seconds: float | None = None) -> bool:
    """Block until no planning is under way, or the time is over; True if none is. Plans take over at iteration ends."""
    with _lock:
        runtimes = list(_runtimes.values())
    return all(runtime.wait_for_plan(timeout_seconds) for runtime in runtimes)


@contextlib.contextmanager
def on_device(tensors: Iterable[torch.Tensor]) -> Iterator[None]:
    """Within, these tensors are in the memory of their device, if they are blocks of some runtime. See `teraio.on_device`."""
    wanted = list(tensors)
    with _lock:
        runtimes = list(_runtimes.values())
    with contextlib.ExitStack() as held:
        for runtime in runtimes:
            held.enter_context(runtime.on_device(wanted))
        yield


def manage_optimizer(optimizer: Optimizer, *, master_weights: bool = False) -> None:
    """Bring its steps and states under the budgets of all runtimes that have its parameters. See `teraio.manage_optimizer`."""
    if not isinstance(optimizer, Optimizer):
        raise UnsupportedError(
            f"manage_optimizer: found {type(optimizer).__name__}, wanted a torch.optim.Optimizer; give the optimizer inside"
        )
    if master_weights:
        keep_masters(optimizer, on_device)
    with _lock:
        _optimizers.add(optimizer)
        runtimes = list(_runtimes.values())
    for runtime in runtimes:
        runtime.manage_optimizer(optimizer)


def reset() -> None:
    """End all runtimes: bring every block back to the device, remove spill files. Compiled models must be compiled again
    (`torch._dynamo.reset()`) before they train on. Blocks until all data is back."""
    with _lock:
        runtimes = list(_runtimes.values())
        _runtimes.clear()
    for runtime in runtimes:
        runtime.close()
