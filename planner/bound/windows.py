"""The times that the lower bound considers: chosen instants, and windows for the copies of each block, rounded outward."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import accumulate, pairwise
from typing import ClassVar

from planner.problem import InactivePeriod, Problem, Repeats, periods_between_uses

_TURN_WEIGHT = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Instants:
    """Chosen starts and ends of stages. Position 2 s is the start of stage s, position 2 s + 1 its end.

    Instants are numbered on over the iteration's end. Span k lies between instants k and k + 1; the last span ends at the next
    iteration's first instant. `span_seconds[k]`: seconds of stages in span k. `can_stall[k]`: false where the span is the run of
    one stage. `live_bytes[k]`: device bytes at instant k if nothing ever leaves the device. `alike`: the instants whose rows are
    added up; where passes repeat, those at the same place of each. `first_alike[k]`: the first of those like k.
    """

    at_instants: ClassVar[bool] = True

    positions: tuple[int, ...]
    stage_count: int
    span_seconds: tuple[float, ...]
    can_stall: tuple[bool, ...]
    live_bytes: tuple[int, ...]
    alike: tuple[range, ...]
    first_alike: tuple[int, ...]

    @classmethod
    def of(cls, problem: Problem, most: int, repeats: Repeats | None = None) -> Instants:
        """Choose at most `most` (at least one) of the iteration's instants. Of passes that repeat, those of one of them count.

        Those of the two stages at each end of a pass come on top. The choice does not depend on the budget. The choice for a
        smaller `most` is a subset of the choice for a larger one.
        """
        stages = problem.trace.stages
        ends = list(accumulate(stage.duration_seconds for stage in stages))
        times = [time for start, end in zip([0.0, *ends[:-1]], ends, strict=True) for time in (start, end)]
        live = [bytes_ for bytes_ in problem.live_bytes for _ in (0, 1)]
        once, others = range(0), range(0)  # the first of the passes that repeat, and the rest of them
        seams: set[int] = set()
        if repeats is not None:
            once = range(2 * repeats.first, 2 * (repeats.first + repeats.length))
            others = range(once.stop, 2 * repeats.end)
            # Where passes meet, what is used at the end of one or at the begin of the next comes and goes within few stages.
            for first in (once.start, others.stop):  # of the first of them, and of the one that comes after them
                last = first + len(once)
                seams |= {*range(first, first + 4), *range(last - 4, last)}
        left = [position for position in range(len(times)) if position not in others]
        waits = [0.0] * len(stages) if repeats is None else _copy_seconds(problem)
        seconds = [waits[(p // 2 + 1) % len(stages)] if p % 2 else stages[p // 2].duration_seconds for p in left]
        chosen = sorted(seams.union(left[n] for n in _keep(seconds, [live[p] for p in left], max(most, 1))))
        copies = [range(p, others.stop if p in once else p + 1, max(len(once), 1)) for p in chosen]
        kept = sorted(position for same in copies for position in same)
        count = len(kept)
        begins = [times[position] for position in kept]
        spans = [later - begin for begin, later in pairwise([*begins, ends[-1] + begins[0]])]
        runs = [p % 2 == 0 and number + 1 < count and kept[number + 1] == p + 1 for number, p in enumerate(kept)]
        step = max(sum(p in once for p in chosen), 1)
        alike = tuple(range(kept.index(same[0]), kept.index(same[-1]) + 1, step) for same in copies)
        return cls(
            positions=tuple(kept),
            stage_count=len(stages),
            span_seconds=tuple(spans),
            can_stall=tuple(not run for run in runs),
            live_bytes=tuple(live[position] for position in kept),
            alike=alike,
            first_alike=tuple(same[0] for k in range(count) for same in alike if k in same),
        )

    def __len__(self) -> int:
        return len(self.positions)

    def like(self, instant: int) -> int:
        """Return the instant that stands for this one and those like it; the same for the spans that begin there."""
        return self.first_alike[instant % len(self)]

    def over(self, budget: int) -> dict[int, int]:
        """Return by how many bytes instants exceed the budget, those alike together, as far as they do."""
        found = {same[0]: sum(self.live_bytes[k] - budget for k in same) for same in self.alike}
        return {k: bytes_ for k, bytes_ in found.items() if bytes_ > 0}

    def span_of(self, stage: int) -> int:
        """Return the span in which the stage starts."""
        return self.last_by(2 * stage)

    def start_of(self, stage: int) -> int:
        """Return the first instant at or after the stage's start."""
        turns, rest = divmod(2 * stage, 2 * self.stage_count)
        return turns * len(self) + bisect_left(self.positions, rest)

    def end_of(self, stage: int) -> int:
        """Return the last instant at or before the stage's end: the span in which it ends."""
        return self.last_by(2 * stage + 1)

    def update_begin(self, stage: int) -> int:
        """Return the span in which the stage is reached, when the one before ends."""
        return self.end_of(stage - 1)

    def last_by(self, position: int) -> int:
        """Return the last instant at or before a position. Both are numbered on, and may be negative."""
        turns, rest = divmod(position, 2 * self.stage_count)
        return turns * len(self) + bisect_right(self.positions, rest) - 1


