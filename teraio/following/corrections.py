"""Computes earlier starts for prefetches that were late. Pure: uses a plan's moves and measured times, reads no clock.

Decides nothing: `follower` applies the starts.

[Note: What is corrected]
A prefetch is late by the time that a stage waited for it beyond the wait that the plan predicts. Its start moves back by
the number of stages that cover half of that time. This repeats until the prefetch is in time. A prefetch that was late only
once is not corrected: the smaller lateness of two successive iterations counts. Nor is one that waited for room, for its own
copy out or for user code: an earlier start would not help, so the runtime does not report those.
The order in which each link serves blocks stays that of the plan: prefetches ahead in the queue move along.
If there is no less waiting after some iterations, the plan's own starts are used again.
Source: the feedback of X. Peng et al., Capuchin: Tensor-based GPU Memory Management for Deep Learning (2020).
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from planner.schema import Move
from teraio.following.drift import Expectation

_DAMPING = 0.5  # share of the lateness that one correction makes up for
_MAX_SHIFT = 0.25  # share of the iteration by which a start moves at most
_NEGLIGIBLE = 0.001  # share of the iteration below which lateness is ignored
_TRIAL_ITERATIONS = 8  # iterations with corrections after which their effect is checked


@dataclass(frozen=True, slots=True, kw_only=True)
class Starts:
    """When prefetches start, as block ids.

    fetch_at: by position in the iteration, in order. due: the prefetches of the next iteration that must have started when it
    begins, in order of need.
    """

    fetch_at: tuple[tuple[int, ...], ...]
    due: tuple[int, ...]


class Corrections:
    """Corrected starts of the prefetches of one plan, see [Note: What is corrected].

    shifts: seconds by which a prefetch starts earlier than planned, by its index in `moves`.
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
        """Take in one iteration. Return whether starts have changed.

        late: seconds by block and stage. waited_seconds: all waiting of the iteration.
        """
        self._waited.append(waited_seconds)
        before, self._late = self._late, self._excess(late, expected)
        if self._given_up:
            return False
        if self.shifts and len(self._waited) == _TRIAL_ITERATIONS:
            if statistics.median(self._waited) >= self._waited_before:  # earlier starts did not help
                self.shifts, self._given_up = {}, True
                return True
            self._waited.clear()
        changed, most = False, _MAX_SHIFT * expected.iteration_seconds
        for index in before.keys() & self._late.keys():  # what was late only once is not corrected
            shift = self.shifts.get(index, 0.0)
            longer = min(shift + _DAMPING * min(before[index], self._late[index]), most)
            if longer > shift:
                if not self.shifts:
                    self._waited_before = statistics.median(self._waited)
                    self._waited.clear()
                self.shifts[index], changed = longer, True
        return changed

    def _excess(self, late: Mapping[tuple[int, int], float], expected: Expectation) -> dict[int, float]:
        """Return the seconds of lateness beyond the predicted ones, by index of the move."""
        excess = {
            self._by_use[use]: seconds - expected.stall_seconds[use[1]] for use, seconds in late.items() if use in self._by_use
        }
        return {index: seconds for index, seconds in excess.items() if seconds > _NEGLIGIBLE * expected.iteration_seconds}

    def starts(self, stage_seconds: Sequence[float]) -> Starts:
        """Return the starts of all prefetches, corrected. stage_seconds: measured, by position."""
        return lay_out_starts(self._moves, corrected_starts(self._moves, self.shifts, stage_seconds), self._count)


def corrected_starts(moves: Sequence[Move], shifts: Mapping[int, float], stage_seconds: Sequence[float]) -> dict[int, int]:
    """Return the stage at which each prefetch starts, by index in `moves` and numbered as in its move.

    shifts: seconds by which a prefetch has to start earlier than planned, by index. It starts as many stages earlier as
    take that long, but not before its copy out is predicted to end.
    """
    count = len(stage_seconds)
    result: dict[int, int] = {}
    for tier in {move.tier for move in moves}:
        # A link's queue has no end: what lies before and after one iteration is taken from its neighbours.
        queue = sorted(
            (move.prefetch.start % count + turn * count, index)
            for index, move in enumerate(moves)
            for turn in range(3)
            if move.prefetch is not None and move.tier == tier
        )
        wanted = [_earlier(start, shifts.get(index, 0.0), stage_seconds) for start, index in queue]
        # The order in which a link serves blocks stays: prefetches ahead in the queue move along.
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
    """Return prefetches by position. At one position, those planned there or nearest after it come first."""
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
    """Return all prefetches as the plan has them. count: number of stages."""
    starts = {index: move.prefetch.start for index, move in enumerate(moves) if move.prefetch is not None}
    return lay_out_starts(moves, starts, count)


def _planned_start(move: Move) -> int:
    return move.before if move.prefetch is None else move.prefetch.start


def _lowest_start(move: Move) -> int:
    # A block that is only dropped has no copy out: its prefetch may start after the use before.
    out = move.after if move.offload is None else max(move.offload.start, move.offload.free_after)
    return min(out + 1, _planned_start(move))


def _earlier(start: int, seconds: float, stage_seconds: Sequence[float]) -> int:
    """Return the last stage that begins `seconds` or more before `start`, at most an iteration earlier."""
    count = len(stage_seconds)
    for stage in range(start, start - count, -1):
        if seconds <= 0.0:
            return stage
        seconds -= stage_seconds[(stage - 1) % count]
    return start - count
