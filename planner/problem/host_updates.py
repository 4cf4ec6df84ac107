"""Optimizer subgroups that update on the host, and what is left for the device then.

[Note: updates on the host] Of a subgroup that updates on the host, in the stage s of the trace:

* States (persistent blocks that only s uses) are never on the device.
* Gradients (other blocks, whose last use is s) are copied out by a move without a prefetch, and consumed there.
* Parameters (persistent blocks that s alone writes and other stages read) have a valid copy in the host tier at all
  times but during the update: they are dropped after the last use before s, without a copy out, and come back after
  the update.
* Blocks that are not movable count as resident as ever; that their few bytes cross the link is not counted.
* All its movable blocks have their place in the host tier for good.
* The host's processor runs one update at a time, in the order of the plan: each when the run of optimizer stages
  that s lies in has been reached (not before: clipping needs all gradients), no stage before s will use its blocks
  any more, and its gradients have landed. It may still run when the next iteration has begun: only the copies in of
  its parameters wait for it. But user code does too, if there is any: [Note: user code] in `planner.problem.user_code`. An
  update that is part of user code is nothing that could run elsewhere.
* Stage s gets shorter by the subgroup's `device_seconds`, and needs no workspace where nothing is left of it.

So what the device does is again an iteration, with fewer uses: `device_iteration`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from planner.schema import Block, Subgroup, Trace

__all__ = [
    "device_iteration",
    "gradients",
    "host_start",
    "host_updatable",
    "movable_blocks",
    "parameters",
    "states",
    "total_bytes",
]

_NOTHING_LEFT = 1e-9


def host_updatable(trace: Trace) -> tuple[Subgroup, ...]:
    """The subgroups that can update on the host: times and uses as in [Note: updates on the host].

    The next iteration waits for an update by its movable parameters: there must be one, each used before the update's
    stage, and the first of them before any gradient comes into being anew.
    """
    if trace.hardware.link("device", "host") is None or trace.hardware.link("host", "device") is None:
        return ()
    owners: dict[int, int] = {}
    for subgroup in trace.subgroups:
        for block in subgroup.blocks:
            owners[block] = owners.get(block, 0) + 1
    return tuple(
        subgroup
        for subgroup in trace.subgroups
        if subgroup.host_seconds is not None
        and trace.stages[subgroup.stage].phase != "user"
        and _holds_back(trace, subgroup)
        and all(owners[block] == 1 for block in subgroup.blocks)
        and all(_takes_part(trace.blocks[block], subgroup.stage) for block in subgroup.blocks)
    )


def states(trace: Trace, subgroup: Subgroup) -> list[Block]:
    """Movable blocks of the subgroup that only its update uses."""
    return [block for block in movable_blocks(trace, subgroup) if block.uses == (subgroup.stage,)]


def parameters(trace: Trace, subgroup: Subgroup) -> list[Block]:
    """Movable persistent blocks of the subgroup that other stages read."""
    return [block for block in movable_blocks(trace, subgroup) if block.persistent and len(block.uses) > 1]


def gradients(trace: Trace, subgroup: Subgroup) -> list[Block]:
    """Movable blocks of the subgroup that its update consumes."""
    return [block for block in movable_blocks(trace, subgroup) if not block.persistent]


def total_bytes(blocks: Iterable[Block]) -> int:
    """Bytes of all of them."""
    return sum(block.size_bytes for block in blocks)


def host_start(trace: Trace, subgroup: Subgroup) -> int:
    """The stage at which the subgroup's update may begin on the host."""
    begin = subgroup.stage
    while begin > 0 and trace.stages[begin - 1].phase == trace.stages[begin].phase:
        begin -= 1
    uses = (use for block in movable_blocks(trace, subgroup) for use in block.uses if use < subgroup.stage)
    return max(begin, max(uses, default=-1) + 1)


def device_iteration(trace: Trace, on_host: Collection[int]) -> Trace:
    """The iteration that is left for the device when the subgroups `on_host` (ids) update on the host.

    Block and stage ids stay; states have no bytes left. Nothing is checked: all of `on_host` must be updatable there.
    """
    if not on_host:
        return trace
    blocks, stages = list(trace.blocks), list(trace.stages)
    for subgroup in (trace.subgroups[number] for number in sorted(on_host)):
        for block in states(trace, subgroup):
            blocks[block.id] = block.model_copy(update={"size_bytes": 0, "movable": False})
        for block in (*parameters(trace, subgroup), *gradients(trace, subgroup)):
            uses = {
                name: tuple(stage for stage in getattr(block, name) if stage != subgroup.stage) for name in ("reads", "writes")
            }
            blocks[block.id] = block.model_copy(update={**uses, "dies_after": None})
        stage = stages[subgroup.stage]
        left = stage.duration_seconds - subgroup.device_seconds
        if left <= _NOTHING_LEFT * trace.stages[stage.id].duration_seconds:
            stage = stage.model_copy(update={"duration_seconds": 0.0, "workspace_bytes": 0})
        else:
            stage = stage.model_copy(update={"duration_seconds": left})
        stages[subgroup.stage] = stage
    return trace.model_copy(update={"blocks": tuple(blocks), "stages": tuple(stages), "subgroups": ()})


def movable_blocks(trace: Trace, subgroup: Subgroup) -> list[Block]:
    """Blocks of the subgroup that can leave the device."""
    return [block for block in map(trace.blocks.__getitem__, subgroup.blocks) if block.movable and block.size_bytes]


def _holds_back(trace: Trace, subgroup: Subgroup) -> bool:
    firsts = [block.uses[0] for block in parameters(trace, subgroup)]
    births = [block.uses[0] for block in gradients(trace, subgroup)]
    return bool(firsts) and max(firsts) < subgroup.stage and min(firsts) <= min(births, default=subgroup.stage)


def _takes_part(block: Block, stage: int) -> bool:
    if not block.movable:
        return True
    if block.persistent:
        return block.uses == (stage,) or block.writes == (stage,)
    return block.uses[-1] == stage and len(block.uses) > 1
