"""Recorded iterations become a trace: uses, lifetimes, times, what can run again; and such a trace is recognised again."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch

import planner
from runtime.device import Span
from runtime.execution import SizedGraph, StageRun
from runtime.paging import Block, Pager
from teraio.planning import plan_cache
from teraio.profiling import Iteration, Profile, Region, profiler, with_lengths

from ...planner.traces import block, staged, trace
from ...runtime.memory_mover import UNIT, Bench
from ..virtual import profile_of


class Blocks:
    """Blocks by name; `movable` ones have a span."""

    def __init__(self) -> None:
        self.pager = Pager(mover=None, budget_bytes=None)
        self.tensors: dict[str, torch.Tensor] = {}

    def make(self, name: str, kind: str = "activation", *, born: int = 0, movable: bool = True) -> Block:
        self.tensors[name] = torch.zeros(64)
        block = self.pager.block_of(self.tensors[name], name=name, kind=kind, user_visible=False)
        block.born = born
        block.span = Span(0, 256) if movable else None
        return block


def record(
    name: str,
    phase: str,
    seconds: float,
    *,
    read: tuple[Block, ...] = (),
    made: tuple[Block, ...] = (),
    written: tuple[Block, ...] = (),
) -> StageRun:
    return StageRun(name=name, phase=phase, seconds=seconds, workspace_bytes=32, read=read, made=made, written=written)


def user() -> StageRun:
    return record("user", "user", 0.5)


def iteration(number: int, blocks: Blocks, seconds: float) -> Iteration:
    """Positions: 0 user, 1 forward, 2 user, 3 backward, 4 user, 5 step. The input comes from the user each time."""
    known = blocks.tensors.keys()
    weight = blocks.pager.known_block(blocks.tensors["weight"]) if "weight" in known else blocks.make("weight", "parameter")
    table = blocks.pager.known_block(blocks.tensors["table"]) if "table" in known else blocks.make("table", movable=False)
    assert weight is not None and table is not None
    given = blocks.make(f"input{number}", born=number)
    saved, output = blocks.make(f"saved{number}", born=number), blocks.make(f"output{number}", born=number)
    gradient = blocks.make(f"gradient{number}", "gradient", born=number)
    forward = record("forward/0", "forward", seconds, read=(weight, given, table), made=(saved, output))
    backward = record("backward/0", "backward", 2 * seconds, read=(saved, weight), made=(gradient,))
    step = record("optimizer/0", "optimizer", seconds, read=(weight, gradient), written=(weight,))
    regions = [
        Region(identity=0, first=0, stages=[user(), forward], made=[saved, output], complete=True),
        Region(identity=1, first=2, stages=[user(), backward], made=[gradient], complete=True),
        Region(identity=2, first=4, stages=[user(), step], complete=True),
    ]
    return Iteration(number=number, regions=regions, held=frozenset({weight, given, gradient}))


def profile(*, state_bytes: int = 0) -> Profile:
    """Of three iterations, of which the second was disturbed."""
    blocks = Blocks()
    iterations = [iteration(number, blocks, seconds) for number, seconds in ((1, 1.75), (2, 9.0), (3, 2.25))]
    return profile_of(iterations, fixed_bytes=state_bytes)


def by_name(found: Profile) -> dict[str, planner.Block]:
    return {block.name.rstrip("3"): block for block in found.trace.blocks}


def test_an_iteration_in_which_the_allocator_took_memory_away_does_not_tell_how_long_a_stage_takes() -> None:
    blocks = Blocks()
    iterations = [iteration(number, blocks, seconds) for number, seconds in ((1, 1.75), (2, 2.0), (3, 2.25))]
    for each in (iterations[0], iterations[2]):
        each.stages[1].retried = True
    for each in iterations:
        each.stages[3].retried = True
    assert [s.duration_seconds for s in profile_of(iterations).trace.stages] == [0.5, 2.0, 0.5, 4.0, 0.5, 2.0]
    iterations[1].stages[1].retried, iterations[2].stages[1].retried = True, False
    assert [s.duration_seconds for s in profile_of(iterations).trace.stages] == [0.5, 2.25, 0.5, 4.0, 0.5, 2.0]


def test_uses_and_what_persists_moves_and_comes_from_user_code() -> None:
    blocks = by_name(profile())
    assert (blocks["weight"].reads, blocks["weight"].writes) == ((1, 3, 5), (5,))
    assert (blocks["saved"].reads, blocks["saved"].writes) == ((3,), (1,))
    assert (blocks["gradient"].reads, blocks["gradient"].writes) == ((5,), (3,))
    assert blocks["output"].uses == (1,)
    assert {name for name, block in blocks.items() if block.persistent} == {"weight", "table"}
    assert {name for name, block in blocks.items() if not block.movable} == {"table"}
    assert (blocks["input"].reads, blocks["input"].writes) == ((1,), (0,)), "it exists from the user code on"


def test_what_is_alive_when_the_iteration_ends_lives_until_then() -> None:
    """Gradients, if their last use is not at the end anyway; no inputs that user code happens to have still."""
    assert {block.dies_after for block in profile().trace.blocks} == {None}
    blocks = Blocks()
    iterations = [iteration(number, blocks, 1.0) for number in (1, 2, 3)]
    for each in iterations:
        each.regions[-1].stages.append(record("optimizer/1", "optimizer", 1.0))
    found = profile_of(iterations)
    assert {name: block.dies_after for name, block in by_name(found).items() if block.dies_after} == {"gradient": 6}
    found = profile_of(iterations, survivors={(1, 0)})
    assert {block.dies_after for block in found.trace.blocks} == {None}, "it persists"


def test_user_code_has_what_a_region_returns() -> None:
    """A model's output is used by the user code after it; a plan may take it away after that only. Not what is only saved."""
    blocks = Blocks()
    iterations = [iteration(number, blocks, 1.0) for number in (1, 2, 3)]
    output, gradient = iterations[-1].regions[0].made[1], iterations[-1].regions[1].made[0]
    output.user_visible = gradient.user_visible = True
    found = by_name(profile_of(iterations))
    assert (found["output"].reads, found["output"].writes) == ((2,), (1,)) and found["saved"].uses == (1, 3)
    assert found["gradient"].uses == (3, 5), "wherever it is, user code can reach it"


