"""Where a plan's re-runs have their places among the stages of an iteration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import planner
from teraio.profiling.iteration import Iteration


@dataclass(frozen=True, slots=True, kw_only=True)
class RerunsByStage:
    """A plan counts re-runs as stages. Here are its numbers, where it counts so, and those of the trace.

    numbers: the number in the plan of each stage of the trace. count: number of stages with re-runs.
    stages: those stages of the trace that run again.
    made: for each re-run, by its number in the plan, the blocks (trace ids) that it makes anew.
    dropped_after: the blocks (trace ids) that are dropped after a stage, by its number in the plan.
    """

    numbers: Sequence[int]
    count: int
    stages: frozenset[int] = frozenset()
    made: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    dropped_after: Mapping[int, tuple[int, ...]] = field(default_factory=dict)

    @classmethod
    def none(cls, count: int) -> RerunsByStage:
        """Nothing runs again. count: number of stages."""
        return cls(numbers=range(count), count=count)

    @classmethod
    def of(cls, trace: planner.Trace, chosen: Sequence[planner.Recompute]) -> RerunsByStage:
        """Lay out the re-runs of a plan. Raises PlanError where a group cannot run again in its place."""
        if not chosen:
            return cls.none(len(trace.stages))
        derived = planner.recomputed(trace, chosen)
        made: dict[int, tuple[int, ...]] = {}
        drops: list[tuple[int, int]] = []
        for number, each in enumerate(sorted(chosen, key=lambda each: each.at)):
            again = each.at + number
            group = trace.recompute[each.group]
            made[again] = tuple(i for i in group.blocks if trace.blocks[i].uses[-1] >= each.at)
            drops += [(derived.blocks[i].uses[-1], i) for i in made[again]]
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
