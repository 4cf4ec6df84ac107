"""What an observer of running programs is told, and what may run between the stages of a program."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from runtime.device import Mark
from runtime.paging import Block


class StageRun(NamedTuple):
    """One run of a stage under the pager.

    begin, end: on the device; the time between them contains no waiting for copies.
    read: blocks that it read. made: blocks that it created. written: blocks that it changed.
    next_uses: returns after how many stages the same region uses a block again; only blocks that it does use again. To be called
    before `Observer.stage_ended` returns.
    never_again: see `Stage`.
    elements: number of parameter elements that it updates. host_seconds: seconds that the same update takes on the host's
    processor; None if it cannot run there.
    collective_seconds: the part of its time in collectives, waiting for other ranks as well; 0 where that cannot be told, as on
    a GPU.
    """

    name: str
    phase: str
    begin: Mark
    end: Mark
    workspace_bytes: int
    read: Sequence[Block]
    made: Sequence[Block]
    written: Sequence[Block]
    next_uses: Callable[[], Mapping[Block, int]] = dict
    never_again: str = ""
    elements: int = 0
    host_seconds: float | None = None
    collective_seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRerun:
    """One more run of a forward stage, in the backward pass. begin, end: as in `StageRun`. made: the blocks that it made anew."""

    name: str
    begin: Mark
    end: Mark
    made: Sequence[Block]


class Observer(Protocol):
    """Records the timeline of an iteration. Only the training thread calls it, between stages."""

    def region_begins(self, identity: Hashable, stage_count: int, *, is_inference: bool = False) -> None:
        """A program or an optimizer step begins, with `stage_count` stages. identity: of the program or the optimizer.

        is_inference: no backward pass will follow.
        """

    def mark(self) -> Mark:
        """Return the present point of the device's work, for the begin or the end of a `StageRun` or a `StageRerun`.

        Where no times are wanted, it is one that is at hand.
        """

    def kept_stages(self) -> Collection[int] | None:
        """Return the numbers of the stages of the region that began last that a plan runs again; None if no plan applies."""

    def reruns_due(self) -> Iterable[tuple[Sequence[Block], Sequence[Block]]]:
        """Yield for each re-run that has its place before the next stage: the blocks that it makes anew, and what to prefetch.

        What comes after a re-run begins when the next one is asked for.
        """

    def stage_ran_again(self, rerun: StageRerun) -> None:
        """A stage has run again, as the plan says or because a block was needed."""

    def stage_reached(self) -> Sequence[Block]:
        """The next stage is about to get its memory. Returns what to prefetch from now on, in order."""

    def stage_ended(self, run: StageRun) -> None:
        """A stage has run. What it held may move again."""

    def region_ended(self) -> None:
        """The region is about to return to user code, or has failed."""


class InterleavedStages(Protocol):
    """Runs stages of its own between those of a program, such as updates of parameters during the backward pass."""

    @property
    def stage_count(self) -> int:
        """Number of stages that it will run; the observer counts them as the program's."""

    def after_stage(self, number: int, read: Sequence[Block], slots: list[Any]) -> None:
        """Stage `number` of the program has ended. read: the blocks that it read. No block is held now.

        It may take values that no later stage reads out of `slots`. The program returns None for those that are results.
        """

    def region_done(self, results: Sequence[Any]) -> None:
        """The program has ended and is about to return `results`. Not called if it failed."""
