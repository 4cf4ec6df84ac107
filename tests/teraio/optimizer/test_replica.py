"""Updates over replicas: the optimizer's own, with its settings, in other memory and other precisions."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch
from torch import Tensor

from teraio.optimizer.capabilities import fused_on_host
from teraio.optimizer.host import tensor_at
from teraio.optimizer.host_rates import HostRates
from teraio.optimizer.replica import Replica, ReplicaUpdate


def parameters(dtype: torch.dtype) -> list[Tensor]:
    torch.manual_seed(0)
    found = [torch.nn.Parameter(torch.randn(32, 16).t().to(dtype)), torch.nn.Parameter(torch.randn(24)[::2].to(dtype))]
    for parameter in found:
        parameter.grad = torch.randn_like(parameter)
    return list(found)


def groups(own: list[Tensor]) -> list[dict[str, Any]]:
    return [{"params": own[:1], "lr": 0.1}, {"params": own[1:], "weight_decay": 0.3}]


def copied(tensor: Tensor, held: list[object]) -> Tensor:
    """The same in memory of its own, at an address."""
    memory = ctypes.create_string_buffer(tensor.untyped_storage().nbytes())
    held.append(memory)
    ctypes.memmove(memory, tensor.untyped_storage().data_ptr(), len(memory))
    return tensor_at(ctypes.addressof(memory), tensor)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad])
def test_as_the_parameters_themselves(kind: Any, dtype: torch.dtype, fused: bool) -> None:
    """Bit for bit with the same implementation, and to rounding with the fused one."""
    theirs, mine = parameters(dtype), parameters(dtype)
    plain, optimizer = kind(groups(theirs), lr=0.01), kind(groups(mine), lr=0.01)
    held: list[object] = []
    if fused:
        assert fused_on_host(optimizer, [dtype])
    states: list[dict[str, Any]] = [{}, {}]
    replicas = [Replica(parameter=copied(p.detach(), held), state=state) for p, state in zip(mine, states, strict=True)]
    for _ in range(4):
        for replica, parameter in zip(replicas, theirs, strict=True):
            assert parameter.grad is not None
            replica.parameter.grad = copied(parameter.grad, held)
        if fused and "step" not in states[0]:
            plain.step()
            for replica, parameter in zip(replicas, theirs, strict=True):
                replica.parameter.copy_(parameter.detach())
                replica.state.update({k: v.clone() if isinstance(v, Tensor) else v for k, v in plain.state[parameter].items()})
            continue
        plain.step()
        ReplicaUpdate(optimizer, [replicas[:1], replicas[1:]], fused=fused).run()
    close = {torch.float32: 1e-5, torch.float64: 1e-10, torch.bfloat16: 0.05, torch.float16: 0.01}[dtype]
    for replica, parameter in zip(replicas, theirs, strict=True):
        pairs = [(replica.parameter, parameter.detach()), *((replica.state[k], v) for k, v in plain.state[parameter].items())]
        for found, expected in pairs:
            if isinstance(expected, Tensor):
                torch.testing.assert_close(found, expected, rtol=close if fused else 0, atol=close if fused else 0)
    assert all(torch.equal(a, b) for a, b in zip(mine, parameters(dtype), strict=True)), "the parameters are as they were"


def test_rates_are_measured_once_where_there_is_room() -> None:
    asked = []

    class Scratch:
        def __init__(self, size_bytes: int) -> None:
            asked.append(size_bytes)
            self.memory = ctypes.create_string_buffer(size_bytes + 64) if size_bytes < 8 << 20 else None

        def __enter__(self) -> int | None:
            return None if self.memory is None else -(-ctypes.addressof(self.memory) // 64) * 64

        def __exit__(self, *_: object) -> None:
            self.memory = None

    rates = HostRates(Scratch, shared=True)
    optimizer = torch.optim.AdamW(parameters(torch.float32))
    seconds = rates.seconds(optimizer, torch.float32, 1000)
    assert seconds is not None and 0.0 < seconds < 1.0
    assert asked[0] > 8 << 20 and asked[-1] < 8 << 20, "less memory, fewer elements"
    count = len(asked)
    assert rates.seconds(optimizer, torch.float32, 2000) == 2 * seconds and len(asked) == count
    assert rates.seconds(torch.optim.LBFGS(parameters(torch.float32)), torch.float32, 1000) is None
    assert rates.seconds(torch.optim.AdamW(parameters(torch.float32), capturable=True), torch.float32, 1000) is None
