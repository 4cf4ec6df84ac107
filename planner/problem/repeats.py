"""Iterations in which passes repeat, as with gradient accumulation: one pass to plan, and the border that the others leave.

[Note: iterations that repeat] With n microbatches, n passes through the same graphs follow one another. The first may differ,
as it makes the gradients, and after the last one comes the update. The others are alike: the same stages, with blocks of the
same sizes and uses. One of them is planned as an iteration of its own, `once`, which begins again when it has ended. What lives
longer than a pass persists in it; what none of its stages uses, such as optimizer states, waits in a lower tier. What runs again
in it does so in all passes, also in the first and the last, as far as these have stages of the same names.

With these re-runs, the border is planned: the iteration from which all like passes are cut out, so that the last pass follows
the first. In their place is a stage without time that reads what is on the device when a pass of `once` begins: so the first of
them can begin like the others. Its plan decides about all that begins in a stage that is left there, the plan of `once` about the
rest, and about what waits when the first of them begins: other copies would come on top of those of the pass. Both together are a
proposal for the whole iteration, to be made exact there.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean

from planner.problem.problem import Decision, Decisions, Problem
from planner.problem.recompute import recomputed, source_blocks
from planner.schema import Block, Budgets, Plan, Recompute, Stage, Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeats:
    """From stage `first` of `trace` on, the same `length` stages run `times` times; after that comes such a pass once more.

    `once`: one of these passes as an iteration of its own, whose blocks and groups are numbered anew. `blocks`: by block of
    `trace`, its counterpart in `once`, as far as a pass uses it. `groups`: by group of `once`, its counterparts in these passes.
    """

    trace: Trace
    first: int
    length: int
    times: int
    once: Trace
    blocks: Mapping[int, int]
    groups: Sequence[Sequence[int]]

    def budgets(self, budgets: Budgets) -> Budgets:
        """Return what of the budgets is left for a pass: what it does not use waits on drives, and else in host memory."""
        idle = sum(block.size_bytes for block in self.trace.blocks if block.persistent and block.id not in self.blocks)
        storage = budgets.storage_bytes
        if self.trace.hardware.link("device", "storage") is not None:
            taken = idle if storage is None else min(idle, storage)
            idle, storage = idle - taken, None if storage is None else storage - taken
        host = None if budgets.host_bytes is None else max(budgets.host_bytes - idle, 0)
        return budgets.model_copy(update={"host_bytes": host, "storage_bytes": storage})

    def reruns(self, chosen: Sequence[Recompute]) -> tuple[Recompute, ...]:
        """Return the re-runs of all passes, where `chosen` are those of `once`."""
        found = [
            Recompute(group=group, at=self.first + number * self.length + each.at)
            for each in chosen
            for number, group in enumerate(self.groups[each.group])
        ]
        group_of = {group.stage: group.id for group in self.trace.recompute}
        for stages in (self.trace.stages[: self.first], self.trace.stages[self.end :]):
            places = {(stage.phase, stage.name): stage.id for stage in stages}
            for each in chosen:
                names = (self.once.stages[stage] for stage in (self.once.recompute[each.group].stage, each.at))
                stage, at = (places.get((like.phase, like.name)) for like in names)
                if stage in group_of and at is not None:
                    found.append(Recompute(group=group_of[stage], at=at))
        return tuple(sorted(found, key=lambda each: each.at))  # stable: re-runs at one place keep their order

    @property
    def end(self) -> int:
        """The stage after these passes."""
        return self.first + self.times * self.length


class LaidOut:
    """The whole iteration with the re-runs that a plan for `once` chooses in all passes; and its border, to be planned."""

    def __init__(self, repeats: Repeats, once: Plan) -> None:
        self.recompute = repeats.reruns(once.recompute)
        self.trace = recomputed(repeats.trace, self.recompute)
        self._repeats, self._once = repeats, once
        self._first = repeats.first + sum(each.at < repeats.first for each in self.recompute)
        self._length = repeats.length + len(once.recompute)
        self._cut = self._length * repeats.times  # stages that the border is without
        self._sources = source_blocks(repeats.trace, self.recompute)
        self._left: list[int] = []  # the blocks of the border
        self._over = {move.block: move for move in once.moves if move.before >= self._length}  # away where a pass begins
        self.border = self._border()

    def decisions(self, problem: Problem, border: Plan) -> Decisions:
        """Return what the plans of `once` and of the border decide, for a problem of `trace`.

        Its updates on the host are those of the border's plan.
        """
        seam, cut = self._first, self._cut
        of_once = {(move.block, move.after): move for move in self._once.moves}
        of_border = {(self._left[move.block], move.after + (cut - 1) * (move.after > seam)): move for move in border.moves}
        over_border = {self._left[move.block]: move for move in border.moves if move.after <= seam < move.before}
        found: Decisions = {}
        for index, period in enumerate(problem.periods):
            number, after = divmod(period.after - seam, self._length)
            like, until = self._repeats.blocks.get(self._sources[period.block]), period.before
            if like is not None and 0 <= number < self._repeats.times:
                over = period.after < seam + cut <= period.before
                # In the pass after them, blocks are away that are so in either plan: each has made room by that.
                move = of_once.get((like, after)) or (over_border.get(period.block) if over else None)
            elif like is not None and period.after < seam <= period.before:
                move = self._over.get(like)
                if move is None:
                    move, until = of_border.get((period.block, period.after)), seam
            else:
                move = of_border.get((period.block, period.after))
            if move is not None:
                leave = min(period.after + move.leaves - move.after, period.last_leave)
                start = period.before if move.prefetch is None else until - move.before + move.prefetch.start
                found[index] = Decision(tier=move.tier, leave=leave, start=max(start, leave + 1))
        return found

    def _border(self) -> Trace:
        trace, seam, cut = self.trace, self._first, self._cut

        def left(stages: Iterable[int]) -> tuple[int, ...]:
            kept = (stage for stage in stages if not seam <= stage < seam + cut)
            return tuple(stage - (cut - 1) * (stage > seam) for stage in kept)

        blocks: list[Block] = []
        for block in trace.blocks:
            reads, writes = left(block.reads), left(block.writes)
            like = self._repeats.blocks.get(self._sources[block.id])
            if like is not None and self._repeats.once.blocks[like].persistent and like not in self._over:
                reads = tuple(sorted((*reads, seam)))
            if reads or writes:
                dies = None if block.dies_after is None else left([max(block.dies_after, seam + cut)])[0]
                changes = {"id": len(blocks), "reads": reads, "writes": writes, "dies_after": dies}
                blocks.append(block.model_copy(update=changes))
                self._left.append(block.id)
        numbers = {block: number for number, block in enumerate(self._left)}
        subgroups = tuple(
            each.model_copy(update={"stage": left([each.stage])[0], "blocks": tuple(numbers[block] for block in each.blocks)})
            for each in trace.subgroups
        )
        passes = Stage(id=seam, name="passes", phase="backward", duration_seconds=0.0)
        stages = tuple(
            stage.model_copy(update={"id": number})
            for number, stage in enumerate([*trace.stages[:seam], passes, *trace.stages[seam + cut :]])
        )
        changes = {"stages": stages, "blocks": tuple(blocks), "subgroups": subgroups, "recompute": (), "not_recomputed": ()}
        return trace.model_copy(update=changes)


def repeats_of(trace: Trace) -> Repeats | None:
    """Return what repeats in an iteration, as [Note: iterations that repeat] says; None if nothing does at least twice."""
    return trace.once(repeats_of, lambda: _found(trace))


def _found(trace: Trace) -> Repeats | None:
    found = _stretch(trace)
    if found is None:
        return None
    first, length, times = found
    for skipped in (0, 1):  # the first one is not like the others if it makes the gradients
        begin, count = first + skipped * length, times - skipped
        after_a_pass = any(stage.phase == "backward" for stage in trace.stages[:begin])
        repeats = _Copies(trace, begin, length, count).folded() if count >= 2 and after_a_pass else None
        if repeats is not None:
            return repeats
    return None


def _stretch(trace: Trace) -> tuple[int, int, int] | None:
    """The first stage, the length and the number of the passes that run the same stages, but for the last of them."""
    likeness = [(stage.phase, stage.name) for stage in trace.stages]
    places: dict[tuple[str, str], list[int]] = defaultdict(list)
    for number, each in enumerate(likeness):
        if each[0] == "backward":
            places[each].append(number)
    counts = Counter(len(each) for each in places.values() if len(each) >= 3).most_common(1)
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
    return begin, length, alike // length


class _Copies:
    """Like passes, and which blocks and groups of them are counterparts. None where they are not alike."""

    def __init__(self, trace: Trace, first: int, length: int, times: int) -> None:
        self._trace, self._first, self._length, self._times = trace, first, length, times

    def folded(self) -> Repeats | None:
        trace = self._trace
        copies: list[dict[tuple[object, ...], list[int]]] = [defaultdict(list) for _ in range(self._times)]
        alike: list[tuple[int, ...]] = []
        for block in trace.blocks:
            ends = (block.uses[0], block.last_stage) if not block.persistent else (0, len(trace.stages) - 1)
            begin, end = map(self._copy_of, ends)
            if begin == end and begin is not None:
                copies[begin][self._key(block, begin)].append(block.id)
            elif not self._repeats(block, begin, end):
                return None
            elif self._relative(block.uses, 0):
                alike.append((block.id,))
        if any(each.keys() != copies[0].keys() for each in copies):
            return None
        for key, members in copies[0].items():
            if any(len(each[key]) != len(members) for each in copies):
                return None
            alike += zip(*(each[key] for each in copies), strict=True)
        alike.sort()
        groups = self._groups()
        if groups is None or any(self._copy_of(subgroup.stage) is not None for subgroup in trace.subgroups):
            return None
        blocks = {block: number for number, members in enumerate(alike) for block in members}
        return Repeats(
            trace=trace,
            first=self._first,
            length=self._length,
            times=self._times,
            once=self._once(alike, groups, blocks),
            blocks=blocks,
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
        """The groups of the first copy with their counterparts."""
        by_stage = {group.stage: group.id for group in self._trace.recompute}
        found: list[tuple[int, ...]] = []
        for group in self._trace.recompute:
            if self._copy_of(group.stage) == 0:
                members = [by_stage.get(group.stage + number * self._length) for number in range(self._times)]
                same = tuple(number for number in members if number is not None)
                if len(same) < self._times:
                    return None
                found.append(same)
        return found

    def _once(self, alike: Sequence[Sequence[int]], groups: Sequence[Sequence[int]], numbers: Mapping[int, int]) -> Trace:
        trace, first, length = self._trace, self._first, self._length
        fixed = sum(b.size_bytes for b in trace.blocks if b.persistent and not b.movable and b.id not in numbers)
        stages: list[Stage] = []
        for number in range(length):
            same = [trace.stages[first + copy * length + number] for copy in range(self._times)]
            seconds, workspace = fmean(each.duration_seconds for each in same), max(each.workspace_bytes for each in same)
            changes = {"id": number, "duration_seconds": seconds, "workspace_bytes": workspace + fixed, "collective_seconds": 0.0}
            stages.append(same[0].model_copy(update=changes))
        blocks: list[Block] = []
        for number, members in enumerate(alike):
            block = trace.blocks[members[0]]
            uses = {"reads": self._relative(block.reads, 0), "writes": self._relative(block.writes, 0)}
            persistent = block.persistent or self._copy_of(block.uses[0]) is None
            dies = None if block.dies_after is None or persistent else block.dies_after - first
            blocks.append(block.model_copy(update={"id": number, "persistent": persistent, "dies_after": dies, **uses}))
        recompute = []
        for number, members in enumerate(groups):
            group = trace.recompute[members[0]]
            made, reads = (tuple(numbers[block] for block in each) for each in (group.blocks, group.reads))
            recompute.append(
                group.model_copy(update={"id": number, "stage": group.stage - first, "blocks": made, "reads": reads})
            )
        changed = {"stages": tuple(stages), "blocks": tuple(blocks), "recompute": tuple(recompute)}
        return trace.model_copy(update={**changed, "subgroups": (), "not_recomputed": ()})
