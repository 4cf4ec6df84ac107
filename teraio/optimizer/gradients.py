"""Which gradients an update has left as they were: copies of these stay valid."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.optim import Optimizer

from runtime.paging import Block


class GradientVersions:
    """The gradients of all parameters that an optimizer has now, and how often each had been written before its update.

    For torch.optim's optimizers: most only read gradients, and none writes through `.data`, which counts no version. A fused
    one divides them in place where a GradScaler has scaled them, and counts none either.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        scaled = getattr(optimizer, "grad_scale", None) is not None
        parameters = (p for group in optimizer.param_groups for p in group["params"])
        gradients = (p.grad for p in parameters if p.grad is not None and not p.grad.is_inference())
        self._versions = [] if scaled else [(gradient, gradient._version) for gradient in gradients]

    def unchanged(self, block_of: Callable[[Tensor], Block | None]) -> set[Block]:
        """Blocks of which no gradient has been written since; block_of: the block of a tensor, if it has one."""
        same: dict[Block, bool] = {}
        for gradient, version in self._versions:
            block = block_of(gradient)
            if block is not None:
                same[block] = same.get(block, True) and gradient._version == version
        return {block for block, is_same in same.items() if is_same}
