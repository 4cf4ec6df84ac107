"""Prefetches that landed late start earlier the next time. Pure: knows a plan's moves and measured times, no clock.

[Note: What is corrected]
A prefetch is late by the time that a stage waited for it beyond the wait that the plan predicts. Its start moves back by
as many stages as cover half of that, again and again until it is in time. Not corrected: what was late once only (the
smaller of two successive iterations counts), and what waited for room, its own copy out or user code rather than for
its link, which an earlier start would not help (the runtime does not report those).
The order in which each link serves blocks stays that of the plan: what is ahead in the queue moves along.
If waiting has not become less after some iterations, the plan's own starts are used again.
Source: the feedback of X. Peng et al., Capuchin: Tensor-based GPU Memory Management for Deep Learning (2020).
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from planner.schema import Move
from teraio.planning.drift import Expectation

_DAMPING = 0.5
_LARGEST_SHIFT = 0.25
"""A start moves by this share of the iteration at most."""
_NEGLIGIBLE = 0.001
"""Lateness below this share of the iteration is as good as none."""
_TRIAL_ITERATIONS = 8
"""After so many iterations with corrections it is seen whether they have helped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Starts:
    """When prefetches are asked for. Block ids.

    fetch_at: by position in the iteration, in order. due: those of the next iteration that are to be asked for by the
    time it begins, in order of need.
    """

    fetch_at: tuple[tuple[int, ...], ...]
    due: tuple[int, ...]


class Corrections:
    """Corrected starts of one plan's prefetches, see [Note: What is corrected].

    shifts: how many seconds earlier each one has to start, by its index in `moves`.
    """

    def __init__(self, moves: Sequence[Move], stage_count: int) -> None:
        self._moves = moves
        self._count = stage_count
        self._by_use = {(m.block, m.before % stage_count): i for i, m in enumerate(moves) if m.prefetch is not None}
        self._late: dict[int, float] = {}
        self._waited: deque[float] = deque(maxlen=_TRIAL_ITERATIONS)
        self._waited_before = 0.0
        self._given_up = False
        self.shifts: dict[int, float] = {}

    def note(self, late: Mapping[tuple[int, int], float], waited_seconds: float, expected: Expectation) -> bool:
        """Take in one iteration: how late blocks were, by block and stage, and all waiting. True if starts have to change."""
        self._waited.append(waited_seconds)
        before, self._late = self._late, self._excess(late, expected)
        if self._given_up:
            return False
        if self.shifts and len(self._waited) == _TRIAL_ITERATIONS:
            if statistics.median(self._waited) >= self._waited_before:
                self.shifts, self._given_up = {}, True
                return True
            self._waited.clear()
        changed, most = False, _LARGEST_SHIFT * expected.iteration_seconds
        for index in before.keys() & self._late.keys():
            shift = self.shifts.get(index, 0.0)
            longer = min(shift + _DAMPING * min(before[index], self._late[index]), most)
            if longer > shift:
                if not self.shifts:
                    self._waited_before = statistics.median(self._waited)
                    self._waited.clear()
                self.shifts[index], changed = longer, True
        return changed

    def _excess(self, late: Mapping[tuple[int, int], float], expected: Expectation) -> dict[int, float]:
        """How much later than predicted, by index of the move."""
        excess = {
            self._by_use[use]: seconds - expected.stall_seconds[use[1]] for use, seconds in late.items() if use in self._by_use
        }
        return {index: seconds for index, seconds in excess.items() if seconds > _NEGLIGIBLE * expected.iteration_seconds}

    def starts(self, stage_seconds: Sequence[float]) -> Starts:
        """All prefetches with the corrections so far; `stage_seconds`: measured, by position."""
        return lay_out_starts(self._moves, corrected_starts(self._moves, self.shifts, stage_seconds), self._count)


def corrected_starts(moves: Sequence[Move], shifts: Mapping[int, float], stage_seconds: Sequence[float]) -> dict[int, int]:
    """The stage at which each prefetch is to start, by index in `moves` and numbered as in its move.

    shifts: by index, seconds by which a prefetch has to start earlier than planned. It starts as many stages earlier as
    take that long, but not before its copy out is predicted to have ended, or its use before if it was only dropped.
    """
    count = len(stage_seconds)
    result: dict[int, int] = {}
    for tier in {move.tier for move in moves}:
        # The links' queues are endless; what lies before and behind one iteration is taken from its neighbours.
        queue = sorted(
            (move.prefetch.start % count + turn * count, index)
            for index, move in enumerate(moves)
            for turn in range(3)
            if move.prefetch is not None and move.tier == tier
        )
        wanted = [_earlier(start, shifts.get(index, 0.0), stage_seconds) for start, index in queue]
        for place in range(len(queue) - 2, -1, -1):
            wanted[place] = min(wanted[place], wanted[place + 1])
        ahead = -count
        for (start, index), target in zip(queue, wanted, strict=True):
            planned = _planned_start(moves[index])
            ahead = max(target, ahead, start - planned + _lowest_start(moves[index]))
            if start // count == 1:
                result[index] = planned - (start - ahead)
    return result


def lay_out_starts(moves: Sequence[Move], starts: Mapping[int, int], count: int) -> Starts:
    """Prefetches by position; at one position those come first that were planned there, or nearest behind it."""
    order = sorted((_planned_start(moves[index]) - start, index) for index, start in starts.items())
    fetch: list[list[int]] = [[] for _ in range(count)]
    for _, index in order:
        fetch[starts[index] % count].append(moves[index].block)
    due = sorted(
        (moves[index].before, place, moves[index].block)
        for place, (_, index) in enumerate(order)
        if starts[index] <= count <= moves[index].before
    )
    return Starts(fetch_at=tuple(map(tuple, fetch)), due=tuple(block for _, _, block in due))


def planned_starts(moves: Sequence[Move], count: int) -> Starts:
    """All prefetches as the plan has them; `count`: of stages."""
    starts = {index: move.prefetch.start for index, move in enumerate(moves) if move.prefetch is not None}
    return lay_out_starts(moves, starts, count)


def _planned_start(move: Move) -> int:
    return move.before if move.prefetch is None else move.prefetch.start


def _lowest_start(move: Move) -> int:
    out = move.after if move.offload is None else max(move.offload.start, move.offload.free_after)
    return min(out + 1, _planned_start(move))


def _earlier(start: int, seconds: float, stage_seconds: Sequence[float]) -> int:
    """The last stage that is reached `seconds` or more before `start`, not more than an iteration earlier."""
    count = len(stage_seconds)
    for stage in range(start, start - count, -1):
        if seconds <= 0.0:
            return stage
        seconds -= stage_seconds[(stage - 1) % count]
    return start - count
