"""Programs run without management and under the pager, what the observer and stages in between are told, and what goes wrong."""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from planner.errors import StorageFullError
from runtime.cpu import CpuMemory
from runtime.execution import WorkspaceMeter, run_managed, run_plain
from runtime.paging import Block, Pager, State

from ..memory_mover import UNIT, Bench
from .programs import WIDTH, Recorder, chain, filled, managed, program, stage


@pytest.mark.parametrize("budget", [None, 3, 4, 5])
def test_managed_gives_the_same_under_any_budget_and_without_a_mover(budget: int | None) -> None:
    bench = Bench(None if budget is None else budget * WIDTH)
    kept = [bench.make(f"other {number}", 2) for number in range(3 if budget else 0)]
    alone = Pager(mover=None, budget_bytes=None)
    for pager in (bench.pager, alone):
        arguments = [filled(3), filled(4)]
        difference, nothing, total = run_managed(chain(), arguments, pager, Recorder(), WorkspaceMeter(None))
        assert arguments == [] and nothing is None
        assert difference.tolist() == filled(11).tolist() and total.tolist() == filled(7).tolist()
        assert {block.name for block in pager.blocks} - {block.name for block in kept} == {"slot4", "slot2"}
    if budget is None:
        assert bench.pager.account.peak_bytes <= 4 * WIDTH
    else:
        assert bench.pager.account.evictions > 0 and [bench.value(block.name) for block in kept] == [1, 1, 1]


def test_what_is_not_needed_any_more_is_freed_inside_a_stage() -> None:
    seen: list[bool] = []
    probe = filled(1)
    block = Bench(None).pager.block_of(probe, name="probe", kind="activation", user_visible=False)

    def look(a: torch.Tensor) -> tuple[torch.Tensor]:
        doubled = a * 2
        del a
        seen.append(block.dead)
        return (doubled,)

    def boxed(values: list[Any]) -> Sequence[Any]:
        doubled = values.pop() * 2
        seen.append(block.dead)
        return (doubled,)

    base = stage("look", look, (0,), (1,), frees=(0,))
    plan = program(replace(base, run=boxed), inputs=1, results=(1,))
    arguments = [probe]
    del probe
    run_plain(plan, arguments)
    assert seen == [True]


def test_the_observer_hears_of_every_stage() -> None:
    bench, recorder = Bench(None), Recorder()
    managed(chain(), [filled(3), filled(4)], bench, recorder)
    assert recorder.regions == [("p", 3)] and recorder.reached == 3 and recorder.ended == 1
    assert [record.name for record in recorder.stages] == ["add", "double", "subtract"]
    names = [[[b.name for b in getattr(record, key)] for key in ("read", "made")] for record in recorder.stages]
    assert names == [[["slot0", "slot1"], ["slot2"]], [["slot2"], ["slot3"]], [["slot3", "slot0"], ["slot4"]]]
    assert recorder.next_uses == [{"slot0": 2, "slot2": 1}, {"slot3": 1}, {}]
    assert all(record.seconds >= 0 for record in recorder.stages)


def test_a_stage_that_writes_its_input() -> None:
    bench, recorder = Bench(None), Recorder()
    running = filled(1)
    block = bench.pager.block_of(running, name="running", kind="buffer", user_visible=True)
    bench.pager.offload(block)
    bench.mover.finish()
    plan = program(
        stage("read", lambda a: (a + 0,), (0,), (1,), next_uses=(1, -1)),
        stage("update", lambda a: (a.mul_(5) * 1,), (0,), (2,), mutates=(0,)),
        inputs=1,
        results=(1, 2),
        kinds=["buffer"],
    )
    managed(plan, [running], bench, recorder)
    assert [list(record.written) for record in recorder.stages] == [[], [block]]
    assert not block.copy_is_valid and running.tolist() == filled(5).tolist()


def test_results_and_inputs_are_reachable_for_user_code_but_what_is_saved_is_not() -> None:
    bench = Bench(None)
    shown, _, saved = managed(chain(), [filled(3), filled(4)], bench)
    known = [bench.pager.known_block(value) for value in (shown, saved)]
    assert [block.user_visible for block in known if block is not None] == [True, False]


