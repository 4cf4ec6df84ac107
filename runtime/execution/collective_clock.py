"""Time that stages spend in collectives: to begin them, and to wait for their results."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.overrides import TorchFunctionMode

__all__ = ["CollectiveClock"]

_NAMESPACES = frozenset(("_c10d_functional", "_c10d_functional_autograd", "_dtensor", "c10d_functional"))


class CollectiveClock(TorchFunctionMode):
    """Within the block, adds up the `seconds` that operators of torch.distributed take on this thread.

    What a rank waits for others is part of it. Only for devices on which such an operator returns when it is done.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seconds = 0.0

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if getattr(function, "namespace", None) not in _NAMESPACES:
            return function(*args, **(kwargs or {}))
        begin = time.perf_counter()
        try:
            return function(*args, **(kwargs or {}))
        finally:
            self.seconds += time.perf_counter() - begin
