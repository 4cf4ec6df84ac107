"""What FSDP2 does with shards between compiled graphs, as stages of the iteration.

[Note: Gathering as a stage]
`fully_shard` makes groups of parameters. Before a group's module runs, and again before its backward pass, FSDP gathers: it reads
all shards of the group. After the backward pass it reduces: it reads whole gradients, and makes those of the shards, or adds to
them. Both happen in hooks, between compiled graphs. Here each is a region with one stage. So shards come to the device before
they are read, a plan sees when that is and brings them in time, and sharded gradients are blocks as soon as there are any.
* The stage ends when FSDP's call returns. From then on FSDP has copied the shards to memory of its own.
* What FSDP copies shards and gradients to does not count before it is a parameter or a gradient, see `docs/distributed.md`.
On a GPU, shards and their gradients stay on the device, see [Note: Shards], and there are no such stages.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from runtime.paging import Block
from teraio.distributed.library_calls import LibraryCalls


class GroupStages:
    """Makes stages of the gathering and reducing of the groups that it is given. Keeps no group alive."""

    def __init__(self, calls: LibraryCalls) -> None:
        self._calls = calls

    def watch(self, group: Any) -> None:
        """Make stages of what this group does, from its next call on. group: an `FSDPParamGroup`. Twice does no harm."""
        self._calls.replace(group, "unshard", self._unshard)
        self._calls.replace(group, "post_backward", self._post_backward)

    def _unshard(self, group: Any, async_op: bool = False) -> None:
        def gather() -> Sequence[Block]:
            type(group).unshard(group, async_op)
            return ()

        in_backward = group._training_state.name == "PRE_BACKWARD"
        begun = group._all_gather_result is not None or not group.is_sharded or (in_backward and not group.unshard_in_backward)
        if begun or not self._calls.active():
            gather()
            return
        shards = self._shards(group)
        with self._calls.region(("gather", id(group)), 1):
            self._calls.stage(_name(group, "backward" if in_backward else "forward", "gather"), gather, read=shards)

    def _post_backward(self, group: Any, *unused: Any) -> None:
        whole = [gradient for each in group.fsdp_params for gradient in _whole_gradients(each)]
        if not whole or not self._calls.active():
            type(group).post_backward(group, *unused)
            return
        reduced = self._known_blocks(whole)
        whole.clear()  # FSDP frees them before it makes the others
        gathered = self._known_blocks([p for each in group.fsdp_params if (p := _gathered(each)) is not None])
        before = self._gradients(group)
        size = sum(each._sharded_param_data.nbytes for each in group.fsdp_params)

        def reduce() -> Sequence[Block]:
            type(group).post_backward(group, *unused)
            return [block for block in self._gradients(group) if block not in before]

        with self._calls.region(("reduce", id(group)), 1):
            self._calls.stage(
                _name(group, "backward", "reduce"),
                reduce,
                read=list(dict.fromkeys((*reduced, *gathered, *before))),
                written=before,
                freed=[*reduced, *gathered],
                made_bytes=0 if before else size,
                workspace_bytes=size if before else 0,  # to be added to those that there are
            )

    def _known_blocks(self, tensors: Sequence[Tensor]) -> list[Block]:
        return [block for tensor in tensors if (block := self._calls.pager.known_block(tensor)) is not None]

    def _shards(self, group: Any) -> list[Block]:
        """Return the blocks of the group's shards. New ones become blocks."""
        pager = self._calls.pager
        for each in group.fsdp_params:
            pager.make_movable(each.sharded_param)
        named = ((each.sharded_param, each._param_fqn) for each in group.fsdp_params)
        return [pager.block_of(shard, name=name, kind="parameter", user_visible=True) for shard, name in named]

    def _gradients(self, group: Any) -> list[Block]:
        """Return the blocks of the shards' gradients: one, since FSDP makes all of them in one storage, or a few."""
        named = ((each.sharded_param.grad, each._param_fqn) for each in group.fsdp_params)
        block_of = self._calls.pager.block_of
        found = (block_of(g, name=f"{name}.grad", kind="gradient", user_visible=False) for g, name in named if g is not None)
        return list(dict.fromkeys(found))


def _name(group: Any, phase: str, what: str) -> str:
    return f"{phase}/{'.'.join(filter(None, (group._module_fqn, what)))}"


def _whole_gradients(parameter: Any) -> Iterator[Tensor]:
    """Yield the gradient of all shards that FSDP is about to reduce, if there is one."""
    gathered = _gathered(parameter)
    for gradient in (parameter.unsharded_accumulated_grad, None if gathered is None else gathered.grad):
        if gradient is not None:
            yield gradient


def _gathered(parameter: Any) -> Tensor | None:
    """Return the whole parameter, if FSDP has made one; it may have freed its memory since."""
    found: Tensor | None = getattr(parameter, "_unsharded_param", None)
    return found
