"""Runs stages where the device's allocator may have no memory although the budget has room.

[Note: Out of memory]
The allocator of a GPU serves a request in one piece. The budget counts bytes, wherever they lie: so a stage can find no memory
although the account has room for it. Then everything leaves that can, free memory goes back to the device, and the stage runs
once more: that is one slow iteration, with the same results. Its inputs are kept meanwhile; without that, those that it needs
last would be gone. A stage that writes in place or draws random numbers cannot run twice. For it the pager tries beforehand
whether its memory is there in one piece (`in_one_piece`). A block that comes back and finds no memory is treated alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from runtime.paging import Block, Pager, out_of_memory

_T = TypeVar("_T")


def run_with_room(
    attempt: Callable[[], _T], pager: Pager, read: Sequence[Block], new_bytes: int, stage: str, *, again: bool
) -> _T:
    """Return what `attempt` returns: a run of the stage that holds `read`, and `new_bytes` beside. See [Note: Out of memory].

    again: whether it may run twice. Waits for copies where it does. Raises BudgetError if there is no memory even so.
    """
    if again:
        try:
            return attempt()
        except torch.OutOfMemoryError:
            pass  # not handled here: the traceback keeps what the stage has made until this block ends
        pager.acquire_again(read, new_bytes, stage)
    try:
        return attempt()
    except torch.OutOfMemoryError as error:
        budget = pager.budget_bytes
        if budget is None:
            raise
        raise out_of_memory(budget, stage) from error
