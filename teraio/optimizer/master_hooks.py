"""The hooks of an optimizer that keeps masters. They also work where teraio does not manage its steps, or no longer does."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from planner.errors import UnsupportedError
from runtime.system import forget_undo, undo_if_interrupted, uninterrupted
from teraio.optimizer.arithmetic import MASTER, NarrowedGroups, run_step, scaling_put_aside
from teraio.optimizer.facts import HALF, OptimizerFacts, OwnHooks, StepArguments, after_closure, closure_of, owned_parameters
from teraio.optimizer.subgroups import cut

SUBGROUP_BYTES = 64 << 20
"""Bytes of masters that are updated together where there is no budget: their gradients in fp32 are temporary."""


def keep_masters(
    optimizer: Optimizer,
    on_device: Callable[[Iterable[Tensor]], AbstractContextManager[None]],
    *,
    subgroup_bytes: int = SUBGROUP_BYTES,
) -> None:
    """Make the optimizer keep masters from now on, see [Note: Master copies]. States that it has are cast to fp32.

    on_device: a context in which tensors can be read. subgroup_bytes: of masters that are updated together in steps that are not
    managed. Raises UnsupportedError, and changes nothing, if the optimizer cannot be cut into subgroups or was loaded before.
    """
    facts = OptimizerFacts.of(optimizer)
    if facts.keeps_masters:
        return
    refuse_with_masters(facts, facts.whole_because)
    named = [
        (group, optimizer.state[p])
        for group in optimizer.param_groups
        for p in group["params"]
        if p.dtype in HALF and p in optimizer.state
    ]
    if any(MASTER in state and state[MASTER].dtype != torch.float32 for _, state in named):
        raise UnsupportedError(
            f"master_weights: this optimizer's {MASTER} is not fp32, because load_state_dict has rounded it; call "
            "manage_optimizer(optimizer, master_weights=True) first, then load_state_dict"
        )
    for group, state in named:
        narrow = {name: value for name, value in state.items() if isinstance(value, Tensor) and value.dtype in HALF}
        with on_device(narrow.values()):
            state.update({name: _widened(group, state, name, value) for name, value in narrow.items()})
    hooks = MasterHooks(subgroup_bytes)
    optimizer.register_step_pre_hook(hooks.before)
    optimizer.register_step_post_hook(hooks.after)
    optimizer.register_load_state_dict_pre_hook(hooks.loading)
    # Otherwise a GradScaler would unscale the gradients in half precision, which it refuses to do in fp16.
    optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]


def _widened(group: dict[str, Any], state: dict[str, Any], name: str, value: Tensor) -> Tensor:
    if name == "sum" and "initial_accumulator_value" in group and not state["step"]:  # Adagrad begins with rounded sums
        return torch.full_like(value, group["initial_accumulator_value"], dtype=torch.float32)
    return value.float()


def refuse_with_masters(facts: OptimizerFacts, reason: str | None) -> None:
    """Raise UnsupportedError if there is a reason why this optimizer, which is to keep masters, cannot be cut into subgroups."""
    if reason is not None:
        raise UnsupportedError(
            f"master_weights: {facts.name} cannot be updated over fp32 copies: {reason}; use an optimizer of "
            "torch.optim that updates each parameter by itself, without step hooks"
        )


class MasterHooks(OwnHooks):
    """The hooks of one optimizer. If teraio has not updated its parameters, the pre-hook does so, some at a time.

    subgroup_bytes: of masters that are updated together there.
    """

    keeps_masters = True

    def __init__(self, subgroup_bytes: int = SUBGROUP_BYTES) -> None:
        self._subgroup_bytes = subgroup_bytes
        self._after = ExitStack()

    @torch._dynamo.disable  # type: ignore[untyped-decorator]
    def before(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> StepArguments | None:
        """Update all parameters that the optimizer shows now, and leave none for the step itself; after its closure, if any."""
        self._after.close()  # if the step before failed
        facts = OptimizerFacts.of(optimizer)
        refuse_with_masters(facts, facts.reason_to_stay_whole(args, kwargs))
        if closure_of(args, kwargs) is not None:
            return after_closure(args, kwargs, lambda: self._update_all(facts))
        self._update_all(facts)
        return None

    def _update_all(self, facts: OptimizerFacts) -> None:
        groups = NarrowedGroups(facts.optimizer)
        sizes = [facts.master_bytes(owned.tensor) or owned.tensor.nbytes for owned in owned_parameters(facts.optimizer)]
        with uninterrupted():
            undo_if_interrupted(self._restore)
            with ExitStack() as restoring:
                restoring.callback(groups.restore)
                for numbers in cut(sizes, self._subgroup_bytes):
                    groups.narrow(numbers)
                    run_step(facts)
                groups.narrow(())
                # PyTorch's own call would refuse a scale, or apply it to nothing: the updates above have used it up.
                restoring.enter_context(scaling_put_aside(facts.optimizer))
                self._after = restoring.pop_all()

    @torch._dynamo.disable  # type: ignore[untyped-decorator]
    def after(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Give the optimizer its parameters back."""
        with uninterrupted():
            self._restore()
            forget_undo(self._restore)

    def _restore(self) -> None:
        self._after.close()

    def loading(self, optimizer: Optimizer, content: dict[str, Any]) -> dict[str, Any]:
        """Return what `load_state_dict` is to load, so that it does not cast states to the parameter's type."""
        return {**content, "state": {number: _guarded(state) for number, state in content["state"].items()}}


def _guarded(state: Any) -> Any:
    if not isinstance(state, dict):
        return state
    floats = {name: v for name, v in state.items() if isinstance(v, Tensor) and v.is_floating_point() and name != "step"}
    return {**state, **{name: value.as_subclass(_Widening) for name, value in floats.items()}}


class _Widening(Tensor):
    """Becomes an fp32 tensor where `load_state_dict` casts it to half precision; shares the memory if it is fp32 already."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def to(self, *, dtype: torch.dtype, device: torch.device) -> Tensor:  # type: ignore[override]
        """Cast as `load_state_dict` asks, but to fp32 in place of half precision."""
        return self.as_subclass(Tensor).to(dtype=torch.float32 if dtype in HALF else dtype, device=device)
