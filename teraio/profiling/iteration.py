"""One recorded training iteration: its regions, their stages, the blocks that the stages used, and where it ends."""

from __future__ import annotations

import logging
import statistics
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field

from torch.optim import Optimizer

from runtime.device import Mark
from runtime.execution import SizedGraph, StageRerun, StageRun, graph_of
from runtime.paging import Block

NEAR = 1.5  # measurements up to this multiple of the fastest one count as undisturbed


def undisturbed(times: Sequence[float]) -> list[float]:
    """Return those of the times of one stage, or of stages alike, that are near the fastest one."""
    fastest = min(times)
    return [seconds for seconds in times if seconds <= max(fastest, NEAR * fastest)]  # a coarse clock may go back


def _take(stage: StageRun, seconds: float) -> float:
    """Let a stage take these seconds at most. Return those that are left over."""
    stage.retried, over = False, max(stage.seconds - seconds, 0.0)
    stage.seconds -= over
    return over


@dataclass(slots=True, kw_only=True)
class Region:
    """One run of a graph or of an optimizer step, with the user code before it (`stages[0]`, phase "user").

    identity: of the graph or the optimizer. first: position of `stages[0]` in the iteration.
    made: the blocks that it created, in order. The order is the same in every iteration. complete: all its stages have run.
    step_goes_on: it belongs to the step that ended the iteration before. read_next: what autograd reads when it has ended.
    """

    identity: Hashable
    first: int
    stages: list[StageRun] = field(default_factory=list)
    made: list[Block] = field(default_factory=list)
    complete: bool = False
    step_goes_on: bool = False
    read_next: Sequence[Block] = ()


