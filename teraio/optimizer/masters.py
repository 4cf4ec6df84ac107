"""Updates of half-precision parameters over copies of them in fp32.

[Note: Master copies]
A bf16 or fp16 parameter rounds away an update that is much smaller than itself. An optimizer that keeps masters has beside its
other states, all in fp32, a copy of each such parameter in fp32: the state "master_param", made at the first update. An update
casts the gradient to fp32, runs the optimizer's own arithmetic over the master, and rounds the master to the parameter
(Micikevicius et al., Mixed Precision Training, ICLR 2018). All other parameters are updated as ever.

The parameter decides: where it is no longer what its master rounds to, user code has written to it (loaded other weights, say),
and the master takes its value before it is updated, element by element.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from teraio.optimizer.capabilities import keeps_masters
from teraio.optimizer.replica import Replica, ReplicaUpdate

MASTER = "master_param"
HALF = frozenset({torch.bfloat16, torch.float16})

_SCALING = frozenset({"Adam", "AdamW"})
"""Their fused kernels heed `grad_scale` and `found_inf`; that of SGD spoils its momentum where it is to do nothing."""


def master_bytes(parameter: Tensor) -> int:
    """Of the parameter's master, and of each state of its size; 0 for a parameter that needs none."""
    return parameter.numel() * torch.float32.itemsize if parameter.dtype in HALF else 0


def lacks_master(optimizer: Optimizer, parameter: Tensor) -> bool:
    """Whether the next update of the parameter makes its master."""
    return keeps_masters(optimizer) and parameter.dtype in HALF and MASTER not in optimizer.state.get(parameter, {})


def casting_bytes(masters: Sequence[int]) -> int:
    """What an update of parameters with masters of so many bytes allocates meanwhile, beside the optimizer's own arithmetic.

    All gradients in fp32; before that, for one parameter at a time, its value in fp32 and a byte for each element.
    """
    return sum(masters) + max(masters, default=0) // torch.float32.itemsize


def run_step(optimizer: Optimizer) -> None:
    """The step of the optimizer over its present groups, without hooks; over masters if it keeps them. Blocks as that does.

    A tensor `optimizer.grad_scale`, which a `GradScaler` puts there, divides the gradients, and nothing is updated where
    `optimizer.found_inf` says so.
    """
    if not keeps_masters(optimizer):
        type(optimizer).step.__wrapped__(optimizer)  # type: ignore[attr-defined]
    elif type(optimizer).__name__ in _SCALING and all(group.get("fused") for group in optimizer.param_groups):
        _update(optimizer, inverse_scale=None)  # which does so by itself
    else:
        with scaling_put_aside(optimizer) as (scale, found_inf):
            if found_inf is None or not found_inf.item():
                _update(optimizer, inverse_scale=None if scale is None else scale.double().reciprocal().float())


@contextmanager
def scaling_put_aside(optimizer: Optimizer) -> Iterator[tuple[Tensor | None, Tensor | None]]:
    """Within, the optimizer has no `grad_scale` and `found_inf`; gives them. What is not fused refuses them."""
    attributes: dict[str, Any] = vars(optimizer)
    kept: dict[str, Any] = {name: attributes.pop(name) for name in ("grad_scale", "found_inf") if name in attributes}
    try:
        yield kept.get("grad_scale"), kept.get("found_inf")
    finally:
        attributes.update(kept)


def _update(optimizer: Optimizer, *, inverse_scale: Tensor | None) -> None:
    groups = [
        [Replica(parameter=p, state=optimizer.state.get(p, {})) for p in group["params"] if p.grad is not None]
        for group in optimizer.param_groups
    ]
    update_replicas(optimizer, groups, inverse_scale=inverse_scale)
    for replica in (replica for group in groups for replica in group):
        if replica.state:
            optimizer.state[replica.parameter] = replica.state


@torch.no_grad()
def update_replicas(
    optimizer: Optimizer, groups: Sequence[Sequence[Replica]], *, inverse_scale: Tensor | None = None, fused: bool = False
) -> None:
    """A `ReplicaUpdate` of `groups`, over the masters of those in half precision if the optimizer keeps masters.

    inverse_scale: what gradients are multiplied by. Masters are states of the replicas; those that are not there are made.
    """
    wide = keeps_masters(optimizer)
    replicas = [replica for group in groups for replica in group]
    masters = [_master(replica) if wide and replica.parameter.dtype in HALF else None for replica in replicas]
    updated = [_updated(*pair, inverse_scale) for pair in zip(replicas, masters, strict=True)]
    following = iter(updated)
    ReplicaUpdate(optimizer, [[next(following) for _ in group] for group in groups], fused=fused).run()
    for replica, master, done in zip(replicas, masters, updated, strict=True):
        if master is not None:
            replica.parameter.copy_(master)
            replica.state.update({MASTER: master, **done.state})


def _master(replica: Replica) -> Tensor:
    """The parameter's master, brought up to date, see [Note: Master copies]."""
    parameter, master = replica.parameter, replica.state.get(MASTER)
    if master is None:
        return parameter.float()
    rounded = master.to(parameter.dtype)
    if parameter.device.type == "cpu" and _same_bits(rounded, parameter):  # elsewhere the host would have to wait to know
        return cast(Tensor, master)
    written = rounded.ne(parameter)
    del rounded
    return torch.where(written, parameter.float(), master, out=master)


def _same_bits(one: Tensor, other: Tensor) -> bool:
    """For tensors in half precision, which `torch.equal` compares slowly: four at a time where they lie side by side."""
    together = torch.int64.itemsize // one.element_size()
    if all(t.is_contiguous() and t.numel() % together == t.storage_offset() % together == 0 for t in (one, other)):
        return torch.equal(one.view(-1).view(torch.int64), other.view(-1).view(torch.int64))
    return torch.equal(one.view(torch.int16), other.view(torch.int16))


def _updated(replica: Replica, master: Tensor | None, inverse_scale: Tensor | None) -> Replica:
    """What the optimizer updates in place of the replica: its master, if it has one, with the gradient in fp32."""
    gradient = replica.parameter.grad
    if master is not None and gradient is not None:
        gradient = gradient.float()
        stand_in = master.detach()  # so that the master does not keep the gradient
        stand_in.grad = gradient
        # Without the master itself: optimizers make their states where there is nothing yet.
        states = {name: value for name, value in replica.state.items() if name != MASTER}
        replica = Replica(parameter=stand_in, state=states)
    if inverse_scale is not None and gradient is not None:
        gradient.mul_(inverse_scale)
    return replica
