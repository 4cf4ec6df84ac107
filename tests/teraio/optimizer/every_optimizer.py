"""Every optimizer whose update is of element by element, over two groups of parameters with different settings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

Make = Callable[[list[nn.Parameter]], Optimizer]


def two_groups(kind: Any, **settings: Any) -> Make:
    def make(parameters: list[nn.Parameter]) -> Optimizer:
        groups = [{"params": parameters[:3], "lr": 0.02}, {"params": parameters[3:], "weight_decay": 0.1}]
        return kind(groups, **settings)

    return make


OPTIMIZERS: dict[str, Make] = {
    "AdamW": two_groups(torch.optim.AdamW, lr=0.01),
    "AdamW fused": two_groups(torch.optim.AdamW, lr=0.01, fused=True),
    "AdamW foreach": two_groups(torch.optim.AdamW, lr=0.01, foreach=True),
    "AdamW amsgrad": two_groups(torch.optim.AdamW, lr=0.01, amsgrad=True),
    "Adam": two_groups(torch.optim.Adam, lr=0.01),
    "SGD": two_groups(torch.optim.SGD, lr=0.01),
    "SGD momentum": two_groups(torch.optim.SGD, lr=0.01, momentum=0.9, nesterov=True),
    "SGD fused": two_groups(torch.optim.SGD, lr=0.01, momentum=0.9, fused=True),
    "Adagrad": two_groups(torch.optim.Adagrad, lr=0.01),
    "NAdam": two_groups(torch.optim.NAdam, lr=0.01),
    "RAdam": two_groups(torch.optim.RAdam, lr=0.01),
    "Adamax": two_groups(torch.optim.Adamax, lr=0.01),
    "Adadelta": two_groups(torch.optim.Adadelta, lr=0.01),
    "RMSprop": two_groups(torch.optim.RMSprop, lr=0.01, momentum=0.9, centered=True),
    "ASGD": two_groups(torch.optim.ASGD, lr=0.01),
    "Rprop": two_groups(torch.optim.Rprop, lr=0.01),
}