def test_what_no_block_is_counts_as_one_that_stays() -> None:
    *_, state = profile(state_bytes=4096).trace.blocks
    assert (state.kind, state.size_bytes, state.movable, state.persistent) == ("optimizer_state", 4096, False, True)
    assert state.uses == (5,)
    assert all(block.kind != "optimizer_state" for block in profile().trace.blocks)


def test_states_persist_and_what_is_updated_is_a_subgroup() -> None:
    """Also a state that the last iteration has brought: made by its update, or loaded."""
    blocks = Blocks()
    iterations = [iteration(number, blocks, 1.0) for number in (1, 2)]
    made = blocks.make("made", "optimizer_state", born=2)
    loaded = blocks.make("loaded", "optimizer_state", born=2)
    step = iterations[-1].regions[-1].stages[-1]
    step.elements, step.made, step.read, step.written = 64, (made,), (*step.read, loaded), (*step.written, loaded)
    iterations[-1].regions[-1].made.append(made)
    found = profile_of(iterations)
    states = [block for block in found.trace.blocks if block.kind == "optimizer_state"]
    assert [block.name for block in states] == ["loaded", "made"]
    assert all(block.persistent and block.movable and block.reads == block.writes == (5,) for block in states)
    (subgroup,) = found.trace.subgroups
    assert (subgroup.stage, subgroup.elements, subgroup.device_seconds, subgroup.host_seconds) == (5, 64, 1.0, None)
    assert {found.trace.blocks[n].name for n in subgroup.blocks} == {"weight", "gradient2", "loaded", "made"}
    assert profile().trace.subgroups == (), "nothing is updated"


# -- recompute groups: what stages make anew, what they read, and which stages have none


