"""Re-runs of forward stages in the backward pass, as stages of their own.

[Note: recomputation] A plan may run recompute groups of the trace again, each just before one backward stage. Such a re-run is a
stage like any other, of phase "recompute":

* A block of the group dies at its last use before the re-run. The re-run makes it anew, as another block of the same size; the
  later uses are uses of that one.
* The group's `reads` are used once more. A block that had died by then lives on until its last re-run. In the meantime it may
  wait in a lower tier like all others, or it is itself made anew by an earlier re-run.
* A block of the group that nothing uses any more counts as workspace of the re-run.

So the iteration with re-runs is again an iteration, and problem, schedule and simulator need no other rules: `recomputed`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from planner.errors import PlanError
from planner.schema import Block, Plan, Recompute, RecomputeGroup, Stage, Trace

__all__ = ["folded", "made_by", "made_bytes", "recompute_seconds", "recomputed", "spelled_out"]


def recomputed(trace: Trace, chosen: Iterable[Recompute]) -> Trace:
    """Return the iteration in which the groups `chosen` run again, by the rules of [Note: recomputation].

    Stages are numbered anew: a source stage s is stage s + the number of re-runs at or before s. Blocks keep their ids; blocks
    that are made anew follow them. The result has no recompute groups. Without `chosen`, it is the trace itself.

    Raises PlanError, with the reason, where a group does not exist or occurs twice; where its place is not in the backward pass,
    or not after the group's stage; where something that it reads or makes is changed in between; and where nothing uses what it
    makes from there on.
    """
    return _derive(trace, chosen)[0]


def spelled_out(trace: Trace, plan: Plan) -> tuple[Trace, Plan]:
    """Return the trace with the plan's re-runs, and the plan's moves and updates for that trace.

    Raises PlanError as `recomputed` does.
    """
    if not plan.recompute:
        return trace, plan
    derived, sources = _derive(trace, plan.recompute)
    anew = {sources[block.id]: block for block in derived.blocks[len(trace.blocks) :]}
    moves = list(plan.moves)
    for index, move in enumerate(moves):
        made = anew.get(move.block)
        if made is not None and move.after >= made.uses[0]:
            moves[index] = move.model_copy(update={"block": made.id})
    return derived, plan.model_copy(update={"moves": tuple(moves), "recompute": ()})


def folded(trace: Trace, chosen: Sequence[Recompute], plan: Plan) -> Plan:
    """Return the plan for `trace` that carries out `plan`, which was made for `recomputed(trace, chosen)`.

    Its lower bound is 0: one that holds for these re-runs does not hold for all plans.
    """
    if not chosen:
        return plan
    sources = _derive(trace, chosen)[1]
    moves = list(plan.moves)
    for index, move in enumerate(moves):
        if sources[move.block] != move.block:
            moves[index] = move.model_copy(update={"block": sources[move.block]})
    predicted = plan.predicted
    if predicted is not None:
        seconds = recompute_seconds(trace, chosen)
        changed = {"ideal_seconds": trace.ideal_seconds, "recompute_seconds": seconds, "lower_bound_seconds": 0.0}
        predicted = predicted.model_copy(update=changed)
    changes = {"trace_fingerprint": trace.fingerprint, "moves": tuple(moves), "recompute": tuple(chosen), "predicted": predicted}
    return plan.model_copy(update=changes)


def made_bytes(trace: Trace, group: RecomputeGroup) -> int:
    """Return the bytes of the blocks that the group makes."""
    return sum(trace.blocks[number].size_bytes for number in group.blocks)


def made_by(trace: Trace, classes: Iterable[Iterable[int]]) -> dict[int, int]:
    """Return, by block, the number of the class of groups (ids) that makes it."""
    return {block: number for number, groups in enumerate(classes) for group in groups for block in trace.recompute[group].blocks}


def recompute_seconds(trace: Trace, chosen: Iterable[Recompute]) -> float:
    """Return the time of all re-runs together."""
    return sum(trace.recompute[each.group].duration_seconds for each in chosen)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rerun:
    """A group that runs again as stage `stage` of the derived trace, just before stage `at` of the source trace."""

    group: RecomputeGroup
    at: int
    stage: int


def _reruns_of(trace: Trace, chosen: Iterable[Recompute]) -> tuple[_Rerun, ...]:
    """The re-runs in the order in which they run."""
    ordered = sorted(chosen, key=lambda each: each.at)  # is stable: equal places keep their order
    seen: set[int] = set()
    for each in ordered:
        if each.group >= len(trace.recompute):
            raise PlanError(f"the plan recomputes group {each.group}; the trace has {len(trace.recompute)} recompute groups")
        if each.group in seen:
            raise PlanError(f"the plan recomputes group {each.group} twice; a group can run again once")
        seen.add(each.group)
        _check_place(trace, trace.recompute[each.group], each.at)
    return tuple(
        _Rerun(group=trace.recompute[each.group], at=each.at, stage=each.at + number) for number, each in enumerate(ordered)
    )


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
    reruns, sources = _reruns_of(trace, chosen), list(range(len(trace.blocks)))
    if not reruns:
        return trace, sources
    places = [rerun.at for rerun in reruns]
    numbers = [stage + bisect_right(places, stage) for stage in range(len(trace.stages))]
    read: dict[int, list[int]] = {}
    for rerun in reruns:
        for number in rerun.group.reads:
            read.setdefault(number, []).append(rerun.stage)
    blocks = [_with_uses(block, numbers, read.get(block.id, [])) for block in trace.blocks]
    stages: list[Stage] = [stage.model_copy(update={"id": numbers[stage.id]}) for stage in trace.stages]
    for rerun in reruns:
        unused = 0
        used = [number for number in rerun.group.blocks if blocks[number].uses[-1] > rerun.stage]
        for number in rerun.group.blocks:
            if number not in used:
                unused += trace.blocks[number].size_bytes
                continue
            blocks[number], anew = _split(blocks[number], rerun.stage, len(blocks))
            blocks.append(anew)
            sources.append(number)
        if not used:
            raise PlanError(
                f"group {rerun.group.id} runs stage {trace.stages[rerun.group.stage].name!r} again before stage {rerun.at}, but "
                "nothing uses what it makes from there on; give an earlier stage, or leave the group out"
            )
        stages.insert(rerun.stage, _stage(trace, rerun, unused))
    subgroups = tuple(each.model_copy(update={"stage": numbers[each.stage]}) for each in trace.subgroups)
    changes = {"stages": tuple(stages), "blocks": tuple(blocks), "subgroups": subgroups, "recompute": (), "not_recomputed": ()}
    return trace.model_copy(update=changes), sources


def _stage(trace: Trace, rerun: _Rerun, unused_bytes: int) -> Stage:
    return Stage(
        id=rerun.stage,
        name=f"recompute/{trace.stages[rerun.group.stage].name}",
        phase="recompute",
        duration_seconds=rerun.group.duration_seconds,
        workspace_bytes=rerun.group.workspace_bytes + unused_bytes,
    )


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
