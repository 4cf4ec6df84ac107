"""What an optimizer allows and needs: read from it once for each step, so that nobody asks the optimizer itself again.

Also the ground that all files of the room stand on: parameters by number, closures of steps, and the hooks that are teraio's own.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.utils._pytree import tree_iter

from runtime.device import MIN_MOVED_BYTES
from runtime.paging import holder_of
from runtime.system import all_objects
from teraio.distributed import is_sharded_over_all, rank_count

# Their update computes each element from the same element of gradient and states.
_ELEMENTWISE = frozenset("Adadelta Adagrad Adam AdamW Adamax ASGD NAdam RAdam RMSprop Rprop SGD".split())
_BY_PARAMETER = frozenset("Adafactor Muon".split())  # their update looks at a whole parameter, but at no other parameter
_FUSED_ON_CPU = frozenset("Adagrad Adam AdamW SGD".split())
USUAL_STATES = 2  # tensors of a parameter's size that most optimizers keep: for optimizers that have not made theirs yet
HALF = frozenset({torch.bfloat16, torch.float16})
MASTER = "master_param"

# Positional and keyword arguments of a step; the optimizer itself is the first of them.
StepArguments = tuple[tuple[Any, ...], dict[str, Any]]


class Promise(NamedTuple):
    """What the user says of an optimizer outside of torch.optim, and what a trial has shown, see `arithmetic.promise`.

    elementwise, states_per_parameter, temporary_copies, foreach: see `OptimizerFacts`.
    """

    elementwise: bool
    states_per_parameter: int
    temporary_copies: int
    foreach: bool


class OwnHooks:
    """Base of the classes whose step hooks belong to teraio. They leave gradients as they are.

    promise: of the optimizer that has these hooks; None if there is none.
    keeps_masters: whether an optimizer that has these hooks keeps masters, see [Note: Master copies].
    updates_alone: whether no other rank updates the parameters of an optimizer that has these hooks, see [Note: Several ranks].
    """

    promise: Promise | None = None
    keeps_masters = False
    updates_alone = False

    @torch._dynamo.disable  # type: ignore[untyped-decorator]
    def there(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Do nothing before a step: that the hook is there says enough."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerFacts:
    """An optimizer as it was when these facts were read. Does not keep it alive.

    name: of its class. from_torch: the class is one of torch.optim.
    elementwise: its update is known, or promised, to compute each element from the same element of gradient and states alone.
    closure_first: a step calls its closure once, before all else, as those of torch.optim do, apart from LBFGS.
    keeps_masters: its half-precision parameters are updated over copies in fp32, see [Note: Master copies].
    is_alone: no other rank updates any of its parameters.
    states_per_parameter: tensors of a parameter's size that it keeps at most; 0 if nobody knows.
    temporary_copies: what an update allocates while it runs, in copies of a parameter. foreach: of all parameters at once; None:
    on a GPU, where torch chooses that by itself.
    whole_because: why no step may be cut into subgroups; None if steps over subgroups give the same result, bit for bit.
    off_host_because: why no subgroup can be updated on the host's processor; None if some can, see also `updates_alone`.
    """

    reference: weakref.ref[Optimizer]
    name: str
    from_torch: bool
    elementwise: bool
    closure_first: bool
    keeps_masters: bool
    is_alone: bool
    states_per_parameter: int
    temporary_copies: int
    foreach: bool | None
    whole_because: str | None
    off_host_because: str | None

    @classmethod
    def of(cls, optimizer: Optimizer) -> OptimizerFacts:
        """Read the facts. Reads settings and hooks only, no tensor on a device."""
        name = type(optimizer).__name__
        from_torch = type(optimizer).__module__.startswith("torch.optim")
        # Optimizers that wrap others may lack the hooks of PyTorch's base class.
        own_hooks = [owner for hook in _hooks_of(optimizer, "pre") if isinstance(owner := _owner(hook), OwnHooks)]
        promise = None if from_torch else next((hooks.promise for hooks in own_hooks if hooks.promise is not None), None)
        elementwise = from_torch and name in _ELEMENTWISE or promise is not None and promise.elementwise
        by_parameter = from_torch and name in _ELEMENTWISE | _BY_PARAMETER
        promised = 0 if promise is None else promise.states_per_parameter
        copies = 4 if name in _BY_PARAMETER | {"Rprop"} else 2
        is_alone = rank_count() == 1 or any(hooks.updates_alone for hooks in own_hooks)
        ways = [group.get("foreach") for group in optimizer.param_groups]
        fused = all(group.get("fused") for group in optimizer.param_groups)  # allocates next to nothing
        return cls(
            reference=weakref.ref(optimizer),
            name=name,
            from_torch=from_torch,
            elementwise=elementwise,
            closure_first=by_parameter or type(optimizer) is torch.optim.SparseAdam,
            keeps_masters=any(hooks.keeps_masters for hooks in own_hooks),
            is_alone=is_alone,
            states_per_parameter=_states_per_parameter(name, optimizer.param_groups) if from_torch else promised,
            temporary_copies=promise.temporary_copies if promise is not None else 0 if fused else copies,
            foreach=promise.foreach if promise is not None else True if any(ways) else None if None in ways else False,
            whole_because=_reason_to_stay_whole(
                optimizer, from_torch=from_torch, by_parameter=by_parameter or promise is not None
            ),
            off_host_because=_reason_against_host(optimizer, elementwise, is_alone),
        )

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer itself. Raises ReferenceError if nobody holds it any more."""
        optimizer = self.reference()
        if optimizer is None:
            raise ReferenceError("the optimizer is gone; this is a bug in teraio, please report it")
        return optimizer

    def reason_to_stay_whole(self, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None) -> str | None:
        """Return why a step with these arguments may not be cut into subgroups; None if it may."""
        if closure_of(args, kwargs or {}) is not None and not self.closure_first:
            return "it is called with a closure"
        return self.whole_because

    def updates_alone(self, parameter: Tensor) -> bool:
        """Return whether no other rank updates the same elements of the parameter, so that they may be rounded in any way."""
        return self.is_alone or is_sharded_over_all(parameter)

    def fused_on_host(self, dtypes: Iterable[torch.dtype]) -> bool:
        """Return whether PyTorch has a fused update on CPU for parameters of these types, with the optimizer's settings."""
        return self.from_torch and self.name in _FUSED_ON_CPU and all(dtype.is_floating_point for dtype in dtypes)

    def master_bytes(self, parameter: Tensor) -> int:
        """Return the bytes of the parameter's master, and of each state with its elements; 0 for a parameter without a master."""
        return parameter.numel() * torch.float32.itemsize if self.keeps_masters and parameter.dtype in HALF else 0

    def trained_bytes(self, parameter: Tensor) -> int:
        """Return the bytes of parameter, gradient, states and master, whether they exist yet or not."""
        size, master = bytes_of(parameter), self.master_bytes(parameter)
        return 2 * size + self.states_per_parameter * (master or size) + master

    def state_sizes(self, parameter: Tensor) -> list[int]:
        """Return the bytes of each tensor that the optimizer keeps for the parameter, without the master."""
        size = self.master_bytes(parameter) or bytes_of(parameter)
        factored = self.from_torch and self.name == "Adafactor" and self.states_per_parameter
        if factored and parameter.dim() > 1:  # keeps a row and a column of a matrix
            return [size // max(parameter.shape[dim], 1) for dim in (-1, -2)]
        return [size] * self.states_per_parameter

    def sizes_made(self, parameter: Tensor) -> list[int]:
        """Return the bytes of each tensor that the next update makes first: of states and master, unless they exist."""
        state, master = self.optimizer.state.get(parameter, {}), self.master_bytes(parameter)
        made = [] if any(isinstance(value, Tensor) for value in state.values()) else self.state_sizes(parameter)
        return [*made, master] if self.keeps_masters and parameter.dtype in HALF and MASTER not in state else made

    def temporary_bytes(self, parameters: Sequence[Tensor]) -> int:
        """Return what the update of these parameters allocates while it runs, casts between them and masters included.

        These are all gradients in fp32, and for one parameter at a time its value in fp32 and a byte for each element.
        """
        masters = [self.master_bytes(parameter) for parameter in parameters]
        sizes = [master or bytes_of(parameter) for master, parameter in zip(masters, parameters, strict=True)]
        at_once = self.foreach or (self.foreach is None and any(parameter.device.type != "cpu" for parameter in parameters))
        casts = sum(masters) + max(masters, default=0) // torch.float32.itemsize
        return self.temporary_copies * (sum(sizes) if at_once else max(sizes, default=0)) + casts

    def update_bytes(self, parameter: Tensor) -> int:
        """Return what the first update of one parameter has on the device at least: it, its gradient, states and temporaries.

        Instead of states and temporaries also slices of them, at most a quarter of its size, see [Note: Updates by slices].
        """
        size = bytes_of(parameter)
        if self.elementwise and not self.keeps_masters and size >= 2 * MIN_MOVED_BYTES:
            return 2 * size + size // 4
        return (2 + self.states_per_parameter + self.temporary_copies) * size


def _states_per_parameter(name: str, groups: list[dict[str, Any]]) -> int:
    match name:
        case "SGD":
            return int(any(group.get("momentum") for group in groups))
        case "RMSprop":
            return 1 + max(bool(group.get("momentum")) + bool(group.get("centered")) for group in groups)
        case "Adagrad" | "Adafactor" | "Muon":
            return 1
        case _:
            return 2 + int(any(group.get("amsgrad") for group in groups))


def _reason_to_stay_whole(optimizer: Optimizer, *, from_torch: bool, by_parameter: bool) -> str | None:
    hooked = hasattr(type(optimizer).step, "__wrapped__")
    if not by_parameter or not hooked:
        unknown = "its update is not known to treat each parameter by itself"
        if from_torch or not hooked:  # no promise is taken for these
            return unknown
        return f"{unknown} (if it does, promise that: manage_optimizer(optimizer, independent='elements' or 'parameters'))"
    if any(group.get("differentiable") for group in optimizer.param_groups):
        return "it is differentiable"
    # A hook that runs after teraio's may still change gradients. A hook that runs before it must see all parameters.
    everywhere = (*_global_optimizer_pre_hooks.values(), *_global_optimizer_post_hooks.values())
    hooks = (*everywhere, *_hooks_of(optimizer, "pre"), *_hooks_of(optimizer, "post"))
    return None if all(isinstance(_owner(hook), OwnHooks) for hook in hooks) else "there are step hooks besides teraio's"


def _reason_against_host(optimizer: Optimizer, elementwise: bool, is_alone: bool) -> str | None:
    if not elementwise:
        return "its update does not compute each element by itself"
    if not is_alone and not any(is_sharded_over_all(owned.tensor) for owned in owned_parameters(optimizer)):
        # see [Note: Several ranks]
        return "several ranks train together, and what one of them rounds differently would make their parameters drift apart"
    if any(group.get("capturable") for group in optimizer.param_groups):
        return "it is capturable: its settings and counters are on the device"
    settings = [value for group in optimizer.param_groups for name, value in group.items() if name != "params"]
    if any(isinstance(value, Tensor) and value.device.type != "cpu" for value in tree_iter(settings)):
        return "its settings are on the device, and a fused update would read them before they have been copied"
    if torch.are_deterministic_algorithms_enabled():
        return "deterministic algorithms are asked for, and it does not round as the device does"
    if getattr(optimizer, "grad_scale", None) is not None or getattr(optimizer, "found_inf", None) is not None:
        return "a GradScaler has it scale the gradients, which only the device knows the scale of"
    return None


def _hooks_of(optimizer: Optimizer, when: str) -> list[Callable[..., Any]]:
    return list(getattr(optimizer, f"_optimizer_step_{when}_hooks", {}).values())


def _owner(hook: Callable[..., Any]) -> object:
    return getattr(hook, "__self__", None)


# -- the function of the user that a step calls


def closure_of(args: Sequence[Any], kwargs: dict[str, Any]) -> Callable[[], Any] | None:
    """Return the function of the user that a step with these arguments calls; None if there is none."""
    closure: Callable[[], Any] | None = args[1] if len(args) > 1 else kwargs.get("closure")
    return closure


def after_closure(args: tuple[Any, ...], kwargs: dict[str, Any], then: Callable[[], None]) -> StepArguments | None:
    """Have `then` called once the gradients of a step are there: at once if it has no closure of the user.

    Otherwise return the arguments of the step with another closure: it calls that of the user, then `then`, and returns the loss.
    """
    closure = closure_of(args, kwargs)
    if closure is None:
        then()
        return None

    # A step that is compiled would take the closure's model into its own graphs, past the backend that the model has.
    @torch._dynamo.disable  # type: ignore[untyped-decorator]
    def closure_and_then() -> Any:
        loss = closure()
        then()
        return loss

    if len(args) > 1:
        return (args[0], closure_and_then, *args[2:]), kwargs
    return args, {**kwargs, "closure": closure_and_then}


# -- parameters


class OwnedParameter(NamedTuple):
    """A parameter of an optimizer: its number among all parameters of the optimizer, and the number of its group."""

    number: int
    group: int
    tensor: Tensor


def owned_parameters(optimizer: Optimizer) -> tuple[OwnedParameter, ...]:
    """Return all parameters that the optimizer has now, in order: the one with number n is at position n."""
    in_order = ((index, parameter) for index, group in enumerate(optimizer.param_groups) for parameter in group["params"])
    return tuple(OwnedParameter(number, index, parameter) for number, (index, parameter) in enumerate(in_order))


def optimizers_alive() -> Iterator[Optimizer]:
    """Yield all optimizers of the process. Looks through all objects of Python, which takes a while: for errors only."""
    return (found for found in all_objects(Optimizer) if hasattr(found, "param_groups"))


def bytes_of(tensor: Tensor) -> int:
    """Return the bytes of the tensor's storage, however much of it the tensor shows."""
    return holder_of(tensor).untyped_storage().nbytes()


def moves(size_bytes: int) -> bool:
    """Return whether so much memory is enough to be moved."""
    return size_bytes >= MIN_MOVED_BYTES


def cut(sizes: Sequence[int], subgroup_bytes: int, *, alone: Container[int] = (), joined: Container[int] = ()) -> Iterator[range]:
    """Yield the numbers of the parameters of subgroups of about `subgroup_bytes`, in order; 0: one parameter each.

    sizes: bytes of each parameter. A subgroup is larger than `subgroup_bytes` only where one parameter is, together with small
    ones before it. alone: numbers of parameters that are a subgroup by themselves. joined: numbers of parameters that are in the
    subgroup of the one before.
    """
    begin = size = 0
    for number, parameter_bytes in enumerate(sizes):
        full = size + parameter_bytes > subgroup_bytes and 2 * size >= subgroup_bytes
        apart = number in alone or number - 1 in alone
        if number > begin and (apart or (full and number not in joined)):
            yield range(begin, number)
            begin, size = number, 0
        size += parameter_bytes
    if begin < len(sizes):
        yield range(begin, len(sizes))