def test_parameters_are_made_movable_and_given_activations_are_left_alone() -> None:
    bench = Bench(None)
    plan = program(stage("use", lambda a, b: (a + b,), (0, 1), (2,)), inputs=2, results=(2,), kinds=["parameter", "activation"])
    parameter = torch.ones(UNIT // 4)
    managed(plan, [parameter, torch.ones(UNIT // 4)], bench)
    assert bench.mover.log.count("adopt") == 1
    managed(plan, [parameter, torch.ones(UNIT // 4)], bench)
    assert bench.mover.log.count("adopt") == 1, "a block stays where it is"


def test_numbers_and_sparse_tensors_are_no_blocks() -> None:
    bench = Bench(None)
    plan = program(
        stage("use", lambda n, s: (torch.sparse.sum(s) * n,), (0, 1), (2,)), inputs=2, results=(2,), kinds=["activation"] * 2
    )
    (result,) = managed(plan, [3, torch.eye(4).to_sparse()], bench)
    assert float(result) == 12
    assert [block.name for block in bench.pager.blocks] == ["slot2"]


def test_time_in_collectives_is_told_apart(group: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the operators of torch.distributed, also of one that fails. Each look at the clock finds it a second later."""
    seconds = itertools.count()

    def reduce(a: torch.Tensor, group: str) -> torch.Tensor:
        begun = torch.ops._c10d_functional.all_reduce.default(a * 2, "sum", group)
        return torch.ops._c10d_functional.wait_tensor.default(begun)

    def all_reduced(a: torch.Tensor) -> tuple[torch.Tensor]:
        monkeypatch.setattr(time, "perf_counter", lambda: float(next(seconds)))
        with pytest.raises(RuntimeError):
            reduce(a, "no such group")
        result = reduce(a, dist.group.WORLD.group_name)
        monkeypatch.undo()
        return (result,)

    one = stage("reduce", all_reduced, (0,), (1,))
    recorder = Recorder()
    for each in (one, replace(one, has_collectives=True)):
        (found,) = managed(program(each, inputs=1, results=(1,)), [filled(2)], Bench(None), recorder)
        assert torch.equal(found, filled(4))
    assert [run.collective_seconds for run in recorder.stages] == [0.0, 3.0]


# -- errors


class Broken(Exception):
    """Raised by the stages here."""


def breaking(*_: Any) -> tuple[Any, ...]:
    raise Broken


def test_a_stage_that_raises() -> None:
    bench, recorder = Bench(None), Recorder()
    first, second = filled(3), filled(4)
    plan = program(
        stage("write", lambda a, b: (a.add_(b) + 0,), (0, 1), (2,), mutates=(0,), next_uses=(1, 1, 1)),
        stage("break", breaking, (0, 1, 2), (3,), frees=(0, 1, 2), mutates=(1,)),
        inputs=2,
        results=(3,),
    )
    with pytest.raises(Broken):
        managed(plan, [first, second], bench, recorder)
    assert recorder.ended == 1 and len(recorder.stages) == 1
    blocks = bench.pager.blocks
    assert all(block.pins == 0 and not block.copy_is_valid for block in blocks)
    assert bench.pager.account.used_bytes == 2 * WIDTH, "what the stages made is gone"
    bench.pager.enter_region()
    bench.pager.acquire(blocks, 100 * WIDTH, "next")


def test_an_error_of_the_storage_tier() -> None:
    bench = Bench(3 * WIDTH)
    kept = bench.make("kept", 4)
    bench.mover.refuse = StorageFullError("the drive is full")
    first = filled(3)
    with pytest.raises(StorageFullError):
        managed(chain(), [first, filled(4)], bench)
    assert bench.value("kept") == 1 and kept.state is State.ON_DEVICE and kept.pins == 0
    difference, _, _ = managed(chain(), [first, filled(4)], bench)
    assert difference.tolist() == filled(11).tolist()


# -- stages that run between those of a program


@dataclass
class Taker:
    """Interleaved stages that note what they see, and take `slot` out when stage `after` has ended."""

    after: int
    slot: int
    stage_count: int = 2
    seen: list[tuple[int, list[str], list[bool]]] = field(default_factory=list)
    results: list[Any] | None = None

    def after_stage(self, number: int, read: Sequence[Block], slots: list[Any]) -> None:
        self.seen.append((number, [block.name for block in read], [slot is not None for slot in slots]))
        if number == self.after:
            slots[self.slot] = None

    def region_done(self, results: Sequence[Any]) -> None:
        self.results = list(results)


def test_interleaved_stages_see_each_stage_and_may_keep_results() -> None:
    bench, recorder, interleaved = Bench(None), Recorder(), Taker(after=1, slot=2)
    arguments = [filled(3), filled(4)]
    found = run_managed(chain(), arguments, bench.pager, recorder, WorkspaceMeter(None), [interleaved])
    assert recorder.regions == [("p", 3 + 2)]
    assert interleaved.seen == [
        (0, ["slot0", "slot1"], [True, False, True, False, False]),
        (1, ["slot2"], [True, False, True, True, False]),
        (2, ["slot3", "slot0"], [False, False, False, False, True]),
    ]
    assert interleaved.results is not None and all(a is b for a, b in zip(interleaved.results, found, strict=True))
    assert torch.equal(found[0], filled(11)) and found[1] is None and found[2] is None
    bench.pager.forget_dead()
    assert [block.name for block in bench.pager.blocks] == ["slot4"], "what the interleaved stages have taken is gone"


def test_interleaved_stages_that_fail_leave_nothing_held() -> None:
    class Failing(Taker):
        def after_stage(self, number: int, read: Sequence[Block], slots: list[Any]) -> None:
            raise ArithmeticError("no")

    bench, recorder, interleaved = Bench(None), Recorder(), Failing(after=0, slot=0)
    with pytest.raises(ArithmeticError):
        run_managed(chain(), [filled(3), filled(4)], bench.pager, recorder, WorkspaceMeter(None), [interleaved])
    assert interleaved.results is None and recorder.ended == 1
    assert all(block.pins == 0 for block in bench.pager.blocks)


# -- how much memory a stage needs: estimated, then measured


class Counter:
    """An allocator that has nothing allocated, and a peak that a test says."""

    allocated_bytes = 0
    peak_bytes = 0

    def reset_peak(self) -> None:
        pass


FIRST = {"first_is_special": True}


@pytest.mark.parametrize(
    ("settings", "runs", "expected"),
    [
        pytest.param(
            FIRST, [(900, 0, 0), (100, 1, 0), (300, 2, 0), (200, 3, 0), (999, 4, 0)], [7, 100, 300, 300, 300], id="the largest"
        ),
        pytest.param(
            FIRST,
            [(900, 0, 0), (100, 0, 0), (500, 0, 0), (200, 1, 0), (999, 1, 0), (300, 2, 0), (800, 3, 0)],
            [7, 100, 100, 200, 200, 300, 300],
            id="one of each iteration",
        ),
        pytest.param({}, [(900, 0, 1), (100, 1, 0), (700, 2, 2), (300, 3, 0)], [7, 100, 100, 300], id="while no block moves"),
    ],
)
def test_which_four_runs_are_measured(settings: dict[str, bool], runs: list[tuple[int, int, int]], expected: list[int]) -> None:
    """runs: the peak, the iteration, and how many blocks move meanwhile. Before there is a measurement, the estimate counts.

    The peak is not forgotten before a first run that does not count: Inductor tunes kernels within the memory below it.
    Like layers share a stage: all runs that are measured would be in the first iteration otherwise.
    """
    memory, moves, iteration = Counter(), 0, 0
    resets: list[int] = []
    seen: list[int] = []
    memory.reset_peak = lambda: resets.append(len(seen))  # type: ignore[method-assign]
    meter = WorkspaceMeter(memory, runs=4, iteration=lambda: iteration, moves=lambda: moves, **settings)
    base = replace(stage("x", lambda a: (a,), (0,), (1,)), output_bytes=0, workspace_bytes=7)
    for peak_bytes, number, moved in runs:
        memory.peak_bytes, iteration = peak_bytes, number
        with meter.watching(base):
            moves += moved
        seen.append(meter.workspace_bytes(base))
    assert seen == expected and (0 in resets) != bool(settings)


def test_a_run_that_fails_is_measured_again_in_the_same_iteration() -> None:
    memory = Counter()
    meter = WorkspaceMeter(memory, runs=4, iteration=lambda: 0)
    base = replace(stage("x", lambda a: (a,), (0,), (1,)), output_bytes=0, workspace_bytes=7)
    with pytest.raises(torch.OutOfMemoryError), meter.watching(base):
        raise torch.OutOfMemoryError
    memory.peak_bytes = 300
    with meter.watching(base):
        pass
    assert meter.workspace_bytes(base) == 300


def test_a_workspace_does_not_depend_on_who_else_holds_the_inputs() -> None:
    """The same code runs for several stages: one frees its input while it runs, the next one's input lives on."""

    def run(values: list[Any]) -> tuple[torch.Tensor]:
        once = values.pop() * 1
        return (once * 2,)

    base = stage("x", lambda a: (a,), (0,), (1,), frees=(0,))
    freeing = replace(base, run=run)
    plan = program(freeing, inputs=1, results=(1,))
    meter = WorkspaceMeter(CpuMemory())
    gc.collect()  # what other tests have left, freed while the stage runs, would hide what it takes
    run_managed(plan, [filled(1)], Bench(None).pager, Recorder(), meter)
    assert meter.workspace_bytes(freeing) >= WIDTH
