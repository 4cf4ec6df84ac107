"""All that teraio knows of one optimizer, in one object: its states as blocks, its subgroups, and its narrowed groups."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from runtime.device import MIN_MOVED_BYTES
from runtime.paging import Block, Pager, holder_of
from teraio.distributed import GradientBuckets, ShardedParameters
from teraio.following import IterationObserver
from teraio.optimizer.capabilities import bytes_of, keeps_masters, reason_to_stay_whole, state_sizes, states_per_parameter
from teraio.optimizer.masters import lacks_master, master_bytes
from teraio.optimizer.parameters import OwnedParameter, ParameterGroups, ParameterUpdate, PendingStep, owned_parameters
from teraio.optimizer.states import OptimizerStates
from teraio.optimizer.subgroup_sizes import SubgroupSizes
from teraio.optimizer.subgroups import Subgroups


class ManagedOptimizer:
    """One optimizer of the process. Keeps neither the optimizer nor, outside of a step, a tensor of it alive.

    states: its states as blocks. subgroups: how its parameters are cut. buckets, sharded: what other libraries hold of its
    gradients and parameters.
    chosen: whether the user gave it to `teraio.manage_optimizer`.
    adoption_due: whether user code may have given it states that are no blocks yet.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        pager: Pager,
        *,
        states: OptimizerStates,
        subgroups: Subgroups,
        buckets: GradientBuckets,
        sharded: ShardedParameters,
    ) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._pager = pager
        self._buckets = buckets
        self._sharded = sharded
        self.states = states
        self.subgroups = subgroups
        self.chosen = False
        self.adoption_due = False
        self._had_blocks = False
        self._load_hook: RemovableHandle | None = None
        self._emptied: ParameterGroups | None = None

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer itself. Raises ReferenceError if nobody holds it any more."""
        optimizer = self._optimizer()
        if optimizer is None:
            raise ReferenceError("the optimizer is gone; this is a bug in teraio, please report it")
        return optimizer

    @property
    def identity(self) -> tuple[str, int]:
        """What a trace and a plan know its steps by: another one for the same parameters takes its place (meta-learning)."""
        first = next(iter(owned_parameters(self.optimizer)), None)
        return f"optimizer {type(self.optimizer).__name__}", id(self.optimizer if first is None else first.tensor)

    @property
    def has_blocks(self) -> bool:
        """Whether a parameter of it is a block, or a shard of one that a graph takes."""
        own = (owned.tensor for owned in owned_parameters(self.optimizer))
        found = any(self._pager.known_block(parameter) is not None or parameter in self._sharded for parameter in own)
        self._had_blocks |= found
        return found

    @property
    def has_had_blocks(self) -> bool:
        """Whether a parameter of it is or was a block. Where everything fits, other memory that it got since is none."""
        return self.has_blocks or self._had_blocks

    @property
    def keeps_masters(self) -> bool:
        """Whether it keeps fp32 copies of its half-precision parameters, see [Note: Master copies]."""
        return keeps_masters(self.optimizer)

    def reason_to_stay_whole(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
        """Return why a step with these arguments is not cut into subgroups; None if it is."""
        return reason_to_stay_whole(self.optimizer, args, kwargs)

    # -- states that user code brings

    @property
    def adopted(self) -> bool:
        """Whether its states have become blocks once."""
        return self._load_hook is not None

    def adopt(self, loaded: Callable[[Optimizer], None]) -> None:
        """Make blocks of its states; from now on call `loaded` when `load_state_dict` has brought others.

        Waits while states are copied to memory that can leave.
        """
        self.adoption_due = False
        self.states.adopt()
        if self._load_hook is None:
            self._load_hook = self.optimizer.register_load_state_dict_post_hook(loaded)

    def forget_loads(self) -> None:
        """Remove the hook on `load_state_dict`."""
        if self._load_hook is not None:
            self._load_hook.remove()

    # -- a step

    def pending_step(self) -> PendingStep:
        """Return what its next step touches. Parameters, gradients and states become blocks.

        To be called before a region begins: new blocks would count twice in a region.
        """
        optimizer = self.optimizer
        parameters = owned_parameters(optimizer)
        states, masters = states_per_parameter(optimizer), self.keeps_masters
        updates: list[list[ParameterUpdate]] = [[] for _ in optimizer.param_groups]
        for owned in parameters:
            updates[owned.group].append(self._update(optimizer, owned, states, masters))
        return PendingStep(optimizer=optimizer, parameters=parameters, updates=tuple(map(tuple, updates)))

    def _update(self, optimizer: Optimizer, owned: OwnedParameter, states: int, masters: bool) -> ParameterUpdate:
        number, parameter = owned.number, owned.tensor
        size = bytes_of(parameter)
        master = master_bytes(parameter) if masters else 0
        updated = master or size
        total_bytes = 2 * size + states * updated + master
        gradient = parameter.grad
        if gradient is None:
            return ParameterUpdate(total_bytes=total_bytes)
        others = self._buckets.hold(parameter) or (parameter in self._sharded and self._sharded.stay)
        own = gradient.layout is torch.strided and not others
        state_bytes = state_sizes(optimizer, parameter, updated)
        fresh_master = master if lacks_master(optimizer, parameter) else 0
        return ParameterUpdate(
            total_bytes=total_bytes,
            size_bytes=updated,
            master_bytes=master,
            device=parameter.device.type,
            dtype=parameter.dtype,
            elements=holder_of(parameter).numel(),
            fresh_bytes=fresh_master + (0 if self.states.exist(parameter) else sum(state_bytes)),
            state_bytes=max((*state_bytes, fresh_master), default=0),
            parameter=self._block(parameter, f"optimizer/parameter.{number}", "parameter"),
            gradient=self._block(gradient, f"optimizer/gradient.{number}", "gradient") if own else None,
            states=tuple(self.states.blocks(owned)),
        )

    def _block(self, tensor: Tensor, name: str, kind: str) -> Block:
        return self._pager.block_of(tensor, name=name, kind=kind, user_visible=True)

    def leave_nothing(self, groups: ParameterGroups) -> None:
        """All parameters are updated: PyTorch's own call of `step` finds none. `step_ended` gives them back."""
        groups.empty()
        self._emptied = groups

    def step_ended(self) -> bool:
        """Give the optimizer back the parameters that `leave_nothing` took. Return whether it had taken them."""
        emptied, self._emptied = self._emptied, None
        if emptied is not None:
            emptied.restore()
        return emptied is not None


