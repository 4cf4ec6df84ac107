"""What an optimizer allows and needs: whether its step can be cut into subgroups, how much state it keeps, its temporaries."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.utils._pytree import tree_iter
from torch.utils.hooks import RemovableHandle

from runtime.device import MIN_MOVED_BYTES
from runtime.paging import holder_of
from teraio.distributed import is_sharded_over_all, rank_count

_ELEMENTWISE = frozenset("Adadelta Adagrad Adam AdamW Adamax ASGD NAdam RAdam RMSprop Rprop SGD".split())
"""Their update computes each element from the same element of gradient and states."""
_FUSED_ON_CPU = frozenset("Adagrad Adam AdamW SGD".split())
_BY_PARAMETER = frozenset("Adafactor Muon".split())
"""Their update looks at a whole parameter, but at no other parameter."""
USUAL_STATES = 2
"""Tensors of a parameter's size that most optimizers keep: for optimizers that have not made theirs yet."""
_COPIES = 2
_MORE_COPIES = 4
"""Temporaries of an update, in copies of a parameter."""
_TAKE_MORE_COPIES = _BY_PARAMETER | {"Rprop"}

StepArguments = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments of a step; the optimizer itself is the first of them."""


class OwnHooks:
    """Base of the classes whose step hooks belong to teraio. They leave gradients as they are.

    keeps_masters: whether an optimizer that has these hooks keeps masters, see [Note: Master copies].
    updates_alone: whether no other rank updates the parameters of an optimizer that has these hooks, see [Note: Several ranks].
    """

    keeps_masters = False
    updates_alone = False


class OwnerHooks(OwnHooks):
    """Marks optimizers whose parameters no other rank updates: those inside a `ZeroRedundancyOptimizer`."""

    updates_alone = True

    def __init__(self) -> None:
        self._handles: list[RemovableHandle] = []

    def mark(self, optimizer: Optimizer) -> None:
        """Mark the optimizer, unless it is marked."""
        if not is_marked(optimizer):
            self._handles.append(optimizer.register_step_pre_hook(self._before))

    def close(self) -> None:
        """Remove the marks."""
        for handle in self._handles:
            handle.remove()

    @torch._dynamo.disable  # type: ignore[untyped-decorator]
    def _before(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Do nothing: that the hook is there says enough."""


def keeps_masters(optimizer: Optimizer) -> bool:
    """Return whether the optimizer's half-precision parameters are updated over copies in fp32."""
    return any(hooks.keeps_masters for hooks in _own_hooks(optimizer))


def updates_alone(optimizer: Optimizer, parameter: torch.Tensor) -> bool:
    """Return whether no other rank updates the same elements of the parameter, so that they may be rounded in any way."""
    return rank_count() == 1 or is_marked(optimizer) or is_sharded_over_all(parameter)


def is_marked(optimizer: Optimizer) -> bool:
    """Return whether no other rank updates any parameter of the optimizer, see `OwnerHooks`."""
    return any(hooks.updates_alone for hooks in _own_hooks(optimizer))


def _own_hooks(optimizer: Optimizer) -> list[OwnHooks]:
    owners = [getattr(hook, "__self__", None) for hook in optimizer._optimizer_step_pre_hooks.values()]
    return [owner for owner in owners if isinstance(owner, OwnHooks)]


def reason_to_stay_whole(optimizer: Optimizer, args: Sequence[Any], kwargs: dict[str, Any]) -> str | None:
    """Return why a step may not be cut into subgroups; None if steps over subgroups give the same result, bit for bit.

    args, kwargs: of the step; the optimizer itself is the first of them.
    """
    kind = type(optimizer)
    if closure_of(args, kwargs) is not None and not calls_closure_first(optimizer):
        return "it is called with a closure"
    if not _updates_by_parameter(optimizer) or not hasattr(kind.step, "__wrapped__"):
        return "its update is not known to treat each parameter by itself"
    if any(group.get("differentiable") for group in optimizer.param_groups):
        return "it is differentiable"
    hooks = (
        *_global_optimizer_pre_hooks.values(),
        *_global_optimizer_post_hooks.values(),
        *optimizer._optimizer_step_pre_hooks.values(),
        *optimizer._optimizer_step_post_hooks.values(),
    )
    if any(not isinstance(getattr(hook, "__self__", None), OwnHooks) for hook in hooks):
        # A hook that runs after teraio's may still change gradients. A hook that runs before it must see all parameters.
        return "there are step hooks besides teraio's"
    return None


def reason_against_host(optimizer: Optimizer) -> str | None:
    """Return why no subgroup can be updated on the host's processor; None if some can, see also `updates_alone`."""
    if not is_elementwise(optimizer):
        return "its update does not compute each element by itself"
    if not any(updates_alone(optimizer, each) for group in optimizer.param_groups for each in group["params"]):
        # see [Note: Several ranks]
        return "several ranks train together, and what one of them rounds differently would make their parameters drift apart"
    if any(group.get("capturable") for group in optimizer.param_groups):
        return "it is capturable: its settings and counters are on the device"
    settings = [value for group in optimizer.param_groups for name, value in group.items() if name != "params"]
    if any(isinstance(value, torch.Tensor) and value.device.type != "cpu" for value in tree_iter(settings)):
        return "its settings are on the device, and a fused update would read them before they have been copied"
    if torch.are_deterministic_algorithms_enabled():
        return "deterministic algorithms are asked for, and it does not round as the device does"
    if getattr(optimizer, "grad_scale", None) is not None or getattr(optimizer, "found_inf", None) is not None:
        return "a GradScaler has it scale the gradients, which only the device knows the scale of"
    return None


