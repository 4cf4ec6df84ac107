"""What it means that optimizer subgroups update on the host, and the iteration that is left for the device then.

Which ones do is decided in `planner.ilp.coarse`, and tried again in `planner.policies.optimise`.

[Note: updates on the host] For a subgroup that updates on the host, with its update in stage s of the trace:

* States (persistent blocks that only s uses) are never on the device.
* Gradients (other blocks, whose last use is s) are copied out by a move without a prefetch. The update consumes them on the
  host.
* Parameters (persistent blocks that s alone writes and other stages read) have a valid copy in the host tier at all times except
  during the update. They are dropped after the last use before s, without a copy out, and come back after the update.
* Blocks that are not movable count as resident, as always. That their few bytes cross the link is not counted.
* All its movable blocks have their place in the host tier for good.
* The host's processor runs one update at a time, in the order of the plan. An update may begin when three things hold: the run
  of optimizer stages that contains s has been reached (not before, since gradient clipping needs all gradients); no stage before
  s will use its blocks any more; its gradients have been copied out. It may still run when the next iteration has begun: then
  only the copies in of its parameters wait for it. If there is user code, user code waits for it too: [Note: user code].
  An update inside user code cannot run on the host.
* Stage s is shorter by the subgroup's `device_seconds`, and needs no workspace if nothing is left of it.

So what the device does is again an iteration, with fewer uses: see `device_iteration`.

[Note: user code] Between compiled regions, user code may read and write parameters, gradients and optimizer states
(`Block.user_visible`) in any tier. So a stage of phase "user" starts only when

* no copy out of such a block is queued or under way, and no copy in of such a block is under way;
* every update on the host that was queued has ended, since updates write such blocks.

From the time at which the stage is reached until it has ended, no copy in of such a block begins. There is one exception: copies
in may begin while a block that the stage itself uses is neither on the device nor on its way. A copy that is held back stays at
the head of its queue, and the copies behind it wait too. Activations and buffers move as usual. In a trace without such stages
all blocks do, and updates on the host may run beside the next forward pass.

So user code waits for a copy out that is queued shortly before it. If the copy is queued when user code has ended, it runs
beside the next region, but the block takes its room for longer: `planner.schedule.variants` weighs the two.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable

from planner.schema import Block, Subgroup, Trace

_NOTHING_LEFT = 1e-9  # share of a stage's duration that counts as rounding


def host_updatable(trace: Trace) -> tuple[Subgroup, ...]:
    """Return the subgroups that can update on the host: their times and uses are as in [Note: updates on the host].

    The next iteration waits for an update through the movable parameters of the subgroup. So there must be such a parameter,
    each must be used before the update's stage, and the first of them before any of its gradients is written again.
    """
    return trace.once(host_updatable, lambda: _host_updatable(trace))


def _host_updatable(trace: Trace) -> tuple[Subgroup, ...]:
    if trace.hardware.link("device", "host") is None or trace.hardware.link("host", "device") is None:
        return ()
    owners = Counter(block for subgroup in trace.subgroups for block in subgroup.blocks)
    return tuple(
        subgroup
        for subgroup in trace.subgroups
        if subgroup.host_seconds is not None
        and trace.stages[subgroup.stage].phase != "user"
        and _next_iteration_waits(trace, subgroup)
        and all(owners[block] == 1 and _fits_update(trace.blocks[block], subgroup.stage) for block in subgroup.blocks)
    )


def states(trace: Trace, subgroup: Subgroup) -> list[Block]:
    """Return the movable blocks of the subgroup that only its update uses."""
    return [block for block in movable_blocks(trace, subgroup) if block.uses == (subgroup.stage,)]


def parameters(trace: Trace, subgroup: Subgroup) -> list[Block]:
    """Return the movable persistent blocks of the subgroup that other stages read."""
    return [block for block in movable_blocks(trace, subgroup) if block.persistent and len(block.uses) > 1]


def gradients(trace: Trace, subgroup: Subgroup) -> list[Block]:
    """Return the movable blocks of the subgroup that its update consumes."""
    return [block for block in movable_blocks(trace, subgroup) if not block.persistent]


def needed_again(trace: Trace, subgroup: Subgroup) -> int:
    """Return the stage that first needs the parameters after the update, numbered on over the iteration's end."""
    uses = (use for block in parameters(trace, subgroup) for use in block.uses if use != subgroup.stage)
    return min((use - subgroup.stage) % len(trace.stages) for use in uses) + subgroup.stage


def total_bytes(blocks: Iterable[Block]) -> int:
    """Return the bytes of all `blocks` together."""
    return sum(block.size_bytes for block in blocks)


def host_bytes(trace: Trace, subgroup: Subgroup) -> int:
    """Return the bytes that the subgroup takes of the host tier if it updates on the host."""
    return total_bytes(movable_blocks(trace, subgroup))


def host_start(trace: Trace, subgroup: Subgroup) -> int:
    """Return the stage at which the subgroup's update may begin on the host."""
    begin = subgroup.stage
    while begin > 0 and trace.stages[begin - 1].phase == trace.stages[begin].phase:
        begin -= 1
    uses = (use for block in movable_blocks(trace, subgroup) for use in block.uses if use < subgroup.stage)
    return max(begin, max(uses, default=-1) + 1)


def device_iteration(trace: Trace, on_host: Collection[int]) -> Trace:
    """Return the iteration that is left for the device when the subgroups `on_host` (ids) update on the host.

    Block and stage ids stay; states have no bytes left. Does not check that the subgroups of `on_host` can update there.
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
        nothing = left <= _NOTHING_LEFT * trace.stages[stage.id].duration_seconds
        changes = {"duration_seconds": 0.0, "workspace_bytes": 0} if nothing else {"duration_seconds": left}
        stages[stage.id] = stage.model_copy(update=changes)
    return trace.model_copy(update={"blocks": tuple(blocks), "stages": tuple(stages), "subgroups": ()})


def movable_blocks(trace: Trace, subgroup: Subgroup) -> list[Block]:
    """Return the blocks of the subgroup that can leave the device."""
    return [block for block in map(trace.blocks.__getitem__, subgroup.blocks) if block.movable and block.size_bytes]


def _next_iteration_waits(trace: Trace, subgroup: Subgroup) -> bool:
    firsts = [block.uses[0] for block in parameters(trace, subgroup)]
    births = [block.uses[0] for block in gradients(trace, subgroup)]
    return bool(firsts) and max(firsts) < subgroup.stage and min(firsts) <= min(births, default=subgroup.stage)


def _fits_update(block: Block, stage: int) -> bool:
    if not block.movable:
        return True
    if block.persistent:
        return block.uses == (stage,) or block.writes == (stage,)
    return block.uses[-1] == stage and len(block.uses) > 1


def user_stages(trace: Trace) -> tuple[int, ...]:
    """Return the stages of user code, ascending."""
    return tuple(stage.id for stage in trace.stages if stage.phase == "user")


def next_user_stage(trace: Trace, stage: int) -> int | None:
    """Return the first stage of user code at or after `stage`, numbered on over the iteration's end; None if there is none."""
    found = user_stages(trace)
    return next((user for user in found if user >= stage), found[0] + len(trace.stages) if found else None)
