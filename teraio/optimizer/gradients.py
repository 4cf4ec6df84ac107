"""Finds the gradients that an update has not changed: their copies in the lower tiers stay valid."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.optim import Optimizer

from runtime.paging import Block


class GradientVersions:
    """The versions that the gradients of an optimizer's present parameters had before an update.

    Correct for the optimizers of torch.optim. Most only read gradients, and none writes through `.data`, which does not change
    the version. If a GradScaler drives a fused optimizer, it divides gradients in place and does not change the version either:
    then no gradient counts as unchanged.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        scaled = getattr(optimizer, "grad_scale", None) is not None
        parameters = (p for group in optimizer.param_groups for p in group["params"])
        gradients = (p.grad for p in parameters if p.grad is not None and not p.grad.is_inference())
        self._versions = [] if scaled else [(gradient, gradient._version) for gradient in gradients]

    def unchanged(self, block_of: Callable[[Tensor], Block | None]) -> set[Block]:
        """Return the blocks of gradients that have not been written since. block_of: returns the block of a tensor, if any."""
        same: dict[Block, bool] = {}
        for gradient, version in self._versions:
            block = block_of(gradient)
            if block is not None:
                same[block] = same.get(block, True) and gradient._version == version
        return {block for block, is_same in same.items() if is_same}
