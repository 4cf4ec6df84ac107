"""The training runs of this process: one for every distinct set of options and device.

torch.compile finds a backend by the name of a function, so one object for the whole process is needed: `REGISTRY`.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Literal

import torch
from torch.optim import Optimizer

from planner.errors import OptionsError, TeraioError, UnsupportedError
from runtime.device import MIN_MOVED_BYTES
from runtime.paging import PLAIN, given_away
from runtime.system import uninterrupted
from teraio.machine import Shared
from teraio.optimizer import ProcessSteps, keep_masters, promise
from teraio.options import Options
from teraio.ranks import RankGroup, only_first_rank_informs, open_group, rank_place
from teraio.training_run import RunParts, TrainingRun
from teraio.watching import BESIDE, IterationStats, Parked

logger = logging.getLogger("teraio")

NewRun = Callable[[Options, torch.device, RunParts, Shared, RankGroup | None], TrainingRun]


class Registry:
    """Owns the training runs, and what they share: parts, measured paths, and which mover owns which storage. Thread-safe.

    parts: of all runs to come. new_run: makes them. shared: what they share. Tests and captures give others.
    """

    def __init__(self) -> None:
        self.parts = RunParts()
        self.new_run: NewRun = TrainingRun
        self.shared = Shared()
        self._lock = threading.Lock()
        self._runs: dict[tuple[Options, torch.device], TrainingRun] = {}
        self._numbers = itertools.count()
        self._watchers: list[Callable[[IterationStats], None]] = []
        self._optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()  # given to manage_optimizer; for later runs too
        # The error is held by what stands for the refused graph.
        self._refusals: weakref.WeakKeyDictionary[torch._guards.TracingContext, weakref.ref[TeraioError]]
        self._refusals = weakref.WeakKeyDictionary()

    def run_for(self, options: Options, device: torch.device, parameters: Sequence[torch.Tensor] = ()) -> TrainingRun:
        """Return the run for these options. Models compiled with equal options share one run: one budget and one timeline.

        Makes it the first time, which waits for measurements, and for the other ranks of this machine; see `teraio.ranks`. Raises
        what `TrainingRun` raises.
        parameters: of the graph that is compiled. If another run manages all of them, the model is compiled again: that run ends,
        and this one takes over what it has left, see `TrainingRun.close`.
        """
        with uninterrupted():
            key = (options, device)
            optimizers = self._end_others(key, parameters)
            with self._lock:
                if key not in self._runs:
                    _show_messages()
                    ranks = open_group(options.local_ranks, timeout_seconds=options.rank_timeout)
                    with ranks.failing_together() if ranks is not None else contextlib.nullcontext():
                        self._runs[key] = self.new_run(options, device, self.parts, self.shared, ranks)
                    self._runs[key].number, self._runs[key].on_iteration = next(self._numbers), self._tell
                    for optimizer in self._optimizers:
                        self._runs[key].steps.manage(optimizer)
                run = self._runs[key]
            run.steps.expect(optimizers)
            return run

    def _end_others(self, key: tuple[Options, torch.device], parameters: Sequence[torch.Tensor]) -> list[Optimizer]:
        """End the runs under other options that manage all of `parameters`. Return the optimizers that they managed."""
        with self._lock:
            counts = {other: run.count_managed(parameters) for other, run in self._runs.items() if other != key}
            ending = [self._runs.pop(other) for other, count in counts.items() if parameters and count == len(parameters)]
            sharing = [(self._runs[other], count) for other, count in counts.items() if count and other in self._runs]
        for run, count in sharing:
            budget = run.status().device_budget_bytes
            logger.warning(
                "%d of %d large parameters of this graph are managed under %s, and do not move under these options; if the model "
                "was compiled again, call teraio.reset() first",
                count,
                len(parameters),
                "other options" if budget is None else f"the budget of {budget:,} bytes",
            )
        optimizers = [optimizer for run in ending for optimizer in run.steps.optimizers()]
        if ending:
            logger.info("the model is compiled again: its run with other options ends")
        _close_all(ending, replaced=True)
        return optimizers

    def leave_given_away(self, parameters: Mapping[str, torch.Tensor]) -> None:
        """Let those of the named parameters that no run manages yet stay where they are, if their memory was given away."""
        runs = self.runs()
        new = {
            name: tensor
            for name, tensor in parameters.items()
            if tensor.untyped_storage().nbytes() >= MIN_MOVED_BYTES and not any(run.count_managed([tensor]) for run in runs)
        }
        given = {id(tensor) for tensor in given_away(list(new.values()))}
        for name, tensor in new.items():
            if id(tensor) in given and not self.shared.ownership.stays(tensor.untyped_storage()):
                self.shared.ownership.leave(tensor.untyped_storage())
                logger.warning(
                    "the memory of %s was given away before the first compiled call (DLPack), so it stays where it is and never "
                    "moves; let go of what holds it before that call",
                    name,
                )

    def runs(self) -> tuple[TrainingRun, ...]:
        """Return all runs, in order of creation."""
        with self._lock:
            return tuple(self._runs.values())

    def forget_unused(self) -> None:
        """Close runs under which nothing has run, such as one whose budget was refused."""
        with uninterrupted():
            with self._lock:
                unused = [self._runs.pop(key) for key, run in list(self._runs.items()) if run.unused]
            _close_all(unused)

    def note_refusal(self, error: TeraioError) -> None:
        """The graph that Dynamo is compiling, or a part of it, was refused."""
        compiling = torch._guards.TracingContext.try_get()
        if compiling is not None:
            self._refusals[compiling] = weakref.ref(error)

    def refuse_again(self) -> None:
        """Raise the error with which another part of the graph that Dynamo is compiling was refused, if one was.

        For DistributedDataParallel, Dynamo splits graphs by buckets. Without this, each part would open the tiers once more.
        """
        compiling = torch._guards.TracingContext.try_get()
        known = self._refusals.get(compiling) if compiling is not None else None
        error = known() if known is not None else None
        if error is not None:
            raise error.without_traceback()

    def on_iteration(self, watcher: Callable[[IterationStats], None]) -> Callable[[], None]:
        """Call `watcher` with each iteration. See `teraio.on_iteration`."""
        self._watchers.append(watcher)
        return lambda: self._watchers.remove(watcher) if watcher in self._watchers else None

    def _tell(self, stats: IterationStats) -> None:
        for watcher in tuple(self._watchers):
            watcher(stats)

    @contextlib.contextmanager
    def on_device(self, tensors: Iterable[torch.Tensor]) -> Iterator[None]:
        """Keep those of `tensors` that are blocks of some run on their device within the `with` block. See `teraio.on_device`."""
        wanted = list(tensors)
        with contextlib.ExitStack() as held:
            for run in self.runs():
                held.enter_context(run.on_device(wanted))
            yield

    def in_main_memory(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor in main memory over the content of one that is away from its GPU; `tensor` itself where it can be read.

        Nothing is copied, and the content's slot stays its own while the result lives. Waits for the device.
        """
        if tensor.device.type == "cpu" or type(tensor) not in PLAIN or tensor.layout is not torch.strided:
            return tensor
        pagers = [run.operators.pager for run in self.runs()]
        with uninterrupted():
            storage = next((found for pager in pagers if (found := pager.map_away(tensor)) is not None), None)
        if storage is None:
            storage = self.shared.ownership.map_left(tensor.untyped_storage())
        if storage is None:
            return tensor
        empty = torch.empty(0, dtype=tensor.dtype, device="cpu")  # whatever the default device is
        return empty.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())

    def park(self) -> Parked:
        """Let everything leave the devices of all runs that can. See `teraio.park`."""
        began, runs = time.perf_counter(), self.runs()
        left_bytes = sum(run.park() for run in runs)
        staying: Counter[str] = Counter()
        for run in runs:
            staying.update(run.staying_bytes())
        for device in {run.device for run in runs}:  # what PyTorch counts there is of all runs
            on_it = [run for run in runs if run.device == device]
            staying[BESIDE] += max(on_it[0].pytorch_bytes - sum(run.counted_bytes for run in on_it), 0)
        return Parked(left_bytes=left_bytes, staying_bytes=+staying, seconds=time.perf_counter() - began)

    def manage_optimizer(
        self,
        optimizer: Optimizer,
        *,
        master_weights: bool = False,
        independent: Literal["parameters", "elements"] | None = None,
    ) -> None:
        """Bring its steps and states under the budgets of all runs that have its parameters. See `teraio.manage_optimizer`."""
        if not isinstance(optimizer, Optimizer):
            raise UnsupportedError(
                f"manage_optimizer: found {type(optimizer).__name__}, wanted a torch.optim.Optimizer; give the optimizer inside"
            )
        if independent not in (None, "parameters", "elements"):
            raise OptionsError(f"manage_optimizer: independent={independent!r}; give 'parameters' or 'elements'")
        if independent is not None:
            promise(optimizer, independent)
        if master_weights:
            keep_masters(optimizer, self.on_device)
        with self._lock:
            self._optimizers.add(optimizer)
        for run in self.runs():
            run.steps.manage(optimizer)

    def reset(self) -> None:
        """End all runs. See `teraio.reset`."""
        with uninterrupted():
            with self._lock:
                runs = list(self._runs.values())
                self._runs.clear()
            _close_all(runs)
            self.shared.ownership.forget_stays()  # what was given away may have come back


def _close_all(runs: Iterable[TrainingRun], *, replaced: bool = False) -> None:
    """Close the runs, all of them even if one fails. replaced: see `TrainingRun.close`."""
    with contextlib.ExitStack() as closing:
        for run in runs:
            closing.callback(run.close, replaced=replaced)


def _show_messages() -> None:
    """Show teraio's messages on the console, unless the program has set up logging itself."""
    if not logger.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("teraio: %(message)s"))
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
    only_first_rank_informs(logger, rank_place())


REGISTRY = Registry()
STEPS = ProcessSteps(REGISTRY.runs, REGISTRY.in_main_memory)
"""Its hooks are there before the first step: this module is imported when `torch.compile` is called with the backend's name."""
