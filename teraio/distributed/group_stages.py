"""What FSDP2 does with shards between compiled graphs, as stages of the iteration.

[Note: Gathering as a stage]
`fully_shard` makes groups of parameters. Before a group's module runs, and again before its backward pass, FSDP gathers: it reads
all shards of the group. After the backward pass it reduces: it reads whole gradients, and makes those of the shards, or adds to
them. Both happen in hooks, between compiled graphs. Here each is a region with one stage. So shards come to the device before
they are read, a plan sees when that is and brings them in time, and sharded gradients are blocks as soon as there are any.
* The stage ends when FSDP's call returns. From then on FSDP has copied the shards to memory of its own.
* Its time has that of the collective in it, with the wait for other ranks. Copies of blocks go on meanwhile.
* What FSDP copies shards and gradients to does not count, see `docs/distributed.md`, until it is a parameter or gradient.
* Nothing of FSDP changes: the same calls in the same order, so ranks without these stages fit to ranks with them.
On a GPU, shards and their gradients stay on the device, see [Note: Shards], and there are no such stages.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from runtime.execution import StageRun
from runtime.paging import Block, Pager
from runtime.system import annotate, uninterrupted
from teraio.profiling import IterationRecorder

_NOT_AGAIN = "it is a collective, which all ranks have to launch as often"


class GroupStages:
    """Makes stages of the gathering and reducing of the groups that it is given. Keeps no group alive. Call `close` at the end.

    active: returns whether regions are managed now; otherwise FSDP runs as without teraio.
    """

    def __init__(self, pager: Pager, recorder: IterationRecorder, *, active: Callable[[], bool]) -> None:
        self._pager = pager
        self._recorder = recorder
        self._active = active
        self._groups: weakref.WeakSet[Any] = weakref.WeakSet()

    def watch(self, group: Any) -> None:
        """Make stages of what this group does, from its next call on. group: an `FSDPParamGroup`. Twice does no harm."""
        if "unshard" not in vars(group):  # else: watched, perhaps by another training run
            self._groups.add(group)
            group.unshard = _replacing(self._unshard, group)
            group.post_backward = _replacing(self._post_backward, group)

    def close(self) -> None:
        """Let all groups run as without teraio."""
        for group in list(self._groups):
            del group.unshard, group.post_backward
        self._groups.clear()

    def _unshard(self, group: Any, async_op: bool = False) -> None:
        def gather() -> None:
            type(group).unshard(group, async_op)

        in_backward = group._training_state.name == "PRE_BACKWARD"
        begun = group._all_gather_result is not None or not group.is_sharded or (in_backward and not group.unshard_in_backward)
        if begun or not self._active():
            return gather()
        self._run(group, "backward" if in_backward else "forward", "gather", gather, read=self._shards(group))

    def _post_backward(self, group: Any, *unused: Any) -> None:
        def reduce() -> None:
            type(group).post_backward(group, *unused)

        whole = [gradient for each in group.fsdp_params for gradient in _whole_gradients(each)]
        if not whole or not self._active():
            return reduce()
        read = [block for gradient in whole if (block := self._pager.known_block(gradient)) is not None]
        whole.clear()  # FSDP frees them before it makes the others
        own = sum(each._sharded_param_data.nbytes for each in group.fsdp_params)
        self._run(group, "backward", "reduce", reduce, read=read, made_bytes=own)

    def _run(
        self, group: Any, phase: str, what: str, call: Callable[[], None], *, read: Sequence[Block], made_bytes: int = 0
    ) -> None:
        """Run a call of FSDP as a region with one stage.

        read: blocks that it reads. made_bytes: of the gradients that it makes, or adds to those that are there.
        """
        name = f"{phase}/{'.'.join(filter(None, (group._module_fqn, what)))}"
        pager, recorder = self._pager, self._recorder
        before = self._gradients(group) if made_bytes else []
        used = list(dict.fromkeys((*read, *before)))
        with uninterrupted(), pager.device.region():
            pager.enter_region()
            try:
                recorder.region_begins((what, id(group)), 1)
                pager.acquire(used, made_bytes, name, then_fetch=recorder.stage_reached())
                try:
                    begin = pager.device.mark()
                    with annotate("stage", name):
                        call()
                    end = pager.device.mark()
                    after = self._gradients(group) if made_bytes else []
                finally:
                    pager.retire(used, before, last_used=read if made_bytes else ())
                recorder.stage_ended(
                    StageRun(
                        name=name,
                        phase=phase,
                        begin=begin,
                        end=end,
                        workspace_bytes=made_bytes if before else 0,
                        read=used,
                        made=[block for block in after if block not in before],
                        written=before,
                        never_again=_NOT_AGAIN,
                    )
                )
                pager.show_to_user(after)
            finally:
                recorder.region_ended()
                pager.leave_region()

    def _shards(self, group: Any) -> list[Block]:
        """Return the blocks of the group's shards. New ones become blocks."""
        for each in group.fsdp_params:
            self._pager.make_movable(each.sharded_param)
        return [
            self._pager.block_of(each.sharded_param, name=each._param_fqn, kind="parameter", user_visible=True)
            for each in group.fsdp_params
        ]

    def _gradients(self, group: Any) -> list[Block]:
        """Return the blocks of the shards' gradients. A group has one, since all its gradients share memory, or a few."""
        named = [(each.sharded_param.grad, each._param_fqn) for each in group.fsdp_params if each.sharded_param.grad is not None]
        found = (
            self._pager.block_of(gradient, name=f"{name}.grad", kind="gradient", user_visible=False) for gradient, name in named
        )
        return list(dict.fromkeys(found))


def _replacing(method: Callable[..., None], group: Any) -> Callable[..., None]:
    """Return what stands for a method of the group. It holds neither the group nor the object of `method` alive.

    Dynamo must not trace it: FSDP's hooks run between graphs.
    """
    reference, weak = weakref.ref(group), weakref.WeakMethod(method)
    name = method.__name__.removeprefix("_")

    @torch._dynamo.disable  # type: ignore[untyped-decorator]
    def call(*arguments: Any, **named: Any) -> None:
        own, run = reference(), weak()
        if own is not None and run is not None:
            run(own, *arguments, **named)
        elif own is not None:
            getattr(type(own), name)(own, *arguments, **named)

    return call


def _whole_gradients(parameter: Any) -> Iterator[Tensor]:
    """Yield the gradient of all shards that FSDP is about to reduce, if there is one."""
    gathered = getattr(parameter, "_unsharded_param", None)
    for gradient in (parameter.unsharded_accumulated_grad, None if gathered is None else gathered.grad):
        if gradient is not None:
            yield gradient
