"""Stages of user code, and the copies and updates that must not be under way in them.

[Note: user code]
Between compiled regions user code may read and write parameters, gradients and optimizer states (`Block.user_visible`),
wherever they are. So a stage of phase "user" starts only when

* of no such block a copy out is queued or under way, or a copy in under way;
* every update on the host that was queued has ended, as it writes such blocks.

From the time at which the stage is reached until it has ended, no copy in of such a block begins; unless a block that the
stage itself uses is neither on the device nor on its way. A copy that is held back stays at the head of its queue, and what
is queued behind it waits too. Activations and buffers come and go as ever, and so does everything in a trace without such
stages: there, updates on the host may run beside the next forward pass.

So a copy out that is queued shortly before user code makes it wait. Queued when user code has ended, it runs beside the next
region, but takes its room for longer: `planner.schedule.user_code` weighs that.
"""

from __future__ import annotations

from planner.schema import Trace

__all__ = ["next_user_stage", "user_stages"]


def user_stages(trace: Trace) -> tuple[int, ...]:
    """The stages of user code, ascending."""
    return tuple(stage.id for stage in trace.stages if stage.phase == "user")


def next_user_stage(trace: Trace, stage: int) -> int | None:
    """The first stage of user code at or after `stage`, numbered on over the iteration's end; None if there is none."""
    found = user_stages(trace)
    return next((user for user in found if user >= stage), found[0] + len(trace.stages) if found else None)