def _copy_seconds(problem: Problem) -> list[float]:
    """By stage, the seconds in which all that it uses after a pause comes in."""
    seconds = [0.0] * problem.stage_count
    for period in problem.periods:
        if not period.final:
            seconds[period.before % len(seconds)] += problem.routes[0].inward.seconds(period.size_bytes)
    return seconds


def _keep(seconds: list[float], live: list[int], most: int) -> list[int]:
    """Remove one position after another, always the least useful one, until `most` are left.

    A position is useful for how it divides the `seconds` around it, and above all for how far the memory there rises above or
    falls below that of its neighbours.
    """
    *times, total = accumulate(seconds, initial=0.0)
    kept = list(range(len(times)))
    most_live = max(*live, 1)

    def worth(number: int) -> float:
        before, here, after = kept[number - 1], kept[number], kept[(number + 1) % len(kept)]
        seconds = (times[after] - times[before]) % total if total > 0 else 0.0
        low, high = sorted((live[before], live[after]))
        # The budget binds at peaks, and most blocks come and go between valleys.
        turn = max(live[here] - high, low - live[here], 0)
        return seconds / (total or 1.0) + _TURN_WEIGHT * turn / most_live

    worths = [worth(number) for number in range(len(kept))]
    while len(kept) > most:  # one at a time, so that fewer instants are always a subset of more
        least = worths.index(min(worths))
        del kept[least], worths[least]
        for number in {(least - 1) % len(kept), least % len(kept)}:
            worths[number] = worth(number)
    return kept


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyWindow:
    """The time between two consecutive uses: the `spans` in which copies run.

    Spans and instants are those that stand for others like them. `adjacent`: the uses are in neighbouring stages, so the window
    is one span with at most a stall. `final`: the time from the last use to the block's death; nothing comes in. `visited`: a
    stage that runs again may use the block in between. `around_update`: it begins or ends with the stage of an update that may
    run on the host. `passes`: the positions in `inside` of instants that stand for all passes that repeat, where the window holds
    all of these. `count`: such windows between two writes of a block, which are taken together.
    """

    spans: tuple[int, ...]
    adjacent: bool
    final: bool = False
    visited: bool = False
    around_update: bool = False
    passes: range = range(0)
    count: int = 1

    @property
    def inside(self) -> tuple[int, ...]:
        """Instants at which the block can be absent: between two spans."""
        return self.spans[1:]


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyClass:
    """Blocks that have the same windows between two writes; the windows are in the order of rank.

    `size_bytes`: of all members together. `read_only`: a valid copy is always in the lower tier. `update`: number of the class
    of updates that may run on the host, if the members belong to one. `persistent`: the members exist all the time. `rerun`:
    number of the class of recompute groups that makes them. `only`: the one member (a block), if blocks are kept apart.
    """

    windows: tuple[CopyWindow, ...]
    read_only: bool
    update: int | None
    persistent: bool
    rerun: int | None
    only: int | None
    size_bytes: int = 0
    smallest_bytes: int = 0
    largest_bytes: int = 0


