"""Re-runs of forward stages in the backward pass, as stages of their own.

[Note: recomputation] A plan may run recompute groups of the trace again, each just before one backward stage. Such a re-run is a
stage like any other, of phase "recompute":

* A block of the group dies at its last use before the re-run. The re-run makes it anew, as another block of the same size; the
  later uses are uses of that one.
* The group's `reads` are used once more. A block that had died by then lives on until its last re-run. In the meantime it may
  wait in a lower tier like all others, or it is itself made anew by an earlier re-run.
* A block of the group that nothing uses any more counts as workspace of the re-run.
* A re-run that is skipped is a stage that takes no time and no workspace. It only reads what it would have made, too, which lives
  on: so the numbers of stages are those of the plan.

So the iteration with re-runs is again an iteration, and problem, schedule and simulator need no other rules: `recomputed`.

Also which groups can run again and where, and sets of them that are worth a try.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise

from planner.errors import PlanError
from planner.schema import Block, Move, Plan, Recompute, RecomputeGroup, Stage, Trace


def recomputed(trace: Trace, chosen: Iterable[Recompute]) -> Trace:
    """Return the iteration in which the groups `chosen` run again, by the rules of [Note: recomputation].

    Stages are numbered anew: a source stage s is stage s + the number of re-runs at or before s. Blocks keep their ids; blocks
    that are made anew follow them. The result has no recompute groups. Without `chosen`, it is the trace itself.

    Raises PlanError, with the reason, where a group does not exist or occurs twice; where its place is not in the backward pass,
    or not after the group's stage; where something that it reads or makes is changed in between; and where nothing uses what it
    makes from there on.
    """
    return _derive(trace, chosen)[0]


def source_blocks(trace: Trace, chosen: Iterable[Recompute]) -> list[int]:
    """Return, for each block of `recomputed(trace, chosen)`, which block of `trace` it is. Raises as that does."""
    return _derive(trace, chosen)[1]


def spelled_out(trace: Trace, plan: Plan) -> tuple[Trace, Plan]:
    """Return the trace with the plan's re-runs, and the plan's moves and updates for that trace.

    Raises PlanError as `recomputed` does.
    """
    if not plan.recompute:
        return trace, plan
    derived, sources = _derive(trace, plan.recompute)
    anew = {sources[block.id]: block for block in derived.blocks[len(trace.blocks) :]}

    def block_of(move: Move) -> int:
        made = anew.get(move.block)
        return made.id if made is not None and move.after >= made.uses[0] else move.block

    return derived, plan.model_copy(update={"moves": _with_blocks(plan.moves, block_of), "recompute": ()})


def _with_blocks(moves: Sequence[Move], block_of: Callable[[Move], int]) -> tuple[Move, ...]:
    """The moves, with other blocks."""
    pairs = ((move, block_of(move)) for move in moves)
    return tuple(move if block == move.block else move.model_copy(update={"block": block}) for move, block in pairs)


def folded(trace: Trace, chosen: Sequence[Recompute], plan: Plan) -> Plan:
    """Return the plan for `trace` that carries out `plan`, which was made for `recomputed(trace, chosen)`.

    Its lower bound is 0: one that holds for these re-runs does not hold for all plans.
    """
    if not chosen:
        return plan
    sources = source_blocks(trace, chosen)
    moves = _with_blocks(plan.moves, lambda move: sources[move.block])
    predicted = plan.predicted
    if predicted is not None:
        seconds = recompute_seconds(trace, chosen)
        changed = {"ideal_seconds": trace.ideal_seconds, "recompute_seconds": seconds, "lower_bound_seconds": 0.0}
        predicted = predicted.model_copy(update=changed)
    changes = {"trace_fingerprint": trace.fingerprint, "moves": moves, "recompute": tuple(chosen), "predicted": predicted}
    return plan.model_copy(update=changes)


def made_bytes(trace: Trace, group: RecomputeGroup) -> int:
    """Return the bytes of the blocks that the group makes."""
    return sum(trace.blocks[number].size_bytes for number in group.blocks)


def made_by(trace: Trace, classes: Iterable[Iterable[int]]) -> dict[int, int]:
    """Return, by block, the number of the class of groups (ids) that makes it."""
    return {block: number for number, groups in enumerate(classes) for group in groups for block in trace.recompute[group].blocks}


def recompute_seconds(trace: Trace, chosen: Iterable[Recompute]) -> float:
    """Return the time of all re-runs together."""
    return sum(trace.recompute[each.group].duration_seconds for each in chosen if not each.skipped)


def _reruns_of(trace: Trace, chosen: Iterable[Recompute]) -> list[tuple[Recompute, RecomputeGroup, int]]:
    """The re-runs in the order in which they run, each with its group and its stage in the derived trace."""
    ordered = sorted(chosen, key=lambda each: each.at)  # is stable: equal places keep their order
    seen: set[int] = set()
    for each in ordered:
        if each.group >= len(trace.recompute):
            raise PlanError(f"the plan recomputes group {each.group}; the trace has {len(trace.recompute)} recompute groups")
        if each.group in seen:
            raise PlanError(f"the plan recomputes group {each.group} twice; a group can run again once")
        seen.add(each.group)
        _check_place(trace, trace.recompute[each.group], each.at)
    return [(each, trace.recompute[each.group], each.at + number) for number, each in enumerate(ordered)]


def _check_place(trace: Trace, group: RecomputeGroup, at: int) -> None:
    what = f"group {group.id} runs stage {trace.stages[group.stage].name!r} again"
    if at >= len(trace.stages) or trace.stages[at].phase != "backward":
        found = "which does not exist" if at >= len(trace.stages) else f"of phase {trace.stages[at].phase!r}"
        raise PlanError(f"{what} before stage {at}, {found}; groups run again only before backward stages")
    if at <= group.stage:
        raise PlanError(f"{what} before stage {at}, but that runs before it, as stage {group.stage}; give a later stage")
    for number in (*group.reads, *group.blocks):
        block = trace.blocks[number]
        if any(group.stage < write < at for write in block.writes):
            raise PlanError(
                f"{what} before stage {at}, but block {block.name!r} is changed between stages {group.stage} and {at}; "
                "give an earlier stage, or leave the group out"
            )


def _derive(trace: Trace, chosen: Iterable[Recompute]) -> tuple[Trace, list[int]]:
    """Return the derived trace and, for each of its blocks, the block of the source trace. Raises PlanError as `recomputed`."""
    wanted = tuple(chosen)
    if not wanted:
        return trace, list(range(len(trace.blocks)))
    known, found = trace.memo.get(_derive, ((), None))
    if wanted != known:
        found = _derived(trace, wanted)
        trace.memo[_derive] = wanted, found  # only the last one: one choice is asked for several times in a row
    derived: tuple[Trace, list[int]] = found
    return derived


def _derived(trace: Trace, chosen: Iterable[Recompute]) -> tuple[Trace, list[int]]:
    reruns, sources = _reruns_of(trace, chosen), list(range(len(trace.blocks)))
    places = [rerun.at for rerun, _, _ in reruns]
    numbers = [stage + bisect_right(places, stage) for stage in range(len(trace.stages))]
    read: dict[int, list[int]] = {}
    for _, group, stage in reruns:
        for number in group.reads:
            read.setdefault(number, []).append(stage)
    blocks = [_with_uses(block, numbers, read.get(block.id, [])) for block in trace.blocks]
    stages: list[Stage] = [each.model_copy(update={"id": numbers[each.id]}) for each in trace.stages]
    for rerun, group, stage in reruns:
        unused = 0
        used = [number for number in group.blocks if blocks[number].uses[-1] > stage]
        for number in group.blocks:
            if number not in used:
                unused += trace.blocks[number].size_bytes
            elif rerun.skipped:
                reads = sorted({*blocks[number].reads, stage})
                blocks[number] = blocks[number].model_copy(update={"reads": tuple(reads)})
            else:
                blocks[number], anew = _split(blocks[number], stage, len(blocks))
                blocks.append(anew)
                sources.append(number)
        name = trace.stages[group.stage].name
        if not used:
            raise PlanError(
                f"group {group.id} runs stage {name!r} again before stage {rerun.at}, but nothing uses what it makes from there "
                "on; give an earlier stage, or leave the group out"
            )
        seconds, workspace = (0.0, 0) if rerun.skipped else (group.duration_seconds, group.workspace_bytes + unused)
        made = Stage(id=stage, name=f"recompute/{name}", phase="recompute", duration_seconds=seconds, workspace_bytes=workspace)
        stages.insert(stage, made)
    subgroups = tuple(each.model_copy(update={"stage": numbers[each.stage]}) for each in trace.subgroups)
    changes = {"stages": tuple(stages), "blocks": tuple(blocks), "subgroups": subgroups, "recompute": (), "not_recomputed": ()}
    return trace.model_copy(update=changes), sources


def _with_uses(block: Block, numbers: Sequence[int], read: Sequence[int]) -> Block:
    """The block in the derived numbering, with the reads of re-runs."""
    reads = tuple(sorted({*(numbers[stage] for stage in block.reads), *read}))
    writes = tuple(numbers[stage] for stage in block.writes)
    dies = None if block.dies_after is None else numbers[block.dies_after]
    if dies is not None and dies <= max((*reads, *writes)):
        dies = None
    return block.model_copy(update={"reads": reads, "writes": writes, "dies_after": dies})


def _split(block: Block, stage: int, number: int) -> tuple[Block, Block]:
    """The block up to a re-run in `stage`, and the one that the re-run makes, with id `number`."""
    old = {name: tuple(use for use in getattr(block, name) if use < stage) for name in ("reads", "writes")}
    new = {name: tuple(use for use in getattr(block, name) if use > stage) for name in ("reads", "writes")}
    anew = block.model_copy(update={**new, "id": number, "writes": (stage, *new["writes"])})
    return block.model_copy(update={**old, "dies_after": None}), anew


# An index, and each index further inside, with or without a name before it, as long as there is something inside it.
_LAYER = re.compile(r"(.*?[./]\d+(?:(?:\.[^.\d{:][^.{:]*)?\.\d+(?=\.[^.]))*)(?:[./:]|$)")


_SMALL = 0.125  # share of the bytes that a group makes


class RerunPlaces:
    """Where groups run again: as late as they can, so that what they make takes room for the shortest time.

    `late`: small blocks of a group may be used before that; they are kept for it. In a layer that saves much and hands on little,
    it is then the layer's own backward stage that decides, and not that of the next one, which reads what was handed on.
    `usable`: the groups (ids) that can run again in the backward pass.
    """

    def __init__(self, trace: Trace, *, late: bool = False) -> None:
        self._trace = trace
        self.alone: dict[int, int] = {}
        """The place of each group if no other one runs again, by id."""
        self._decide: dict[int, list[int]] = {}  # the blocks (ids) that decide about its place, by group
        for group in trace.recompute:
            large = made_bytes(trace, group) * _SMALL
            for least in (large, 0) if late else (0,):
                blocks = [number for number in group.blocks if trace.blocks[number].size_bytes >= least]
                uses = (use for number in blocks for use in trace.blocks[number].uses if use > group.stage)
                place = min((use for use in uses if trace.stages[use].phase == "backward"), default=None)
                if place is not None and self._unchanged(group, place):
                    self.alone[group.id], self._decide[group.id] = place, blocks
                    break

    @property
    def usable(self) -> Collection[int]:
        """Return the ids of the groups that can run again, ascending."""
        return self.alone.keys()

    def of(self, groups: Collection[int]) -> tuple[Recompute, ...]:
        """Return the groups (ids) with their places, in the order in which they run.

        A group runs at the first use of its blocks (late: of its large blocks) in the backward pass: by a backward stage, or by
        a group of `groups` that reads them. Groups that cannot run again are left out.
        """
        trace, place = self._trace, dict[int, int]()
        wanted: dict[int, int] = {}  # by block, the first place of a group that reads it
        for group in sorted((trace.recompute[number] for number in set(groups)), key=lambda group: -group.stage):
            if group.id not in self.alone:
                continue
            at = min([self.alone[group.id], *(wanted[block] for block in self._decide[group.id] if block in wanted)])
            place[group.id] = at
            for block in group.reads:
                wanted[block] = min(at, wanted.get(block, at))
        return self.in_order(place)

    def in_order(self, places: Mapping[int, int]) -> tuple[Recompute, ...]:
        """Return groups (ids) with given places. Those with one place run in the order of their stages."""
        ordered = sorted(places, key=lambda number: (places[number], self._trace.recompute[number].stage))
        return tuple(Recompute(group=number, at=places[number]) for number in ordered)

    def options(self, number: int) -> tuple[int, ...]:
        """Return the backward stages that use a block of a group (id) after an idle time: places that may pay, ascending."""
        group, found = self._trace.recompute[number], set()
        for block in (self._trace.blocks[number] for number in group.blocks):
            for after, before in pairwise(block.uses):
                if before > after + 1 and self._trace.stages[before].phase == "backward" and self._unchanged(group, before):
                    found.add(before)
        return tuple(sorted(found))

    def together(self) -> Iterator[tuple[Recompute, ...]]:
        """Yield, for each backward stage, all groups that can run again there and make what is used from there on."""
        groups = [self._trace.recompute[number] for number in self.alone]
        until = {each.id: max(self._trace.blocks[block].uses[-1] for block in each.blocks) for each in groups}
        for stage in self._trace.stages:
            if stage.phase == "backward":
                found = [each.id for each in groups if until[each.id] >= stage.id and self._unchanged(each, stage.id)]
                if found:
                    yield self.in_order(dict.fromkeys(found, stage.id))

    def _unchanged(self, group: RecomputeGroup, place: int) -> bool:
        blocks = (self._trace.blocks[number] for number in (*group.reads, *group.blocks))
        return not any(group.stage < write < place for block in blocks for write in block.writes)


def kinds_of_places(trace: Trace) -> tuple[RerunPlaces, ...]:
    """Return the early places and, if they are others, the late ones."""
    early, late = RerunPlaces(trace), RerunPlaces(trace, late=True)
    return (early,) if late.alone == early.alone else (early, late)


def layer_of(name: str) -> str | None:
    """Return the beginning of a stage's name that is its layer's; None if it is in no layer.

    It ends with the first index (`forward/layers.3` for `forward/layers.3.mlp.up`). Layers right inside a layer count by
    themselves: `stages.0.blocks.3` for `stages.0.blocks.3.mlp.fc1`. A module without modules inside it is no layer there, such
    as a part of a sequence: `layers.3` for `layers.3.mlp.0`.
    """
    found = _LAYER.match(name)
    return found[1] if found is not None else None


def rounded(trace: Trace, shares: Mapping[int, float]) -> frozenset[int]:
    """Return whole groups, so that up to any stage about as many of each kind run again as `shares` (by group) say."""
    chosen = set()
    carried: dict[str, float] = {}
    for group in trace.recompute:
        kind = _kind(trace, group.id)
        carried[kind] = carried.get(kind, 0.0) + shares.get(group.id, 0.0)
        if carried[kind] >= 0.5:
            carried[kind] -= 1.0
            chosen.add(group.id)
    return frozenset(chosen)


def over_half(shares: Mapping[int, float]) -> frozenset[int]:
    """Return the groups with a share of more than a half."""
    return frozenset(group for group, share in shares.items() if share > 0.5)


def simple_sets(trace: Trace, usable: Collection[int]) -> Iterator[frozenset[int]]:
    """Yield sets of `usable` groups that do not depend on budgets and rates: all, whole layers and spans of them, some kinds."""
    if not usable:
        return
    yield frozenset(usable)
    span = 1
    while span < 2 * len(usable):
        yield whole_layers(trace, usable, span=span)
        span *= 2
    yield from by_kind(trace, usable)


def by_kind(trace: Trace, usable: Collection[int]) -> Iterator[frozenset[int]]:
    """Yield sets of `usable` groups, each with one kind more: the one that makes the most bytes per second of those left."""
    kinds: dict[str, list[int]] = {}
    for group in usable:
        kinds.setdefault(_kind(trace, group), []).append(group)

    def seconds_per_byte(kind: str) -> float:
        groups = [trace.recompute[number] for number in kinds[kind]]
        size = sum(made_bytes(trace, group) for group in groups)
        return sum(group.duration_seconds for group in groups) / max(size, 1)

    chosen: frozenset[int] = frozenset()
    for kind in sorted(kinds, key=seconds_per_byte):
        chosen |= set(kinds[kind])
        yield chosen


def whole_layers(trace: Trace, usable: Collection[int], *, span: int = 1) -> frozenset[int]:
    """Return the `usable` groups of all layers, but for those that make what the next layer reads.

    That is what checkpoints of every layer recompute. A layer is a run of forward stages whose names begin alike, see
    `layer_of`; other stages are no layer. span: keep only what every `span`-th layer hands on.
    """
    numbers, count = _layers(trace)

    def hands_on(group: int) -> bool:
        own = numbers[trace.recompute[group].stage]
        reads = (use for block in trace.recompute[group].blocks for use in trace.blocks[block].reads)
        return any(trace.stages[use].phase == "forward" and numbers[use] != own for use in reads)

    found = set()
    for group in usable:
        layer = numbers[trace.recompute[group].stage]
        if layer is not None and (not hands_on(group) or ((layer + 1) % span and layer + 1 < count)):
            found.add(group)
    return frozenset(found)


def _layers(trace: Trace) -> tuple[list[int | None], int]:
    """The number of each forward stage's layer, from 0; None for other stages. And how many layers there are."""
    found: list[int | None] = []
    last, count = "", 0
    for stage in trace.stages:
        layer = layer_of(stage.name) if stage.phase == "forward" else None
        if layer is not None and layer != last:
            last, count = layer, count + 1
        found.append(None if layer is None else count - 1)
    return found, count


def _kind(trace: Trace, group: int) -> str:
    """The name of the group's stage without numbers: equal stages of different layers are of one kind."""
    return re.sub(r"\d+", "#", trace.stages[trace.recompute[group].stage].name)
