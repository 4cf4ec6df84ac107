"""Stages of user code, and the copies and updates that must not run during them.

[Note: user code] Between compiled regions, user code may read and write parameters, gradients and optimizer states
(`Block.user_visible`) in any tier. So a stage of phase "user" starts only when

* no copy out of such a block is queued or under way, and no copy in of such a block is under way;
* every update on the host that was queued has ended, since updates write such blocks.

From the time at which the stage is reached until it has ended, no copy in of such a block begins. There is one exception: copies
in may begin while a block that the stage itself uses is neither on the device nor on its way. A copy that is held back stays at
the head of its queue, and the copies behind it wait too. Activations and buffers move as usual. In a trace without such stages
all blocks do, and updates on the host may run beside the next forward pass.

So user code waits for a copy out that is queued shortly before it. If the copy is queued when user code has ended, it runs
beside the next region, but the block takes its room for longer: `planner.schedule.user_code` weighs the two.
"""

from __future__ import annotations

from planner.schema import Trace

__all__ = ["next_user_stage", "user_stages"]


def user_stages(trace: Trace) -> tuple[int, ...]:
    """Return the stages of user code, ascending."""
    return tuple(stage.id for stage in trace.stages if stage.phase == "user")


def next_user_stage(trace: Trace, stage: int) -> int | None:
    """Return the first stage of user code at or after `stage`, numbered on over the iteration's end; None if there is none."""
    found = user_stages(trace)
    return next((user for user in found if user >= stage), found[0] + len(trace.stages) if found else None)
