"""The iteration with re-runs: stages and blocks as worked out by hand, and groups that cannot run again."""

import pytest

from planner import Block, PlanError, Recompute, recomputed
from planner.problem import layer_of, live_bytes

from ..traces import layers


def chosen(*pairs: tuple[int, int]) -> tuple[Recompute, ...]:
    return tuple(Recompute(group=group, at=at) for group, at in pairs)


def uses(block: Block) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return block.writes, block.reads


def test_a_block_dies_before_its_re_run_and_another_one_is_born_there() -> None:
    trace = layers()
    derived = recomputed(trace, chosen((0, 5)))
    assert [stage.name for stage in derived.stages[4:]] == ["backward/1", "recompute/forward/0", "backward/0"]
    assert [stage.id for stage in derived.stages] == list(range(7))
    again = derived.stages[5]
    assert (again.phase, again.duration_seconds, again.workspace_bytes) == ("recompute", 1.0, 1)
    assert uses(derived.blocks[0]) == ((0,), (1,)), "its last use is in the forward pass"
    anew = derived.blocks[4]
    assert (anew.id, anew.name, anew.size_bytes, anew.kind) == (4, "a0", 10, "activation")
    assert uses(anew) == ((5,), (6,))
    assert uses(derived.blocks[3]) == ((), (0, 1, 2, 3, 4, 5, 6)), "the re-run reads the weight"
    assert derived.recompute == ()
    assert live_bytes(trace) == [20, 30, 40, 40, 30, 20]
    assert live_bytes(derived) == [20, 30, 30, 30, 20, 21, 20]


def test_a_re_run_reads_what_an_earlier_re_run_made() -> None:
    derived = recomputed(layers(), chosen((1, 4), (0, 4)))
    # In the order of the list: forward/1 reads the a0 of the forward pass; then forward/0 makes it anew.
    assert [stage.name for stage in derived.stages[4:6]] == ["recompute/forward/1", "recompute/forward/0"]
    assert uses(derived.blocks[0]) == ((0,), (1, 4))
    other = recomputed(layers(), chosen((0, 4), (1, 4)))
    assert [stage.name for stage in other.stages[4:6]] == ["recompute/forward/0", "recompute/forward/1"]
    assert uses(other.blocks[0]) == ((0,), (1,))
    assert [uses(block) for block in other.blocks[4:]] == [((4,), (5, 7)), ((5,), (6,))]


def test_what_nothing_uses_any_more_is_workspace() -> None:
    trace = layers()
    early = trace.blocks[1].model_copy(update={"id": 4, "name": "early", "reads": (3,), "size_bytes": 7})
    group = trace.recompute[1].model_copy(update={"blocks": (1, 4)})
    both = trace.rebuilt(blocks=(*trace.blocks, early), recompute=(trace.recompute[0], group, trace.recompute[2]))
    derived = recomputed(both, chosen((1, 4)))
    assert derived.stages[4].workspace_bytes == 1 + 7
    assert len(derived.blocks) == 6 and uses(derived.blocks[4]) == ((1,), (3,))


def test_a_block_that_outlives_its_last_use() -> None:
    trace = layers()
    outliving = trace.blocks[1].model_copy(update={"dies_after": 5})
    derived = recomputed(trace.model_copy(update={"blocks": (trace.blocks[0], outliving, *trace.blocks[2:])}), chosen((1, 4)))
    assert derived.blocks[1].dies_after is None and derived.blocks[4].dies_after == 6


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        ([(3, 5)], "recomputes group 3; the trace has 3 recompute groups"),
        ([(0, 5), (0, 4)], "recomputes group 0 twice"),
        ([(0, 6)], "again before stage 6, which does not exist"),
        ([(0, 2)], "again before stage 2, of phase 'forward'; groups run again only before backward stages"),
        ([(2, 4)], "but nothing uses what it makes from there on"),
        ([(0, 4), (1, 5)], "nothing uses what it makes"),
    ],
)
def test_groups_that_cannot_run_again(pairs: list[tuple[int, int]], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        recomputed(layers(), chosen(*pairs))


def test_a_group_whose_input_is_changed_in_between_cannot_run_again() -> None:
    trace = layers(changed=(4,))
    assert len(recomputed(trace, chosen((0, 4))).stages) == 7, "at the start of the stage it is not changed yet"
    with pytest.raises(PlanError, match="before stage 5, but block 'w' is changed between stages 0 and 5"):
        recomputed(trace, chosen((0, 5)))


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("forward/layers.3.mlp.up", "forward/layers.3"),
        ("backward#3/layers.3.{qkv,proj}:2", "backward#3/layers.3"),
        ("forward/layers.0..layers.1", "forward/layers.0"),
        ("forward/stages.0.blocks.3.{conv_dw,mlp.fc1}", "forward/stages.0.blocks.3"),
        ("forward/layers.3.mlp.0", "forward/layers.3"),
        ("forward/features.1.0.block.5", "forward/features.1.0"),
        ("forward/0", "forward/0"),
        ("forward/root", None),
    ],
)
def test_the_layer_of_a_stage(name: str, layer: str | None) -> None:
    assert layer_of(name) == layer


def test_the_last_choice_is_kept_and_another_one_is_worked_out_anew() -> None:
    made = layers()
    once = recomputed(made, chosen((0, 5)))
    assert recomputed(made, list(chosen((0, 5)))) is once
    other = recomputed(made, chosen((1, 4)))
    assert [stage.phase for stage in other.stages] != [stage.phase for stage in once.stages]
    again = recomputed(made, chosen((0, 5)))
    assert again is not once and again == once and recomputed(made, ()) is made
