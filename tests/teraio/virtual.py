"""Training in virtual time: a real pager and recorder over a mover whose copies take as long as a test says."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from types import SimpleNamespace

import pytest
import torch

import planner
from planner import Budgets, Hardware, Link, Move, Plan, Prefetch
from planner.policies.predictions import prediction
from planner.schema import Placement
from runtime import device as device_module
from runtime.execution import StageRun
from runtime.paging import Block, Done, Pager
from runtime.transfer import LinkRates, OneWay
from teraio.following import IterationObserver
from teraio.profiling import Iteration, Profile, build_profile

from ..runtime.memory_mover import UNIT, MemoryMover, Stepping

BLOCK_BYTES = 2 * UNIT
STAGES = 8
COUNT = STAGES + 1
"""Positions in an iteration: user code, then the stages."""
OUT, IN = "device->storage", "storage->device"


class TimedMover(MemoryMover):
    """Each direction serves its copies in order; `seconds`: what one takes. Counts as the engine's links do."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.seconds = {OUT: 1.0, IN: 1.0}
        self.free_at = {OUT: 0.0, IN: 0.0}
        self.ends: list[float] = []
        self.moved = {OUT: 0, IN: 0}
        self.busy = {OUT: 0.0, IN: 0.0}

    def _begin(self, block: Block, kind: str, done: Done) -> None:
        super()._begin(block, kind, done)
        link = {"out": OUT, "in": IN}[kind]
        self.free_at[link] = max(self.now, self.free_at[link]) + self.seconds[link]
        self.ends.append(self.free_at[link])
        self.moved[link] += block.size_bytes
        self.busy[link] += self.seconds[link]

    def end_next(self) -> bool:
        if not self.ends:
            return False
        index = self.ends.index(min(self.ends))
        self.now = max(self.now, self.ends.pop(index))
        self.finish(index)
        return True

    def pass_seconds(self, seconds: float) -> None:
        until = self.now + seconds
        while self.ends and min(self.ends) <= until:
            self.end_next()
        self.now = until

    def perf_counter(self) -> float:
        return self.now

    # -- what a plan in force asks of the machine

    def moved_bytes(self) -> dict[str, int]:
        return dict(self.moved)

    def busy_seconds(self) -> dict[str, float]:
        return dict(self.busy)


class VirtualTraining:
    """One region of STAGES stages, each of which reads a weight of its own for `stage_seconds`.

    graph: its identity. between_seconds: of the host, after each stage. codes: what each stage runs, by which stages are alike.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, budget_blocks: int = STAGES) -> None:
        self.mover = TimedMover()
        clock = SimpleNamespace(perf_counter=self.mover.perf_counter)
        monkeypatch.setattr(device_module, "time", clock)
        self.pager = Pager(
            mover=self.mover,
            budget_bytes=budget_blocks * BLOCK_BYTES,
            condition=Stepping(self.mover.end_next),
            now_seconds=self.mover.perf_counter,
        )
        self.observer = IterationObserver(self.pager)
        self.graph: Hashable = "graph"
        self.stage_seconds = [1.0] * STAGES
        self.between_seconds = 0.0
        self.codes: list[str | None] = [None] * STAGES
        self.weights: list[Block] = []
        self._tensors: list[torch.Tensor] = []
        for number in range(STAGES):
            tensor, block = self._make(number)
            self._tensors.append(tensor)
            self.weights.append(block)

    def _make(self, number: int) -> tuple[torch.Tensor, Block]:
        self.pager.acquire([], BLOCK_BYTES, "make")
        tensor = torch.full((BLOCK_BYTES,), number, dtype=torch.uint8)
        block = self.pager.block_of(tensor, name=f"weight.{number}", kind="parameter", user_visible=False)
        self.pager.retire([], [])
        return tensor, block

    def replace(self, number: int) -> None:
        """Give a weight other memory, as `parameter.data = other` does."""
        self._tensors[number], self.weights[number] = self._make(number)

    def iteration(self) -> Iteration:
        self.regions()
        return self.observer.iteration_ends()

    def regions(self) -> None:
        """All regions of an iteration."""
        self.pager.enter_region()
        self.observer.region_begins(self.graph, STAGES)
        for number, weight in enumerate(self.weights):
            fetch = self.observer.stage_reached()
            self.pager.acquire([weight], 0, f"stage {number}", then_fetch=fetch)
            begin = self.observer.mark()
            self.mover.pass_seconds(self.stage_seconds[number])
            end = self.observer.mark()
            self.pager.retire([weight], [])
            self.mover.pass_seconds(self.between_seconds)
            run = StageRun(name=f"forward/{number}", phase="forward", read=[weight], code=self.codes[number])
            self.observer.stage_ended(run, begin, end)
        self.observer.region_ended()
        self.pager.leave_region()

    def profile(self) -> Profile:
        """Of iterations as they run now; the links' rates are those of the mover now."""
        iterations = [self.iteration() for _ in range(3)]
        for iteration in iterations:
            iteration.read_times()
        rates = {link: BLOCK_BYTES / seconds for link, seconds in self.mover.seconds.items()}
        return profile_of(iterations[1:], hardware=hardware(rates))


