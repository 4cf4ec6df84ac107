"""Descriptors that forked children do not keep: a child that outlives its parent would keep the bytes of deleted files.

And those that bypass the page cache.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress

_OWN: set[int] = set()


def keep_from_children(descriptor: int) -> None:
    """Replace the descriptor by one of /dev/null in the children that Python forks from now on, until `close_descriptor`.

    Its number stays taken there: a child that writes to it by mistake writes to no other file.
    """
    _OWN.add(descriptor)


def close_descriptor(descriptor: int) -> None:
    """Close a descriptor, also of `keep_from_children`."""
    _OWN.discard(descriptor)
    os.close(descriptor)


def open_direct(descriptor: int, flags: int, works: Callable[[int], bool]) -> int | None:
    """Open an open file again for direct I/O. Return the descriptor; None if the system refuses it, or `works` does."""
    try:
        direct = os.open(f"/proc/self/fd/{descriptor}", flags | os.O_DIRECT)
    except OSError:
        return None
    with suppress(OSError):
        if works(direct):
            return direct
    os.close(direct)
    return None


def _replace_in_child() -> None:
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in _OWN:
        os.dup2(nothing, descriptor, inheritable=False)
    os.close(nothing)


os.register_at_fork(after_in_child=_replace_in_child)
