"""Lets signals wait while teraio changes its state.

[Note: Interrupts]
Python runs the handler of a signal in the main thread, between any two instructions, and the handler may raise: Ctrl-C raises
KeyboardInterrupt at a random line. At most lines of teraio something is half done: a slot is taken that no block has yet, a block
is held for a stage that does not know it. So whatever teraio does in the main thread between two pieces of user code runs within
`uninterrupted()`. There a signal that has a handler in Python waits for the next `checkpoint()`, or for the end. Checkpoints are
where whoever holds something is prepared for an error: before a stage, and while a stage waits for copies or for room.

An error of teraio's own code, or of the memory that it asks for, is raised at once. What holds something gives it back as for any
error of Python: in `finally`, or by an `ExitStack`. What was to be undone by a later hook is undone at the end of the context.

What ends the process without a handler in Python does so at once, as ever. Python runs no handler in other threads. The handlers
are those of the program again as soon as teraio returns to it.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # `signal` looks each handler up in an enum, which takes most of the time
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

# What people raise exceptions from: Ctrl-C, the end of a job, timeouts. Not the signals of sampling profilers.
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGALRM, signal.SIGUSR1, signal.SIGUSR2)

Handler = Callable[[int, FrameType | None], Any]


class _Interrupts:
    """A context in which signals wait, see [Note: Interrupts]. It may be entered again inside. In other threads it does nothing.

    The handler stands in for those of the program. Outside of the context, where an interrupt may have left it behind or
    `undo_if_interrupted` needs it, it calls them at once.
    """

    def __init__(self) -> None:
        self._depth = 0
        self._waiting: dict[int, None] = {}
        self._handlers: dict[int, Handler] = {}
        self._undos: dict[Callable[[], object], None] = {}
        self._earlier: frozenset[Callable[[], object]] = frozenset()  # what was to be undone when the context was entered

    def __enter__(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        if not self._depth:
            self._earlier = frozenset(self._undos)
            self._stand_in()
        self._depth += 1

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        if self._depth > 1:
            self._depth -= 1
            return
        try:
            if kind is not None:
                self._undo([undo for undo in self._undos if undo not in self._earlier])
            self.checkpoint()
        finally:
            self._depth = 0
            if not self._undos:
                self._hand_back()

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Within the block, user code runs that teraio calls: it is interrupted at once, and finds the handlers of the program.

        Only where nothing is half done.
        """
        if not self._depth or threading.current_thread() is not threading.main_thread():
            yield
            return
        self.checkpoint()
        depth, earlier, self._depth = self._depth, self._earlier, 0
        if not self._undos:
            self._hand_back()
        try:
            yield
        finally:
            self._depth, self._earlier = depth, earlier
            self._stand_in()

    def checkpoint(self) -> None:
        """Call the handlers of the signals that wait."""
        if not self._waiting or threading.current_thread() is not threading.main_thread():
            return
        while self._waiting:
            self._call(self._waiting.popitem()[0], sys._getframe())

    def undo_if_interrupted(self, undo: Callable[[], object]) -> None:
        """Call `undo` if a handler raises before `forget_undo` is called, also outside of the context, or if the context fails.

        For what a hook leaves to be undone by a later hook, which never comes if user code is interrupted in between. It may find
        nothing to undo.
        """
        self._undos[undo] = None

    def forget_undo(self, undo: Callable[[], object]) -> None:
        """Do not call `undo` any more."""
        self._undos.pop(undo, None)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._depth:
            self._waiting[number] = None
        else:
            self._call(number, frame)

    def _call(self, number: int, frame: FrameType | None) -> None:
        try:
            self._handlers[number](number, frame)
        except BaseException:
            self._undo(list(self._undos))
            raise

    def _undo(self, undos: list[Callable[[], object]]) -> None:
        """Undo the latest first."""
        for undo in reversed(undos):
            self._undos.pop(undo, None)
            undo()

    def _stand_in(self) -> None:
        for number in _SIGNALS:
            handler = _signal.getsignal(number)
            if callable(handler) and handler != self._handle:
                self._handlers[number] = handler
                _signal.signal(number, self._handle)

    def _hand_back(self) -> None:
        # None is forgotten: a program that replaced a handler meanwhile has got `_handle` in return, and may set it again.
        for number, handler in self._handlers.items():
            if _signal.getsignal(number) == self._handle:  # unless the program has set another one meanwhile
                _signal.signal(number, handler)


_INTERRUPTS = _Interrupts()  # one for the process, as its handlers are

checkpoint = _INTERRUPTS.checkpoint
interruptible = _INTERRUPTS.interruptible
undo_if_interrupted = _INTERRUPTS.undo_if_interrupted
forget_undo = _INTERRUPTS.forget_undo


def uninterrupted() -> _Interrupts:
    """Return a context in which signals wait, see [Note: Interrupts]."""
    return _INTERRUPTS
