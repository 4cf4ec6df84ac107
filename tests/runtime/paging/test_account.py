"""What the budget counts, in numbers."""

from __future__ import annotations

import torch

from runtime.paging.account import NO_LIMIT, MemoryAccount
from runtime.paging.block import Block, State


def block(size_bytes: int) -> Block:
    return Block(storage=torch.UntypedStorage(size_bytes), name="w", kind="parameter", user_visible=False, span=None)


def account() -> MemoryAccount:
    """3 of blocks, 20 reserved, 100 fixed, 200 external: 323 of 1000."""
    account = MemoryAccount(1000)
    account.fixed_bytes, account.external_bytes, account.reserved_bytes = 100, 200, 20
    account.add(block(3))
    return account


def test_everything_on_the_device_counts() -> None:
    assert account().unmoved_bytes == 300
    assert account().total_bytes == 323
    assert account().free_bytes == 677


def test_what_a_stage_has_reserved_is_there_for_it() -> None:
    assert account().unused_bytes == 697
    assert account().short_bytes(697) == 0
    assert account().short_bytes(700) == 3
    assert account().short_bytes(0) == -697


def test_a_block_counts_until_its_memory_is_taken() -> None:
    counted, leaving = account(), block(3)
    counted.begin_offload(leaving)
    assert (counted.used_bytes, counted.offloading_bytes, leaving.state) == (3, 3, State.OFFLOADING)
    counted.end_offload(leaving)
    assert (counted.used_bytes, counted.offloading_bytes, leaving.state) == (3, 0, State.ON_DEVICE)
    counted.remove(leaving)
    assert (counted.total_bytes, leaving.state) == (320, State.OFFLOADED)
    counted.add(leaving)
    counted.remove(leaving, State.DROPPED)
    assert (counted.total_bytes, leaving.state) == (320, State.DROPPED)


def test_a_block_that_comes_in_counts_from_the_beginning() -> None:
    counted, coming = account(), block(7)
    counted.begin_prefetch(coming)
    assert (counted.used_bytes, counted.prefetching_blocks, coming.state) == (10, 1, State.PREFETCHING)
    counted.end_prefetch(coming)
    assert (counted.used_bytes, counted.prefetching_blocks, coming.state) == (10, 0, State.ON_DEVICE)


def test_the_peak_is_the_highest_total() -> None:
    counted = account()
    counted.note_peak()
    counted.reserved_bytes = 0
    counted.note_peak()
    assert counted.peak_bytes == 323


def test_a_recognised_block_is_no_longer_external() -> None:
    counted = account()
    counted.recognise(150)
    assert counted.external_bytes == 50
    counted.recognise(150)
    assert counted.external_bytes == 0, "the device had less than that"


def test_without_a_budget_nothing_is_short() -> None:
    counted = MemoryAccount(None)
    counted.used_bytes = 1 << 50
    assert counted.free_bytes == NO_LIMIT and counted.short_bytes(1 << 50) < 0
