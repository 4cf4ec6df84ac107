"""What the budget counts, in numbers."""

from __future__ import annotations

from runtime.paging.account import NO_LIMIT, MemoryAccount


def account() -> MemoryAccount:
    """3 of blocks, 20 reserved, 100 fixed, 200 external: 323 of 1000."""
    account = MemoryAccount(1000)
    account.fixed_bytes, account.external_bytes, account.reserved_bytes = 100, 200, 20
    account.add(3)
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
    counted = account()
    counted.begin_offload(3)
    assert (counted.used_bytes, counted.offloading_bytes) == (3, 3)
    counted.end_offload(3)
    assert (counted.used_bytes, counted.offloading_bytes) == (3, 0)
    counted.remove(3)
    assert counted.total_bytes == 320


def test_a_block_that_comes_in_counts_from_the_beginning() -> None:
    counted = account()
    counted.begin_prefetch(7)
    assert (counted.used_bytes, counted.prefetching_blocks, counted.peak_bytes) == (10, 1, 330)
    counted.end_prefetch()
    assert (counted.used_bytes, counted.prefetching_blocks) == (10, 0)


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
    counted.add(1 << 50)
    assert counted.free_bytes == NO_LIMIT and counted.short_bytes(1 << 50) < 0
