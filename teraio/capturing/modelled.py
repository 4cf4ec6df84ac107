"""The machine of a capture: what its description says, in the place of what is measured. It computes nothing.

The device's clock goes on by what work is estimated to take, and its memory holds no bytes. What runs outside of compiled graphs
(the loss, clipping, the updates of optimizers) is seen operator by operator.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import is_fake, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.weak import WeakIdKeyDictionary

import planner
from runtime.device import MIN_MOVED_BYTES, CpuDevice, Span, WallMark
from runtime.paging import Block, NullMover
from teraio.machine import Machine, ResolvedBudgets
from teraio.optimizer import HostRates, OptimizerFacts
from teraio.stages import Kernel, base_name, operator_kernel


class ModelledDevice(CpuDevice):
    """A `Device` on which work takes the seconds that `advance` is told. Also the `MeasuredMemory` of its stages.

    now_seconds: the seconds of all work so far. allocated_bytes: 0, as everything counts from there. peak_bytes: what the stage
    that ran last has allocated, as `allocate` was told.
    """

    allocated_bytes = 0

    def __init__(self) -> None:
        super().__init__()
        self.now_seconds = 0.0
        self.peak_bytes = 0

    def reset_peak(self) -> None:
        self.peak_bytes = 0

    def allocate(self, size_bytes: int) -> None:
        """A stage has allocated so many bytes at once, outputs included."""
        self.peak_bytes = max(self.peak_bytes, size_bytes)

    def advance(self, seconds: float) -> None:
        """Some work was done, which takes so long."""
        self.now_seconds += seconds

    def mark(self) -> WallMark:
        return WallMark(self.now_seconds)


class ResidentMover(NullMover):
    """A `Mover` that says what could leave the device. There is no budget under a capture, so nothing ever does."""

    def span(self, storage: torch.UntypedStorage, *, adopt: bool = False) -> Span | None:
        return Span(0, storage.nbytes()) if storage.nbytes() >= MIN_MOVED_BYTES else None

    def replaced(self, blocks: Sequence[Block]) -> Sequence[Block]:
        """Return none: fake storages have no memory that could be another one."""
        return ()


def modelled_machine(modelled: ModelledDevice, described: planner.Hardware) -> Machine:
    """Return the `Machine` of a description. It has lower tiers, but nothing moves to them: there is no budget."""
    return Machine(
        name=described.name,
        device=modelled,
        device_memory_bytes=described.device_memory_bytes,
        budgets=ResolvedBudgets(),
        memory=modelled,
        mover=ResidentMover(),
        undo=ExitStack(),
        described=described,
    )


class DescribedHostRates(HostRates):
    """elements_per_second: how fast updates run on the host's processor; None if they cannot run there."""

    def __init__(self, elements_per_second: float | None) -> None:
        self._elements_per_second = elements_per_second

    def seconds(self, facts: OptimizerFacts, dtype: torch.dtype, elements: int) -> float | None:
        if self._elements_per_second is None or facts.off_host_because is not None:
            return None
        return elements / self._elements_per_second


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


class KnownValues(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Lets constructors of models read values that do not depend on parameters: rates from `torch.linspace`, sizes, tables.

    Keeps the values of small fake tensors on the CPU that are made from numbers, and of what is computed from them. What is
    random or not initialised has none, so no parameter has. To be entered under a fake mode.
    """

    _MOST_ELEMENTS = 4096
    _READING = frozenset(("item", "_local_scalar_dense", "equal", "is_nonzero"))

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._known = WeakIdKeyDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        given = [tensor for tensor in tree_leaves((args, named)) if isinstance(tensor, torch.Tensor)]
        if not isinstance(func, OpOverload):
            return func(*args, **named)
        drawn = torch.Tag.nondeterministic_seeded in func.tags or base_name(func).startswith(("empty", "new_empty"))
        known = not drawn and all(tensor in self._known or not is_fake(tensor) for tensor in given)
        if known and given and base_name(func) in self._READING:
            return self._computed(func, args, named)
        result = func(*args, **named)
        made = [tensor for tensor in tree_leaves(result) if isinstance(tensor, torch.Tensor)]
        small = all(tensor.device.type == "cpu" and tensor.numel() <= self._MOST_ELEMENTS for tensor in made)
        if known and small and (made or func._schema.is_mutable):
            for tensor, value in zip(made, tree_leaves(self._computed(func, args, named)), strict=False):
                self._known[tensor] = value
        elif func._schema.is_mutable:
            self._forget(given)
        return result

    def _forget(self, tensors: Sequence[torch.Tensor]) -> None:
        """Forget the values of tensors, and of all that share memory with them."""
        gone = {self._known[tensor].untyped_storage().data_ptr() for tensor in tensors if tensor in self._known}
        for tensor, value in list(self._known.items()):  # type: ignore[no-untyped-call]
            if value.untyped_storage().data_ptr() in gone:
                del self._known[tensor]

    def _computed(self, func: OpOverload, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        args, named = tree_map_only(torch.Tensor, self._value, (args, named))
        with unset_fake_temporarily():
            return func(*args, **named)

    def _value(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._known[tensor] if tensor in self._known else tensor
