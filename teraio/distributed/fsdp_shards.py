"""Parameters that `torch.distributed.fsdp.fully_shard` (FSDP2) has sharded.

[Note: Shards]
`fully_shard` replaces each parameter by this rank's shard, a DTensor. The optimizer updates shards. Before a module runs, FSDP
gathers its parameters into storages of its own, which it empties when the module has run. Compiled graphs take these.
* Gathered parameters are FSDP's. They count against the budget while they are there, and never move.
* Shards, and the optimizer's states for them, are blocks. On CPU they and their gradients move, and what FSDP does with them is a
  stage: [Note: Gathering as a stage]. On a GPU, shards and gradients stay on the device: FSDP reads and writes them in streams of
  its own, which nothing orders against copies. States move.
FSDP has no public interface that tells which storages are whose: `private_names.py` has the names that are used.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.weak import WeakTensorKeyDictionary

from planner.errors import UnsupportedError
from runtime.paging import Pager, holder_of
from teraio.distributed.fsdp_stages import GroupStages
from teraio.distributed.private_names import FSDP_GROUP, FSDP_PARAMETER, FSDP_STATE, fsdp_states, module_states


class ShardedParameters:
    """The shards of those parameters that the graphs of one training run have taken. Keeps none of them alive.

    groups: makes stages of what FSDP does with shards between graphs; None: they are no stages.
    """

    def __init__(self, pager: Pager, groups: GroupStages | None = None) -> None:
        self._pager = pager
        self._groups = groups
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
                if self._groups is not None and not self.stay:
                    self._groups.watch(group)

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
