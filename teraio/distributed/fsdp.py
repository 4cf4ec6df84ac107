"""FSDP2 (`torch.distributed.fsdp.fully_shard`): where shards and gathered parameters lie, and what it does with them as stages.

[Note: Shards]
`fully_shard` replaces each parameter by this rank's shard, a DTensor. The optimizer updates shards. Before a module runs, FSDP
gathers its parameters into storages of its own, which it empties when the module has run. Compiled graphs take these.
* Gathered parameters are FSDP's. They count against the budget while they are there, and never move.
* Shards, and the optimizer's states for them, are blocks. On CPU they and their gradients move, and what FSDP does with them is a
  stage: [Note: Gathering as a stage]. On a GPU, shards and gradients stay on the device: FSDP reads and writes them in streams of
  its own, which nothing orders against copies. States move.
FSDP has no public interface that tells which storages are whose: `private_names.py` has the names that are used.

[Note: Gathering as a stage]
`fully_shard` makes groups of parameters. Before a group's module runs, and again before its backward pass, FSDP gathers: it reads
all shards of the group. After the backward pass it reduces: it reads whole gradients, and makes those of the shards, or adds to
them. Both happen in hooks, between compiled graphs. Here each is a region with one stage. So shards come to the device before
they are read, a plan sees when that is and brings them in time, and sharded gradients are blocks as soon as there are any.
* The stage ends when FSDP's call returns. From then on FSDP has copied the shards to memory of its own.
* What FSDP copies shards and gradients to does not count before it is a parameter or a gradient, see `docs/distributed.md`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.weak import WeakTensorKeyDictionary

from planner.errors import UnsupportedError
from runtime.paging import Block, Pager, holder_of
from teraio.distributed.library_calls import LibraryCalls
from teraio.distributed.private_names import FSDP_GROUP, FSDP_PARAMETER, FSDP_STATE, fsdp_states, module_states


class ShardedParameters:
    """The shards of those parameters that the graphs of one training run have taken. Keeps none of them alive.

    calls: make stages of what FSDP does with shards between graphs, where these can leave the device.
    """

    def __init__(self, calls: LibraryCalls) -> None:
        self._pager = calls.pager
        self._calls = calls
        self._shards: Any = WeakTensorKeyDictionary()
        self._gathered: dict[int, StorageWeakRef] = {}
        self._checked: set[tuple[type, type]] = set()  # classes of groups and parameters that have the names that are used

    def __contains__(self, parameter: Tensor) -> bool:
        return len(self._shards) > 0 and parameter in self._shards

    @property
    def stay(self) -> bool:
        """Whether shards and their gradients have to stay on the device, see [Note: Shards]."""
        return self._pager.device.asynchronous

    def note(self, parameters: Iterable[Any]) -> None:
        """A graph is about to take these parameters. Lets those stay where they are that FSDP has gathered.

        Raises UnsupportedError if FSDP itself moves shards between device and host, or is that of a torch that is not known.
        """
        if not module_states():
            return
        tensors = [each for each in parameters if isinstance(each, Tensor) and each.layout is torch.strided]
        new = {_key(each) for each in tensors if self._pager.known_block(each) is None}
        new -= self._gathered.keys()
        if not new:
            return
        for group, parameter in _sharded():
            self._check(group, parameter)
            gathered = getattr(parameter, "_unsharded_param", None)
            if gathered is not None and _key(gathered) in new:
                self._take(parameter, gathered)
                if not self.stay:
                    self._calls.replace(group, "unshard", _unshard)
                    self._calls.replace(group, "post_backward", _post_backward)

    def _check(self, group: Any, parameter: Any) -> None:
        if (type(group), type(parameter)) not in self._checked:
            FSDP_GROUP.require(group)
            FSDP_PARAMETER.require(parameter)
            self._checked.add((type(group), type(parameter)))

    def _take(self, parameter: Any, gathered: Tensor) -> None:
        if parameter.offload_to_cpu:
            raise UnsupportedError(
                "found fully_shard with CPUOffloadPolicy, which moves shards and updates them on the host by itself; leave out "
                "its argument offload_policy: teraio moves what does not fit, within the memory_budget"
            )
        storage = holder_of(gathered).untyped_storage()
        self._gathered[storage._cdata] = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        self._shards[parameter.sharded_param] = True
        self._pager.leave(gathered)
        if self.stay:
            self._pager.leave(parameter.sharded_param)
        else:
            self._pager.make_movable(parameter.sharded_param)


# Called in place of the methods of a group, an `FSDPParamGroup`, see [Note: Gathering as a stage].


def _unshard(calls: LibraryCalls, group: Any, async_op: bool = False) -> None:
    def gather() -> Sequence[Block]:
        type(group).unshard(group, async_op)
        return ()

    in_backward = group._training_state.name == "PRE_BACKWARD"
    begun = group._all_gather_result is not None or not group.is_sharded or (in_backward and not group.unshard_in_backward)
    if begun or not calls.active():
        gather()
        return
    shards, phase = _shards(calls.pager, group), "backward" if in_backward else "forward"
    with calls.region(("gather", id(group)), 1):
        calls.observer.run_stage(_name(group, phase, "gather"), gather, phase=phase, read=shards, collective=True)


def _post_backward(calls: LibraryCalls, group: Any, *unused: Any) -> None:
    found = (g for p in group.fsdp_params for g in (p.unsharded_accumulated_grad, getattr(_gathered(p), "grad", None)))
    whole = [gradient for gradient in found if gradient is not None]  # of all shards, that FSDP is about to reduce
    if not whole or not calls.active():
        type(group).post_backward(group, *unused)
        return
    pager = calls.pager
    reduced = _known_blocks(pager, whole)
    whole.clear()  # FSDP frees them before it makes the others
    gathered = _known_blocks(pager, [p for each in group.fsdp_params if (p := _gathered(each)) is not None])
    before = _gradients(pager, group)
    size = sum(each._sharded_param_data.nbytes for each in group.fsdp_params)

    def reduce() -> Sequence[Block]:
        type(group).post_backward(group, *unused)
        return [block for block in _gradients(pager, group) if block not in before]

    with calls.region(("reduce", id(group)), 1):
        made = calls.observer.run_stage(
            _name(group, "backward", "reduce"),
            reduce,
            phase="backward",
            read=list(dict.fromkeys((*reduced, *gathered, *before))),
            written=before,
            freed=[*reduced, *gathered],
            made_bytes=0 if before else size,
            workspace_bytes=size if before else 0,  # to be added to those that there are
            collective=True,
        )
        pager.show_to_user(made)


def _known_blocks(pager: Pager, tensors: Sequence[Tensor]) -> list[Block]:
    return [block for block in pager.known_blocks(tensors) if block is not None]


def _shards(pager: Pager, group: Any) -> list[Block]:
    """Return the blocks of the group's shards. New ones become blocks."""
    for each in group.fsdp_params:
        pager.make_movable(each.sharded_param)
    named = ((each.sharded_param, each._param_fqn) for each in group.fsdp_params)
    return [pager.block_of(shard, name=name, kind="parameter", user_visible=True) for shard, name in named]


