"""Runs the optimizer's own arithmetic: over some of its parameters, over other tensors in their place, and over masters.

[Note: Master copies]
A bf16 or fp16 parameter rounds away an update that is much smaller than itself. An optimizer that keeps masters has a copy in
fp32 of each such parameter: the state "master_param", made at the first update. Its other states are in fp32 as well. An update
casts the gradient to fp32, runs the optimizer's own arithmetic over the master, and rounds the master to the parameter
(Micikevicius et al., Mixed Precision Training, ICLR 2018). All other parameters are updated as usual.

The parameter decides. If an element is not what its master rounds to, user code has written to it (by loading other weights, for
example), and the master takes its value before the update.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, cast

import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_iter

from planner.errors import UnsupportedError
from runtime.system import forget_undo, undo_if_interrupted, uninterrupted
from teraio.optimizer.facts import (
    HALF,
    MASTER,
    OptimizerFacts,
    OwnedParameter,
    OwnHooks,
    Promise,
    StepArguments,
    after_closure,
    cut,
    owned_parameters,
)

# Their fused kernels respect `grad_scale` and `found_inf`. That of SGD damages its momentum when it should do nothing.
_SCALING = frozenset({"Adam", "AdamW"})

# Shown by groups that show no parameter: of a group without any, Dynamo finds that all are on a GPU, and makes it capturable.
_NOTHING = torch.empty(0, device="cpu")


def emptied(optimizer: Optimizer) -> Callable[[], None]:
    """Show the optimizer no parameters, by copies of its groups. Return what gives it its own groups back: for one step only."""
    groups = optimizer.param_groups
    optimizer.param_groups = [{**group, "params": [_NOTHING]} for group in groups]
    return partial(setattr, optimizer, "param_groups", groups)


@dataclass(frozen=True, slots=True, kw_only=True)
class Replica:
    """Stands for a parameter of a group in one update: the parameter itself, or a copy in other memory or of other precision.

    `parameter` has its gradient in `.grad`. `state` receives what the update makes.
    """

    group: int
    parameter: Tensor
    state: dict[str, Any]


def has_elements_of(state: Any, parameter: Tensor) -> bool:
    """Return whether a state has one element for each element of the parameter."""
    return isinstance(state, Tensor) and state.numel() == parameter.numel()


def copied(value: Any) -> Any:
    """Return a copy of a state that is a tensor, and any other value as it is."""
    return value.clone() if isinstance(value, Tensor) else value


def run_step(facts: OptimizerFacts, parameters: Iterable[OwnedParameter]) -> None:
    """Run the optimizer's step over these of its parameters, without hooks; over masters if it keeps them. Waits as that does.

    If a `GradScaler` has set `optimizer.grad_scale`, gradients are divided by it, and nothing is updated if `optimizer.found_inf`
    is not zero.
    """
    optimizer, inverse_scale = facts.optimizer, None
    replicas = [
        Replica(group=owned.group, parameter=owned.tensor, state=optimizer.state.get(owned.tensor, {}))
        for owned in parameters
        if owned.tensor.grad is not None
    ]
    kernel_scales = facts.from_torch and facts.name in _SCALING and all(group.get("fused") for group in optimizer.param_groups)
    with ExitStack() as aside:
        if facts.keeps_masters and not kernel_scales:
            scale, found_inf = aside.enter_context(scaling_put_aside(optimizer))
            if found_inf is not None and found_inf.item():
                return
            inverse_scale = None if scale is None else scale.double().reciprocal().float()
        update_replicas(facts, replicas, inverse_scale=inverse_scale)
    for replica in replicas:
        if replica.state:
            optimizer.state[replica.parameter] = replica.state


@contextmanager
def scaling_put_aside(optimizer: Optimizer) -> Iterator[tuple[Tensor | None, Tensor | None]]:
    """Take `grad_scale` and `found_inf` away for a while, and give them. Updates that are not fused refuse to run with them."""
    attributes: dict[str, Any] = vars(optimizer)
    kept: dict[str, Any] = {name: attributes.pop(name) for name in ("grad_scale", "found_inf") if name in attributes}
    try:
        yield kept.get("grad_scale"), kept.get("found_inf")
    finally:
        attributes.update(kept)


@torch.no_grad()
def update_replicas(
    facts: OptimizerFacts, replicas: Sequence[Replica], *, inverse_scale: Tensor | None = None, fused: bool = False
) -> None:
    """Update replicas and their states, without hooks; in any thread. Over masters if the optimizer keeps them.

    inverse_scale: gradients are multiplied by it. Masters are states of the replicas; missing ones are made. fused: use PyTorch's
    fused implementation for CPUs, whatever the groups say. Waits as the optimizer's step does.
    """
    masters = [_master(each) if facts.keeps_masters and each.parameter.dtype in HALF else None for each in replicas]
    updated = [_updated(*pair, inverse_scale) for pair in zip(replicas, masters, strict=True)]
    _run(facts.optimizer, updated, fused)
    for replica, master, done in zip(replicas, masters, updated, strict=True):
        if master is not None:
            replica.parameter.copy_(master)
            replica.state.update({MASTER: master, **done.state})


def _run(optimizer: Optimizer, replicas: Sequence[Replica], fused: bool) -> Optimizer:
    """Run the optimizer's step over the replicas, with its present settings, by a twin of it. Return the twin."""
    groups: dict[int, list[Replica]] = defaultdict(list)
    for replica in replicas:
        groups[replica.group].append(replica)
    # A twin that shares all but parameters and states: the optimizer itself may be in use by another thread meanwhile.
    twin = object.__new__(type(optimizer))
    twin.__dict__.update(optimizer.__dict__)
    twin.param_groups = [
        {
            **group,
            # The fused kernels would treat tensors with gaps, or of different strides, as dense.
            **({"fused": True, "foreach": False} if fused and all(map(_is_dense, groups[number])) else {}),
            "params": [replica.parameter for replica in groups[number]],
        }
        for number, group in enumerate(optimizer.param_groups)
    ]
    twin.state = defaultdict(dict, {replica.parameter: replica.state for replica in replicas if replica.state})
    type(twin).step.__wrapped__(twin)  # type: ignore[attr-defined]
    for replica in replicas:
        made = twin.state.get(replica.parameter)
        if made is not None and made is not replica.state:
            replica.state.update(made)
    return twin


