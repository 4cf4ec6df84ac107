"""A step in several passes whose gradients add up: its trace, made from that of a step with fewer. Needs no torch."""

from __future__ import annotations

import re
from collections import defaultdict
from itertools import groupby
from typing import Literal

import planner
from planner.errors import UnsupportedError
from planner.schema import Block, RecomputeGroup, Stage

# layer by layer: each layer runs for all passes before the next one does, forward and backward. So its parameters come in once
# for all passes, and what is between two layers waits for all of them. A training loop has to do that: teraio keeps its order.
Order = Literal["pass by pass", "layer by layer"]

_LAYER = re.compile(r"(?:[^.{,:]+\.)*?\d+(?=[.{,:]|$)")  # the first numbered module in the name of a stage


def with_passes(trace: planner.Trace, times: int, order: Order = "pass by pass") -> planner.Trace:
    """Return the trace of an iteration with all that is before its first update `times` times.

    The gradients of the first pass stay until the update, and each other pass adds to them: that takes as long as updates take
    for as many bytes. Raises UnsupportedError where parameters are updated between the stages of a pass, and where names of
    stages do not tell layers apart.
    """
    return _Passes(trace, times, order).trace()


class _Passes:
    def __init__(self, trace: planner.Trace, times: int, order: Order) -> None:
        self._trace, self._times = trace, times
        phases = [stage.phase for stage in trace.stages]
        self._end = phases.index("optimizer") if "optimizer" in phases else len(phases)  # of the passes
        if not self._end or {"forward", "backward"} & {*phases[self._end :]}:
            raise UnsupportedError(
                "gradients cannot add up: parameters are updated between the stages of a pass; trace it without overlap_step"
            )
        self._pieces = [(0, self._end)] if order == "pass by pass" else self._layers()

    def _layers(self) -> list[tuple[int, int]]:
        """The stages of each layer, forward and backward, and of what is between layers: begin and end."""

        def layer(stage: Stage) -> tuple[str, str]:
            found = _LAYER.match(stage.name.partition("/")[2])
            return stage.phase, found[0] if found else ""

        pieces, begin, names = [], 0, set()
        for (_, name), stages in groupby(self._trace.stages[: self._end], layer):
            end = begin + len(list(stages))
            pieces.append((begin, end))
            names.add(name)
            begin = end
        if len(names - {""}) < 2:
            raise UnsupportedError("the names of stages do not tell layers apart")
        return pieces

    def trace(self) -> planner.Trace:
        trace, shift = self._trace, (self._times - 1) * self._end
        place = [[0] * self._end for _ in range(self._times)]  # of each stage, by pass
        for begin, end in self._pieces:
            for number in range(self._times):
                first = begin * self._times + number * (end - begin)
                place[number][begin:end] = range(first, first + end - begin)
        blocks: list[Block] = []
        known: list[dict[int, int]] = [{} for _ in range(self._times)]  # the ids of blocks, by pass

        def add(block: Block, passes: range) -> None:
            """The block that these passes have together. What is after all passes belongs to the last of them."""
            last = passes[-1] == self._times - 1

            def moved(uses: tuple[int, ...], among: range) -> set[int]:
                within = {place[number][use] for number in among for use in uses if use < self._end}
                return within | {use + shift for use in uses if last and use >= self._end}

            reads, writes, dies = moved(block.reads, passes), moved(block.writes, passes), block.dies_after
            if block.kind == "gradient" and not block.persistent:
                reads |= {use for use in moved(block.writes, passes[1:]) if use < self._end + shift}
            if dies is not None:
                (dies,) = moved((dies,), passes[-1:]) or {place[passes[-1]][-1]}
            update = {"reads": tuple(sorted(reads)), "writes": tuple(sorted(writes)), "id": len(blocks)}
            outlives = dies is not None and dies > max(reads | writes)
            blocks.append(block.model_copy(update={**update, "dies_after": dies if outlives else None}))
            for number in passes:
                known[number][block.id] = blocks[-1].id

        for block in trace.blocks:
            if block.persistent or block.uses[0] >= self._end or self._adds_up(block):
                add(block, range(self._times))
            else:
                for number in range(self._times):
                    add(block, range(number, number + 1))
        groups: list[RecomputeGroup] = []
        for group in trace.recompute:
            for number in range(self._times):
                made, reads = (tuple(sorted(known[number][each] for each in ids)) for ids in (group.blocks, group.reads))
                update = {"id": len(groups), "stage": place[number][group.stage], "blocks": made, "reads": reads}
                groups.append(group.model_copy(update=update))
        return trace.rebuilt(
            stages=self._stages(place),
            blocks=tuple(blocks),
            subgroups=tuple(
                each.model_copy(update={"stage": each.stage + shift, "blocks": tuple(known[-1][i] for i in each.blocks)})
                for each in trace.subgroups
            ),
            recompute=tuple(groups),
            not_recomputed=(),
            tiled=(),
            lengths=None,
            work=trace.work and trace.work.times(self._times),
        )

    def _adds_up(self, block: Block) -> bool:
        return block.kind == "gradient" and not block.persistent and block.last_stage >= self._end

    def _stages(self, place: list[list[int]]) -> tuple[Stage, ...]:
        adding: dict[int, float] = defaultdict(float)  # seconds, by stage
        rate = self._bytes_per_second()
        for block in self._trace.blocks if rate else ():
            made = [use for use in block.writes if use < self._end]
            if made and self._adds_up(block):
                adding[made[-1]] += 3 * block.size_bytes / rate  # two are read, one is written
        found: list[Stage] = []
        for number in range(self._times):
            for stage in self._trace.stages[: self._end]:
                seconds = stage.duration_seconds + (adding[stage.id] if number else 0.0)
                found.append(stage.model_copy(update={"id": place[number][stage.id], "duration_seconds": seconds}))
        found.sort(key=lambda stage: stage.id)
        rest = self._trace.stages[self._end :]
        return (*found, *(stage.model_copy(update={"id": len(found) + i}) for i, stage in enumerate(rest)))

    def _bytes_per_second(self) -> float:
        """What updates read and write in a second; 0 if that is not known."""
        updates = {stage.id: stage.duration_seconds for stage in self._trace.stages if stage.phase == "optimizer"}
        touched = sum(
            block.size_bytes * sum(use in updates for use in (*block.reads, *block.writes)) for block in self._trace.blocks
        )
        seconds = sum(updates.values())
        return touched / seconds if seconds else 0.0
