"""Which operators draw random numbers, or make them of seeds that were drawn before."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from teraio.stages import cost

_SEEDS = frozenset(("inductor_seed", "inductor_seeds"))
_OF_SEEDS = frozenset(("inductor_random", "inductor_randint"))


def draws_seeds(node: Node) -> bool:
    """Return whether `node` draws the seeds of Inductor's random numbers."""
    return cost.packet_name(node) in _SEEDS


def uses_seed(node: Node) -> bool:
    """Return whether `node` makes random numbers of a seed. Where stages run operator by operator it draws them instead."""
    return cost.packet_name(node) in _OF_SEEDS


def looks_up_seed(node: Node) -> bool:
    """Return whether `node` takes one of the seeds that were drawn."""
    return cost.packet_name(node) == "inductor_lookup_seed"


def draws(node: Node) -> bool:
    """Return whether an operator of PyTorch changes the state of a random generator."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or torch.Tag.nondeterministic_seeded not in target.tags:
        return False
    for position, argument in enumerate(target._schema.arguments):
        if argument.name == "dropout_p":  # of attention, which is tagged also where it drops nothing
            named: Any = node.kwargs.get("dropout_p", argument.default_value)
            given: Any = node.args[position] if position < len(node.args) else named
            return not (isinstance(given, (int, float)) and given == 0)
    return True
