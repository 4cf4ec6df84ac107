"""Update stages within a backward graph: how they are cut, and what is left where one cannot run, or fails."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim import Optimizer

from teraio.optimizer import owned_parameters
from teraio.optimizer.final_gradients import FinalGradient, UpdateEligibility
from teraio.optimizer.overlapped_steps import Member, RegionUpdates, UpdateStage, cut_updates

from .managed_training import Start, Training
from .plain_training import KIB, SIZE, set_gradients


def members_of(training: Training, optimizer: Optimizer) -> list[Member]:
    """Every parameter of the training; its gradient is in the slot of its number, final after the first stage."""
    found = []
    for owned in owned_parameters(optimizer):
        number, group, parameter = owned
        block = training.pager.known_block(parameter)
        assert block is not None
        member = Member(
            facts=training.steps.managed(optimizer).facts,
            parameter=parameter,
            eligibility=UpdateEligibility(optimizer=weakref.ref(optimizer), group=group, number=number),
            final=FinalGradient(slot=number, after=0),
            block=block,
            states=tuple(training.steps.managed(optimizer).states.blocks(owned)),
        )
        found.append(member)
    return found


def updates(training: Training, members: Sequence[Member], stages: Sequence[UpdateStage], **more: Any) -> RegionUpdates:
    settings: dict[str, Any] = {"no_room": lambda members, error: pytest.fail(str(error)), **more}
    return RegionUpdates(training.pager, training.recorder, "backward", members, stages, **settings)


def gradients(training: Training, step: int) -> list[Any]:
    """New blocks, as a graph makes them, that nobody else holds."""
    set_gradients(training.parameters, step)
    slots = []
    for number, parameter in enumerate(training.parameters):
        slots.append(parameter.grad)
        parameter.grad = None
        training.pager.acquire([], SIZE, "make")
        training.pager.block_of(slots[-1], name=f"gradient.{number}", kind="gradient", user_visible=False)
        training.pager.retire([], [])
    return slots


def run_stage(training: Training, region: RegionUpdates, slots: list[Any]) -> None:
    with training.pager.device.region():
        training.pager.enter_region()
        training.recorder.region_begins("graph", region.stage_count)
        try:
            region.after_stage(0, slots)
        finally:
            training.recorder.region_ended()
            training.pager.leave_region()


def test_no_room_keeps_the_gradient(started: Start) -> None:
    """The budget shrinks so that the first update just fits, and the second, of two parameters, does not."""
    training = started(3, budget_bytes=64 * SIZE)
    optimizer = torch.optim.AdamW(training.parameters)
    training.train(optimizer, 1)
    members = members_of(training, optimizer)
    slots = gradients(training, 1)
    refused: list[tuple[list[Member], int]] = []
    region = updates(
        training,
        members,
        [UpdateStage(0, (2,)), UpdateStage(0, (0, 1))],
        no_room=lambda members, error: refused.append((list(members), error.smallest_bytes)),
    )
    needed = 4 * SIZE + 2 * SIZE + training.pager.account.fixed_bytes  # AdamW's temporaries are two copies
    training.pager.account.budget_bytes = needed + SIZE
    before = [p.detach().clone() for p in training.parameters]
    run_stage(training, region, slots)
    ((whom, smallest),) = refused
    assert whom == members[:2] and smallest == needed + 4 * SIZE
    assert [slot is None for slot in slots] == [False, False, True]
    assert [member.eligibility.updated for member in members] == [False, False, True]
    assert [torch.equal(p, b) for p, b in zip(training.parameters, before, strict=True)] == [True, True, False]
    assert all(block.pins == 0 for block in training.pager.blocks)


def test_an_update_that_fails(started: Start) -> None:
    """The error is the user's to see; nothing stays held, and nobody takes the parameter for untouched."""
    training = started(2, budget_bytes=None)
    optimizer = torch.optim.SGD(training.parameters, lr=0.1)
    training.train(optimizer, 1)
    optimizer.param_groups[0]["lr"] = "fast"
    members = members_of(training, optimizer)
    slots = gradients(training, 1)
    with pytest.raises(TypeError):
        run_stage(training, updates(training, members, [UpdateStage(0, (0, 1))]), slots)
    assert slots == [None, None] and all(p.grad is None for p in training.parameters)
    assert all(member.eligibility.updated for member in members)
    assert all(block.pins == 0 for block in training.pager.blocks)


# -- how they are cut


class Planned:
    """What `cut_updates` looks at: the optimizer, the bytes, and the stage."""

    def __init__(self, optimizer: object, size_bytes: int, after: int) -> None:
        self.facts, self.size_bytes, self.final = optimizer, size_bytes, FinalGradient(slot=0, after=after)


ONE, OTHER = object(), object()


def cut(members: Sequence[Planned], largest_bytes: int, **sizes: int) -> tuple[UpdateStage, ...]:
    return cut_updates(members, largest_bytes, **sizes)  # type: ignore[arg-type]


def test_large_ones_by_themselves_small_ones_with_what_comes_after() -> None:
    members = [Planned(ONE, KIB, 0), Planned(ONE, 8 * KIB, 1), Planned(ONE, KIB, 2), Planned(ONE, KIB, 2), Planned(ONE, KIB, 5)]
    assert cut(members, 64 * KIB, min_bytes=4 * KIB) == (UpdateStage(1, (0, 1)), UpdateStage(5, (2, 3, 4)))
    assert cut(members, 0, min_bytes=4 * KIB) == tuple(UpdateStage(m.final.after, (n,)) for n, m in enumerate(members))


def test_every_optimizer_has_stages_of_its_own() -> None:
    members = [Planned(ONE, KIB, 1), Planned(OTHER, KIB, 0), Planned(ONE, KIB, 0), Planned(OTHER, KIB, 3)]
    assert cut(members, 64 * KIB) == (UpdateStage(1, (2, 0)), UpdateStage(3, (1, 3)))


@given(
    members=st.lists(
        st.builds(Planned, st.sampled_from([ONE, OTHER]), st.integers(1, 12 << 20), st.integers(0, 6)), min_size=1, max_size=12
    ),
    largest=st.integers(0, 32 << 20),
)
def test_each_is_updated_once_and_not_too_early(members: list[Planned], largest: int) -> None:
    stages = cut(members, largest)
    assert sorted(number for stage in stages for number in stage.members) == list(range(len(members)))
    assert [stage.after for stage in stages] == sorted(stage.after for stage in stages)
    for stage in stages:
        own = [members[number] for number in stage.members]
        assert stage.after == max(member.final.after for member in own)
        assert len({member.facts for member in own}) == 1
        size, last = sum(member.size_bytes for member in own), own[-1].size_bytes
        assert size <= largest or len(own) == 1 or 2 * (size - last) < largest