class Recorded:
    """Stages 0 and 1 forward, 2 backward. 0 makes `x` and `small` of the weight; 1 makes `y`; 2 reads `x` and `y`."""

    def __init__(self) -> None:
        self.bench = Bench(None)
        self.weight, self.x, self.y = (self.bench.make(name, 2) for name in ("weight", "x", "y"))
        self.small = self.bench.make("small", 1)
        self.ids = {self.weight: 0, self.x: 1, self.small: 2, self.y: 3}
        self.stages = [
            self.stage("forward", [self.weight], [self.x, self.small]),
            self.stage("forward", [self.x, self.small], [self.y]),
            self.stage("backward", [self.x, self.y], []),
        ]

    def stage(self, phase: str, read: list[Block], made: list[Block]) -> StageRun:
        return StageRun(name=phase, phase=phase, workspace_bytes=5, read=tuple(read), made=tuple(made))

    def found(self, against: str = "", kept: Sequence[Block] = ()) -> tuple[list[planner.RecomputeGroup], list[tuple[int, str]]]:
        blocks = [
            planner.Block(
                id=number,
                name=block.name,
                kind="activation" if number else "parameter",
                size_bytes=block.size_bytes,
                persistent=not number or block in kept,
                reads=tuple(i for i, stage in enumerate(self.stages) if block in stage.read),
                writes=tuple(i for i, stage in enumerate(self.stages) if block in stage.made),
                movable=block.span is not None,
            )
            for block, number in self.ids.items()
        ]
        groups, others = profiler._recompute_groups(self.stages, [1.0, 2.0, 3.0], blocks, self.ids, against=against)
        return list(groups), [(each.stage, each.reason) for each in others]


def test_stages_that_make_what_backward_needs() -> None:
    groups, others = Recorded().found()
    assert [(g.id, g.stage, g.blocks, g.reads, g.duration_seconds) for g in groups] == [
        (0, 0, (1,), (0,), 1.0),
        (1, 1, (3,), (1, 2), 2.0),
    ]
    assert [g.workspace_bytes for g in groups] == [5 + UNIT, 5], "with what is too small to move"
    assert not others


def test_a_stage_that_must_not_run_again_and_a_reason_that_holds_for_all() -> None:
    recorded = Recorded()
    recorded.stages[1].never_again = "it draws random numbers"
    groups, others = recorded.found()
    assert [g.stage for g in groups] == [0] and others == [(1, "it draws random numbers")]
    groups, others = Recorded().found("no")
    assert not groups and others == [(0, "no"), (1, "no")]


@pytest.mark.parametrize("what", ["seen by user code", "not needed by backward"])
def test_what_need_not_be_made_anew(what: str) -> None:
    recorded = Recorded()
    if what == "seen by user code":
        recorded.y.user_visible = True
    else:
        recorded.stages[2] = recorded.stage("backward", [recorded.x], [])
    groups, others = recorded.found()
    assert [g.stage for g in groups] == [0] and not others


def test_a_stage_that_makes_a_result_which_is_kept_beyond_the_iteration() -> None:
    """As a loss that the model returns, with the variable `loss` of an ordinary loop."""
    recorded = Recorded()
    loss = recorded.bench.make("loss", 1)
    recorded.ids[loss] = 4
    recorded.stages[1] = recorded.stage("forward", [recorded.x, recorded.small], [recorded.y, loss])
    assert [g.stage for g in recorded.found()[0]] == [0, 1]
    groups, others = recorded.found(kept=[loss])
    assert [g.stage for g in groups] == [0]
    assert others == [(1, "it makes loss, which your code keeps beyond the end of the iteration")]


# -- a trace of an earlier run is recognised in an iteration that runs the same, and in no other