class ManagedOptimizers:
    """The `ManagedOptimizer` of each optimizer of the process. Keeps no optimizer alive.

    buckets, sharded: see `ManagedOptimizer`. on_host: whether subgroups may be updated on the host.
    """

    def __init__(
        self,
        pager: Pager,
        recorder: IterationObserver,
        sizes: SubgroupSizes,
        *,
        sharded: ShardedParameters | None = None,
        min_moved_bytes: int = MIN_MOVED_BYTES,
        on_host: bool = False,
    ) -> None:
        self._pager = pager
        self._recorder = recorder
        self._on_host = on_host
        self.sizes = sizes
        self.buckets = GradientBuckets()
        self._sharded = sharded or ShardedParameters(pager)
        self._min_moved_bytes = min_moved_bytes
        self._managed: weakref.WeakKeyDictionary[Optimizer, ManagedOptimizer] = weakref.WeakKeyDictionary()

    def __iter__(self) -> Iterator[ManagedOptimizer]:
        for _optimizer, managed in list(self._managed.items()):  # the list keeps the optimizers alive meanwhile
            yield managed

    def of(self, optimizer: Optimizer) -> ManagedOptimizer:
        """Return what is known of the optimizer. An optimizer that is new here has no blocks yet."""
        managed = self._managed.get(optimizer)
        if managed is None:
            states = OptimizerStates(
                optimizer,
                self._pager,
                self._recorder,
                changed=self._count_small_states,
                min_moved_bytes=self._min_moved_bytes,
            )
            subgroups = Subgroups(self._pager, self.sizes, min_moved_bytes=self._min_moved_bytes, on_host=self._on_host)
            managed = self._managed[optimizer] = ManagedOptimizer(
                optimizer, self._pager, states=states, subgroups=subgroups, buckets=self.buckets, sharded=self._sharded
            )
        return managed

    def look_for_buckets(self) -> None:
        """Count the buckets of gradients that there are by now."""
        self.buckets.look()
        self._count_small_states()

    def _count_small_states(self) -> None:
        """States that are no blocks stay on the device, of all optimizers together, and so do buckets of gradients."""
        self._pager.fixed_bytes = sum(managed.states.small_bytes for managed in self) + self.buckets.size_bytes
