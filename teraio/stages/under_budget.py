"""Operators that user code calls outside of graphs, under the budget.

[Note: Operators under the budget]
Each operator that is called in this thread is treated as a stage: the blocks that it reads come to the device first, room is
made for its results, and what it writes has no valid copy any more. Large results become blocks, which leave when others need the
room. An operator over lists, such as those that clip gradients, treats a few of their tensors at a time. Nothing else changes:
operators run in the order in which they would have run, so a model is initialised with the same random numbers.

[Note: Clipping what is out of reach]
On a GPU nothing stands in for what waits on a drive. A training loop clips or unscales its gradients by functions of PyTorch,
between the backward pass and the step. From the first run on that has drives there, these functions are others, which do the same
with the operators under the budget while gradients wait on a drive. What else reads such gradients gets an error.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from runtime.execution import OperatorRunner
from runtime.paging import PLAIN, State
from teraio.stages.operators import by_name, written_names

_SHARE = 8  # of the budget: what an operator over lists works on at once


class OperatorsUnderBudget(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Runs each operator of this thread under the budget, see [Note: Operators under the budget]."""

    def __init__(self, operators: OperatorRunner) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._operators = operators
        self._most_bytes = (operators.pager.account.budget_bytes or sys.maxsize) // _SHARE

    def __torch_dispatch__(
        self, func: OpOverload, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func.is_view:  # touches no byte
            return func(*args, **(kwargs or {}))
        given = by_name(func, args, kwargs or {})
        if "_foreach_" not in str(func):
            return self._run(func, given)
        results = [self._run(func, group) for group in _groups(given, self._most_bytes)]
        return None if results[0] is None else [each for group in results for each in group]

    def _run(self, func: OpOverload, given: Mapping[str, Any]) -> Any:
        return self._operators.run(
            lambda: func(**given),
            name=str(func),
            reads=_tensors(given),
            writes=_tensors([given.get(name) for name in written_names(func)]),
            new_bytes=_result_bytes(func, given, self._operators.device),
        )


def _groups(given: Mapping[str, Any], most_bytes: int) -> Iterator[dict[str, Any]]:
    """Cut the arguments of an operator that treats the tensors of its lists one by one: each group has one, or `most_bytes`."""
    lists = {name: value for name, value in given.items() if isinstance(value, (list, tuple)) or name == "scalars"}
    begin = size_bytes = 0
    for number, tensors in enumerate(zip(*lists.values(), strict=True)):
        added = sum(each.nbytes for each in tensors if isinstance(each, Tensor))
        if begin < number and size_bytes + added > most_bytes:
            yield {**given, **{name: value[begin:number] for name, value in lists.items()}}
            begin, size_bytes = number, 0
        size_bytes += added
    yield {**given, **{name: value[begin:] for name, value in lists.items()}}


def _tensors(arguments: Any) -> list[Tensor]:
    return [each for each in tree_leaves(arguments) if isinstance(each, Tensor)]


def _result_bytes(func: OpOverload, arguments: Mapping[str, Any], device: torch.device) -> int:
    """Return the bytes of the operator's results on the device, found by running it on tensors without memory.

    0 for an operator that cannot run there: its results count when they are there, and then others leave.
    """
    if all(each.alias_info is not None for each in func._schema.returns):
        return 0  # it writes to what is there
    given = arguments.get("device")
    if given is not None and torch.device(given).type != device.type:
        return 0

    def without_memory(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if type(value) not in PLAIN or value.layout is not torch.strided:
            raise NotImplementedError
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")

    replaced = {"generator": None, "device": torch.device("meta"), "pin_memory": False}
    try:
        results = func(**{name: replaced.get(name, value) for name, value in tree_map(without_memory, dict(arguments)).items()})
    except (NotImplementedError, RuntimeError, TypeError):
        return 0
    return sum(each.untyped_storage().nbytes() for each in _tensors(results))


# -- see [Note: Clipping what is out of reach]

_clipped: weakref.WeakSet[OperatorRunner] = weakref.WeakSet()


def clip_under_budget(operators: OperatorRunner) -> None:
    """From now on, gradients of this run that wait on drives are brought in where they are clipped or unscaled."""
    _clipped.add(operators)
    _replace_clipping()


@functools.cache
def _replace_clipping() -> None:
    # `clip_grad_norm_` calls the first two by these names, whoever has imported it.
    norm = torch.nn.utils.clip_grad._get_total_norm = _bringing_in(torch.nn.utils.clip_grad._get_total_norm)
    clip = torch.nn.utils.clip_grad._clip_grads_with_norm_ = _bringing_in(torch.nn.utils.clip_grad._clip_grads_with_norm_)
    torch.nn.utils.get_total_norm, torch.nn.utils.clip_grads_with_norm_ = norm, clip
    torch.nn.utils.clip_grad_value_ = _bringing_in(torch.nn.utils.clip_grad_value_)
    torch.amp.GradScaler._unscale_grads_ = _bringing_in(torch.amp.GradScaler._unscale_grads_)  # type: ignore[method-assign]


def _bringing_in(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def brought_in(*args: Any, **kwargs: Any) -> Any:
        with contextlib.ExitStack() as modes:
            for operators in _clipped:
                away = [block for block in operators.pager.blocks if block.state is State.OFFLOADED]
                if any(block.kind == "gradient" and block.tier == "storage" for block in away):
                    modes.enter_context(OperatorsUnderBudget(operators))
            return function(*args, **kwargs)

    return brought_in
