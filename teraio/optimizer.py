"""The optimizer step under the budget: run by subgroups of parameters, each one a stage.

Works with unmodified `torch.optim` optimizers through PyTorch's global step hooks: the pre-hook runs the undecorated
`step` once for every subgroup with `param_groups` narrowed to it and leaves the groups empty for the original call, so
schedulers, state and hooks see one ordinary step. An optimizer whose update is not elementwise per parameter, or that is
called with a closure, runs as it is; what it touches that is not on the device is read and written through its stand-in.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import (
    _global_optimizer_post_hooks,
    _global_optimizer_pre_hooks,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from planner.errors import BudgetError
from runtime.block import Block
from runtime.executor import Observer
from runtime.pager import Pager

_LARGEST_SUBGROUP_BYTES = 64 << 20
_SMALLEST_SUBGROUP_BYTES = 1 << 20
_SUBGROUPS_PER_BUDGET = 16
_ELEMENTWISE = frozenset(
    "Adadelta Adagrad Adam AdamW Adamax ASGD NAdam RAdam RMSprop Rprop SGD".split()
)


class OptimizerSteps:
    """Hooks every optimizer of the process that updates managed parameters. Call `close` to unhook.

    active: whether steps are run by subgroups now. step_done is called with the optimizer after each step of it, when
    all bookkeeping is finished.
    """

    def __init__(
        self, pager: Pager, observer: Observer, *, active: Callable[[], bool], step_done: Callable[[Optimizer], None]
    ) -> None:
        self._pager = pager
        self._observer = observer
        self._active = active
        self._step_done = step_done
        self._state_bytes: dict[int, int] = {}
        self._narrowed: dict[int, list[list[Any]]] = {}
        self._handles = [
            register_optimizer_step_pre_hook(self._before),
            register_optimizer_step_post_hook(self._after),
        ]

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    def _is_ours(self, optimizer: Optimizer) -> bool:
        parameters = (p for group in optimizer.param_groups for p in group["params"])
        return any(self._pager.known_block(p) is not None for p in parameters)

    def _before(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self._active() or not self._is_ours(optimizer) or not can_split(optimizer, args, kwargs):
            return
        subgroups = list(_subgroups(optimizer, self._subgroup_bytes()))
        self._check_first_step(optimizer, subgroups)
        self._pager.enter()
        try:
            self._observer.region_begins(("optimizer", id(optimizer)), len(subgroups))
            groups = [group["params"] for group in optimizer.param_groups]
            try:
                for number, subgroup in enumerate(subgroups):
                    self._step_subgroup(optimizer, number, subgroup)
            finally:
                for group, parameters in zip(optimizer.param_groups, groups, strict=True):
                    group["params"] = parameters
        finally:
            self._observer.region_ended()
            self._pager.fence()
        for group in optimizer.param_groups:
            group["params"] = []
        self._narrowed[id(optimizer)] = groups

    def _subgroup_bytes(self) -> int:
        budget = self._pager.budget_bytes
        if budget is None:
            return _LARGEST_SUBGROUP_BYTES
        return min(max(budget // _SUBGROUPS_PER_BUDGET, _SMALLEST_SUBGROUP_BYTES), _LARGEST_SUBGROUP_BYTES)

    def _check_first_step(self, optimizer: Optimizer, subgroups: list[list[list[torch.Tensor]]]) -> None:
        """Before the first step allocates any state: will all of it fit beside one subgroup? Raises BudgetError."""
        budget = self._pager.budget_bytes
        if budget is None or optimizer.state:
            return
        parts = [[p for group in subgroup for p in group if p.grad is not None] for subgroup in subgroups]
        states = states_per_parameter(optimizer)
        sizes = [sum(p.untyped_storage().nbytes() for p in part) for part in parts]
        reserved = [_workspace_bytes(optimizer, part) for part in parts]  # with the new state of the part
        earlier = itertools.accumulate(sizes, initial=0)
        stages = zip(earlier, sizes, reserved, strict=False)
        largest = max((states * before + 2 * size + extra for before, size, extra in stages), default=0)
        needed = self._pager.fixed_bytes + largest
        if needed > budget:
            raise BudgetError(smallest_bytes=needed, budget_bytes=budget, stage="optimizer")

    def _step_subgroup(self, optimizer: Optimizer, number: int, subgroup: list[list[torch.Tensor]]) -> None:
        parameters = [p for group in subgroup for p in group if p.grad is not None]
        dense = [p.grad for p in parameters if p.grad is not None and p.grad.layout is torch.strided]
        gradients = [self._block(gradient, "gradient") for gradient in dense]
        own = [self._block(p, "parameter") for p in parameters]
        read = list(dict.fromkeys((*own, *gradients)))
        workspace = _workspace_bytes(optimizer, parameters)
        name = f"optimizer/subgroup.{number}"
        self._pager.acquire(read, workspace, name, then_fetch=self._observer.stage_reached())
        try:
            begin = time.perf_counter()
            for group, narrowed in zip(optimizer.param_groups, subgroup, strict=True):
                group["params"] = narrowed
            type(optimizer).step.__wrapped__(optimizer)  # type: ignore[attr-defined]
            seconds = time.perf_counter() - begin
        finally:
            self._count_state(optimizer)  # before what was reserved for new state is given back
            self._pager.retire(read, read)
        self._observer.stage_ended(
            name=name,
            phase="optimizer",
            seconds=seconds,
            workspace_bytes=workspace,
            read=read,
            made=[],
            written=own,
            next_uses={},
        )

    def _count_state(self, optimizer: Optimizer) -> None:
        """Optimizer state counts as resident."""
        self._state_bytes[id(optimizer)] = state_bytes(optimizer)
        self._pager.fixed_bytes = sum(self._state_bytes.values())

    def _block(self, tensor: torch.Tensor, kind: str) -> Block:
        return self._pager.block_of(tensor, name=f"optimizer/{kind}", kind=kind, user_visible=True)

    def _after(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        groups = self._narrowed.pop(id(optimizer), None)
        if groups is not None:
            for group, parameters in zip(optimizer.param_groups, groups, strict=True):
                group["params"] = parameters
        if self._is_ours(optimizer):
            self._count_state(optimizer)
            self._step_done(optimizer)


def can_split(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether one step equals steps over parts of the parameters, bit for bit."""
    kind = type(optimizer)
    closure = args[1] if len(args) > 1 else kwargs.get("closure")  # args[0] is the optimizer
    hooks = (
        *_global_optimizer_pre_hooks.values(),
        *_global_optimizer_post_hooks.values(),
        *optimizer._optimizer_step_pre_hooks.values(),
        *optimizer._optimizer_step_post_hooks.values(),
    )
    hooked = any(not isinstance(getattr(hook, "__self__", None), OptimizerSteps) for hook in hooks)
    return (
        not hooked  # one that runs after ours may still change gradients; one that runs before must see all parameters
        and kind.__module__.startswith("torch.optim")
        and kind.__name__ in _ELEMENTWISE
        and closure is None
        and hasattr(kind.step, "__wrapped__")
        and not any(group.get("differentiable") for group in optimizer.param_groups)
    )


