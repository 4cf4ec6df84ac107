"""Half-precision parameters, and the textbook loop over fp32 clones that masters are compared with."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from teraio.optimizer.master_hooks import SUBGROUP_BYTES, keep_masters

Make = Callable[[list[Any]], Optimizer]
Groups = Callable[[list[Any]], list[dict[str, Any]]]

HALF = (torch.bfloat16, torch.float16)
WIDE = 8 << 10
"""Bytes of the master of a large parameter, and of each of its states."""


def half_parameters(dtype: torch.dtype, count: int = 5) -> list[nn.Parameter]:
    """So many of 4 KiB in half precision, one of 8 KiB in fp32, a small one, and one that never gets a gradient."""
    generator = torch.Generator().manual_seed(0)
    types = [*[((64, 32), dtype)] * count, ((64, 32), torch.float32), ((5, 3), dtype), ((64, 32), dtype)]
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape, dtype in types]


def set_gradients(parameters: list[nn.Parameter], step: int, scale: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    for parameter in parameters[:-1]:
        parameter.grad = (scale * torch.randn(parameter.shape, generator=generator)).to(parameter.dtype)


def two_groups(kind: Any, **settings: Any) -> Make:
    def make(parameters: list[Any]) -> Optimizer:
        groups = [{"params": parameters[:3], "lr": 0.002}, {"params": parameters[3:], "weight_decay": 0.1}]
        optimizer: Optimizer = kind(groups, **settings)
        return optimizer

    return make


KINDS: dict[str, Make] = {
    "AdamW": two_groups(torch.optim.AdamW, lr=0.001),
    "AdamW fused amsgrad": two_groups(torch.optim.AdamW, lr=0.001, fused=True, amsgrad=True),
    "AdamW foreach": two_groups(torch.optim.AdamW, lr=0.001, foreach=True),
    "SGD": two_groups(torch.optim.SGD, lr=0.001),
    "SGD momentum": two_groups(torch.optim.SGD, lr=0.001, momentum=0.9, nesterov=True),
    "SGD fused": two_groups(torch.optim.SGD, lr=0.001, momentum=0.9, fused=True),
    "RMSprop": two_groups(torch.optim.RMSprop, lr=0.001, momentum=0.9, centered=True),
    "Adagrad": two_groups(torch.optim.Adagrad, lr=0.001, initial_accumulator_value=0.1),
    "NAdam": two_groups(torch.optim.NAdam, lr=0.001),
    "RAdam": two_groups(torch.optim.RAdam, lr=0.001),
    "Adamax": two_groups(torch.optim.Adamax, lr=0.001),
    "Adadelta": two_groups(torch.optim.Adadelta, lr=0.1),
    "ASGD": two_groups(torch.optim.ASGD, lr=0.001),
    "Rprop": two_groups(torch.optim.Rprop, lr=0.001),
    "Adafactor": two_groups(torch.optim.Adafactor, lr=0.001),
    "Muon": two_groups(torch.optim.Muon, lr=0.001, ns_steps=1),  # each takes seconds in bfloat16
}


class Textbook:
    """A plain optimizer over fp32 clones of the parameters; each step casts gradients up and parameters down."""

    def __init__(self, parameters: list[nn.Parameter], make: Make) -> None:
        self.parameters = parameters
        self.masters = [p.detach().clone().float() for p in parameters]
        self.optimizer = make(self.masters)

    @torch.no_grad()
    def step(self, inverse_scale: float = 1.0) -> None:
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            master.grad = None if parameter.grad is None else parameter.grad.float() * inverse_scale
        self.optimizer.step()
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            parameter.copy_(master)

    def train(self, steps: int, first: int = 0) -> Textbook:
        for step in range(first, first + steps):
            set_gradients(self.parameters, step)
            self.step()
        return self

    def state_dict(self) -> dict[str, Any]:
        """As an optimizer that keeps masters has it."""
        content = self.optimizer.state_dict()
        for number, (parameter, master) in enumerate(zip(self.parameters, self.masters, strict=True)):
            if parameter.dtype in HALF and parameter.grad is not None:
                content["state"].setdefault(number, {})["master_param"] = master
        return content

    def load_state_dict(self, content: dict[str, Any]) -> None:
        """Of an optimizer that keeps masters; the parameters have been loaded."""
        for master, parameter in zip(self.masters, self.parameters, strict=True):
            master.copy_(parameter.detach())
        states = {number: dict(state) for number, state in content["state"].items()}
        for number, state in states.items():
            if "master_param" in state:
                self.masters[number].copy_(state.pop("master_param"))
        own = {number: state for number, state in states.items() if state}
        self.optimizer.load_state_dict({**content, "state": own})


def keeping(optimizer: Optimizer, *, subgroup_bytes: int = SUBGROUP_BYTES) -> Optimizer:
    """As `teraio.manage_optimizer(optimizer, master_weights=True)` without any runtime."""

    def on_device(tensors: Iterable[Tensor]) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    keep_masters(optimizer, on_device, subgroup_bytes=subgroup_bytes)
    return optimizer


def differences(optimizer: Optimizer, expected: Textbook) -> list[str]:
    """Names of what is not the same: parameters, masters and states, bit for bit, and their types."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    found = {f"parameter {n}": p.detach() for n, p in enumerate(parameters)} | named(optimizer.state_dict())
    wanted = {f"parameter {n}": p.detach() for n, p in enumerate(expected.parameters)} | named(expected.state_dict())
    missing = found.keys() ^ wanted.keys()
    wrong = [n for n in found.keys() & wanted.keys() if found[n].dtype != wanted[n].dtype or not torch.equal(found[n], wanted[n])]
    return sorted([*missing, *wrong])


def named(content: dict[str, Any]) -> dict[str, Tensor]:
    return {f"{name} {number}": value for number, state in content["state"].items() for name, value in state.items()}