def _is_dense(replica: Replica) -> bool:
    parameter, gradient = replica.parameter, replica.parameter.grad
    states = [v for v in replica.state.values() if isinstance(v, Tensor) and v.size() == parameter.size() and v.dim()]
    tensors = [parameter, *([gradient] if gradient is not None else []), *states]
    dense = (t.is_contiguous() or t.nbytes == t.untyped_storage().nbytes() for t in tensors)
    return all(dense) and all(t.stride() == parameter.stride() for t in tensors)


def _master(replica: Replica) -> Tensor:
    """Return the parameter's master, brought up to date, see [Note: Master copies]."""
    parameter, master = replica.parameter, replica.state.get(MASTER)
    if master is None:
        return parameter.float()
    rounded = master.to(parameter.dtype)
    # On another device the host would have to wait for the answer.
    if parameter.device.type == "cpu" and _same_bits(rounded, parameter):
        return cast(Tensor, master)
    written = rounded.ne(parameter)
    del rounded  # the memory that was reserved is not enough for it and what comes now
    return torch.where(written, parameter.float(), master, out=master)


def _same_bits(one: Tensor, other: Tensor) -> bool:
    """Compare tensors in half precision, for which `torch.equal` is slow: four elements at a time where memory allows it."""
    together = torch.int64.itemsize // one.element_size()
    if all(t.is_contiguous() and t.numel() % together == t.storage_offset() % together == 0 for t in (one, other)):
        return torch.equal(one.view(-1).view(torch.int64), other.view(-1).view(torch.int64))
    return torch.equal(one.view(torch.int16), other.view(torch.int16))


def _updated(replica: Replica, master: Tensor | None, inverse_scale: Tensor | None) -> Replica:
    """Return what the optimizer updates in place of the replica: its master, if it has one, with the gradient in fp32."""
    gradient = replica.parameter.grad
    if master is not None and gradient is not None:
        gradient = gradient.float()
        stand_in = master.detach()  # so that the master does not keep the gradient
        stand_in.grad = gradient
        # Without the master itself: optimizers make their states where there is nothing yet.
        states = {name: value for name, value in replica.state.items() if name != MASTER}
        replica = Replica(group=replica.group, parameter=stand_in, state=states)
    if inverse_scale is not None and gradient is not None:
        gradient.mul_(inverse_scale)
    return replica


