"""Processes that form a gloo group, for many cases one after the other: to start them takes longer than a case."""

from __future__ import annotations

import dataclasses
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

from runtime.transfer import Engine
from teraio import phases
from teraio.registry import REGISTRY

from ..thoroughness import by_profile
from ..training import MIB, forget
from .in_process import InProcessJob

COUNT = 2
_SECONDS = by_profile(ci=280.0, long=1100.0)
"""A case that takes longer, or a rank that waits longer for the other, is a failure. Cases take seconds on an idle machine."""


class Ranks:
    """`count` processes with the environment that torchrun gives them. They start at the first case, and anew after a failure."""

    def __init__(self, folder: Path, count: int = COUNT) -> None:
        self._folder = folder
        self._count = count
        self._starts = 0
        self._processes: list[Any] = []
        self._connections: list[Connection] = []

    def run(self, case: Callable[..., Any], *arguments: Any, **named: Any) -> list[Any]:
        """Call `case` in each rank and return its results, by rank. Raises AssertionError with the traceback if a rank raises."""
        return self._results(case, arguments, named, dying=())

    def run_killing(self, dying: int, case: Callable[..., Any], *arguments: Any, **named: Any) -> list[Any]:
        """As `run`, but the process of rank `dying` ends in the case: its result is None. The others end as well, afterwards."""
        results = self._results(case, arguments, named, dying=(dying,))
        self.close()
        return results

    def _results(self, case: Any, arguments: Any, named: Any, dying: tuple[int, ...]) -> list[Any]:
        if not self._processes:
            self._start()
        for connection in self._connections:
            connection.send((case, arguments, named))
        results: dict[int, Any] = {}
        until = time.monotonic() + _SECONDS
        while len(results) < self._count:
            for rank, connection in enumerate(self._connections):
                if rank not in results and connection.poll(0.02):
                    failed, results[rank] = _received(connection)
                    if failed != (rank in dying):
                        self.close()
                        raise AssertionError(f"rank {rank} {'failed' if failed else 'lives'}:\n{results[rank]}")
            if time.monotonic() > until:
                self.close()
                raise AssertionError(f"only the ranks {sorted(results)} ended within {_SECONDS} s")
        return [results[rank] for rank in range(self._count)]

    def _start(self) -> None:
        self._starts += 1
        store = str(self._folder / f"store{self._starts}")
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["teraio", "torch._inductor.compile_fx", "torch.distributed.tensor"])
        for rank in range(self._count):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, self._count, store, theirs, _SECONDS), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._connections.append(ours)

    def close(self) -> None:
        """End the processes: those that wait for a case by themselves, so that what they reached counts as covered."""
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            process.join(5.0)
            process.kill()
            process.join()
        self._processes, self._connections = [], []


def _received(connection: Connection) -> tuple[bool, Any]:
    """Return whether the rank failed, and its result or its traceback; None if its process has ended."""
    try:
        return connection.recv()
    except (EOFError, ConnectionResetError):
        return True, None


def _serve(rank: int, count: int, store: str, connection: Connection, seconds: float) -> None:
    torch.set_num_threads(1)
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
    os.environ |= {name: str(number) for name, number in place.items()}
    REGISTRY.parts = dataclasses.replace(REGISTRY.parts, start_job=InProcessJob)
    phases._LONGEST = 1  # also on a busy machine: cases train for few steps
    Engine.measure = functools.partialmethod(Engine.measure, MIB)  # type: ignore[assignment]
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, count), rank=rank, world_size=count, timeout=datetime.timedelta(seconds=seconds)
    )
    gc.freeze()
    gc.freeze = gc.unfreeze = lambda: None  # what is there by now, all searches of objects pass over, too: a third of the time
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
