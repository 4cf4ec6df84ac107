"""One of two ranks under gloo: runs the cases that it is told on standard input, and answers each with a line of JSON.

Started by `test_two_ranks.py` with the environment variables of torchrun.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import teraio
from planner import Budgets, Trace
from runtime.transfer.engine import Engine
from teraio.machine import Machine
from teraio.ranks import RankGroup
from teraio.registry import REGISTRY
from tests.teraio.in_process import InProcessJob
from tests.training import MIB, Chain, forget

RANK = int(os.environ["RANK"])
CASES: dict[str, Callable[..., dict[str, Any]]] = {}


class Job(InProcessJob):
    """Counts the plans that this rank makes."""

    made = 0

    def __init__(self, trace: Trace, budgets: Budgets, *, time_limit_seconds: float) -> None:
        Job.made += 1
        super().__init__(trace, budgets, time_limit_seconds=time_limit_seconds)


class Lines(logging.Handler):
    """Keeps what teraio logs."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[tuple[str, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append((record.levelname, record.getMessage()))


def train(steps: int, *, together: bool = True, pause: float = 0.0, **options: Any) -> None:
    """Train with codegen="eager"; together: with a collective in each step."""
    torch.manual_seed(0)
    module = Chain()
    model = teraio.compile(module, codegen="eager", **options)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5, momentum=0.9)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(16, 512)).square().mean().backward()
        time.sleep(pause)
        if together:
            dist.all_reduce(torch.ones(1))
        optimizer.step()


def case(run: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    CASES[run.__name__] = run
    return run


@case
def trained(options: list[dict[str, Any]], steps: int = 14, pause: list[float] | None = None) -> dict[str, Any]:
    """Train and tell what came of it. options, pause: by rank."""
    torch.set_num_threads(1)
    train(steps, pause=0.0 if pause is None else pause[RANK], **options[RANK])
    (run,) = REGISTRY.runs()
    machine = run._machine
    (tier,) = (each.tier for each in machine._opened.tiers)
    found = {
        "status": json.loads(run.status().as_text()),
        "made": Job.made,
        "storage_bytes": tier.store.limit_bytes,
        "threads": tier.engine._threads if tier.engine is not None else None,
        "links": [link.model_dump(mode="json") for link in machine.hardware().links],
        "devices": run._pager.budget_bytes,
    }
    follower = run._phase.follower
    if follower is not None:
        found["moves"] = [move.model_dump(mode="json") for move in follower._now.plan.moves]
    dist.barrier()
    found["node"] = {rank: [each.phase for each in told] for rank, told in teraio.node_status().items()}
    dist.barrier()
    return found


@case
def alone(options: dict[str, Any]) -> dict[str, Any]:
    """Only rank 0 trains."""
    if RANK == 0:
        train(3, together=False, **options)
    return {"ranks": list(teraio.node_status())}


@case
def killed(options: list[dict[str, Any]]) -> dict[str, Any]:
    """Rank 1 dies while rank 0 waits for it."""
    if RANK == 1:

        def open_and_die(*arguments: Any, ranks: RankGroup, **parts: Any) -> Machine:
            Machine(*arguments, **parts)
            os.kill(os.getpid(), signal.SIGKILL)
            raise AssertionError

        REGISTRY.open_machine = open_and_die
    train(2, together=False, **options[RANK])
    return {}


def main() -> None:
    Engine.measure = functools.partialmethod(Engine.measure, MIB)  # type: ignore[assignment]
    REGISTRY.new_run = functools.partial(REGISTRY.new_run, start_job=Job)
    logger, lines = logging.getLogger("teraio"), Lines()
    logger.addHandler(lines)
    logger.setLevel(logging.INFO)
    dist.init_process_group("gloo", store=dist.FileStore(sys.argv[1], 2), rank=RANK, world_size=2)
    for line in sys.stdin:
        told = json.loads(line)
        lines.lines.clear()
        Job.made = 0
        answer: dict[str, Any] = {}
        try:
            answer = CASES[told["case"]](**told["arguments"])
        except teraio.TeraioError as error:
            answer = {"error": type(error).__name__, "message": str(error)}
        answer["log"] = list(lines.lines)
        with contextlib.suppress(teraio.TeraioError):
            forget()
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
