"""Updates of half-precision parameters over copies of them in fp32.

[Note: Master copies]
A bf16 or fp16 parameter rounds away an update that is much smaller than itself. An optimizer that keeps masters has a copy in
fp32 of each such parameter: the state "master_param", made at the first update. Its other states are in fp32 as well. An update
casts the gradient to fp32, runs the optimizer's own arithmetic over the master, and rounds the master to the parameter
(Micikevicius et al., Mixed Precision Training, ICLR 2018). All other parameters are updated as usual.

If they differ, the parameter is right: where an element is not what its master rounds to, user code has written to it (by loading
other weights, for example), and the master takes its value before the update.
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
"""Their fused kernels respect `grad_scale` and `found_inf`. That of SGD damages its momentum when it should do nothing."""


def master_bytes(parameter: Tensor) -> int:
    """Return the bytes of the parameter's master, and of each state with its elements; 0 for a parameter that needs no master."""
    return parameter.numel() * torch.float32.itemsize if parameter.dtype in HALF else 0


def lacks_master(optimizer: Optimizer, parameter: Tensor) -> bool:
    """Return whether the next update of the parameter makes its master."""
    return keeps_masters(optimizer) and parameter.dtype in HALF and MASTER not in optimizer.state.get(parameter, {})


def casting_bytes(masters: Sequence[int]) -> int:
    """Return what an update allocates for casts, besides the temporaries of the optimizer. masters: bytes of each master.

    These are all gradients in fp32, and for one parameter at a time its value in fp32 and a byte for each element.
    """
    return sum(masters) + max(masters, default=0) // torch.float32.itemsize


def run_step(optimizer: Optimizer) -> None:
    """Run the optimizer's step over its present groups, without hooks; over masters if it keeps them. Waits as that step does.

    If a `GradScaler` has set `optimizer.grad_scale`, gradients are divided by it, and nothing is updated if `optimizer.found_inf`
    is not zero.
    """
    if not keeps_masters(optimizer):
        type(optimizer).step.__wrapped__(optimizer)  # type: ignore[attr-defined]
    elif type(optimizer).__name__ in _SCALING and all(group.get("fused") for group in optimizer.param_groups):
        _update(optimizer, inverse_scale=None)  # its kernel does the scaling
    else:
        with scaling_put_aside(optimizer) as (scale, found_inf):
            if found_inf is None or not found_inf.item():
                _update(optimizer, inverse_scale=None if scale is None else scale.double().reciprocal().float())


@contextmanager
def scaling_put_aside(optimizer: Optimizer) -> Iterator[tuple[Tensor | None, Tensor | None]]:
    """Take `grad_scale` and `found_inf` away for a while, and give them. Updates that are not fused refuse to run with them."""
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
    """Run a `ReplicaUpdate` of `groups`. If the optimizer keeps masters, half-precision replicas are updated over theirs.

    inverse_scale: gradients are multiplied by it. Masters are states of the replicas. Missing ones are made.
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
    """Return the parameter's master, brought up to date, see [Note: Master copies]."""
    parameter, master = replica.parameter, replica.state.get(MASTER)
    if master is None:
        return parameter.float()
    rounded = master.to(parameter.dtype)
    if parameter.device.type == "cpu" and _same_bits(
        rounded, parameter
    ):  # on another device the host would have to wait for the answer
        return cast(Tensor, master)
    written = rounded.ne(parameter)
    del rounded
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
        replica = Replica(parameter=stand_in, state=states)
    if inverse_scale is not None and gradient is not None:
        gradient.mul_(inverse_scale)
    return replica
