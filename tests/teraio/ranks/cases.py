"""What each of two ranks runs for `test_two_ranks.py`: it trains with teraio, and answers with what came of it."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import teraio
from planner import Budgets, Trace
from teraio.machine import Machine, Shared, open_machine
from teraio.options import Options
from teraio.ranks import RankGroup
from teraio.registry import REGISTRY

from ...training import Chain
from ..in_process import InProcessJob

Answer = dict[str, Any]


class Lines(logging.Handler):
    """Keeps what teraio logs."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[tuple[str, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append((record.levelname, record.getMessage()))


@contextlib.contextmanager
def logged() -> Iterator[list[tuple[str, str]]]:
    """Give the list of what teraio logs in the block, with levels."""
    logger, lines = logging.getLogger("teraio"), Lines()
    logger.addHandler(lines)
    logger.setLevel(logging.INFO)
    try:
        yield lines.lines
    finally:
        logger.removeHandler(lines)


def answering(case: Callable[..., Answer]) -> Callable[..., Answer]:
    """Have a case answer with the error of teraio that it ended with, if any, and with what teraio has logged."""

    @functools.wraps(case)
    def run(*arguments: Any, **named: Any) -> Answer:
        with logged() as lines:
            try:
                answer = case(*arguments, **named)
            except teraio.TeraioError as error:
                answer = {"error": type(error).__name__, "message": str(error)}
        return {**answer, "log": list(lines)}

    return run


def train(steps: int, *, together: bool = True, pause: float = 0.0, **options: Any) -> None:
    """Train with codegen="eager"; together: with a collective in each step."""
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


@answering
def trained(options: list[dict[str, Any]], steps: int = 14, pause: tuple[float, float] = (0.0, 0.0)) -> Answer:
    """Train by one plan, also if the machine's times change, and tell what came of it. options, pause: by rank."""
    made: list[Trace] = []

    def start_job(trace: Trace, budgets: Budgets, **others: Any) -> InProcessJob:
        made.append(trace)
        return InProcessJob(trace, budgets, **others)

    rank = dist.get_rank()
    with mock.patch.object(REGISTRY, "parts", dataclasses.replace(REGISTRY.parts, start_job=start_job)):
        train(steps, pause=pause[rank], **{"replan": False, **options[rank]})
    (run,) = REGISTRY.runs()
    machine = run._machine
    (tier,) = (each.tier for each in machine.tiers)
    found = {
        "status": dataclasses.asdict(run.status()),
        "made": len(made),
        "storage_bytes": tier.store.limit_bytes,
        "threads": tier.engine.write_link.thread_count if tier.engine is not None else None,
        "links": [link.model_dump(mode="json") for link in machine.hardware().links],
        "devices": run._pager.account.budget_bytes,
    }
    in_force = run._phase.in_force
    if in_force is not None:
        found["moves"] = [move.model_dump(mode="json") for move in in_force.plan.moves]
    told: list[tuple[teraio.Status, ...]] = [()] * dist.get_world_size()
    dist.all_gather_object(told, teraio.status())
    found["phases"] = [[each.phase for each in of_rank] for of_rank in told]
    return found


@answering
def started_again(options: dict[str, Any], steps: int, folder: Path) -> Answer:
    """Start with the plans that earlier starts kept below `folder`, whatever the rates are this time."""
    with (
        mock.patch("teraio.planning.plan_cache._RATES_DIFFER", 1e9),
        mock.patch.dict(os.environ, {"XDG_CACHE_HOME": str(folder)}),
    ):
        return trained.__wrapped__([options] * 2, steps=steps)  # type: ignore[attr-defined]


@answering
def alone(options: dict[str, Any]) -> Answer:
    """Only rank 0 trains."""
    if dist.get_rank() == 0:
        train(3, together=False, **options)
    return {"runs": len(teraio.status())}


@answering
def killed(options: list[dict[str, Any]]) -> Answer:
    """Rank 1 dies while rank 0 waits for it."""
    rank = dist.get_rank()
    if rank == 1:

        def open_and_die(options: Options, device: torch.device, shared: Shared, ranks: RankGroup | None) -> Machine:
            open_machine(options, device, shared)
            os.kill(os.getpid(), signal.SIGKILL)
            raise AssertionError

        REGISTRY.parts = dataclasses.replace(REGISTRY.parts, open_machine=open_and_die)
    train(2, together=False, **options[rank])
    return {}
