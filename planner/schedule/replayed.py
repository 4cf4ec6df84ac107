"""Plans with their replay: when stages were reached, and for which copies they waited."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate

from planner.errors import InfeasiblePlanError
from planner.problem import DEFAULT_WRITE_WEIGHT, Decisions, Problem, build_plan, host_start, outward_weight, user_stages
from planner.schema import Plan
from planner.simulator import Timeline, simulate

_SAME = 1e-9  # share of the iteration by which times may differ and still be the same instant


@dataclass(frozen=True, slots=True, kw_only=True)
class StageClock:
    """When each stage is reached, in seconds from the iteration's start, and how long the iteration takes.

    `update_seconds`: when each subgroup's update on the host ends, counted on over the iteration's end. `copy_seconds`: how long
    the copy in of each period took, where that is known; other copies take what their link needs when it is otherwise idle.
    `user_stages`: stages of user code, ascending.
    """

    reached_seconds: tuple[float, ...]
    iteration_seconds: float
    update_seconds: dict[int, float] = field(default_factory=dict)
    copy_seconds: dict[int, float] = field(default_factory=dict)
    user_stages: tuple[int, ...] = ()

    @classmethod
    def ideal(cls, problem: Problem) -> StageClock:
        """Return the clock of an iteration that never waits."""
        durations = [stage.duration_seconds for stage in problem.trace.stages]
        ends = [0.0, *accumulate(durations)]
        free = 0.0
        updates = {}
        for number in problem.on_host:
            subgroup = problem.source.subgroups[number]
            free = max(free, ends[host_start(problem.source, subgroup)]) + (subgroup.host_seconds or 0.0)
            updates[number] = free
        return cls(
            reached_seconds=tuple(ends[:-1]),
            iteration_seconds=ends[-1],
            update_seconds=updates,
            user_stages=user_stages(problem.trace),
        )

    def time(self, stage: int) -> float:
        """Return when a stage (numbered on over the iteration's end) is reached."""
        turns, stage = divmod(stage, len(self.reached_seconds))
        return turns * self.iteration_seconds + self.reached_seconds[stage]

    def stage_at(self, seconds: float) -> int:
        """Return the last stage (numbered on, perhaps negative) that is reached by `seconds`."""
        if self.iteration_seconds <= 0:
            return 0
        turns, rest = divmod(seconds, self.iteration_seconds)
        return int(turns) * len(self.reached_seconds) + bisect_right(self.reached_seconds, rest) - 1

    def last_user_stage(self, seconds: float) -> int | None:
        """Return the last stage of user code (numbered on, perhaps negative) that is reached clearly before `seconds`."""
        if not self.user_stages or self.iteration_seconds <= 0:
            return None
        turns, rest = divmod(seconds - _SAME * self.iteration_seconds, self.iteration_seconds)
        position = bisect_left(self.user_stages, rest, key=self.reached_seconds.__getitem__) - 1
        return (int(turns) - (position < 0)) * len(self.reached_seconds) + self.user_stages[position]


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyIn:
    """A copy in of the replay, by its period. `slack_seconds`: from its end to the start of the stage that uses the block.

    `wait_seconds`: how long that stage waited, if the copy was the last thing that it waited for; otherwise 0.
    """

    index: int
    slack_seconds: float
    wait_seconds: float


@dataclass(frozen=True, kw_only=True)
class ReplayedPlan:
    """The plan of `decisions` for `problem`, with its replay. `lead`: the reserve of its prefetches, see `schedule`."""

    problem: Problem
    decisions: Decisions
    plan: Plan
    timeline: Timeline
    write_weight: float = DEFAULT_WRITE_WEIGHT
    lead: float = 0.0

    @classmethod
    def of(cls, problem: Problem, decisions: Decisions, write_weight: float = DEFAULT_WRITE_WEIGHT) -> ReplayedPlan:
        """Build the plan and replay it. Raises InfeasiblePlanError as `simulate` does, and where it has another border."""
        plan = build_plan(problem, decisions, policy="")
        away = {each.block for each in plan.initial if each.tier != problem.border[each.block]} if problem.border else ()
        if away:
            raise InfeasiblePlanError(f"blocks {sorted(away)[:20]} do not begin the iteration in the tiers that are given")
        timeline = simulate(problem.source, plan)
        return cls(problem=problem, decisions=decisions, plan=plan, timeline=timeline, write_weight=write_weight)

    @cached_property
    def cost(self) -> float:
        """Iteration seconds, plus what the copies out are worth."""
        cost = self.timeline.iteration_seconds
        for route in self.problem.routes:
            written_seconds = self.timeline.moved_bytes.get(route.outward.name, 0) / route.outward.bytes_per_second
            cost += outward_weight(route.tier, self.write_weight) * written_seconds
        return cost

    @cached_property
    def clock(self) -> StageClock:
        """The clock of the replay."""
        problem, timeline = self.problem, self.timeline
        reached = tuple(stage.reached_seconds for stage in timeline.stages)
        ideal = StageClock.ideal(problem)
        updates = dict(ideal.update_seconds)  # an update may be missing where the replay was not steady
        for update in timeline.updates:
            start = host_start(problem.source, problem.source.subgroups[update.subgroup])
            updates[update.subgroup] = reached[start] + update.end_seconds - update.queued_seconds
        copies = {}
        for transfer in timeline.transfers:
            move = self.plan.moves[transfer.move]
            if transfer.link.endswith("->device"):
                copies[problem.period_after[move.block, move.after]] = transfer.end_seconds - transfer.start_seconds
        seconds = timeline.iteration_seconds
        return replace(ideal, reached_seconds=reached, iteration_seconds=seconds, update_seconds=updates, copy_seconds=copies)

    def copies_in(self) -> list[CopyIn]:
        """Return the copies in, in the order of their ends."""
        found, length = [], self.timeline.iteration_seconds
        for transfer in self.timeline.transfers:
            move = self.plan.moves[transfer.move]
            if not transfer.link.endswith("->device"):
                continue
            stage = self.timeline.stages[move.before % self.problem.stage_count]
            slack = (stage.start_seconds - transfer.end_seconds) % length
            slack = 0.0 if slack > length - _SAME * length else slack
            waited = stage.stall_seconds if slack <= _SAME * length and stage.stall_seconds > _SAME * length else 0.0
            index = self.problem.period_after[move.block, move.after]
            found.append(CopyIn(index=index, slack_seconds=slack, wait_seconds=waited))
        return found