def _gradients(pager: Pager, group: Any) -> list[Block]:
    """Return the blocks of the shards' gradients: one, since FSDP makes all of them in one storage, or a few."""
    named = ((each.sharded_param.grad, f"{each._param_fqn}.grad") for each in group.fsdp_params)
    found = (pager.block_of(g, name=name, kind="gradient", user_visible=False) for g, name in named if g is not None)
    return list(dict.fromkeys(found))


def _key(tensor: Tensor) -> int:
    key: int = holder_of(tensor).untyped_storage()._cdata
    return key


def _sharded() -> Iterator[tuple[Any, Any]]:
    """Yield FSDP's records of all parameters that this process has sharded, each with that of its group."""
    for state in fsdp_states():
        groups = getattr(state, "_fsdp_param_groups", None)
        if groups is None:  # torch < 2.13
            FSDP_STATE.require(state)
            groups = [state._fsdp_param_group]
        for group in groups:
            yield from ((group, each) for each in group.fsdp_params) if group is not None else ()


def _name(group: Any, phase: str, what: str) -> str:
    return f"{phase}/{'.'.join(filter(None, (group._module_fqn, what)))}"


def _gathered(parameter: Any) -> Tensor | None:
    """Return the whole parameter, if FSDP has made one; it may have freed its memory since."""
    found: Tensor | None = getattr(parameter, "_unsharded_param", None)
    return found