def two_layers(blocks: Blocks, *, first: bool = False, number: int = 0) -> Iteration:
    """Two layers with equal blocks and AdamW's update of both. first: the optimizer makes its states."""
    known = {name: blocks.pager.known_block(tensor) for name, tensor in blocks.tensors.items()}

    def lasting(name: str, kind: str) -> object:
        return known.get(name) or blocks.make(name, kind)

    weights = [lasting(f"weight.{i}", "parameter") for i in range(2)]
    states = [lasting(f"state.{i}", "optimizer_state") for i in range(2)]
    given = blocks.make(f"given{number}", born=number)
    given.name = "given"
    gradients = [blocks.make(f"gradient{number}.{i}", "gradient", born=number) for i in range(2)]
    for gradient in gradients:
        gradient.name = "gradient"
    forward = record("forward/0", "forward", 1.0, read=(given, *weights))  # type: ignore[arg-type]
    backward = record("backward/0", "backward", 1.0, read=tuple(weights), made=tuple(gradients))  # type: ignore[arg-type]
    old, new = ((), tuple(states)) if first else (tuple(states), ())
    step = record("optimizer/0", "optimizer", 1.0, read=(*weights, *gradients, *old), made=new, written=(*weights, *old))  # type: ignore[arg-type]
    regions = [
        Region(identity=i, first=2 * i, stages=[user(), stage], made=list(stage.made), complete=True)
        for i, stage in enumerate((forward, backward, step))
    ]
    return Iteration(number=number, regions=regions)


def kept(fixed_bytes: int = 0) -> planner.Trace:
    blocks = Blocks()
    found = profile_of([two_layers(blocks, number=number) for number in (1, 2)], fixed_bytes=fixed_bytes)
    return planner.Trace.build(**{name: getattr(found.trace, name) for name in planner.Trace.model_fields})


@pytest.mark.parametrize("first", [True, False])
def test_the_same_iteration(first: bool) -> None:
    """Also the first one, in which states are made and parameters are new."""
    trace = kept()
    found = plan_cache.recognise(trace, two_layers(Blocks(), first=first), fixed_bytes=0)
    assert found is not None and found.trace is trace
    assert {number: block.name for block, number in found.ids.items()} == {block.id: block.name for block in trace.blocks}
    equal = [number for block, number in found.ids.items() if block.name == "gradient"]
    assert equal == sorted(equal), "blocks that nothing tells apart have the order of their making"


CHANGES: dict[str, Callable[[StageRun, StageRun], object]] = {
    "another name": lambda backward, forward: setattr(backward, "name", "backward/1"),
    "another size": lambda backward, forward: setattr(backward.made[0], "size_bytes", backward.made[0].size_bytes + 1),
    "one more": lambda backward, forward: setattr(forward, "read", (*forward.read, Blocks().make("more"))),
    "one that stays": lambda backward, forward: setattr(backward.made[0], "span", None),
}


@pytest.mark.parametrize("change", CHANGES)
def test_another_iteration_is_not_recognised(change: str) -> None:
    other = two_layers(Blocks())
    CHANGES[change](other.regions[1].stages[1], other.regions[0].stages[1])
    assert plan_cache.recognise(kept(), other, fixed_bytes=0) is None


def test_what_stays_on_the_device_is_about_the_same() -> None:
    trace = kept(fixed_bytes=3 << 20)
    assert plan_cache.recognise(trace, two_layers(Blocks()), fixed_bytes=(3 << 20) + 100) is not None
    assert plan_cache.recognise(trace, two_layers(Blocks()), fixed_bytes=1 << 20) is None


# -- sizes and times as functions of the length, from profiles at several lengths

Sizes = Sequence[tuple[int, ...]]


