"""Calls of PyTorch's parallel libraries as regions of the iteration: what they read and write between compiled graphs is a use.

The calls are methods of objects that Python code of PyTorch calls. The object gets a method of its own in place of that of its
class, which does the same inside a stage. Nothing else changes: the same collectives in the same order, so that ranks with such
stages fit to ranks without them. Its time has that of the collective in it, with the wait for other ranks.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

import torch

from planner.errors import BudgetError
from runtime.paging import Pager
from runtime.system import uninterrupted
from teraio.following import IterationObserver


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

    def replace(self, owner: Any, name: str, function: Callable[..., None]) -> None:
        """Have `function(self, owner, ...)` called where others call `owner.name(...)`. Does nothing if that was done before.

        Dynamo does not trace it. Once `self` is gone, the method of the class runs.
        """
        if name in vars(owner):
            return
        own, ours = weakref.ref(owner), weakref.ref(self)

        @torch._dynamo.disable  # type: ignore[untyped-decorator]
        def call(*arguments: Any, **named: Any) -> None:
            there, calls = own(), ours()
            if there is not None and calls is not None:
                function(calls, there, *arguments, **named)
            elif there is not None:
                getattr(type(there), name)(there, *arguments, **named)

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
        """Within, `observer.run_stage` is called so often. Waits at the end until no block that user code can reach is copied.

        step_goes_on: see `IterationObserver.region_begins`. Raises BudgetError, StorageError, and what the calls raise.
        """
        with uninterrupted(), self.pager.region():
            try:
                self.observer.region_begins(identity, stage_count, step_goes_on=step_goes_on)
                yield
            except BudgetError as error:
                raise self.explained(error) from None
            finally:
                self.observer.region_ended()
