"""Iterations in which a stretch of stages repeats, as with gradient accumulation: a short one to plan, and its plan laid out.

[Note: iterations that repeat] With n microbatches, n passes through the same graphs follow one another. The first may differ,
as it makes the gradients, and the last one, as the update follows. The others are alike: the same stages, with blocks of the
same sizes and uses. In the short iteration that stretch occurs once, between the pass before it and the pass after it: its
borders. What is decided for the stretch then holds for all its copies; what is decided between its end and the pass after it
also holds between two copies. All else stays. The result is a proposal for the whole iteration, to be made exact there.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean

from planner.problem.recompute import recomputed
from planner.schema import Block, Move, Plan, Recompute, RecomputeGroup, Stage, Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeats:
    """From stage `first` on, the same `length` stages run `times` times in an iteration; in `short`, they run once.

    `blocks`, `groups`: by block and recompute group (id) of `short`, its counterparts in the iteration: one, or one in each copy
    of the stretch.
    """

    short: Trace
    first: int
    length: int
    times: int
    blocks: Sequence[Sequence[int]]
    groups: Sequence[Sequence[int]]

    def laid_out(self, plan: Plan) -> Plan:
        """Return a plan for the iteration that does what `plan` does in the short one; without placements and predictions."""
        reruns = [each for each in plan.recompute if each.at >= self.first]
        first = self.first + len(plan.recompute) - len(reruns)  # as re-runs number the stages
        length = self.length + sum(each.at < self.first + self.length for each in reruns)
        derived = recomputed(self.short, plan.recompute)
        moves: list[Move] = []
        for move in plan.moves:
            begins = next((use for use in derived.blocks[move.block].uses if first <= use < first + length), None)
            moves += self._copies(move, first, length, begins, len(derived.stages))
        recompute = [Recompute(group=group, at=at) for each in plan.recompute for group, at in self._reruns(each)]
        return plan.model_copy(update={"moves": tuple(moves), "recompute": tuple(recompute), "initial": (), "predicted": None})

    def _reruns(self, each: Recompute) -> Iterator[tuple[int, int]]:
        inside = self.first <= each.at < self.first + self.length
        at = each.at if each.at < self.first + self.length else each.at + (self.times - 1) * self.length
        return ((group, at + number * self.length * inside) for number, group in enumerate(self.groups[each.group]))

    def _copies(self, move: Move, first: int, length: int, begins: int | None, stages: int) -> Iterator[Move]:
        """The moves of all copies of the stretch in place of one. begins: the first use of the move's block in the stretch."""
        blocks, end = self.blocks[move.block], first + length
        last = (self.times - 1) * length
        if first <= move.after and move.before < end:  # within the stretch
            for number in range(self.times):
                yield _shifted(move, number * length, number * length, blocks[number % len(blocks)])
            return
        if len(blocks) > 1:  # it dies with its copy of the stretch
            for number in range(self.times):
                yield _shifted(move, number * length, number * length, blocks[number])
            return
        if first <= move.after < end and begins is not None and move.prefetch is not None:  # from one copy to the next
            for number in range(self.times - 1):
                yield _shifted(move, number * length, begins + (number + 1) * length - move.before, blocks[0])
        turns, back = divmod(move.before, stages)
        yield _shifted(move, last * (move.after >= first), last * (turns + (back >= end)), blocks[0])


def _shifted(move: Move, after: int, before: int, block: int) -> Move:
    """The move `after` stages later at its begin, and `before` stages later at its end."""
    if not (after or before) and block == move.block:
        return move
    leave = min((move.after if move.offload is None else move.offload.start) + after, move.before + before - 1)
    changes: dict[str, object] = {"block": block, "after": move.after + after, "before": move.before + before}
    if move.offload is not None:
        changes["offload"] = move.offload.model_copy(update={"start": leave, "free_after": leave})
    if move.prefetch is not None:
        start = max(move.prefetch.start + before, leave + 1)
        changes["prefetch"] = move.prefetch.model_copy(update={"start": start, "ready_by": move.before + before})
    return move.model_copy(update=changes)


def repeats_of(trace: Trace) -> Repeats | None:
    """Return what repeats in an iteration, as [Note: iterations that repeat] says; None if nothing does at least twice."""
    found = _stretch(trace)
    if found is None:
        return None
    first, length, times = found
    copies = _Copies(trace, first, length, times)
    return copies.folded()


def _stretch(trace: Trace) -> tuple[int, int, int] | None:
    """The first stage, the length and the number of the passes between the first and the last that run the same stages."""
    likeness = [(stage.phase, stage.name) for stage in trace.stages]
    places: dict[tuple[str, str], list[int]] = defaultdict(list)
    for number, each in enumerate(likeness):
        if each[0] == "backward":
            places[each].append(number)
    counts = Counter(len(each) for each in places.values() if len(each) >= 4).most_common(1)
    if not counts:
        return None
    often = next(each for each in places.values() if len(each) == counts[0][0])
    length = Counter(later - earlier for earlier, later in pairwise(often)).most_common(1)[0][0]
    begin, runs = 0, []
    for number in range(len(likeness) - length + 1):
        if number == len(likeness) - length or likeness[number] != likeness[number + length]:
            runs.append((number - begin, -begin))
            begin = number + 1
    alike, begin = max(runs)[0], -max(runs)[1]
    passes = alike // length + 1
    return (begin + length, length, passes - 2) if passes >= 4 else None


