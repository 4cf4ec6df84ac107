"""While everything fits, stages run unmanaged: notice when that may no longer be so, by measured peaks and by symbolic sizes."""

from __future__ import annotations

from collections.abc import Hashable

from runtime.execution import MeasuredMemory, Program

_NEWS = 1.1  # a peak is reported again only if it exceeds the last reported one by this factor


class PeakWatch:
    """Watches the peak memory of each unmanaged iteration. It grows with more forward passes before one backward pass, say.

    Memory that user code allocates during an iteration counts as well. That is why a known peak is not reported again.
    """

    def __init__(self, memory: MeasuredMemory, budget_bytes: int) -> None:
        self._memory = memory
        self._budget_bytes = budget_bytes
        self._known_peak = 0
        self._external_bytes = 0

    def begin(self, managed_bytes: int) -> None:
        """Start watching unmanaged iterations; `managed_bytes` of the allocated bytes are teraio's."""
        self._external_bytes = self._bytes_beside(managed_bytes)
        self._memory.reset_peak()

    def outgrown(self, managed_bytes: int) -> bool:
        """Return whether the iteration that has just ended took more than the budget, and more than was known."""
        # External memory may have been freed since `begin`. What is new, such as gradients, belongs to the iteration.
        self._external_bytes = min(self._external_bytes, self._bytes_beside(managed_bytes))
        peak = self._memory.peak_bytes - self._external_bytes
        self._memory.reset_peak()
        if peak <= max(self._budget_bytes, _NEWS * self._known_peak):
            return False
        self._known_peak = peak
        return True

    def _bytes_beside(self, managed_bytes: int) -> int:
        # Negative if some managed memory does not count as allocated, because it is lent: then the peak lacks it as well.
        return self._memory.allocated_bytes - managed_bytes


class LargestSizes:
    """The largest byte counts with which each graph with symbolic sizes has run.

    A graph that ran under the budget fits, and so does every call with smaller sizes.
    """

    def __init__(self) -> None:
        self._seen: set[Hashable] = set()
        self._largest: dict[Hashable, tuple[int, ...]] = {}

    def grow(self, graph: Hashable, sized: Program) -> bool:
        """Note that `graph` is about to run as `sized`. Return whether a stage, or all together, need more than ever before."""
        if sized.identity in self._seen:
            return False
        self._seen.add(sized.identity)
        needs = tuple(s.need_bytes for s in sized.stages)
        needs = (*needs, sum(stage.output_bytes for stage in sized.stages))
        before = self._largest.get(graph, (0,) * len(needs))
        self._largest[graph] = tuple(map(max, needs, before))
        return self._largest[graph] != before
