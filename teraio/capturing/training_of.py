"""The training of a given model, for a capture: a copy of the model under fake tensors, and a plain step."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from planner.errors import OptionsError

MakeOptimizer = Callable[[Iterable[nn.Parameter]], Optimizer]
Inputs = Sequence[Any] | Mapping[str, Any]


def training_of(
    model: nn.Module, inputs: Inputs, make_optimizer: MakeOptimizer, loss_of: Callable[[Any], Tensor] | None, device: torch.device
) -> Callable[[], Callable[[], object]]:
    """Return what makes the step of a model: forward pass, loss, backward pass, update, gradients set to None.

    device: where it runs.
    """

    def training() -> Callable[[], object]:
        copied = faked(model, device)
        optimizer = make_optimizer(copied.parameters())
        compiled = torch.compile(copied, backend="teraio")
        named = {name: _fake(value, device) for name, value in inputs.items()} if isinstance(inputs, Mapping) else {}
        given = [] if isinstance(inputs, Mapping) else [_fake(value, device) for value in inputs]

        def step() -> None:
            output = compiled(*given, **named)
            (loss_of or _loss)(output).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()

        return step

    training.__name__ = type(model).__name__
    return training


def faked(model: nn.Module, device: torch.device) -> nn.Module:
    """Return a copy whose parameters and buffers are fake tensors on a device. To be called under a fake mode.

    The model may be on the device "meta".
    """
    tensors = chain(model.parameters(), model.buffers())  # shared ones come once
    return copy.deepcopy(model, {id(tensor): _fake(tensor, device) for tensor in tensors})


def _fake(value: Any, device: torch.device) -> Any:
    if not isinstance(value, Tensor):
        return value
    made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)
    return nn.Parameter(made, requires_grad=value.requires_grad) if isinstance(value, nn.Parameter) else made


def _loss(output: Any) -> Tensor:
    loss = output if isinstance(output, Tensor) else getattr(output, "loss", None)
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise OptionsError(
            f"capture: the model returns {type(output).__name__}, neither a loss nor something with a loss; give loss=, a "
            "function from what the model returns to the loss"
        )
    return loss