def sampled(
    sizes: Sizes, *, bytes_at: Callable[[int], int] = lambda n: 8 * n + 8, seconds_at: Callable[[int], float] = float
) -> Profile:
    """Two stages and the user code before them for each of `sizes`, with a block that the first of them makes."""
    regions = [
        Region(identity=SizedGraph(0, each), first=3 * number, stages=[StageRun(name="x", phase="forward")] * 3)
        for number, each in enumerate(sizes)
    ]
    times = [1.0 if stage % 3 != 1 else seconds_at(sizes[stage // 3][-1]) for stage in range(3 * len(sizes))]
    blocks = [block(bytes_at(each[-1]), [3 * number + 1], [3 * number + 2]) for number, each in enumerate(sizes)]
    made = trace(staged("uff" * len(sizes), times), blocks)
    return Profile(trace=made, iteration=Iteration(number=0, regions=regions), ids={})


def test_sizes_are_exact_and_times_fitted_by_parts_that_are_not_negative() -> None:
    def seconds(length: int) -> float:
        return 0.5 + 0.01 * length + 1e-5 * length**2

    def size(length: int) -> int:
        return length * (length + 1) // 2 + 3

    found = with_lengths([sampled([(4, n)], bytes_at=size, seconds_at=seconds) for n in (10, 50, 200, 101)][:-1])
    assert found.trace.lengths is not None and (found.trace.lengths.lowest, found.trace.lengths.places) == ((10,), (1,))
    for length in (10, 37, 101, 199):
        there = found.trace.at(length)
        assert there.blocks[0].size_bytes == size(length)
        assert there.stages[1].duration_seconds == pytest.approx(seconds(length)) and there.stages[2].duration_seconds == 1.0
    falling = with_lengths([sampled([(4, n)], seconds_at=lambda n: 300.0 - n) for n in (10, 100, 200)]).trace
    (times,) = falling.lengths.stage_seconds if falling.lengths else ()
    assert times.coefficients == (pytest.approx(590 / 3), 0.0, 0.0), "disturbed: no time falls with the length"


def test_sizes_that_are_no_polynomial_are_below_none_that_was_seen() -> None:
    def padded(length: int) -> int:
        return length * (-(-length // 8) * 8)

    found = with_lengths([sampled([(n,)], bytes_at=padded) for n in (9, 16, 33, 41, 57, 100)]).trace
    for length in (9, 16, 33, 41, 57, 100):
        assert padded(length) <= found.at(length).blocks[0].size_bytes <= padded(length) + 800


def test_a_trace_has_all_microbatches_as_long_as_the_longest() -> None:
    samples = [sampled([(4, a), (4, b)]) for a, b in ((10, 30), (70, 20), (60, 50))]
    found = with_lengths(samples)
    assert [each.size_bytes for each in found.trace.blocks] == [8 * 70 + 8] * 2
    assert [found.trace.stages[number].duration_seconds for number in (1, 4)] == [pytest.approx(70.0)] * 2
    assert found.samples == tuple(samples) and found.iteration is samples[-1].iteration
    assert [each.size_bytes for each in found.trace.at(20).blocks] == [168, 168]


def test_where_the_number_of_inputs_varies_too_all_depends_on_both() -> None:
    """As in the last batch of a data set, which says little of the length. Blocks grow with what is in the batch, or in a row."""

    def of(number: int, length: int) -> Profile:
        return sampled([(number, length)], bytes_at=lambda n: 8 * n * number + 4 * n, seconds_at=lambda n: 0.5 + n * number)

    found = with_lengths([of(3, 10), of(8, 20), of(8, 15), of(8, 30), of(5, 12), of(8, 40)]).trace
    assert found.lengths is not None and (found.lengths.lowest, found.lengths.highest) == ((10, 3), (40, 8))
    for length, number in ((40, 8), (17, 8), (25, 4), (11, 3)):
        assert found.at(length, number).blocks[0].size_bytes == 8 * length * number + 4 * length
        assert found.at(length, number).stages[1].duration_seconds == pytest.approx(0.5 + length * number)
    assert found.at(17) == found.at(17, 8), "the highest number, if none is said"


@pytest.mark.parametrize(
    "sizes",
    [([(4, 9)],), ([(4, 9, 2)], [(3, 7, 5)], [(4, 5, 1)], [(6, 5, 4)]), ([(4, 9)], [(4, 9)]), ([(4, 9)], [(4, 9), (4, 9)])],
)
def test_what_does_not_tell_enough_leaves_the_trace_as_it_is(sizes: tuple[Sizes, ...]) -> None:
    """One length, three sizes that vary by themselves, and other stages."""
    found = with_lengths([sampled(each) for each in sizes])
    assert found.trace.lengths is None and isinstance(found.trace, planner.Trace)
