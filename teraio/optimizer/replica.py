"""The update of an optimizer over other tensors than its parameters: copies in other memory, or of another precision."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Replica:
    """Stands for a parameter in one update. `parameter` has its gradient in `.grad`. `state` receives what the update makes."""

    parameter: Tensor
    state: dict[str, Any]


def by_group(optimizer: Optimizer, replicas: Iterable[tuple[int, Replica]]) -> list[list[Replica]]:
    """Return replicas as `ReplicaUpdate` takes them. Each is given with the number of its parameter's group."""
    groups: list[list[Replica]] = [[] for _ in optimizer.param_groups]
    for group, replica in replicas:
        groups[group].append(replica)
    return groups


class ReplicaUpdate:
    """One update of replicas, by group, with the optimizer's present settings. `run` may be called in any thread.

    fused: use PyTorch's fused implementation for CPUs, whatever the groups say. Groups with tensors that have gaps or differ in
    strides are excepted, since it would treat them as dense.
    """

    def __init__(self, optimizer: Optimizer, groups: Sequence[Sequence[Replica]], *, fused: bool = False) -> None:
        other = object.__new__(type(optimizer))
        other.__dict__.update(optimizer.__dict__)
        other.param_groups = [
            {
                **group,
                **({"fused": True, "foreach": False} if fused and all(map(_is_dense, replicas)) else {}),
                "params": [replica.parameter for replica in replicas],
            }
            for group, replicas in zip(optimizer.param_groups, groups, strict=True)
        ]
        other.state = defaultdict(dict)
        for replicas in groups:
            for replica in replicas:
                if replica.state:
                    other.state[replica.parameter] = replica.state
        self._optimizer = other
        self._replicas = [replica for replicas in groups for replica in replicas]

    def run(self) -> None:
        """Update the replicas and their states. Waits as the optimizer's step does. Calls no hook."""
        type(self._optimizer).step.__wrapped__(self._optimizer)  # type: ignore[attr-defined]
        for replica in self._replicas:
            made = self._optimizer.state.get(replica.parameter)
            if made is not None and made is not replica.state:
                replica.state.update(made)


def scratch_replica(optimizer: Optimizer, parameter: Tensor, shape: tuple[int, ...], *, states: bool = True) -> Replica:
    """Return zeros of `shape` in place of a parameter and its gradient, to try an update with. Reads no data except counters.

    states: include the states that the parameter has: zeros for elementwise ones, copies of the others.
    """
    tried = torch.zeros(shape, dtype=parameter.dtype, device=parameter.device)
    tried.grad = torch.zeros_like(tried)
    known = optimizer.state.get(parameter) or {} if states else {}
    state = {
        name: torch.zeros_like(tried, dtype=value.dtype) if has_elements_of(value, parameter) else copied(value)
        for name, value in known.items()
    }
    return Replica(parameter=tried, state=state)


def has_elements_of(state: Any, parameter: Tensor) -> bool:
    """Return whether a state has one element for each element of the parameter."""
    return isinstance(state, Tensor) and state.numel() == parameter.numel()


def copied(value: Any) -> Any:
    """Return a copy of a state that is a tensor, and any other value as it is."""
    return value.clone() if isinstance(value, Tensor) else value


def _is_dense(replica: Replica) -> bool:
    parameter, gradient = replica.parameter, replica.parameter.grad
    states = [v for v in replica.state.values() if isinstance(v, Tensor) and v.size() == parameter.size() and v.dim()]
    tensors = [parameter, *([gradient] if gradient is not None else []), *states]
    dense = (t.is_contiguous() or t.nbytes == t.untyped_storage().nbytes() for t in tensors)
    return all(dense) and all(t.stride() == parameter.stride() for t in tensors)
