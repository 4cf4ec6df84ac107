"""Where iterations end, what they take undisturbed and of the budget, and that a batch larger than all that fitted is noticed."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

import teraio
from planner import Plan, Trace
from runtime.execution import StageRun
from teraio.profiling import Iteration, IterationBorder, Region, profiler
from teraio.watching import PeakWatch

from ...training import MIB, Training, begin, unequal


def weight() -> nn.Parameter:
    return nn.Parameter(torch.zeros(2))


@pytest.fixture
def border() -> IterationBorder:
    return IterationBorder()


def ends(border: IterationBorder, *steps: torch.optim.Optimizer) -> list[bool]:
    return [border.ends_with(optimizer) for optimizer in steps]


def test_the_first_optimizer_ends_iterations(border: IterationBorder) -> None:
    """Not the critic of a generator, nor, of one for each parameter, another, in hooks of the backward pass or in a loop."""
    generator, critic = SGD([weight()]), SGD([weight()])
    assert ends(border, generator, *[critic] * 5, generator) == [True, *[False] * 5, True]
    border, optimizers = IterationBorder(), [SGD([weight()]) for _ in range(12)]
    assert ends(border, *optimizers * 7) == [True, *[False] * 11] * 7
    assert border.tell() and ends(border, *optimizers) == [False] * 12, "from now on the user says it"


def test_optimizers_over_the_same_parameters(border: IterationBorder) -> None:
    """The one that replaces another ends iterations from its first step on, whatever its address is; later if that is held.

    Two that alternate stay apart.
    """
    parameter = weight()
    assert ends(border, SGD([parameter])) == [True]
    second = SGD([parameter])
    assert ends(border, second, second) == [True, True]
    border, first, second = IterationBorder(), SGD([parameter]), SGD([parameter, weight()])
    assert ends(border, first, first, second, second, second) == [True, True, False, True, True]
    border, first, second = IterationBorder(), SGD([parameter]), SGD([parameter])
    assert ends(border, *[first, second] * 4) == [True, False] * 4


# -- without steps


def passes(border: IterationBorder, count: int, *, left: bool = False) -> list[bool]:
    """For each forward pass, and a backward pass after it, whether an iteration ended before it."""
    found = []
    for _ in range(count):
        found.append(border.ends_before("model", gradients_left=lambda: left))
        border.backward_begins()
    return found


def infer(border: IterationBorder, count: int) -> list[bool]:
    """For each inference pass of two graphs, whether an iteration ended before it."""
    found = []
    for _ in range(count):
        ended, never = [border.ends_before(graph, inference=True, gradients_left=lambda: False) for graph in ("first", "second")]
        assert not never
        found.append(ended)
    return found


def test_passes_that_leave_gradients_may_have_one_update(border: IterationBorder) -> None:
    assert passes(border, 40, left=True) == [False] * 32 + [True] * 8


def test_passes_of_inference_end_iterations_where_nothing_trains(border: IterationBorder) -> None:
    optimizer = SGD([weight()])
    assert infer(border, 35) == [False] * 32 + [True] * 3 and border.waiting_for is None
    assert passes(border, 7) == [False] * 4 + [True] * 3, "it was an evaluation"
    assert not any(infer(border, 40))
    assert ends(border, optimizer) == [True] and not any(infer(border, 40))


# -- what a stage takes while nothing disturbs it, and whether enough measurements say so


def iterations(*seconds: tuple[float, ...], phase: str = "forward") -> list[Iteration]:
    """One iteration for each tuple, which has the seconds of its stages."""
    return [
        Iteration(
            number=number,
            regions=[Region(identity=0, first=0, stages=[StageRun(name="s", phase=phase, seconds=each) for each in times])],
        )
        for number, times in enumerate(seconds)
    ]


@pytest.mark.parametrize(
    ("measured", "found"),
    [
        (iterations((1.0, 4.0), (1.2, 5.0), (1.1, 4.1)), [1.1, 4.1]),  # like ones give their median
        (iterations((1.0, 9.0), (7.0, 4.0), (1.2, 4.4)), [1.1, 4.2]),  # a disturbance may begin and end within an iteration
        (iterations((0.1,), (7.0,), (8.0,), phase="user"), [7.0]),  # user code does not do the same each time
        (iterations((0.0, -1e-9), (0.0, 0.0), (1.0, 1e-9)), [0.0, -1e-9]),  # clocks of little precision
    ],
)
def test_disturbed_measurements_do_not_count(measured: list[Iteration], found: list[float]) -> None:
    assert profiler._stage_seconds(measured) == pytest.approx(found)


# -- an iteration that takes more than the budget is noticed, whatever else the process has allocated and frees

MANAGED_BYTES = 20


@dataclass
class Memory:
    """peaks: those of a budget of 100 bytes."""

    allocated_bytes: int
    peak_bytes: int = 0

    def __post_init__(self) -> None:
        self.peaks = PeakWatch(self, 100)
        self.peaks.begin(MANAGED_BYTES)

    def reset_peak(self) -> None:
        self.peak_bytes = self.allocated_bytes

    def outgrown(self, needed_bytes: int, *, freed_bytes: int = 0) -> bool:
        """First something else goes, then an iteration needs so much beside what it had before."""
        self.allocated_bytes -= freed_bytes
        self.peak_bytes = max(self.peak_bytes, self.allocated_bytes + needed_bytes)
        return self.peaks.outgrown(MANAGED_BYTES)


@pytest.mark.parametrize("beside", [0, 500, -15, -500], ids=["alone", "others", "some of it lent", "others' memory freed here"])
@pytest.mark.parametrize(("needed", "outgrown"), [(80, False), (81, True)])
def test_only_what_the_iteration_takes_counts(beside: int, needed: int, outgrown: bool) -> None:
    assert Memory(allocated_bytes=MANAGED_BYTES + beside).outgrown(needed) is outgrown


def test_what_others_free_hides_nothing_and_a_known_peak_is_no_news() -> None:
    memory = Memory(allocated_bytes=MANAGED_BYTES + 500)
    assert not memory.outgrown(10) and memory.outgrown(81, freed_bytes=500)
    memory = Memory(allocated_bytes=MANAGED_BYTES)
    assert [memory.outgrown(needed) for needed in (90, 90, 100, 102)] == [True, False, False, True]


# -- graphs with symbolic sizes: that small ones fit does not mean that larger ones do

BUDGET_BYTES = 28 * MIB


def begin_small(options: dict[str, Any] | None, **further: Any) -> Training:
    """Weights of 1 MiB each; the activations of 1024 rows take 2 MiB each."""
    return begin(
        lambda: nn.Sequential(*[nn.Sequential(nn.Linear(512, 512, bias=False), nn.Tanh()) for _ in range(8)]),
        lambda module: [torch.optim.SGD(module.parameters(), lr=0.1)],
        None if options is None else {"memory_budget": BUDGET_BYTES, **options},
        **further,
    )


def rows_of(count: int) -> Tensor:
    return torch.full((count, 512), 0.5)


def test_a_batch_that_is_larger_than_all_that_fitted_keeps_the_budget(tmp_path: Path) -> None:
    """After a reset it runs without one."""
    training = begin_small({"storage": tmp_path, "profile_iterations": 1}, dynamic=True)
    training.run(map(rows_of, (64, 64, 64, 64, 32, 1024, 1024)))
    statuses = [status for (status,) in training.progress]
    assert all(0 < status.device_peak_bytes <= BUDGET_BYTES for status in statuses)
    phases = [status.phase for status in statuses]
    moved = [status.moved_bytes["device->storage"] for status in statuses]
    assert phases[3:5] == ["fits", "fits"], "nothing larger ran"
    assert phases[5] != "fits" and moved[4] == 0 < moved[5]
    teraio.reset()
    loss = training.model(rows_of(1024)).square().mean()
    loss.backward()
    assert torch.isfinite(loss) and teraio.status() == ()


def trained(folder: Path, shapes: Iterable[tuple[tuple[int, ...], ...]], **options: Any) -> list[teraio.Status]:
    """The status after each step, whose passes take inputs of these shapes: within the budget, with the bits of no budget."""
    steps, progress, found = list(shapes), [], []
    for settings in ({"storage": folder, "profile_iterations": 1, **options}, None):
        training = begin_small(settings, dynamic=True)

        def step(passes: tuple[tuple[int, ...], ...], index: int, training: Training = training) -> None:
            for shape in passes:
                training.model(torch.full((*shape, 512), 0.5)).square().mean().backward()
            training.update()

        training.run(steps, step, planned=True)
        progress.append([status for statuses in training.progress for status in statuses])
        found.append(list(training.finish().values()))
    assert not unequal(*found)
    assert all(status.device_peak_bytes <= BUDGET_BYTES for status in progress[0])
    return progress[0]


def one_pass(*rows: int) -> list[tuple[tuple[int], ...]]:
    return [((each,),) for each in rows]


def test_one_plan_is_followed_for_inputs_of_all_sizes_until_larger_ones_come(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It is that of the largest, wherever these came. It is followed while one for larger ones is made."""
    sizes = (*(1024, 64, 512, 960, 704, 832, 640), *(320, 1000, 64), 1400, 1024, 1400, 512)
    with caplog.at_level(logging.INFO, "teraio"):
        statuses = trained(tmp_path, one_pass(*sizes))
    assert {status.deviations for status in statuses} == {0}
    phases = [status.phase for status in statuses]
    assert phases[4:6] == ["planning", "planned"] and set(phases[5:10]) == {"planned"}
    assert phases[10:12] == ["planning", "planned"] and set(phases[12:]) == {"planned"}
    assert "inputs were larger than those that the plan is for" in caplog.text and statuses[-1].replans == 0