@dataclass(slots=True, kw_only=True)
class Iteration:
    """One recorded iteration.

    seconds: from the end of the previous optimizer step to the end of this one; 0 until `read_times` was called.
    waited_seconds: the part of them spent waiting for copies, for room and for updates on the host. On an asynchronous device it
    includes the time in which the device waited for the host.
    survivors: (number of the region, ordinal in it) of the blocks that were made in this iteration and still alive when the
    first region of the next one began after user code, such as gradients that are not set to None before the forward pass.
    held: the blocks that were used in this iteration and still alive at its end, such as gradients that are set to None after the
    step. Only if it is timed or did not run as planned.
    reruns: what ran again. They are no stages: a trace and its numbers leave them out.
    untimed, gaps: begin and end of what is not measured yet.
    truncated: some of its regions are not in this record, because it has too many.
    left_out: before which of its regions a long row of inference regions is not in this record.
    timed: the seconds of its stages and of their gaps are measured, see [Note: Sampled times] in `teraio.profiling.recorder`.
    away: begin and end of the times in which the device was parked, which `seconds` leaves out; until they are read.
    woken: the device was parked before one of its regions, so that blocks came back which are there otherwise.
    """

    number: int
    regions: list[Region] = field(default_factory=list)
    seconds: float = 0.0
    waited_seconds: float = 0.0
    survivors: set[tuple[int, int]] = field(default_factory=set)
    held: frozenset[Block] = frozenset()
    reruns: list[StageRerun] = field(default_factory=list)
    untimed: list[tuple[StageRun | StageRerun | Iteration, Mark, Mark]] = field(default_factory=list)
    gaps: list[tuple[Mark, Mark]] = field(default_factory=list)
    truncated: bool = False
    left_out: list[int] = field(default_factory=list)
    timed: bool = True
    away: list[tuple[Mark, Mark]] = field(default_factory=list)
    woken: bool = False

    def read_times(self) -> None:
        """Fill in the seconds of all stages and of the iteration. Waits until the device has finished the iteration."""
        for record, begin, end in self.untimed:
            record.seconds += end.seconds_since(begin)
        self.waited_seconds += sum(end.seconds_since(begin) for begin, end in self.gaps)
        if self.gaps:  # of an asynchronous device
            self.waited_seconds += self._take_waits_out()
        self.seconds -= sum(end.seconds_since(begin) for begin, end in self.away)
        self.away.clear()
        self.untimed.clear()
        self.gaps.clear()

    def _take_waits_out(self) -> float:
        """Let a stage that took far longer than those with the same code take as long as they did. Return the seconds left over.

        On an asynchronous device nothing slows kernels down so much: the device waited within the stage, mostly for the
        allocator, which had to take memory away, see [Note: Memory in pieces] in `runtime.paging.eviction`.
        """
        alike: dict[Hashable, list[StageRun]] = {}
        for stage in self.stages:
            if stage.code is not None:
                alike.setdefault(stage.code, []).append(stage)
        waited = 0.0
        for stages in alike.values():
            clean = [stage.seconds for stage in stages if not stage.retried]
            if not clean:
                continue
            usual = statistics.median(undisturbed(clean))
            waited += sum(_take(stage, usual) for stage in stages if stage.retried or stage.seconds > NEAR * usual)
        return waited

    def correct(self, seconds: Sequence[float]) -> None:
        """Let stages in which the allocator took memory away take these seconds at most, by position. The rest was waiting."""
        retried = ((stage, known) for stage, known in zip(self.stages, seconds, strict=True) if stage.retried)
        self.waited_seconds += sum(_take(stage, known) for stage, known in retried)

    def uses(self) -> dict[Block, tuple[int, ...]]:
        """Return the positions at which each block was used, in the order of first use."""
        uses: dict[Block, list[int]] = {}
        for position, stage in enumerate(self.stages):
            for block in (*stage.read, *stage.made, *stage.written):
                if block not in uses:
                    uses[block] = [position]
                elif uses[block][-1] != position:
                    uses[block].append(position)
        return {block: tuple(positions) for block, positions in uses.items()}

    def alive(self) -> set[tuple[int, int]]:
        """Return (number of the region, ordinal in it) of the blocks that were made in it and are still alive."""
        regions = enumerate(self.regions)
        return {(index, number) for index, each in regions for number, b in enumerate(each.made) if b.storage() is not None}

    @property
    def signature(self) -> tuple[tuple[Hashable, int], ...]:
        """A value that is equal for iterations that ran the same regions in the same order."""
        left_out = (("left out", place) for place in self.left_out)
        return *((r.identity, len(r.stages)) for r in self.regions), *left_out

    @property
    def structure(self) -> tuple[tuple[Hashable, int], ...]:
        """A value that is equal for iterations that ran the same graphs in the same order, whatever the sizes of their inputs."""
        return tuple((graph_of(identity), count) for identity, count in self.signature)

    @property
    def sizes_vary(self) -> bool:
        """Whether one of its graphs takes inputs of other sizes, too."""
        return any(isinstance(region.identity, SizedGraph) for region in self.regions)

    def made(self) -> Iterator[Block]:
        """Go through what its regions made, without the states that an optimizer makes in its first step."""
        return (block for region in self.regions for block in region.made if block.kind != "optimizer_state")

    @property
    def made_bytes(self) -> int:
        """Bytes of all that its regions made: more for larger inputs."""
        return sum(block.size_bytes for block in self.made())

    @property
    def complete(self) -> bool:
        """Whether this record has all regions of the iteration, and each of them ran to its end."""
        return not self.truncated and all(region.complete for region in self.regions)

    @property
    def is_update_alone(self) -> bool:
        """Whether an optimizer has stepped without a pass, such as that of a rank whose batches have ended (`Join`)."""
        own = [region for region in self.regions if not region.step_goes_on]
        return bool(own) and all(stage.phase in ("user", "optimizer") for region in own for stage in region.stages)

    @property
    def stage_count(self) -> int:
        """Number of recorded stages: the position of the next one."""
        return self.regions[-1].first + len(self.regions[-1].stages) if self.regions else 0

    @property
    def stages(self) -> list[StageRun]:
        """All stages, by position."""
        return [stage for region in self.regions for stage in region.stages]


# -- where iterations end

logger = logging.getLogger("teraio")

LONGEST_PERIOD = 16  # iterations of so many kinds may take turns
_TO_BE_SURE = 4  # so many iterations beyond two periods have to be as those before them