def hardware(rates: Mapping[str, float], *, latency: float = 0.0, **sizes: int) -> Hardware:
    """A machine with links of these bytes per second, by name. sizes: of its other memory."""
    ends = {link: link.split("->") for link in rates}
    links = tuple(
        Link(from_tier=ends[link][0], to_tier=ends[link][1], bytes_per_second=rate, latency_seconds=latency)  # type: ignore[arg-type]
        for link, rate in rates.items()
    )
    return Hardware(name="made up", device_memory_bytes=1 << 30, links=links, **sizes)


def link_rates(write: float, read: float, *, latency: float = 0.0, duplex: tuple[float, float] | None = None) -> LinkRates:
    """What an engine measures, in bytes per second. duplex: of both ways at once, if that is less."""
    both = duplex or (write, read)
    return LinkRates(OneWay(write, latency, both[0]), OneWay(read, latency, both[1]))


def for_each_iteration(patch: pytest.MonkeyPatch, act: Callable[[Iteration], None]) -> None:
    """Call `act` with each iteration that ends."""
    ends = IterationObserver.iteration_ends

    def ending(observer: IterationObserver, **how: bool) -> Iteration:
        iteration = ends(observer, **how)
        act(iteration)
        return iteration

    patch.setattr(IterationObserver, "iteration_ends", ending)


MACHINE = hardware({})


def profile_of(
    iterations: Sequence[Iteration],
    *,
    survivors: Collection[tuple[int, int]] = (),
    fixed_bytes: int = 0,
    hardware: Hardware = MACHINE,
) -> Profile:
    """What `build_profile` makes of them."""
    names = {"name": "virtual", "created_by": "tests"}
    return build_profile(iterations, **names, hardware=hardware, fixed_bytes=fixed_bytes, survivors=set(survivors))


def plan_for(trace: planner.Trace, *fetched: tuple[int, int]) -> Plan:
    """Each weight (stage, start) is dropped after its use and fetched from `start` on, a position in the next iteration."""

    def move(stage: int, start: int) -> Move:
        place, end = stage + 1, stage + 1 + COUNT
        prefetch = Prefetch(start=start + COUNT, ready_by=end)
        return Move(block=stage, after=place, before=end, tier="storage", offload=None, prefetch=prefetch)

    plan = Plan(
        trace_fingerprint=trace.fingerprint,
        policy="by hand",
        budgets=Budgets(device_bytes=STAGES * BLOCK_BYTES),
        moves=tuple(move(*each) for each in sorted(fetched, key=lambda pair: pair[1])),
        initial=tuple(Placement(block=stage, tier="storage") for stage, start in sorted(fetched) if start >= 0),
    )
    return plan.model_copy(update={"predicted": prediction(trace, planner.simulate(trace, plan))})