class _Copies:
    """The copies of a stretch, and which blocks and groups of them are counterparts. None where they are not alike."""

    def __init__(self, trace: Trace, first: int, length: int, times: int) -> None:
        self._trace, self._first, self._length, self._times = trace, first, length, times

    def folded(self) -> Repeats | None:
        trace = self._trace
        copies: list[dict[tuple[object, ...], list[int]]] = [defaultdict(list) for _ in range(self._times)]
        single: list[int] = []
        for block in trace.blocks:
            ends = (block.uses[0], block.last_stage) if not block.persistent else (0, len(trace.stages) - 1)
            begin, end = map(self._copy_of, ends)
            if begin == end and begin is not None:
                copies[begin][self._key(block, begin)].append(block.id)
            elif self._repeats(block, begin, end):
                single.append(block.id)
            else:
                return None
        if any(each.keys() != copies[0].keys() for each in copies):
            return None
        alike: list[tuple[int, ...]] = [(number,) for number in single]
        for key, members in copies[0].items():
            if any(len(each[key]) != len(members) for each in copies):
                return None
            alike += zip(*(each[key] for each in copies), strict=True)
        alike.sort()
        groups = self._groups()
        if groups is None or any(self._copy_of(subgroup.stage) is not None for subgroup in trace.subgroups):
            return None
        return Repeats(
            short=self._short(alike, groups),
            first=self._first,
            length=self._length,
            times=self._times,
            blocks=alike,
            groups=groups,
        )

    def _copy_of(self, stage: int) -> int | None:
        """The number of the copy that a stage is in; None for other stages."""
        number = (stage - self._first) // self._length
        return number if 0 <= number < self._times else None

    def _relative(self, stages: Iterable[int], copy: int) -> tuple[int, ...]:
        begin = self._first + copy * self._length
        return tuple(stage - begin for stage in stages if self._copy_of(stage) == copy)

    def _key(self, block: Block, copy: int) -> tuple[object, ...]:
        uses = self._relative(block.reads, copy), self._relative(block.writes, copy), self._relative([block.last_stage], copy)
        return block.kind, block.size_bytes, block.movable, block.dies_after is None, *uses

    def _repeats(self, block: Block, begin: int | None, end: int | None) -> bool:
        """Whether a block that is not of one copy is used alike in all of them, and neither begins nor ends in one."""
        uses = [(self._relative(block.reads, copy), self._relative(block.writes, copy)) for copy in range(self._times)]
        return begin is None and end is None and all(each == uses[0] for each in uses)

    def _groups(self) -> list[tuple[int, ...]] | None:
        by_stage = {group.stage: group.id for group in self._trace.recompute}
        found: list[tuple[int, ...]] = []
        for group in self._trace.recompute:
            copy = self._copy_of(group.stage)
            if copy is None:
                found.append((group.id,))
            members = [by_stage.get(group.stage + number * self._length) for number in range(self._times)]
            if copy == 0:
                same = tuple(number for number in members if number is not None)
                if len(same) < self._times:
                    return None
                found.append(same)
        return found

    def _short(self, alike: Sequence[Sequence[int]], groups: Sequence[Sequence[int]]) -> Trace:
        trace, first, length = self._trace, self._first, self._length
        cut = (self._times - 1) * length
        number_of = {block: number for number, members in enumerate(alike) for block in members}

        def kept(stages: Iterable[int]) -> tuple[int, ...]:
            return tuple(
                stage if stage < first + length else stage - cut
                for stage in stages
                if not first + length <= stage < first + length + cut
            )

        def group_of(number: int, members: Sequence[int]) -> RecomputeGroup:
            group = trace.recompute[members[0]]
            blocks, reads = ([number_of[block] for block in each] for each in (group.blocks, group.reads))
            changes = {"id": number, "stage": kept([group.stage])[0], "blocks": tuple(blocks), "reads": tuple(reads)}
            return group.model_copy(update=changes)

        stages: list[Stage] = []
        for number in [*range(first + length), *range(first + length + cut, len(trace.stages))]:
            copies = 1 if self._copy_of(number) is None else self._times
            same = [trace.stages[number + copy * length] for copy in range(copies)]
            seconds, workspace = fmean(each.duration_seconds for each in same), max(each.workspace_bytes for each in same)
            changes = {"id": len(stages), "duration_seconds": seconds, "workspace_bytes": workspace, "collective_seconds": 0.0}
            stages.append(same[0].model_copy(update=changes))
        blocks = []
        for number, members in enumerate(alike):
            block = trace.blocks[members[0]]
            dies = None if block.dies_after is None else kept([block.dies_after])[0]
            changes = {"id": number, "reads": kept(block.reads), "writes": kept(block.writes), "dies_after": dies}
            blocks.append(block.model_copy(update=changes))
        subgroups = [
            each.model_copy(update={"stage": kept([each.stage])[0], "blocks": tuple(number_of[block] for block in each.blocks)})
            for each in trace.subgroups
        ]
        return trace.model_copy(
            update={
                "stages": tuple(stages),
                "blocks": tuple(blocks),
                "subgroups": tuple(subgroups),
                "recompute": tuple(group_of(number, members) for number, members in enumerate(groups)),
                "not_recomputed": (),
            }
        )
