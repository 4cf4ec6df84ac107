"""A plan, laid out by position in the iteration: where blocks leave, come back, are dropped, and where stages run again.

Also what is followed for shorter inputs, see [Note: Thinned plans] in `planner.policies.shorter`, and how starts of prefetches
are corrected. Pure: reads no clock, and decides nothing.

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
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import planner
from planner.schema import Move, WaitingTier, dominates
from runtime.execution import SizedGraph, graph_of
from teraio.following.drift import Expectation
from teraio.profiling import Iteration, Profile, first_sized


@dataclass(frozen=True, slots=True, kw_only=True)
class RerunsByStage:
    """A plan counts re-runs as stages. Here are its numbers, where it counts so, and those of the trace.

    numbers: the number in the plan of each stage of the trace. count: number of stages with re-runs.
    stages: those stages of the trace that run again.
    made: for each re-run, by its number in the plan, the blocks (trace ids) that it makes anew.
    dropped_after: the blocks (trace ids) that are dropped after a stage, by its number in the plan. What is not dropped, as of
    re-runs that are skipped, is not made anew.
    """

    numbers: Sequence[int]
    count: int
    stages: frozenset[int] = frozenset()
    made: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    dropped_after: Mapping[int, tuple[int, ...]] = field(default_factory=dict)

    @classmethod
    def of(cls, trace: planner.Trace, chosen: Sequence[planner.Recompute]) -> RerunsByStage:
        """Lay out the re-runs of a plan. Raises PlanError where a group cannot run again in its place."""
        if not chosen:
            return cls(numbers=range(len(trace.stages)), count=len(trace.stages))
        derived = planner.recomputed(trace, [each.model_copy(update={"skipped": False}) for each in chosen])
        made: dict[int, tuple[int, ...]] = {}
        drops: list[tuple[int, int]] = []
        for number, each in enumerate(sorted(chosen, key=lambda each: each.at)):
            again = each.at + number
            group = trace.recompute[each.group]
            made[again] = tuple(i for i in group.blocks if trace.blocks[i].uses[-1] >= each.at)
            drops += [(derived.blocks[i].uses[-1], i) for i in made[again] if not each.skipped]
        after = {stage: tuple(i for _, i in each) for stage, each in groupby(sorted(drops), key=lambda drop: drop[0])}
        return cls(
            numbers=tuple(stage.id for stage in derived.stages if stage.phase != "recompute"),
            count=len(derived.stages),
            stages=frozenset(trace.recompute[each.group].stage for each in chosen),
            made=made,
            dropped_after=after,
        )

    def late(self, iteration: Iteration) -> dict[tuple[int, int], float]:
        """Return how long stages and re-runs waited for prefetches, by trace id and by stage as the plan counts it."""
        stages = zip(self.numbers, iteration.stages, strict=False)
        first = {(block, number): seconds for number, stage in stages for block, seconds in stage.late}
        planned = [(each.position, each.late) for each in iteration.reruns if each.position is not None]
        return first | {(block, number): seconds for number, late in planned for block, seconds in late}

    def spread(self, seconds: Sequence[float], again: Mapping[int, float]) -> list[float]:
        """Return the seconds of all stages as the plan counts them. seconds: of those of the trace. again: of the re-runs."""
        spread = [again.get(number, 0.0) for number in range(self.count)]
        for number, each in zip(self.numbers, seconds, strict=True):
            spread[number] = each
        return spread


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSchedule:
    """What to offload and to prefetch at each position, see [Note: Positions], and the regions that the plan expects.

    Positions are the plan's: its re-runs count as stages.
    regions: graph or optimizer of each region and position of its user stage, in order. counts: its number of stages, without
    re-runs. made_ids: for each region the trace ids of the blocks that it makes, in order; -1 for a block that the trace lacks.
    leave_after: for each position the blocks (trace ids) to offload after that stage, and the tier for each.
    fetch_at: for each position the blocks (trace ids) to prefetch. Those of the next iteration are counted from 0 again.
    on_host: positions of the stages whose updates run on the host, in the order of these updates.
    kept: for each region the numbers of its stages that run again later; they count from the first one after the user code.
    reruns: what runs again, and what is dropped.
    """

    regions: tuple[tuple[Hashable, int], ...]
    counts: tuple[int, ...]
    made_ids: tuple[tuple[int, ...], ...]
    leave_after: tuple[tuple[tuple[int, WaitingTier], ...], ...]
    fetch_at: tuple[tuple[int, ...], ...]
    on_host: tuple[int, ...] = ()
    kept: tuple[frozenset[int], ...] = ()
    reruns: RerunsByStage

    @classmethod
    def of(cls, profile: Profile, plan: planner.Plan) -> StageSchedule:
        """Lay out a plan that was made for the profile's trace. Raises PlanError where a stage cannot run again in its place."""
        recorded, ids = profile.iteration, profile.ids
        reruns = RerunsByStage.of(profile.trace, plan.recompute)
        leave: list[list[tuple[int, WaitingTier]]] = [[] for _ in range(reruns.count)]
        for move in plan.moves:  # in this order they enter the queues of the links
            leave[move.leaves % reruns.count].append((move.block, move.tier))
        # The trace has one subgroup for each stage that updates parameters, in this order.
        updates = [position for position, stage in enumerate(recorded.stages) if stage.elements]
        return cls(
            regions=tuple((graph_of(r.identity), reruns.numbers[r.first]) for r in recorded.regions),
            counts=tuple(len(r.stages) for r in recorded.regions),
            made_ids=tuple(tuple(ids.get(b, -1) for b in r.made) for r in recorded.regions),
            leave_after=tuple(map(tuple, leave)),
            fetch_at=planned_starts(plan.moves, reruns.count).fetch_at,
            on_host=tuple(reruns.numbers[updates[number]] for number in plan.on_host),
            kept=tuple(
                frozenset(n for n in range(len(r.stages) - 1) if r.first + 1 + n in reruns.stages) for r in recorded.regions
            ),
            reruns=reruns,
        )


