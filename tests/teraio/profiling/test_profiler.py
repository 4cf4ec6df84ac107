"""Recorded iterations become a trace: uses, lifetimes, times, and what stays where it is."""

from __future__ import annotations

import torch

import planner
from planner import Hardware
from runtime.device import Span
from runtime.paging import Block, Pager
from teraio.profiling import Iteration, Profile, Region, StageRecord, build_profile

HARDWARE = Hardware(name="made up", device_memory_bytes=1 << 30)


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
) -> StageRecord:
    return StageRecord(name=name, phase=phase, seconds=seconds, workspace_bytes=32, read=read, made=made, written=written)


def user(seconds: float = 0.5) -> StageRecord:
    return record("user", "user", seconds)


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


def profile(*, state_bytes: int = 0, survivors: set[tuple[int, int]] | None = None) -> Profile:
    """Of three iterations, of which the second was disturbed."""
    blocks = Blocks()
    iterations = [iteration(number, blocks, seconds) for number, seconds in ((1, 1.75), (2, 9.0), (3, 2.25))]
    return build_profile(
        iterations,
        name="x",
        created_by="tests",
        hardware=HARDWARE,
        fixed_bytes=state_bytes,
        survivors=survivors or set(),
    )


def by_name(found: Profile) -> dict[str, planner.Block]:
    return {block.name.rstrip("3"): block for block in found.trace.blocks}


def test_times_are_those_of_undisturbed_iterations() -> None:
    stages = profile().trace.stages
    assert [s.duration_seconds for s in stages] == [0.5, 2.0, 0.5, 4.0, 0.5, 2.0]
    assert [s.phase for s in stages] == ["user", "forward", "user", "backward", "user", "optimizer"]
    assert [s.workspace_bytes for s in stages] == [32] * 6


def test_uses() -> None:
    blocks = by_name(profile())
    assert (blocks["weight"].reads, blocks["weight"].writes) == ((1, 3, 5), (5,))
    assert (blocks["saved"].reads, blocks["saved"].writes) == ((3,), (1,))
    assert (blocks["gradient"].reads, blocks["gradient"].writes) == ((5,), (3,))
    assert blocks["output"].uses == (1,)


def test_what_persists() -> None:
    blocks = by_name(profile())
    assert {name for name, block in blocks.items() if block.persistent} == {"weight", "table"}


def test_what_user_code_brings_exists_from_the_user_code_on() -> None:
    given = by_name(profile())["input"]
    assert not given.persistent and given.writes == (0,) and given.reads == (1,)


def test_what_outlives_the_iteration_persists() -> None:
    """A gradient that is set to None only before the next backward."""
    assert by_name(profile(survivors={(1, 0)}))["gradient"].persistent
    assert not by_name(profile(survivors={(0, 0)}))["gradient"].persistent


def test_what_is_alive_when_the_iteration_ends_lives_until_then() -> None:
    """Gradients, if their last use is not at the end anyway; no inputs that user code happens to have still."""
    assert {block.dies_after for block in profile().trace.blocks} == {None}
    blocks = Blocks()
    iterations = [iteration(number, blocks, 1.0) for number in (1, 2, 3)]
    for each in iterations:
        each.regions[-1].stages.append(record("optimizer/1", "optimizer", 1.0))
    found = build_profile(iterations, name="x", created_by="tests", hardware=HARDWARE, fixed_bytes=0, survivors=set())
    assert {name: block.dies_after for name, block in by_name(found).items() if block.dies_after} == {"gradient": 6}
    found = build_profile(iterations, name="x", created_by="tests", hardware=HARDWARE, fixed_bytes=0, survivors={(1, 0)})
    assert {block.dies_after for block in found.trace.blocks} == {None}, "it persists"


def test_user_code_has_what_a_region_returns() -> None:
    """A model's output is used by the user code after it; a plan may take it away after that only. Not what is only saved."""
    blocks = Blocks()
    iterations = [iteration(number, blocks, 1.0) for number in (1, 2, 3)]
    output, gradient = iterations[-1].regions[0].made[1], iterations[-1].regions[1].made[0]
    output.user_visible = gradient.user_visible = True
    found = by_name(build_profile(iterations, name="x", created_by="tests", hardware=HARDWARE, fixed_bytes=0, survivors=set()))
    assert (found["output"].reads, found["output"].writes) == ((2,), (1,)) and found["saved"].uses == (1, 3)
    assert found["gradient"].uses == (3, 5), "wherever it is, user code can reach it"


def test_what_can_not_move() -> None:
    blocks = by_name(profile())
    assert not blocks["table"].movable and blocks["weight"].movable


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
    found = build_profile(iterations, name="x", created_by="tests", hardware=HARDWARE, fixed_bytes=0, survivors=set())
    states = [block for block in found.trace.blocks if block.kind == "optimizer_state"]
    assert [block.name for block in states] == ["loaded", "made"]
    assert all(block.persistent and block.movable and block.reads == block.writes == (5,) for block in states)
    (subgroup,) = found.trace.subgroups
    assert (subgroup.stage, subgroup.elements, subgroup.device_seconds, subgroup.host_seconds) == (5, 64, 1.0, None)
    assert {found.trace.blocks[n].name for n in subgroup.blocks} == {"weight", "gradient2", "loaded", "made"}
    assert profile().trace.subgroups == (), "nothing is updated"


def test_ids_are_those_of_the_last_iteration() -> None:
    found = profile()
    assert sorted(found.ids.values()) == list(range(len(found.trace.blocks)))
    assert {block.name: found.trace.blocks[number].name for block, number in found.ids.items()} == {
        block.name: block.name for block in found.ids
    }
    assert found.iteration.number == 3


def test_the_trace_can_be_saved_planned_and_simulated() -> None:
    trace = profile(state_bytes=100).trace
    links = tuple(
        planner.Link(from_tier=a, to_tier=b, bytes_per_second=1e6, latency_seconds=0.0)
        for a, b in (("device", "storage"), ("storage", "device"))
    )  # type: ignore[arg-type]
    trace = trace.model_copy(update={"hardware": HARDWARE.model_copy(update={"links": links})})
    smallest, stage = planner.floor(trace)
    assert smallest >= 3 * 256 + 100 and trace.stages[stage].name == "forward/0"
    plan = planner.plan(trace, planner.Budgets(device_bytes=smallest))
    assert planner.simulate(trace, plan).iteration_seconds >= trace.ideal_seconds