def test_what_trains_with_the_largest_inputs_first_trains_with_them_last(tmp_path: Path) -> None:
    """Cut for 8 rows, all layers would be one stage, which needs more than the budget for 1400. Then one graph serves all."""
    statuses = trained(tmp_path, one_pass(8, 8, 16, 1400, 8, 1024, 1400, 64, 512, 8))
    assert statuses[-1].phase == "planned" and statuses[-1].floor_bytes <= statuses[2].floor_bytes * 2  # type: ignore[operator]
    assert statuses[3].stages > statuses[2].stages and statuses[-1].stages == statuses[3].stages


def test_inputs_that_grow_in_small_steps_do_not_have_a_graph_made_for_each(tmp_path: Path) -> None:
    """Only when stages have to become half as large."""
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    statuses = trained(tmp_path, one_pass(*range(8, 1400, 96)))
    assert 1 < len({status.stages for status in statuses}) <= 4
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] - before <= 4


def test_a_promise_that_does_not_fit_is_told_before_training(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    training = begin_small({"storage": tmp_path})
    batch = rows_of(64)
    torch._dynamo.mark_dynamic(batch, 0, min=2, max=1 << 20)
    training.model(batch)
    assert "inputs as large as promised (torch._dynamo.mark_dynamic) would not fit" in caplog.text


def test_a_second_start_follows_the_plan_of_the_first_one_whatever_its_first_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a promise of the largest lets the graph be cut alike."""

    def promised(rows: int) -> Tensor:
        batch = rows_of(rows)
        torch._dynamo.mark_dynamic(batch, 0, min=2, max=1024)
        return batch

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    options = {"storage": tmp_path, "profile_iterations": 1, "memory_budget": BUDGET_BYTES, "plan_cache": "read-write"}
    phases = []
    for sizes in ((1024, 512, 960, 704, 832, 640), (320, 1024, 64, 1000)):
        training = begin_small(options)
        training.run(map(promised, sizes), planned=True)
        assert all(status.device_peak_bytes <= BUDGET_BYTES for (status,) in training.progress)
        phases.append([status.phase for (status,) in training.progress])
        training.finish()
    assert phases[0][-1] == "planned" and set(phases[1]) == {"planned"}


def test_small_inputs_move_less_and_find_all_where_the_plan_has_it(tmp_path: Path) -> None:
    """Also where all that were profiled were large. What stays on the device there leaves again for large ones."""
    statuses = trained(tmp_path, one_pass(1400, 1400, 1400, 1400, 900, 1400, 900, 700, 1400, 900, 800))
    assert [status.phase for status in statuses[4:]] == ["planned"] * 7
    assert {status.deviations for status in statuses} == {0}
    totals = [sum(status.moved_bytes.values()) for status in statuses]
    moved = [after - before for before, after in zip(totals, totals[1:], strict=False)]
    by_the_plan_for_large_ones, large, *small = moved[5], moved[7], moved[8], moved[9]
    assert max(small) < min(by_the_plan_for_large_ones, large) and statuses[-1].replans == 0


def test_inputs_with_moves_of_their_own_give_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Moves are made for each size, wherever they are possible, and followed in turns with those of the plan."""
    shorter = sys.modules["planner.policies.shorter"]
    monkeypatch.setattr(shorter, "_MUCH", 0.0)
    monkeypatch.setattr(shorter, "_CLEARLY", 1000.0)
    sizes = one_pass(1400, 1400, 1150, 1400, 950, 1400, 1150, 950, 1400, 950, 1150, 1400)
    statuses = trained(tmp_path, sizes, plan_out=tmp_path / "plan.json")
    plan = Plan.load(tmp_path / "plan.json")
    assert plan.shorter[0].sizes == (1190,) and all(each.moves for each in plan.shorter)
    assert {status.deviations for status in statuses} == {0}
    assert statuses[-1].phase == "planned" and statuses[-1].replans == 0


def test_a_last_batch_with_fewer_rows_and_one_of_length_1_leave_the_plan_for_all_lengths(tmp_path: Path) -> None:
    """The first is profiled among the others. The second is another graph, after which the plan goes on."""
    sizes = ((8, 128), (8, 128), (8, 60), (3, 96), (8, 128), (8, 100), (8, 90), (8, 1), (5, 128), (8, 64), (8, 128))
    statuses = trained(tmp_path, [(size,) for size in sizes], trace_out=tmp_path / "trace.json")
    assert {status.phase for status in statuses[5:]} == {"planned"}
    assert statuses[6].deviations == 0 < statuses[7].deviations == statuses[-1].deviations
    lengths = Trace.load(tmp_path / "trace.json").lengths
    assert lengths is not None and (lengths.lowest, lengths.highest) == ((60, 3), (128, 8))


@pytest.mark.parametrize("held", [0, 80 * MIB])
def test_more_passes_at_once_than_all_that_fitted_are_noticed(tmp_path: Path, held: int) -> None:
    """Also where something else was there when the first ones fitted, and went away meanwhile."""
    training = begin_small({"storage": tmp_path, "profile_iterations": 1})
    model, (sgd,) = training.model, training.optimizers
    garbage: list[Tensor] = []

    def iteration(passes: int) -> str:
        inputs = rows_of(512)
        sum(model(inputs).square().mean() for _ in range(passes)).backward()  # type: ignore[union-attr]
        sgd.step()
        sgd.zero_grad()
        return teraio.status()[0].phase

    iteration(1)
    garbage.append(torch.empty(held, dtype=torch.uint8))
    assert [iteration(1) for _ in range(4)][-1] == "fits"
    garbage.clear()
    assert iteration(4) == "profile"
    for _ in range(3):
        iteration(4)
    status = teraio.status()[0]
    assert status.phase != "fits" and BUDGET_BYTES // 2 < status.device_peak_bytes <= BUDGET_BYTES
    assert status.moved_bytes["device->storage"] > 0
