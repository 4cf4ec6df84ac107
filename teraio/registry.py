"""The runtimes of this process: one for every distinct set of options and device."""

from __future__ import annotations

import logging
import threading

import torch

from teraio.lifecycle import Lifecycle
from teraio.options import Options
from teraio.status import Status

_lock = threading.Lock()
_runtimes: dict[tuple[Options, torch.device], Lifecycle] = {}


def _show_messages() -> None:
    """teraio says in a few lines what it does; where the program has set up logging, that decides instead."""
    logger = logging.getLogger("teraio")
    if not logger.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("teraio: %(message)s"))
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)


def runtime_for(options: Options, device: torch.device) -> Lifecycle:
    """The runtime for these options; models that are compiled with equal options share one budget and one timeline."""
    with _lock:
        key = (options, device)
        if key not in _runtimes:
            _show_messages()
            _runtimes[key] = Lifecycle(options, device)
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


def reset() -> None:
    """End all runtimes: bring every block back to the device, remove spill files. Compiled models must be compiled again
    (`torch._dynamo.reset()`) before they train on. Blocks until all data is back."""
    with _lock:
        runtimes = list(_runtimes.values())
        _runtimes.clear()
    for runtime in runtimes:
        runtime.close()
