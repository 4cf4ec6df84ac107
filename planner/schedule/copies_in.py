"""Copies in of a replay, and which of them stages wait for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from planner.problem import Problem
from planner.schema import Plan
from planner.simulator import Timeline

__all__ = ["CopyIn", "copies_in"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyIn:
    """A copy in of the replay, by its period. `slack_seconds`: from its end to the start of the stage that uses the block.

    `wait_seconds`: how long that stage waited, if the copy was the last thing that it waited for; otherwise 0.
    """

    index: int
    slack_seconds: float
    wait_seconds: float


def copies_in(problem: Problem, plan: Plan, timeline: Timeline) -> Iterator[CopyIn]:
    """Yield the copies in of `timeline`, the replay of `plan`, which is for `problem`."""
    tolerance = 1e-9 * timeline.iteration_seconds
    for transfer in timeline.transfers:
        move = plan.moves[transfer.move]
        if not transfer.link.endswith("->device"):
            continue
        stage = timeline.stages[move.before % problem.stage_count]
        slack = (stage.start_seconds - transfer.end_seconds) % timeline.iteration_seconds
        slack = 0.0 if slack > timeline.iteration_seconds - tolerance else slack
        waited = stage.stall_seconds if slack <= tolerance and stage.stall_seconds > tolerance else 0.0
        yield CopyIn(index=problem.period_after[move.block, move.after], slack_seconds=slack, wait_seconds=waited)