def fused_on_host(optimizer: Optimizer, dtypes: Iterable[torch.dtype]) -> bool:
    """Return whether PyTorch has a fused update on CPU for parameters of these types, with the optimizer's settings."""
    return type(optimizer).__name__ in _FUSED_ON_CPU and all(dtype.is_floating_point for dtype in dtypes)


def closure_of(args: Sequence[Any], kwargs: dict[str, Any]) -> Callable[[], Any] | None:
    """Return the function of the user that a step with these arguments calls; None if there is none."""
    closure: Callable[[], Any] | None = args[1] if len(args) > 1 else kwargs.get("closure")
    return closure


def calls_closure_first(optimizer: Optimizer) -> bool:
    """Return whether a step calls its closure once, before all else, as those of `torch.optim` do, apart from LBFGS."""
    return _updates_by_parameter(optimizer) or type(optimizer) is torch.optim.SparseAdam


def after_closure(args: tuple[Any, ...], kwargs: dict[str, Any], then: Callable[[], None]) -> StepArguments:
    """Return the arguments of a step with another closure: it calls that of the user, then `then`, and returns the loss."""
    closure = closure_of(args, kwargs)

    # A step that is compiled would take the closure's model into its own graphs, past the backend that the model has.
    @torch._dynamo.disable  # type: ignore[untyped-decorator]
    def closure_and_then() -> Any:
        loss = closure() if closure is not None else None
        then()
        return loss

    if len(args) > 1:
        return (args[0], closure_and_then, *args[2:]), kwargs
    return args, {**kwargs, "closure": closure_and_then}


def _updates_by_parameter(optimizer: Optimizer) -> bool:
    kind = type(optimizer)
    return kind.__module__.startswith("torch.optim") and kind.__name__ in _ELEMENTWISE | _BY_PARAMETER


def is_elementwise(optimizer: Optimizer) -> bool:
    """Return whether the update is known to compute each element from the same element of gradient and states alone."""
    kind = type(optimizer)
    return kind.__module__.startswith("torch.optim") and kind.__name__ in _ELEMENTWISE


def states_per_parameter(optimizer: Optimizer) -> int:
    """Return how many tensors of a parameter's size the optimizer keeps for it at most. 0 for optimizers outside torch.optim."""
    kind = type(optimizer)
    groups = optimizer.param_groups
    if not kind.__module__.startswith("torch.optim"):
        return 0
    match kind.__name__:
        case "SGD":
            return int(any(group.get("momentum") for group in groups))
        case "RMSprop":
            return 1 + max(bool(g.get("momentum")) + bool(g.get("centered")) for g in groups)
        case "Adagrad" | "Adafactor" | "Muon":
            return 1
        case _:
            return 2 + int(any(group.get("amsgrad") for group in groups))


def state_sizes(optimizer: Optimizer, parameter: torch.Tensor, size_bytes: int) -> list[int]:
    """Return the bytes of each tensor that the optimizer keeps for the parameter. size_bytes: of what it updates.

    Adafactor keeps a row and a column of a matrix.
    """
    if type(optimizer) is torch.optim.Adafactor and parameter.dim() > 1:
        return [size_bytes // parameter.shape[dim] for dim in (-1, -2)] if parameter.numel() else []
    return [size_bytes] * states_per_parameter(optimizer)


def temporary_bytes(optimizer: Optimizer, parameters: Sequence[tuple[str, int]]) -> int:
    """Return what the update of these parameters (device type, bytes) allocates while it runs.

    A fused update allocates next to nothing, foreach copies of all parameters, any other copies of one parameter at a time.
    """
    groups = optimizer.param_groups
    copies = _MORE_COPIES if type(optimizer).__name__ in _TAKE_MORE_COPIES else _COPIES
    if all(group.get("fused") for group in groups):
        return 0
    on_gpu = any(device != "cpu" for device, _ in parameters)  # where torch chooses foreach by itself
    if any(group.get("foreach") or (group.get("foreach") is None and on_gpu) for group in groups):
        return copies * sum(size for _, size in parameters)
    return copies * max((size for _, size in parameters), default=0)


def update_bytes(optimizer: Optimizer, parameter: torch.Tensor) -> int:
    """Return what the first update of one parameter has on the device at least: it, its gradient, its states and their copies.

    Instead of states and copies also slices of them, at most a quarter of its size, see [Note: Updates by slices].
    """
    size = bytes_of(parameter)
    if is_elementwise(optimizer) and not keeps_masters(optimizer) and size >= 2 * MIN_MOVED_BYTES:
        return 2 * size + size // 4
    return 2 * size + states_per_parameter(optimizer) * size + temporary_bytes(optimizer, [(parameter.device.type, size)])


def bytes_of(tensor: torch.Tensor) -> int:
    """Return the bytes of the tensor's storage, however much of it the tensor shows."""
    return holder_of(tensor).untyped_storage().nbytes()
