"""Whether what ran unmanaged has come to need more than the budget; asked only where asking is cheap."""

from __future__ import annotations

from runtime.execution import MeasuredMemory

_NEWS = 1.1
"""A peak is news if it is so much above the last one that was."""


class PeakWatch:
    """Looks at the peak of each iteration while everything fits: more forward passes before one backward than before, say.

    What user code allocates meanwhile counts as well, so a peak that is known is no news.
    """

    def __init__(self, memory: MeasuredMemory, budget_bytes: int) -> None:
        self._memory = memory
        self._budget_bytes = budget_bytes
        self._known_peak = 0
        self._beside = 0

    def begin(self, managed_bytes: int) -> None:
        """From now on all runs unmanaged; so many of the bytes that are allocated are managed ones, the rest is none of ours."""
        self._beside = self._bytes_beside(managed_bytes)
        self._memory.reset_peak()

    def outgrown(self, managed_bytes: int) -> bool:
        """Whether the iteration that ends took more than the budget, and more than was known."""
        # What was there at first may have been freed since; what was not, such as gradients, is no user's.
        self._beside = min(self._beside, self._bytes_beside(managed_bytes))
        peak = self._memory.peak_bytes - self._beside
        self._memory.reset_peak()
        if peak <= max(self._budget_bytes, _NEWS * self._known_peak):
            return False
        self._known_peak = peak
        return True

    def _bytes_beside(self, managed_bytes: int) -> int:
        # Less than none if memory is managed that is not counted as allocated, being lent, say: the peak has not got it either.
        return self._memory.allocated_bytes - managed_bytes
