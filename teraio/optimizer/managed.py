"""All that teraio knows of one optimizer, in one object: its facts, its states as blocks, and its subgroups.

[Note: Optimizer states]
A tensor in `optimizer.state` that is large enough to move is a block like any other. It is persistent. The stage that updates
its parameter reads and writes it. User code may read, save and replace it. Smaller tensors (step counters, states of biases)
stay on the device and are counted in `Pager.fixed_bytes`.

The pager cannot tell a tensor that `torch.load` has read, or mapped, from memory whose address somebody else has. Such a tensor
would have to stay where it is. An optimizer that was given such states gets copies of them, which can leave. Each gets room
first, so that a loaded optimizer may be larger than the budget.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field
from itertools import chain
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_iter
from torch.utils.hooks import RemovableHandle

from runtime.execution import OperatorRunner
from runtime.paging import Block, Pager, holder_of
from teraio.distributed import GradientBuckets, ShardedParameters
from teraio.following import IterationObserver
from teraio.optimizer.arithmetic import emptied
from teraio.optimizer.facts import OptimizerFacts, OwnedParameter, bytes_of, moves, owned_parameters
from teraio.optimizer.subgroups import ParameterUpdate, PendingStep, Subgroups, SubgroupSizes


class ManagedOptimizer:
    """One optimizer of the process. Keeps neither the optimizer nor, outside of a step, a tensor of it alive.

    by: all managed optimizers, this one among them. facts: what was last read from the optimizer; `renew` reads them again.
    subgroups: how its parameters are cut. chosen: whether the user gave it to `teraio.manage_optimizer`.
    adoption_due: whether user code may have given it states that are no blocks yet. load_hook: on `load_state_dict`; None before
    its states have become blocks once. small_bytes: of all tensors in its state that are no blocks. had_blocks: whether a
    parameter of it was found to be a block once. Where everything fits, other memory that it got since is none.
    """

    def __init__(self, optimizer: Optimizer, by: ManagedOptimizers) -> None:
        self.facts = OptimizerFacts.of(optimizer)
        self._by, self._pager = by, by.pager
        self.subgroups = Subgroups(by.pager, by.sizes, on_host=by.on_host)
        self.chosen = False
        self.adoption_due = False
        self.had_blocks = False
        self.load_hook: RemovableHandle | None = None
        self._give_back: Callable[[], None] | None = None
        # By number of the parameter, name of the state, and position among the tensors of that name.
        self._blocks_of_states: dict[tuple[int, str, int], Block] = {}
        self.small_bytes = 0

    def renew(self) -> OptimizerFacts:
        """Read the facts again: where a step or a backward pass begins, since user code may have changed settings and hooks."""
        self.facts = OptimizerFacts.of(self.facts.optimizer)
        return self.facts

    @property
    def identity(self) -> tuple[str, int]:
        """What a trace and a plan know its steps by: another one for the same parameters takes its place (meta-learning)."""
        first = next((p for group in self.facts.optimizer.param_groups for p in group["params"]), self.facts.optimizer)
        return f"optimizer {self.facts.name}", id(first)

    @property
    def has_blocks(self) -> bool:
        """Whether a parameter of it is a block, or a shard of one that a graph takes."""
        own = (parameter for group in self.facts.optimizer.param_groups for parameter in group["params"])
        found = any(self._pager.known_block(parameter) is not None or parameter in self._by.sharded for parameter in own)
        self.had_blocks |= found
        return found

    # -- states that user code brings

    def adopt(self, loaded: Callable[[Optimizer], None]) -> None:
        """Make blocks of its large states, and count the others. Call `loaded` when `load_state_dict` has brought others.

        Waits while states are copied to memory that can leave.
        """
        self.adoption_due = False
        for owned in owned_parameters(self.facts.optimizer):
            state = self.facts.optimizer.state.get(owned.tensor)
            if self._pager.can_move and isinstance(state, dict):
                for name in [name for name, value in state.items() if self._is_immovable(value)]:
                    state[name] = self._copied(state[name])  # who owns the old one too, such as a loaded dictionary, keeps that
            self.state_blocks(owned)
        self.count_states()
        if self.load_hook is None:
            self.load_hook = self.facts.optimizer.register_load_state_dict_post_hook(loaded)

    # -- its states

    def state_blocks(self, owned: OwnedParameter, *, just_made: bool = False) -> list[Block]:
        """Return the blocks of a parameter's large states. New states become blocks.

        just_made: the states were made in the region that runs, and did not exist when it began. Waits while a state that was
        made before teraio managed the optimizer is moved to memory that can leave.
        """
        found = []
        for name, ordinal, tensor in _tensors(self.facts.optimizer.state, owned.tensor):
            if not moves(bytes_of(tensor)):
                continue
            self._pager.make_movable(tensor)
            full_name = self.state_name(owned, name) + (f".{ordinal}" if ordinal else "")
            block = self._pager.block_of(tensor, name=full_name, kind="optimizer_state", user_visible=not just_made)
            key = owned.number, name, ordinal
            before = self._blocks_of_states.get(key)
            if before is not None and before is not block and before.dead:  # a plan goes on with the new one
                self._by.observer.replace(before, block)
            self._blocks_of_states[key] = block
            found.append(block)
        self._pager.show_to_user(found)
        return found

    def state_name(self, owned: OwnedParameter, state: str) -> str:
        """Return the name of the block of a parameter's state."""
        own = self._pager.known_block(owned.tensor)
        owner = own.name if own is not None and not own.name.startswith("optimizer/") else str(owned.number)
        return f"optimizer/{owner}.{state}"

    def made_states(self, parameters: Iterable[OwnedParameter], known: Sequence[Block]) -> list[Block]:
        """Return the states of these parameters that are not in `known`, which an update has just made.

        Counts the small states again.
        """
        found = [block for owned in parameters for block in self.state_blocks(owned, just_made=True)]
        self.count_states()
        return [block for block in dict.fromkeys(found) if block not in known]

    def _copied(self, value: Tensor) -> Tensor:
        runner = OperatorRunner(self._pager, value.device)
        return runner.run(value.clone, name="a state of an optimizer", reads=(), writes=(), new_bytes=holder_of(value).nbytes)

    def _is_immovable(self, value: Any) -> bool:
        """Return whether a large state cannot leave, because somebody else may have its address."""
        if not isinstance(value, Tensor) or value.layout is not torch.strided or self._pager.known_block(value) is not None:
            return False
        held = holder_of(value)
        storage = held.untyped_storage()
        whole = held.nbytes == storage.nbytes() and moves(held.nbytes)
        return whole and not storage.resizable() and not storage.is_shared() and not self._pager.make_movable(value)

    def count_states(self) -> None:
        """Count the bytes of states that are no blocks."""
        storages: dict[int, int] = {}
        states = self.facts.optimizer.state
        for parameter in list(states):
            for _, _, tensor in _tensors(states, parameter):
                if self._pager.known_block(tensor) is None:
                    storage = holder_of(tensor).untyped_storage()
                    storages[storage._cdata] = storage.nbytes()
        self.small_bytes = sum(storages.values())
        self._by.count_small_states()

    # -- a step

    def pending_step(self) -> PendingStep:
        """Return what its next step touches. Parameters, gradients and states become blocks.

        To be called before a region begins: new blocks would count twice in a region.
        """
        parameters = owned_parameters(self.facts.optimizer)
        return PendingStep(facts=self.facts, parameters=parameters, updates=tuple(map(self._update, parameters)))

    def _update(self, owned: OwnedParameter) -> ParameterUpdate:
        number, parameter, gradient = owned.number, owned.tensor, owned.tensor.grad
        total_bytes = self.facts.trained_bytes(parameter)
        if gradient is None:
            return ParameterUpdate(total_bytes=total_bytes)
        others = self._by.buckets.hold(parameter) or (parameter in self._by.sharded and self._by.sharded.stay)
        own = gradient.layout is torch.strided and not others
        fresh = self.facts.sizes_made(parameter)
        return ParameterUpdate(
            total_bytes=total_bytes,
            elements=holder_of(parameter).numel(),
            fresh_bytes=sum(fresh),
            largest_fresh_bytes=max(fresh, default=0),
            parameter=self.block(parameter, number, "parameter"),
            gradient=self.block(gradient, number, "gradient") if own else None,
            states=tuple(self.state_blocks(owned)),
        )

    def block(self, tensor: Tensor, number: int, kind: Literal["parameter", "gradient"]) -> Block:
        """Return the block of the parameter with that number, or of its gradient. What is none becomes one."""
        return self._pager.block_of(tensor, name=f"optimizer/{kind}.{number}", kind=kind, user_visible=True)

    def leave_nothing(self) -> None:
        """All parameters are updated: PyTorch's own call of `step` finds none. `step_ended` gives them back."""
        self._give_back = emptied(self.facts.optimizer)

    def step_ended(self) -> bool:
        """Give the optimizer back the parameters that `leave_nothing` took. Return whether it had taken them."""
        give_back, self._give_back = self._give_back, None
        if give_back is not None:
            give_back()
        return give_back is not None


