"""A trace of an earlier run is recognised in an iteration that runs the same, and in no other."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import planner
from teraio.planning.plan_cache import recognise
from teraio.profiling import Iteration, Region, StageRecord, build_profile

from .test_profiler import HARDWARE, Blocks, record, user


def iteration(blocks: Blocks, *, first: bool = False, number: int = 0) -> Iteration:
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
    profile = build_profile(
        [iteration(blocks, number=number) for number in (1, 2)],
        name="x",
        created_by="an earlier run",
        hardware=HARDWARE,
        fixed_bytes=fixed_bytes,
        survivors=set(),
    )
    return planner.Trace.build(**{name: getattr(profile.trace, name) for name in planner.Trace.model_fields})


@pytest.mark.parametrize("first", [True, False])
def test_the_same_iteration(first: bool) -> None:
    """Also the first one, in which states are made and parameters are new."""
    trace = kept()
    found = recognise(trace, iteration(Blocks(), first=first), fixed_bytes=0)
    assert found is not None and found.trace is trace
    assert {number: block.name for block, number in found.ids.items()} == {block.id: block.name for block in trace.blocks}
    equal = [number for block, number in found.ids.items() if block.name == "gradient"]
    assert equal == sorted(equal), "blocks that nothing tells apart have the order of their making"


def no_stage(other: Iteration) -> None:
    other.regions[1].stages.pop()


def another_name(other: Iteration) -> None:
    other.regions[1].stages[1].name = "backward/1"


def another_size(other: Iteration) -> None:
    other.regions[1].stages[1].made[0].size_bytes += 1


def another_use(other: Iteration) -> None:
    _exchange(other.regions[0].stages[1], lambda stage: stage.read[:-1])


def one_more(other: Iteration) -> None:
    _exchange(other.regions[0].stages[1], lambda stage: (*stage.read, Blocks().make("more")))


def that_stays(other: Iteration) -> None:
    other.regions[1].stages[1].made[0].span = None


def _exchange(stage: StageRecord, read: Callable[[StageRecord], tuple]) -> None:  # type: ignore[type-arg]
    stage.read = read(stage)


@pytest.mark.parametrize("change", [no_stage, another_name, another_size, another_use, one_more, that_stays])
def test_another_iteration(change: Callable[[Iteration], None]) -> None:
    other = iteration(Blocks())
    change(other)
    assert recognise(kept(), other, fixed_bytes=0) is None


def test_what_stays_on_the_device_is_about_the_same() -> None:
    trace = kept(fixed_bytes=3 << 20)
    assert recognise(trace, iteration(Blocks()), fixed_bytes=(3 << 20) + 100) is not None
    assert recognise(trace, iteration(Blocks()), fixed_bytes=1 << 20) is None
