"""Updates inside the backward pass (option `overlap_step`). The rest of teraio knows only `OverlappedSteps`."""

from teraio.optimizer.in_backward.steps import OverlappedSteps

__all__ = ["OverlappedSteps"]
