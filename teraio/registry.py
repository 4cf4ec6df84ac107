"""The training runs of this process: one for every distinct set of options and device.

torch.compile finds a backend by the name of a function, so one object for the whole process is needed: `REGISTRY`.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator

import torch
from torch.optim import Optimizer

from planner.errors import UnsupportedError
from runtime.paging import StorageOwnership
from runtime.system import uninterrupted
from teraio.machine import Machine, MeasuredPaths
from teraio.optimizer import ProcessSteps, keep_masters
from teraio.options import Options
from teraio.status import Status
from teraio.training_run import TrainingRun


class Registry:
    """Owns the training runs, and what they share: measured paths, and which mover owns which storage. Thread-safe.

    open_machine, new_run: make a run and its machine. measured: paths of this machine, each measured once. Tests give others.
    """

    def __init__(self) -> None:
        self.open_machine: Callable[..., Machine] = Machine
        self.new_run: Callable[..., TrainingRun] = TrainingRun
        self.measured = MeasuredPaths()
        self._ownership = StorageOwnership()
        self._lock = threading.Lock()
        self._runs: dict[tuple[Options, torch.device], TrainingRun] = {}
        self._optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()  # given to manage_optimizer; for later runs too

    def run_for(self, options: Options, device: torch.device) -> TrainingRun:
        """Return the run for these options. Models compiled with equal options share one run: one budget and one timeline.

        Makes it the first time, which waits for measurements. Raises what `TrainingRun` raises.
        """
        with uninterrupted(), self._lock:
            key = (options, device)
            if key not in self._runs:
                _show_messages()
                open_machine = functools.partial(self.open_machine, measured=self.measured, ownership=self._ownership)
                self._runs[key] = self.new_run(options, device, open_machine=open_machine)
                for optimizer in self._optimizers:
                    self._runs[key].manage_optimizer(optimizer)
            return self._runs[key]

    def runs(self) -> tuple[TrainingRun, ...]:
        """Return all runs, in order of creation."""
        with self._lock:
            return tuple(self._runs.values())

    def forget_unused(self) -> None:
        """Close runs under which nothing has run, such as one whose budget was refused."""
        with uninterrupted():
            with self._lock:
                unused = {key: run for key, run in self._runs.items() if run.unused}
                for key in unused:
                    del self._runs[key]
            _close_all(unused.values())

    def status(self) -> tuple[Status, ...]:
        """Return what every run is doing, in order of creation. See `teraio.status`."""
        return tuple(run.status() for run in self.runs())

    def wait_for_plan(self, timeout_seconds: float | None = None) -> bool:
        """Wait until no plan is being made, or until the time is over. See `teraio.wait_for_plan`."""
        return all(run.wait_for_plan(timeout_seconds) for run in self.runs())

    def step_done(self) -> None:
        """An iteration of all runs has ended. See `teraio.step_done`."""
        for run in self.runs():
            run.step_done()

    @contextlib.contextmanager
    def on_device(self, tensors: Iterable[torch.Tensor]) -> Iterator[None]:
        """Keep those of `tensors` that are blocks of some run on their device within the `with` block. See `teraio.on_device`."""
        wanted = list(tensors)
        with contextlib.ExitStack() as held:
            for run in self.runs():
                held.enter_context(run.on_device(wanted))
            yield

    def manage_optimizer(self, optimizer: Optimizer, *, master_weights: bool = False) -> None:
        """Bring its steps and states under the budgets of all runs that have its parameters. See `teraio.manage_optimizer`."""
        if not isinstance(optimizer, Optimizer):
            raise UnsupportedError(
                f"manage_optimizer: found {type(optimizer).__name__}, wanted a torch.optim.Optimizer; give the optimizer inside"
            )
        if master_weights:
            keep_masters(optimizer, self.on_device)
        with self._lock:
            self._optimizers.add(optimizer)
        for run in self.runs():
            run.manage_optimizer(optimizer)

    def reset(self) -> None:
        """End all runs: bring every block back to the device, remove spill files. See `teraio.reset`."""
        with uninterrupted():
            with self._lock:
                runs = list(self._runs.values())
                self._runs.clear()
            _close_all(runs)


def _close_all(runs: Iterable[TrainingRun]) -> None:
    """Close the runs, all of them even if one fails."""
    with contextlib.ExitStack() as closing:
        for run in runs:
            closing.callback(run.close)


def _show_messages() -> None:
    """Show teraio's messages on the console, unless the program has set up logging itself."""
    logger = logging.getLogger("teraio")
    if not logger.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("teraio: %(message)s"))
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)


REGISTRY = Registry()
STEPS = ProcessSteps(REGISTRY.runs)
"""Its hooks are there before the first step: this module is imported when `torch.compile` is called with the backend's name."""