@dataclass(eq=False)
class ManagedOptimizers:
    """The `ManagedOptimizer` of each optimizer of the process. Keeps no optimizer alive.

    buckets, sharded: what other libraries hold of gradients and parameters. on_host: whether subgroups may update on the host.
    """

    pager: Pager
    observer: IterationObserver
    sizes: SubgroupSizes
    sharded: ShardedParameters
    _: KW_ONLY
    on_host: bool = False
    buckets: GradientBuckets = field(init=False, default_factory=GradientBuckets)
    _managed: weakref.WeakKeyDictionary[Optimizer, ManagedOptimizer] = field(
        init=False, default_factory=weakref.WeakKeyDictionary
    )

    def __iter__(self) -> Iterator[ManagedOptimizer]:
        for _optimizer, managed in list(self._managed.items()):  # the list keeps the optimizers alive meanwhile
            yield managed

    def of(self, optimizer: Optimizer) -> ManagedOptimizer:
        """Return what is known of the optimizer. An optimizer that is new here has no blocks yet."""
        managed = self._managed.get(optimizer)
        if managed is None:
            managed = self._managed[optimizer] = ManagedOptimizer(optimizer, self)
        return managed

    def count_small_states(self) -> None:
        """Count what stays on the device: states of all optimizers that are no blocks, and buckets of gradients."""
        self.pager.account.fixed_bytes = sum(managed.small_bytes for managed in self) + self.buckets.size_bytes


def _tensors(states: dict[Any, Any], parameter: Any) -> Iterator[tuple[str, int, Tensor]]:
    """Yield the strided tensors of a parameter's state that are on its device, each with its name and position."""
    state = states.get(parameter)  # a defaultdict, which gets no entry so
    named: Sequence[tuple[Any, Any]] = list(state.items()) if isinstance(state, dict) else [("state", state)]
    device = parameter.device if isinstance(parameter, Tensor) else None
    for name, value in named:
        leaves = (value,) if isinstance(value, Tensor) else tree_iter(value)
        for ordinal, leaf in enumerate(chain.from_iterable(map(_with_memory, leaves))):
            if isinstance(leaf, Tensor) and leaf.layout is torch.strided and device in (None, leaf.device):
                yield str(name), ordinal, leaf


def _with_memory(value: Any) -> Iterator[Any]:
    """Yield the tensors that hold the data of a state: of one of 8 bits its codes and scales, since it has no memory itself."""
    holder = holder_of(value) if isinstance(value, Tensor) else value
    if is_traceable_wrapper_subclass(holder):
        names, _ = holder.__tensor_flatten__()
        for name in names:
            yield from _with_memory(getattr(holder, name))
    else:
        yield value
