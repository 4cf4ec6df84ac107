"""The ranks of one training as workers, which all take their steps at the same time."""

import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

from examples.training import Report, Setting, Step
from examples.worker import EXACT_MEMORY, Worker

RANKS = 2
PROGRAM = "benchmarks.rank_worker"

T = TypeVar("T")


class Ranks:
    """`RANKS` workers that form a process group. Calls wait for all of them and raise WorkerFailed, as those of `Worker` do.

    log: with `{rank}`, the file for each rank's messages.
    """

    def __init__(self, setting: Setting, log: Path) -> None:
        port = _free_port()
        self._stack = ExitStack()
        self._threads = self._stack.enter_context(ThreadPoolExecutor(RANKS))

        def start(rank: int) -> Worker:
            return Worker(setting, Path(str(log).format(rank=rank)), _environment(rank, port), program=PROGRAM)

        with self._stack:
            self._workers = [self._stack.enter_context(worker) for worker in self._threads.map(start, range(RANKS))]
            self._stack = self._stack.pop_all()

    def step(self) -> Step:
        """Take one step. Returns that of rank 0, with the times of the slowest rank."""
        steps = self._all(Worker.step)
        slowest = {name: max(getattr(step, name) for step in steps) for name in ("seconds", "optimizer_seconds")}
        return steps[0].model_copy(update=slowest)

    def wait_for_plan(self) -> None:
        """Wait until no rank waits for a plan."""
        self._all(Worker.wait_for_plan)

    def finish(self) -> list[Report]:
        """End the training and its processes. Returns the report of each rank."""
        return self._all(Worker.finish)

    def _all(self, call: Callable[[Worker], T]) -> list[T]:
        return list(self._threads.map(call, self._workers))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stack.close()


def _environment(rank: int, port: int) -> dict[str, str]:
    """Return what torchrun sets for this rank, and what makes peaks of memory exact."""
    count, number = str(RANKS), str(rank)
    named = {"RANK": number, "LOCAL_RANK": number, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
    return {**named, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1", **EXACT_MEMORY}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
