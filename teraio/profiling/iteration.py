"""One training iteration as it was recorded: its regions, their stages, and the blocks that these used."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

from runtime.device import Mark
from runtime.paging import Block


@dataclass(slots=True, kw_only=True)
class StageRecord:
    """One stage as it ran. `seconds` without waiting for copies; known once `Iteration.read_times` was called.

    elements: of the parameters that it updates. late: trace ids of the prefetched blocks that it waited for, and how long
    after the wait began each of them landed. host_seconds: what the update takes on the host's processor, or took there if
    it ran `on_host`; None if it cannot run there.
    """

    name: str
    phase: str
    seconds: float = 0.0
    workspace_bytes: int = 0
    elements: int = 0
    host_seconds: float | None = None
    on_host: bool = False
    read: tuple[Block, ...] = ()
    made: tuple[Block, ...] = ()
    written: tuple[Block, ...] = ()
    late: tuple[tuple[int, float], ...] = ()


@dataclass(slots=True, kw_only=True)
class Region:
    """One run of a graph or of an optimizer step, and the user code before it (`stages[0]`, phase "user").

    made: blocks that came into being, in order; the same order in every iteration.
    """

    identity: Hashable
    first: int
    stages: list[StageRecord] = field(default_factory=list)
    made: list[Block] = field(default_factory=list)
    complete: bool = False


@dataclass(slots=True, kw_only=True)
class Iteration:
    """One recorded iteration. `seconds` from the end of the step before to the end of this one's.

    waited_seconds: of these, spent waiting for copies, room and updates on the host; on an asynchronous device also for the host.
    survivors: (region, ordinal) of the blocks that were made in it and still alive when the next iteration's first
    region began, such as gradients that are not set to None before the forward pass.
    held: blocks that were used in it and still alive when it ended, such as gradients that are set to None after the step.
    """

    number: int
    regions: list[Region] = field(default_factory=list)
    seconds: float = 0.0
    waited_seconds: float = 0.0
    survivors: set[tuple[int, int]] = field(default_factory=set)
    held: frozenset[Block] = frozenset()
    untimed: list[tuple[StageRecord | Iteration, Mark, Mark]] = field(default_factory=list)
    gaps: list[tuple[Mark, Mark]] = field(default_factory=list)

    def read_times(self) -> None:
        """Fill in the seconds of all stages and of the whole. Blocks until the device has finished the iteration."""
        for record, begin, end in self.untimed:
            record.seconds += end.seconds_since(begin)
        self.waited_seconds += sum(end.seconds_since(begin) for begin, end in self.gaps)
        self.untimed.clear()
        self.gaps.clear()

    @property
    def signature(self) -> tuple[tuple[Hashable, int], ...]:
        """Equal for iterations that ran the same regions in the same order."""
        return tuple((r.identity, len(r.stages)) for r in self.regions)

    @property
    def stages(self) -> list[StageRecord]:
        return [stage for region in self.regions for stage in region.stages]
