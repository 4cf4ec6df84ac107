"""Lets Python's threads take shorter turns, so that threads which copy do not wait for the training thread.

[Note: Short turns]
A thread that returns from a system call needs the interpreter's lock. If the training thread holds it, because it launches
kernels, Python lets that one go on for the switch interval, 5 ms by default. A thread that copies through small buffers returns
from a call every half millisecond or so: it would spend most of its time waiting. With turns of half a millisecond it does not.
"""

from __future__ import annotations

import sys
import threading

_SECONDS = 0.0005
_lock = threading.Lock()
_count = 0
_before = _during = 0.0


def begin() -> None:
    """Shorten the switch interval of the process, unless it is shorter already, until as many calls of `end` have followed."""
    global _count, _before, _during
    with _lock:
        if _count == 0:
            _before = sys.getswitchinterval()
            sys.setswitchinterval(min(_before, _SECONDS))
            _during = sys.getswitchinterval()  # Python rounds it
        _count += 1


def end() -> None:
    """Undo one `begin`. The last one brings the interval back, unless somebody else has set another one meanwhile."""
    global _count
    with _lock:
        _count -= 1
        if _count == 0 and sys.getswitchinterval() == _during:
            sys.setswitchinterval(_before)