# -- optimizers of one's own

_TRIED_SHAPE = (8, 16)
_TRIED_STEPS = 3


def promise(optimizer: Optimizer, independent: Literal["parameters", "elements"]) -> None:
    """Take the user's word that the update treats each parameter, or each element of it, independently of all others.

    A trial with small tensors looks for the opposite first: updates together and apart must have the same bits, and a step must
    change nothing but parameters and their states. It does not change the optimizer, nor PyTorch's random numbers. Raises
    UnsupportedError if it finds something; waits for a few updates.
    """
    name, step = type(optimizer).__name__, type(optimizer).step
    if not hasattr(step, "__wrapped__"):
        raise UnsupportedError(f"manage_optimizer: {name}.step has no hooks of torch.optim.Optimizer; derive the class from it")
    promises = []
    with torch.random.fork_rng(devices=[]), _disable_current_modes(), torch.no_grad(), scaling_put_aside(optimizer):
        for owned in {each.group: each for each in owned_parameters(optimizer)}.values():
            try:
                promises.append(_tried(optimizer, owned, elementwise=independent == "elements"))
            except Exception as error:
                raised = f"a step with new parameters raises {type(error).__name__}: {error}"
                found = error if isinstance(error, _Broken) else raised
                raise UnsupportedError(
                    f"manage_optimizer: {name} does not treat {independent} independently: {found}; leave `independent` out, so "
                    "that it is updated as a whole"
                ) from error
    kept = Promise(*(max(values) for values in zip(*promises, strict=True)))
    hooks = OwnHooks()
    hooks.promise = kept
    optimizer.register_step_pre_hook(hooks.there)


class _Broken(Exception):
    """What breaks a promise, in words."""