def states_per_parameter(optimizer: Optimizer) -> int:
    """How many tensors of a parameter's size the optimizer keeps for it, at most."""
    kind = type(optimizer).__name__
    if kind == "SGD":
        return int(any(group.get("momentum") for group in optimizer.param_groups))
    if kind == "RMSprop":
        return 1 + max(bool(g.get("momentum")) + bool(g.get("centered")) for g in optimizer.param_groups)
    if kind == "Adagrad":
        return 1
    return 2 + int(any(group.get("amsgrad") for group in optimizer.param_groups))


def _subgroups(optimizer: Optimizer, subgroup_bytes: int) -> Iterator[list[list[torch.Tensor]]]:
    """Parts of the parameters of about `subgroup_bytes`, each as one list per parameter group."""
    count = len(optimizer.param_groups)
    part: list[list[torch.Tensor]] = [[] for _ in range(count)]
    size = 0
    for index, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            part[index].append(parameter)
            size += parameter.untyped_storage().nbytes()
            if size >= subgroup_bytes:
                yield part
                part, size = [[] for _ in range(count)], 0
    if any(part):
        yield part


def state_bytes(optimizer: Optimizer) -> int:
    """Bytes of all tensors in the optimizer's state, shared storages counted once."""
    storages: dict[int, int] = {}
    for state in optimizer.state.values():
        for value in state.values() if isinstance(state, dict) else ():
            if isinstance(value, torch.Tensor):
                storage = value.untyped_storage()
                storages[storage._cdata] = storage.nbytes()
    return sum(storages.values())


def _workspace_bytes(optimizer: Optimizer, parameters: list[torch.Tensor]) -> int:
    """Temporaries of the update: none to speak of if fused, two copies of all parameters of a part if foreach, else of one.

    A part that has no state yet (the first step) also allocates it.
    """
    sizes = [p.untyped_storage().nbytes() for p in parameters]
    first = sum(size for p, size in zip(parameters, sizes, strict=True) if not optimizer.state.get(p))
    if any(group.get("fused") for group in optimizer.param_groups):
        temporary = 0
    elif any(group.get("foreach") for group in optimizer.param_groups):
        temporary = 2 * sum(sizes)
    else:
        temporary = 2 * max(sizes, default=0)
    return temporary + states_per_parameter(optimizer) * first
