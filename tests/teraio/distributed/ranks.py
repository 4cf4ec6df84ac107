"""Two processes that form a gloo group, for many cases one after the other: to start them takes longer than a case."""

from __future__ import annotations

import datetime
import functools
import gc
import multiprocessing
import os
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from runtime.transfer.engine import Engine
from teraio.registry import REGISTRY

from ...training import MIB, forget
from ..in_process import InProcessJob

COUNT = 2
_SECONDS = 280.0
"""A case that takes longer, or a rank that waits longer for the other, is a failure. Cases take seconds on an idle machine."""


class Ranks:
    """`COUNT` processes. They start at the first case, and anew after a case that failed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._starts = 0
        self._processes: list[Any] = []
        self._connections: list[Connection] = []

    def run(self, case: Callable[..., Any], *arguments: Any, **named: Any) -> list[Any]:
        """Call `case` in each rank and return its results, by rank. Raises AssertionError with the traceback if a rank raises."""
        if not self._processes:
            self._start()
        for connection in self._connections:
            connection.send((case, arguments, named))
        results: dict[int, Any] = {}
        until = time.monotonic() + _SECONDS
        while len(results) < COUNT:
            for rank, connection in enumerate(self._connections):
                if rank not in results and connection.poll(0.02):
                    failed, results[rank] = connection.recv()
                    if failed:
                        self.close()
                        raise AssertionError(f"rank {rank} failed:\n{results[rank]}")
            if time.monotonic() > until:
                self.close()
                raise AssertionError(f"only the ranks {sorted(results)} ended within {_SECONDS} s")
        return [results[rank] for rank in range(COUNT)]

    def _start(self) -> None:
        self._starts += 1
        context = multiprocessing.get_context("spawn")
        for rank in range(COUNT):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, str(self._folder / f"store{self._starts}"), theirs), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._connections.append(ours)

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for connection in self._connections:
            connection.close()
        self._processes, self._connections = [], []


def _serve(rank: int, store: str, connection: Connection) -> None:
    torch.set_num_threads(1)
    os.environ["RANK"], os.environ["WORLD_SIZE"] = os.environ["LOCAL_RANK"], os.environ["LOCAL_WORLD_SIZE"] = (
        str(rank),
        str(COUNT),
    )
    REGISTRY.new_run = functools.partial(REGISTRY.new_run, start_job=InProcessJob)
    Engine.measure = functools.partialmethod(Engine.measure, MIB)  # type: ignore[assignment]
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, COUNT), rank=rank, world_size=COUNT, timeout=datetime.timedelta(seconds=_SECONDS)
    )
    while True:
        try:
            case, arguments, named = connection.recv()
        except EOFError:
            return
        forget()
        torch.manual_seed(0)
        try:
            answer = (False, case(*arguments, **named))
        except BaseException:
            answer = (True, traceback.format_exc())
        connection.send(answer)
        forget()
        gc.collect()  # what is left of the case: the buckets of a DistributedDataParallel count as long as it lives
