"""What graphs with symbolic sizes have needed so far: known to fit is what ran under the budget, and what is smaller."""

from __future__ import annotations

from collections.abc import Hashable

from runtime.execution import Program


class LargestSizes:
    """The largest byte counts with which each graph has run."""

    def __init__(self) -> None:
        self._seen: set[Hashable] = set()
        self._largest: dict[Hashable, tuple[int, ...]] = {}

    def grow(self, graph: Hashable, sized: Program) -> bool:
        """`graph` is about to run as `sized`. Whether one of its stages, or all together, take more than ever before."""
        if sized.identity in self._seen:
            return False
        self._seen.add(sized.identity)
        needs = tuple(s.input_bytes + s.output_bytes + s.workspace_bytes for s in sized.stages)
        needs = (*needs, sum(stage.output_bytes for stage in sized.stages))
        before = self._largest.get(graph, (0,) * len(needs))
        self._largest[graph] = tuple(map(max, needs, before))
        return self._largest[graph] != before
