"""Which tier a block gets its slot in: the wanted one, else the first with room."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest
import torch

from planner.errors import StorageFullError
from planner.schema import WaitingTier
from runtime.device import Span
from runtime.paging import Block, Tier, Tiers

from ..slab import Slab

UNIT = 64


def block(name: str = "w") -> Block:
    storage = torch.zeros(UNIT, dtype=torch.uint8).untyped_storage()
    return Block(storage=storage, name=name, kind="activation", user_visible=False, span=Span(0, UNIT))


@pytest.fixture
def stores() -> dict[WaitingTier, Slab]:
    return {"host": Slab(1, UNIT), "storage": Slab(2, UNIT)}


@pytest.fixture
def tiers(stores: dict[WaitingTier, Slab]) -> Tiers:
    return Tiers([Tier(name=name, store=store, engine=None) for name, store in stores.items()])


def test_the_first_tier_with_room_then_the_next(tiers: Tiers) -> None:
    blocks = [block() for _ in range(4)]
    assert [tiers.place(b, None).name for b in blocks[:3]] == ["host", "storage", "storage"]
    with pytest.raises(StorageFullError):
        tiers.place(blocks[3], None)
    assert blocks[3].slot is None and blocks[3].tier is None


@pytest.mark.parametrize(("wanted", "other"), [("host", "storage"), ("storage", "host")])
def test_the_wanted_tier_unless_it_is_full(tiers: Tiers, wanted: WaitingTier, other: WaitingTier) -> None:
    found = [tiers.place(block(), wanted).name for _ in range(3)]
    assert found == [wanted, *(("storage", "storage") if wanted == "host" else ("storage", other))]


def test_a_block_keeps_its_slot_or_changes_to_the_wanted_tier(tiers: Tiers, stores: dict[WaitingTier, Slab]) -> None:
    moving = block()
    tiers.place(moving, "storage")
    slot = moving.slot
    assert tiers.place(moving, None).name == tiers.place(moving, "storage").name == "storage"
    assert moving.slot is slot
    assert tiers.place(moving, "host").name == moving.tier == "host"
    assert (stores["host"].used_bytes, stores["storage"].used_bytes) == (UNIT, 0)
    other = block()
    tiers.place(other, "storage")
    assert tiers.place(other, "host").name == "storage", "host is full: it stays where it is"
    tiers.free(moving)
    tiers.free(moving)
    assert stores["host"].used_bytes == 0 and moving.tier is None


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def test_a_full_tier_keeps_no_frame_alive(tiers: Tiers, no_collector: None) -> None:
    """Else tensors in the frames of callers would live on, and AccumulateGrad would clone each gradient among them."""
    tiers.place(block(), "host")

    def caller() -> weakref.ref[torch.Tensor]:
        gradient = torch.zeros(1)
        assert tiers.place(block(), "host").name == "storage"
        return weakref.ref(gradient)

    assert caller()() is None