class IterationBorder:
    """Knows what ends iterations. Keeps no optimizer alive.

    [Note: Where iterations end]
    * With `teraio.step_done()`, once the user has called it.
    * Else with the step of the first optimizer seen. Steps of others are part of the iteration. Another optimizer takes over if
      the first one is gone, or no longer used.
    * Where no optimizer steps: where the forward graph begins again that came first, after a backward graph has run. That may as
      well be the next pass before one update, so some passes have to go by first: few if no gradient of a pass is left when
      the next one begins, many if gradients are.
    * Where nothing but inference has run: where the graph begins again that came first. Many passes have to go by first, since a
      training may begin with an evaluation.

    period: so many of these ends make one. In some loops, iterations of several kinds take turns: PPO updates several times by
    one rollout, a task of meta-learning has several steps. `Repetition` finds the period.
    """

    # Steps of another optimizer without one of the first, after which this counts as no longer used; other graphs, likewise.
    _PATIENCE = 4
    _PASSES = 4
    _PASSES_THAT_LEAVE_GRADIENTS = 32

    def __init__(self) -> None:
        self._first: weakref.ref[Optimizer] | None = None
        self._others: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()  # steps since one of the first
        self._told = False
        self._graph: Hashable | None = None
        self._other_graphs = 0
        self._went_back = False
        self._passes = 0
        self._passes_without_gradients = 0
        self._trains = False
        self._ends = 0
        self.period = 1

    @property
    def waiting_for(self) -> str | None:
        """What has to happen before it is known where iterations end; None if it is known."""
        if self._told or self._first is not None or self._knows_passes:
            return None
        return (
            f"the end of an iteration: the step of a torch.optim optimizer over parameters of the compiled model, or "
            f"teraio.step_done() after your own update ({self._passes} passes so far)"
        )

    def tell(self) -> bool:
        """The user says where iterations end, from now on. Return whether one ends here."""
        self._told = True
        return self._period_ends()

    def _period_ends(self) -> bool:
        self._ends = (self._ends + 1) % self.period
        return not self._ends

    # -- steps of optimizers

    def ends_with(self, optimizer: Optimizer) -> bool:
        """Return whether the step that `optimizer` has just done ends an iteration."""
        if self._told:
            return False
        first = self._first() if self._first is not None else None
        if first is None or (first is not optimizer and self._no_longer_used(first, optimizer)):
            first = optimizer
            self._first = weakref.ref(optimizer)
        if first is optimizer:
            self._others.clear()
            return self._period_ends()
        self._others[optimizer] = self._others.get(optimizer, 0) + 1
        return False

    def _no_longer_used(self, first: Optimizer, other: Optimizer) -> bool:
        """Two that alternate over the same parameters are both in use. One that steps twice in a row has replaced the other."""
        own = {id(parameter) for group in first.param_groups for parameter in group["params"]}
        shared = any(id(parameter) in own for group in other.param_groups for parameter in group["params"])
        return self._others.get(other, 0) >= (1 if shared else self._PATIENCE + 1)

    # -- passes

    @property
    def _knows_passes(self) -> bool:
        return self._passes_without_gradients >= self._PASSES or self._passes >= self._PASSES_THAT_LEAVE_GRADIENTS

    def backward_begins(self) -> None:
        """A backward graph is about to run."""
        self._went_back = True

    def ends_before(self, graph: Hashable, *, inference: bool = False, gradients_left: Callable[[], bool]) -> bool:
        """Return whether an iteration ends before the run of a forward graph that is about to begin. Not for one inside backward.

        inference: no backward graph will follow. gradients_left: returns whether a gradient of the iteration is still there.
        """
        if self._told or self._first is not None or (inference and self._trains):
            return False
        if not inference and not self._trains:
            self._trains, self._graph, self._passes = True, None, 0
        if not (inference or self._went_back or self._graph is None):
            return False
        self._went_back = False
        if graph != self._graph:
            self._other_graphs += 1
            if self._graph is None or self._other_graphs > self._PATIENCE:
                self._graph, self._other_graphs = graph, 0
            return False
        self._other_graphs = 0
        self._passes += 1
        self._passes_without_gradients += not inference and not gradients_left()
        return self._knows_passes and self._period_ends()


class Repetition:
    """Lets several iterations count as one if they repeat after so many, and no longer if these do not repeat."""

    def __init__(self, border: IterationBorder) -> None:
        self._border = border
        self._latest: deque[Hashable] = deque(maxlen=2 * LONGEST_PERIOD + _TO_BE_SURE)  # signatures
        self._shortest, self._longest = 2, LONGEST_PERIOD
        border.period = 1

    def look(self, iteration: Iteration, *, compiled: bool, repeats: bool) -> str | None:
        """Take in an iteration. Return why it cannot be used if a period was found with it.

        compiled: a graph was compiled in it. repeats: nothing shows that it ran other graphs than the one before.
        """
        border, latest = self._border, self._latest
        if border.period > 1:
            if iteration.truncated:
                self._longest = border.period - 1
            if iteration.truncated or not repeats:
                self._shortest = border.period + 1 if border.period < self._longest else 2
                border.period = 1
            return None
        if compiled or not iteration.complete:
            latest.clear()
            return None
        latest.append(iteration.signature)
        found = list(latest)
        for period in range(self._shortest, self._longest + 1):
            same = period + _TO_BE_SURE
            if found[-same:] == found[-same - period : -period] and len(set(found[-period:])) > 1:
                logger.info("iterations repeat after %d: from now on, so many count as one", period)
                border.period = period
                latest.clear()
                return f"iterations repeat after {period}, and so many count as one from now on"
        return None
