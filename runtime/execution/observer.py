"""Who looks on while programs run: what an observer is told, and what may run between the stages of a program."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from runtime.device import Mark
from runtime.paging import Block


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRun:
    """One run of a stage under the pager.

    begin, end: on the device; waiting for copies is not between them.
    read: blocks that it used. made: blocks that it brought into being. written: blocks that it changed.
    next_uses: for blocks that the same region uses again, after how many stages.
    elements: number of parameter elements that it updates. host_seconds: how long the same update takes on the host's
    processor, None if it cannot run there.
    """

    name: str
    phase: str
    begin: Mark
    end: Mark
    workspace_bytes: int
    read: Sequence[Block]
    made: Sequence[Block]
    written: Sequence[Block]
    next_uses: Mapping[Block, int] = field(default_factory=dict)
    elements: int = 0
    host_seconds: float | None = None


class Observer(Protocol):
    """Keeps the timeline of an iteration; called by the training thread only, never inside a stage."""

    def region_begins(self, identity: Hashable, stage_count: int) -> None:
        """A program, or an optimizer step, of so many stages is about to run."""

    def stage_reached(self) -> Sequence[Block]:
        """The stage before has ended. Returns what to prefetch from now on, in order."""

    def stage_ended(self, run: StageRun) -> None:
        """A stage has run; what it held may move again."""

    def region_ended(self) -> None:
        """The region is about to return to user code, or failed."""


class InterleavedStages(Protocol):
    """Looks on while a program runs under management, and may run stages of its own between those of the program."""

    @property
    def stage_count(self) -> int:
        """How many stages of its own it will run, as the observer should expect."""

    def after_stage(self, number: int, read: Sequence[Block], slots: list[Any]) -> None:
        """Stage `number` of the program has ended, which read `read`; nothing is held now.

        It may take values out of `slots` that no later stage reads: where they are results, the program returns None.
        """

    def region_done(self, results: Sequence[Any]) -> None:
        """The program has run to its end and is about to return `results`. Not called if it failed."""
