"""Calls of PyTorch's parallel libraries as regions of the iteration: what they read and write between compiled graphs is a use.

The calls are methods of objects that Python code of PyTorch calls. The object gets a method of its own in place of that of its
class, which does the same inside a stage. Nothing else changes: the same collectives in the same order, so that ranks with such
stages fit to ranks without them. Its time has that of the collective in it, with the wait for other ranks.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

import torch

from planner.errors import BudgetError
from runtime.execution import StageRun
from runtime.paging import Block, Pager
from runtime.system import annotate, uninterrupted
from teraio.following import IterationObserver

_NOT_AGAIN = "it is a collective, which all ranks have to launch as often"


@dataclass(eq=False)
class LibraryCalls:
    """Runs calls as stages under the pager, and puts methods in the place of others until `close`. Keeps no object alive.

    active: returns whether regions are managed now; otherwise calls should run as without teraio.
    explained: returns the error of a call that does not fit with a budget that does for all that is known.
    """

    pager: Pager
    observer: IterationObserver
    _: KW_ONLY
    active: Callable[[], bool]
    explained: Callable[[BudgetError], BudgetError]
    _changed: weakref.WeakKeyDictionary[Any, list[str]] = field(init=False, default_factory=weakref.WeakKeyDictionary)

    def replace(self, owner: Any, name: str, method: Callable[..., None]) -> None:
        """Have `method(owner, ...)` called where others call `owner.name(...)`. Does nothing if that was done before.

        Dynamo does not trace it. Once the object of `method` is gone, the method of the class runs.
        """
        if name in vars(owner):
            return
        own, ours = weakref.ref(owner), weakref.WeakMethod(method)

        @torch._dynamo.disable  # type: ignore[untyped-decorator]
        def call(*arguments: Any, **named: Any) -> None:
            there, run = own(), ours()
            if there is not None:
                (run or getattr(type(there), name))(there, *arguments, **named)

        setattr(owner, name, call)
        self._changed.setdefault(owner, []).append(name)

    def close(self) -> None:
        """Take all methods away that `replace` has put in place."""
        for owner, names in list(self._changed.items()):
            for name in names:
                delattr(owner, name)
        self._changed.clear()

    @contextmanager
    def region(self, identity: Hashable, stage_count: int, *, step_goes_on: bool = False) -> Iterator[None]:
        """Within, `stage` is called so many times. Waits at the end until no block that user code can reach is being copied.

        step_goes_on: see `IterationObserver.region_begins`.
        """
        with uninterrupted(), self.pager.region():
            try:
                self.observer.region_begins(identity, stage_count, step_goes_on=step_goes_on)
                yield
            finally:
                self.observer.region_ended()

    def stage(
        self,
        name: str,
        call: Callable[[], Sequence[Block]],
        *,
        read: Sequence[Block],
        written: Sequence[Block] = (),
        freed: Sequence[Block] = (),
        made_bytes: int = 0,
        workspace_bytes: int = 0,
    ) -> None:
        """Run `call`, which returns the blocks that it makes, as the next stage; its phase is what `name` begins with.

        read: all blocks that it needs on the device. written: those of them that it changes. freed: those that may be gone then.
        Waits for copies of blocks. Raises BudgetError, StorageError, and what the call raises.
        """
        pager, phase = self.pager, name.partition("/")[0]
        fetch = self.observer.stage_reached()
        try:
            pager.acquire(read, made_bytes + workspace_bytes, name, then_fetch=fetch)
        except BudgetError as error:
            raise self.explained(error) from None
        try:
            begin = self.observer.mark()
            with annotate("stage", name):
                made = call()
            end = self.observer.mark()
        finally:
            pager.retire(read, written, last_used=freed)
        self.observer.stage_ended(
            StageRun(
                name=name,
                phase=phase,
                begin=begin,
                end=end,
                workspace_bytes=workspace_bytes,
                read=read,
                made=made,
                written=written,
                never_again=_NOT_AGAIN,
                collective_seconds=0.0 if pager.device.asynchronous else end.seconds_since(begin),
            )
        )
        pager.show_to_user(made)