_TELLING = 0.5  # of the time of a planned iteration: shorter ones say little of that


class ThinnedPlans:
    """The plans for shorter inputs that belong to a plan. All calls are for the training thread; none waits."""

    def __init__(self, profile: Profile, plan: planner.Plan) -> None:
        self._profile = profile
        self._plan = plan
        self._graph = first_sized(profile.iteration)
        self._schedules: dict[tuple[int, ...], StageSchedule] = {}  # by sizes
        self._largest: tuple[int, ...] = ()

    def sizes_of(self, graph: Hashable) -> tuple[int, ...] | None:
        """Return the sizes of the inputs of a graph, as in `Lengths`, if it is the one by which they are told."""
        lengths = self._profile.trace.lengths
        if lengths is None or self._graph is None or not isinstance(graph, SizedGraph) or graph.graph != self._graph.graph:
            return None
        return tuple(graph.sizes[place] for place in lengths.places) if max(lengths.places) < len(graph.sizes) else None

    def covers(self, iteration: Iteration, share: float) -> bool:
        """Return whether none of its inputs is smaller than that share of those for which something is known."""
        lengths = self._profile.trace.lengths
        if lengths is None:  # inputs did not vary before
            return not iteration.sizes_vary or iteration.made_bytes >= share * self._profile.made_bytes
        least = [share * size for size in lengths.lowest]
        found = (self.sizes_of(region.identity) for region in iteration.regions)
        return all(sizes is None or dominates(sizes, least) for sizes in found)

    def is_whole(self, iteration: Iteration) -> bool:
        """Return whether all inputs of an iteration, which ran the graphs of the plan, are of the sizes that the plan is for."""
        lengths = self._profile.trace.lengths
        if lengths is None:
            return iteration.signature == self._profile.iteration.signature
        return {self.sizes_of(region.identity) for region in iteration.regions} <= {None, lengths.highest}

    def shares(self, iteration: Iteration) -> tuple[float, ...] | None:
        """Return what share of its time with the inputs that the plan is for each stage takes with those of an iteration.

        None if its inputs were of several sizes, or of sizes for which it is not known, or so much shorter that they say little.
        """
        trace, found = self._profile.trace, {self.sizes_of(region.identity) for region in iteration.regions} - {None}
        lengths, sizes = trace.lengths, next(iter(found), None)
        if lengths is None or sizes is None or len(found) > 1:
            return None
        if iteration.structure != self._profile.iteration.structure or not dominates(sizes, lengths.lowest):
            return None
        known = lengths.stage_shares(sizes)
        shares = tuple(known.get(stage.id, 1.0) for stage in trace.stages)
        here = sum(share * stage.duration_seconds for share, stage in zip(shares, trace.stages, strict=True))
        return shares if min(shares) > 0 and _TELLING * trace.ideal_seconds <= here else None

    def schedule_for(self, graph: Hashable, *, begins: bool) -> StageSchedule | None:
        """Return what moves from a run of this graph on, by the largest inputs of the iteration so far; None: all of the plan.

        begins: the iteration begins with this run.
        """
        before, sizes = () if begins else self._largest, self.sizes_of(graph) or ()
        self._largest = tuple(map(max, before, sizes)) if before and sizes else before or sizes
        found = self._plan.shorter_for(self._largest) if self._largest else None
        if found is None:
            return None
        if found.sizes not in self._schedules:
            followed = self._plan.followed(found, self._profile.trace)
            self._schedules[found.sizes] = StageSchedule.of(self._profile, followed)
        return self._schedules[found.sizes]


# -- when prefetches start

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
