"""Counts what runs outside of compiled graphs: the loss, clipping, the updates of optimizers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from teraio.stages import Kernel, operator_kernel


class EagerWork(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Tells `count` the kernel of each operator that runs within, unless `paused`. Not those inside of higher-order operators."""

    supports_higher_order_operators = True

    def __init__(self, count: Callable[[Kernel], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._count = count
        self._paused = False

    @classmethod
    def is_infra_mode(cls) -> bool:
        """It changes nothing, so that torch.compile need not leave out what runs under it."""
        return True

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Count nothing within."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        result = func(*args, **named)
        if not self._paused and isinstance(func, OpOverload):
            names = (argument.name for argument in func._schema.arguments)
            kernel = operator_kernel(func, dict(zip(names, args, strict=False)) | named, result)
            if kernel is not None:
                self._count(kernel)
        return result
