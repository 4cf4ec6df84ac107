"""What a training run is doing, what each of its iterations took, and what `teraio.park` has left on the device.

Also what is watched while everything fits and stages run unmanaged, to notice when that may no longer be so.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Self

if TYPE_CHECKING:  # `import teraio` must not import torch
    from runtime.execution import MeasuredMemory, Program, StageRerun
    from runtime.paging import Pager
    from teraio.machine import Machine
    from teraio.profiling import Iteration

RunPhase = Literal["profile", "planning", "planned", "fits", "demand"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """A snapshot of a training run.

    phase: "profile" (blocks move on demand, stages are measured), "planning" (on demand while the solver runs), "planned",
    "fits" (nothing has to move, stages run unmanaged) or "demand" (no plan could be made; the log says why).
    waiting_for: why there is no plan yet, in plain text; None if there is one, or if none is needed.
    iterations: number of finished iterations. device_peak_bytes: as teraio counts them, workspaces included.
    movable_bytes: of all blocks that can leave the device, wherever they are now. immovable_bytes: what stays on the device.
    moved_bytes: since the start, by link ("device->storage", "storage->device").
    busy_seconds: time since the start in which each link was copying. exposed_seconds: the part of it in which the training
    thread waited for copies or room; the rest was hidden. Empty on a GPU, where the host does not wait.
    predicted_iteration_seconds: by the plan in force. measured_iteration_seconds: median of the latest iterations of this phase.
    ideal_iteration_seconds: the sum of all stages of the trace, as if memory had no limit.
    floor_bytes: the smallest budget that would do. deviations: number of regions that ran otherwise than planned.
    drift: median time of the latest planned iterations over the predicted time, less 1; None while it is not known.
    late_seconds: time in the last iteration spent waiting for copies and room; on a GPU, between stages, in the last one that was
    timed.
    recomputed_stages, recomputed_bytes, recompute_seconds: forward stages that ran again in the last iteration, the size of
    what they recomputed, and how long they took.
    reserved_bytes: what PyTorch's allocator has taken from the GPU, handed out or not. allocator_retries: how often so far it had
    to wait for the GPU and take free memory away. None on CPU.
    replans: how often a plan made from measured times has replaced the plan before it.
    trace_path, plan_path: files that were written. stages, distinct_stages: number of stages, and of those compiled separately.
    """

    phase: RunPhase
    waiting_for: str | None
    iterations: int
    device_budget_bytes: int | None
    device_peak_bytes: int
    movable_bytes: int
    immovable_bytes: int
    moved_bytes: dict[str, int]
    busy_seconds: dict[str, float]
    exposed_seconds: dict[str, float]
    predicted_iteration_seconds: float | None
    measured_iteration_seconds: float | None
    ideal_iteration_seconds: float | None
    floor_bytes: int | None
    deviations: int
    drift: float | None
    late_seconds: float
    recomputed_stages: int
    recomputed_bytes: int
    recompute_seconds: float
    reserved_bytes: int | None
    allocator_retries: int | None
    replans: int
    trace_path: str | None
    plan_path: str | None
    stages: int
    distinct_stages: int


@dataclass(frozen=True, slots=True, kw_only=True)
class IterationStats:
    """What one iteration took.

    run: number of the run in this process, from 0: models compiled with equal options share one. iteration: its number, from 0.
    phase: of the run while it ran, see `teraio.Status`.
    seconds: from the end of the iteration before to its own end. The first one includes compilation.
    waited_seconds: the part of them in which training waited for copies, for room and for updates on the host; on a GPU, also
    for the host. recompute_seconds: of stages that ran again. On a GPU under a plan, both are those of the latest iteration whose
    stages were timed: every eighth at least. predicted_seconds: by the plan in force; None without one.
    tier_bytes: what is in each tier at its end: blocks and what stays on the device; in lower tiers, their slots.
    moved_bytes, busy_seconds: by link ("device->storage"): what it carried, and for how long it was copying.
    """

    run: int
    iteration: int
    phase: RunPhase
    seconds: float
    waited_seconds: float
    recompute_seconds: float
    predicted_seconds: float | None
    tier_bytes: dict[str, int]
    moved_bytes: dict[str, int]
    busy_seconds: dict[str, float]

    def bytes_per_second(self, link: str) -> float | None:
        """Return the rate at which the link carried bytes while it was busy; None if it carried nothing."""
        seconds = self.busy_seconds.get(link, 0.0)
        return self.moved_bytes.get(link, 0) / seconds if seconds else None


class History:
    """The iterations of one run. `note` is for the training thread, all else for any.

    finished: how many have ended. reruns: of the last one. waited_seconds, recompute_seconds: of the last one whose stages were
    timed, see `Status`.
    """

    def __init__(self, machine: Machine, pager: Pager) -> None:
        self._machine = machine
        self._pager = pager
        self._moved_bytes: Mapping[str, int] = {}
        self._busy_seconds: Mapping[str, float] = {}
        self.finished = 0
        self.reruns: Sequence[StageRerun] = ()
        self.waited_seconds = self.recompute_seconds = 0.0

    def note(self, iteration: Iteration, phase: RunPhase, predicted_seconds: float | None, *, run: int) -> IterationStats:
        """Take in an iteration that has ended, and whose times are known. run: its number, for `IterationStats`."""
        moved_bytes, busy_seconds = self._machine.moved_bytes(), self._machine.busy_seconds()
        self.reruns = tuple(iteration.reruns)
        if iteration.timed:
            self.waited_seconds = iteration.waited_seconds
            self.recompute_seconds = sum(rerun.seconds for rerun in iteration.reruns)
        stats = IterationStats(
            run=run,
            iteration=self.finished,
            phase=phase,
            seconds=iteration.seconds,
            waited_seconds=self.waited_seconds,
            recompute_seconds=self.recompute_seconds,
            predicted_seconds=predicted_seconds,
            tier_bytes={
                "device": self._pager.account.used_bytes + self._pager.account.unmoved_bytes,
                **self._machine.used_bytes(),
            },
            moved_bytes={link: value - self._moved_bytes.get(link, 0) for link, value in moved_bytes.items()},
            busy_seconds={link: value - self._busy_seconds.get(link, 0.0) for link, value in busy_seconds.items()},
        )
        self._moved_bytes, self._busy_seconds = moved_bytes, busy_seconds
        self.finished += 1
        return stats


BESIDE = "of your code and of libraries, and gaps between what stays"


@dataclass(frozen=True, slots=True, kw_only=True)
class Parked:
    """The device is empty but for what is named here, until the next compiled region or optimizer step.

    left_bytes: have left the device now. staying_bytes: of what PyTorch still holds there, by the reason why it does.
    seconds: that parking took.

    As a context it only shows for how long the device is yours: blocks come back with the next region, not at the end.
    """

    left_bytes: int
    staying_bytes: Mapping[str, int]
    seconds: float

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing comes back before it is needed."""


# -- while everything fits: measured peaks, and symbolic sizes

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