def _tried(optimizer: Optimizer, owned: OwnedParameter, *, elementwise: bool) -> Promise:
    """Try updates of small tensors in place of a parameter. Raises _Broken."""
    parameter, draw = owned.tensor, torch.Generator().manual_seed(0)
    device = torch.device("cpu") if isinstance(parameter, FakeTensor) else parameter.device

    def drawn() -> list[Tensor]:
        return [torch.randn(_TRIED_SHAPE, generator=draw).to(device, parameter.dtype) for _ in range(_TRIED_STEPS + 1)]

    def after(*given: Sequence[Tensor]) -> list[Replica]:
        with _disable_current_modes():  # what is made here is no memory of the update
            tried = [[each.clone() for each in of_one] for of_one in given]
        replicas = [Replica(group=owned.group, parameter=each[0], state={}) for each in tried]
        for number in range(1, _TRIED_STEPS + 1):
            for replica, each in zip(replicas, tried, strict=True):
                replica.parameter.grad = each[number]
            before = _settings(optimizer)
            found = _settings(_run(optimizer, replicas, fused=False))
            if changed := [key for key, value in found.items() if before.get(key) != value]:
                raise _Broken(f"its step changes {', '.join(changed)}, and would for each subgroup")
        return replicas

    one, other = drawn(), drawn()
    with _MostAllocated() as by_one:
        (alone,) = after(one)
    with _MostAllocated() as by_two:
        both = after(one, other)
    if not all(map(_equal, both, (alone, *after(other)))):
        raise _Broken("the update of one parameter depends on another one")
    if elementwise:
        halves = after(*([each[rows] for each in one] for rows in (slice(4), slice(4, None))))
        parts = [_elements_of(each) for each in halves]
        if not all(torch.equal(value, torch.cat([each[name] for each in parts])) for name, value in _elements_of(alone).items()):
            raise _Broken("the update of one element depends on another one")
    size = alone.parameter.nbytes
    states = sum(value.nbytes for name, value in _elements_of(alone).items() if name)
    temporary = by_one.most_bytes - states
    at_once = by_two.most_bytes - 2 * states > temporary + size
    return Promise(elementwise, -(-states // size), -(-temporary // size), at_once)


def _elements_of(replica: Replica) -> dict[str, Tensor]:
    """Return the parameter, under the name "", and the states that have its elements."""
    states = {name: value for name, value in replica.state.items() if has_elements_of(value, replica.parameter)}
    return {"": replica.parameter, **states}


def _equal(one: Replica, other: Replica) -> bool:
    pairs = [(one.parameter, other.parameter), *((value, other.state.get(name)) for name, value in one.state.items())]
    same = (torch.equal(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else a == b for a, b in pairs)
    return one.state.keys() == other.state.keys() and all(same)


def _settings(optimizer: Optimizer) -> dict[str, object]:
    """Return what an optimizer has beside parameters and their states, in values that compare."""
    own = {f"self.{name}": value for name, value in vars(optimizer).items() if name not in ("param_groups", "state")}
    groups = {
        f"the group's {name!r}": [group.get(name) for group in optimizer.param_groups]
        for group in optimizer.param_groups
        for name in group
        if name != "params"
    }
    return {name: _comparable(value) for name, value in (own | groups).items()}


def _comparable(value: Any) -> object:
    match value:
        case Tensor():
            return id(value), value._version
        case dict():
            return {str(key): _comparable(each) for key, each in value.items()}
        case list() | tuple():
            return [_comparable(each) for each in value]
        case int() | float() | complex() | str() | None:
            return value
        case _:
            return id(value)


class _MostAllocated(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Finds the most bytes that operators have made and that are alive at once."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.most_bytes = self._bytes = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {each.untyped_storage()._cdata for each in tree_iter((args, kwargs)) if isinstance(each, Tensor)}
        for made in tree_iter(result):
            if isinstance(made, Tensor) and (storage := made.untyped_storage())._cdata not in given | self._known:
                self._known.add(storage._cdata)
                self._bytes += storage.nbytes()
                weakref.finalize(storage, self._gone, storage._cdata, storage.nbytes()).atexit = False
        self.most_bytes = max(self.most_bytes, self._bytes)
        return result

    def _gone(self, key: int, size_bytes: int) -> None:
        self._known.discard(key)
        self._bytes -= size_bytes


# Bytes of masters that are updated together in steps that are not managed: their gradients in fp32 are temporary.
SUBGROUP_BYTES = 64 << 20


def keep_masters(optimizer: Optimizer, on_device: Callable[[Iterable[Tensor]], AbstractContextManager[None]]) -> None:
    """Make the optimizer keep masters from now on, see [Note: Master copies]. States that it has are cast to fp32.

    on_device: a context in which tensors can be read. Raises UnsupportedError, and changes nothing, if the optimizer cannot be
    cut into subgroups or was loaded before.
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
    hooks = MasterHooks()
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
    """The hooks of one optimizer that keeps masters: they also work where teraio does not manage its steps.

    If teraio has not updated its parameters, the pre-hook does so, some at a time.
    """

    keeps_masters = True

    def __init__(self) -> None:
        self._after = ExitStack()

    @torch._dynamo.disable  # type: ignore[untyped-decorator]
    def before(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> StepArguments | None:
        """Update all parameters that the optimizer shows now, and leave none for the step itself; after its closure, if any."""
        self._after.close()  # if the step before failed
        facts = OptimizerFacts.of(optimizer)
        refuse_with_masters(facts, facts.reason_to_stay_whole(args, kwargs))
        return after_closure(args, kwargs, lambda: self._update_all(facts))

    def _update_all(self, facts: OptimizerFacts) -> None:
        optimizer, parameters = facts.optimizer, owned_parameters(facts.optimizer)
        sizes = [facts.master_bytes(owned.tensor) or owned.tensor.nbytes for owned in parameters]
        with uninterrupted():
            undo_if_interrupted(self._after.close)
            for numbers in cut(sizes, SUBGROUP_BYTES):
                run_step(facts, [parameters[number] for number in numbers])
            self._after.callback(emptied(optimizer))
            # PyTorch's own call would refuse a scale, or apply it to nothing: the updates above have used it up.
            self._after.enter_context(scaling_put_aside(optimizer))

    @torch._dynamo.disable  # type: ignore[untyped-decorator]
    def after(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Give the optimizer its parameters back."""
        with uninterrupted():
            self._after.close()
            forget_undo(self._after.close)

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