def copy_classes(
    problem: Problem,
    instants: Instants,
    updates: Sequence[Collection[int]],
    *,
    apart: bool,
    made_by: Mapping[int, int],
    visits: Mapping[int, Sequence[range]],
) -> tuple[CopyClass, ...]:
    """Return every stretch between two writes of every block, without windows that cannot help.

    Equal ones form one class, unless all are kept `apart`. updates: the subgroups of each class of updates. made_by, visits: see
    `planner.bound.classes`.

    A window helps if the block can be absent at an instant that exceeds the budget, or if a copy made in it is still valid in a
    later window that helps.
    """
    tight = instants.over(problem.budgets.device_bytes)
    stages = problem.stage_count
    stretches: dict[tuple[int, int], list[InactivePeriod]] = {}
    for block in problem.periods_of:
        for period in periods_between_uses(problem.trace.blocks[block], stages):
            stretches.setdefault((block, period.epoch), []).append(period)
    owner = {
        block: (number, problem.trace.subgroups[subgroup].stage)
        for number, subgroups in enumerate(updates)
        for subgroup in subgroups
        for block in problem.trace.subgroups[subgroup].blocks
    }
    spans_of = cache(partial(_spans, instants))
    groups: dict[CopyClass, list[int]] = defaultdict(list)
    for (block, _), periods in stretches.items():
        read_only = periods[0].read_only
        update, stage = owner.get(block, (None, None))
        windows = []
        for each in periods:  # in the order of rank, adjacent uses included
            spans = spans_of(instants.end_of(each.after), instants.start_of(each.before))
            windows.append(_window(each, stages, *spans, stage, visits.get(block, ())))
        helpful = [number for number, w in enumerate(windows) if any(k in tight for k in w.inside)]
        # The windows of a read_only block are independent of one another.
        runs = [windows[n : n + 1] for n in helpful] if read_only else [windows[: n + 1] for n in helpful[-1:]]
        for run in runs:
            if len(instants.alike) < len(instants):
                run = [replace(window, count=count) for window, count in Counter(run).items()]
            alike = CopyClass(
                windows=tuple(run),
                read_only=read_only,
                update=update,
                persistent=problem.trace.blocks[block].persistent,
                rerun=made_by.get(block),
                only=block if apart else None,
            )
            groups[alike].append(periods[0].size_bytes)
    return tuple(
        replace(each, size_bytes=sum(sizes), smallest_bytes=min(sizes), largest_bytes=max(sizes))
        for each, sizes in groups.items()
    )


def _window(
    period: InactivePeriod, stages: int, spans: tuple[int, ...], passes: range, update: int | None, visits: Sequence[range]
) -> CopyWindow:
    """That of a period, in an iteration of so many `stages`. update: the stage of its block's update, if that may run on the
    host."""
    between = [range(period.after + 1 - turn, period.before + 1 - turn) for turn in (0, stages)]
    return CopyWindow(
        spans=spans,
        passes=passes,
        adjacent=not period.gap,
        final=period.final,
        visited=any(max(p.start, b.start) < min(p.stop, b.stop) for p in visits for b in between),
        around_update=update in ((period.after,) if period.final else (period.after, period.before % stages)),
    )


def _spans(instants: Instants, begin: int, end: int) -> tuple[tuple[int, ...], range]:
    """The spans `begin` … `end` − 1, those of passes that repeat only once if all of these are there; and `passes`."""
    spans, passes = list(range(begin, end)), range(0)
    many = [same for same in instants.alike if len(same) > 1]
    if many:
        for turn in range(begin // len(instants), end // len(instants) + 1):
            first, last = (each + turn * len(instants) for each in (many[0][0], many[-1][-1]))
            if begin < first and last + 1 < end:
                passes = range(first - begin - 1, first - begin - 1 + len(many))
                spans = [*range(begin, first + len(many)), *range(last + 1, end)]
    return tuple(instants.like(k) for k in spans), passes
