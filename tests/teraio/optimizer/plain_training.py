"""Optimizers and parameters that the tests train with, plain training of them, and comparisons bit for bit."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from teraio.optimizer import keep_masters

KIB = 1 << 10
MIB = 1 << 20

Make = Callable[[list[Any]], Optimizer]

# -- optimizers


def two_groups(kind: Any, lr: float = 0.01, **settings: Any) -> Make:
    """Two groups with different settings; the first has three parameters."""

    def make(parameters: list[Any]) -> Optimizer:
        groups = [{"params": parameters[:3], "lr": 2 * lr}, {"params": parameters[3:], "weight_decay": 0.1}]
        optimizer: Optimizer = kind(groups, lr=lr, **settings)
        return optimizer

    return make


OPTIMIZERS: dict[str, Make] = {
    "AdamW": two_groups(torch.optim.AdamW),
    "AdamW fused": two_groups(torch.optim.AdamW, fused=True),
    "AdamW foreach": two_groups(torch.optim.AdamW, foreach=True),
    "AdamW amsgrad": two_groups(torch.optim.AdamW, amsgrad=True),
    "Adam": two_groups(torch.optim.Adam),
    "SGD": two_groups(torch.optim.SGD),
    "SGD momentum": two_groups(torch.optim.SGD, momentum=0.9, nesterov=True),
    "SGD fused": two_groups(torch.optim.SGD, momentum=0.9, fused=True),
    "Adagrad": two_groups(torch.optim.Adagrad),
    "NAdam": two_groups(torch.optim.NAdam),
    "RAdam": two_groups(torch.optim.RAdam),
    "Adamax": two_groups(torch.optim.Adamax),
    "Adadelta": two_groups(torch.optim.Adadelta),
    "RMSprop": two_groups(torch.optim.RMSprop, momentum=0.9, centered=True),
    "ASGD": two_groups(torch.optim.ASGD),
    "Rprop": two_groups(torch.optim.Rprop),
}
"""Every optimizer whose update is elementwise."""

STATE_OPTIMIZERS = {name: make for name, make in OPTIMIZERS.items() if name != "SGD"}

MASTER_OPTIMIZERS: dict[str, Make] = {
    "AdamW": two_groups(torch.optim.AdamW, 0.001),
    "AdamW fused amsgrad": two_groups(torch.optim.AdamW, 0.001, fused=True, amsgrad=True),
    "AdamW foreach": two_groups(torch.optim.AdamW, 0.001, foreach=True),
    "SGD": two_groups(torch.optim.SGD, 0.001),
    "SGD momentum": two_groups(torch.optim.SGD, 0.001, momentum=0.9, nesterov=True),
    "SGD fused": two_groups(torch.optim.SGD, 0.001, momentum=0.9, fused=True),
    "RMSprop": two_groups(torch.optim.RMSprop, 0.001, momentum=0.9, centered=True),
    "Adagrad": two_groups(torch.optim.Adagrad, 0.001, initial_accumulator_value=0.1),
    "NAdam": two_groups(torch.optim.NAdam, 0.001),
    "RAdam": two_groups(torch.optim.RAdam, 0.001),
    "Adamax": two_groups(torch.optim.Adamax, 0.001),
    "Adadelta": two_groups(torch.optim.Adadelta, 0.1),
    "ASGD": two_groups(torch.optim.ASGD, 0.001),
    "Rprop": two_groups(torch.optim.Rprop, 0.001),
    "Adafactor": two_groups(torch.optim.Adafactor, 0.001),
    "Muon": two_groups(torch.optim.Muon, 0.001, ns_steps=1),  # each takes seconds in bfloat16
}


def adamw(parameters: list[nn.Parameter]) -> Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


# -- parameters and gradients

SIZE = 4 * KIB
"""Bytes of one of `square_parameters`. With gradient, two states and two temporaries of AdamW it takes six times as much."""
LARGE_SHAPE = (1553, 257)
"""Shape of the large one of `large_parameters`: about 1.5 MiB in 32 bits, no whole number of slices, pages or vectors."""
LARGE = 1553 * 257 * 4
HALF = (torch.bfloat16, torch.float16)
WIDE = 8 * KIB
"""Bytes of the master of a large one of `half_parameters`, and of each of its states."""


def random_parameters(shapes: Iterable[tuple[Sequence[int], torch.dtype]]) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(tuple(shape), generator=generator).to(dtype)) for shape, dtype in shapes]


def square_parameters(count: int) -> list[nn.Parameter]:
    return random_parameters([((32, 32), torch.float32)] * count)


def nine_parameters(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    """Seven of 4 KiB in 32 bits, a small one, and one for `set_most_gradients` to leave out."""
    return random_parameters((shape, dtype) for shape in [(32, 32)] * 7 + [(5,), (16, 4)])


def large_parameters(dtype: torch.dtype = torch.float32, shape: Sequence[int] = LARGE_SHAPE) -> list[nn.Parameter]:
    """A large one between small ones."""
    return random_parameters((each, dtype) for each in ((32, 32), shape, (7,), (64, 16)))


def half_parameters(dtype: torch.dtype, count: int = 5) -> list[nn.Parameter]:
    """So many of 4 KiB in half precision, one of 8 KiB in fp32, a small one, and one for `set_most_gradients` to leave out."""
    types = [*[((64, 32), dtype)] * count, ((64, 32), torch.float32), ((5, 3), dtype), ((64, 32), dtype)]
    return random_parameters(types)


def set_gradients(parameters: Sequence[nn.Parameter], step: int, scale: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    for parameter in parameters:
        parameter.grad = torch.empty_like(parameter)
        parameter.grad.copy_(scale * torch.randn(parameter.shape, generator=generator))


def set_most_gradients(parameters: Sequence[nn.Parameter], step: int, scale: float = 1.0) -> None:
    """For all parameters but the last one."""
    set_gradients(parameters[:-1], step, scale)


# -- plain training and comparisons


def parameters_of(optimizer: Optimizer) -> list[Any]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def train(optimizer: Optimizer, steps: int, first: int = 0) -> None:
    for step in range(first, first + steps):
        set_gradients(parameters_of(optimizer), step)
        optimizer.step()
        optimizer.zero_grad()


def train_most(parameters: Sequence[nn.Parameter], optimizer: Optimizer, steps: int, first: int = 0) -> None:
    """The last parameter gets no gradient."""
    for step in range(first, first + steps):
        set_most_gradients(parameters, step)
        optimizer.step()


def plain(steps: int, parameters: list[nn.Parameter] | None = None, make: Make = torch.optim.AdamW) -> dict[str, Tensor]:
    """What plain PyTorch makes of the parameters, six square ones unless others are given."""
    optimizer = make(square_parameters(6) if parameters is None else parameters)
    train(optimizer, steps)
    return everything(optimizer)


def everything(*optimizers: Optimizer) -> dict[str, Tensor]:
    """Copies of parameters and states, in order, with names."""
    found: dict[str, Tensor] = {}
    owned = [(optimizer, parameter) for optimizer in optimizers for parameter in parameters_of(optimizer)]
    for number, (optimizer, parameter) in enumerate(owned):
        found[f"{number}"] = parameter.detach().clone()
        for name, value in optimizer.state.get(parameter, {}).items():
            if value is not None:
                found[f"{number}.{name}"] = torch.as_tensor(value).clone()
    return found


def differing(found: dict[str, Tensor], expected: dict[str, Tensor]) -> list[str]:
    """Names of tensors that are not equal bit for bit; of all if they, or their order, are not the same."""
    if list(found) != list(expected):
        return [*found, "in place of", *expected]
    return [name for name, value in found.items() if not torch.equal(value, expected[name])]


def state_bytes(optimizer: Optimizer) -> int:
    """Bytes of all tensors in the optimizer's state. A storage that several tensors share counts once."""
    storages = [value.untyped_storage() for value in tree_leaves(dict(optimizer.state)) if isinstance(value, Tensor)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


# -- masters


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
            set_most_gradients(self.parameters, step)
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


def keeping(optimizer: Optimizer) -> Optimizer:
    """As `teraio.manage_optimizer(optimizer, master_weights=True)` without any runtime."""

    def on_device(tensors: Iterable[Tensor]) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    keep_masters(optimizer, on_device)
    return optimizer


def differences(optimizer: Optimizer, expected: Textbook) -> list[str]:
    """Names of what is not the same: parameters, masters and states, bit for bit, and their types."""
    found = {f"parameter {n}": p.detach() for n, p in enumerate(parameters_of(optimizer))} | named(optimizer.state_dict())
    wanted = {f"parameter {n}": p.detach() for n, p in enumerate(expected.parameters)} | named(expected.state_dict())
    missing = found.keys() ^ wanted.keys()
    wrong = [n for n in found.keys() & wanted.keys() if found[n].dtype != wanted[n].dtype or not torch.equal(found[n], wanted[n])]
    return sorted([*missing, *wrong])


def named(content: dict[str, Any]) -> dict[str, Tensor]:
    return {f"{name} {number}": value for number, state in content["state"].items() for name, value in state.items()}
