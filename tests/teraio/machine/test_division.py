"""How ranks divide memory and drives, in numbers."""

from pathlib import Path

import pytest

from planner import OptionsError
from teraio.machine.division import DrivesAndMemory, divided
from teraio.machine.tiers import io_threads
from teraio.options import Options, Share

DRIVE = Path("/drive")


def seen(count: int, **fields: object) -> dict[int, DrivesAndMemory]:
    known = {"drives": (1,), "free": 1000, "available": 1000, "resident": 100} | fields
    return dict.fromkeys(range(count), DrivesAndMemory(**known))  # type: ignore[arg-type]


def test_the_default_on_cpu_is_a_share_of_what_is_available() -> None:
    options = Options(storage=(DRIVE,))
    assert divided(options, 0, seen(2), on_cpu=True).memory_budget == 450
    assert divided(options, 0, seen(4), on_cpu=True).memory_budget == 225
    half = Options(storage=(DRIVE,), memory_budget=Share(0.5))
    assert divided(half, 1, seen(2), on_cpu=True).memory_budget == 300  # of 1000 + 2 x 100
    given = Options(storage=(DRIVE,), memory_budget=77)
    assert divided(given, 1, seen(2), on_cpu=True).memory_budget == 77


def test_a_host_tier_that_nobody_asked_for_is_a_share_on_gpus() -> None:
    options = Options(memory_budget=100)
    assert divided(options, 0, seen(4), on_cpu=False).host_budget == 125
    assert divided(options, 0, seen(4), on_cpu=True).host_budget is None


def test_drives_are_divided_among_those_that_use_them() -> None:
    options = Options(storage=(DRIVE,))
    assert divided(options, 0, seen(2), on_cpu=False).storage_budget == 500
    own = {0: DrivesAndMemory(drives=(1,), free=1000, available=1), 1: DrivesAndMemory(drives=(2,), free=800, available=1)}
    assert divided(options, 1, own, on_cpu=False).storage_budget is None
    some = {0: DrivesAndMemory(drives=(1,), free=1000, available=1, storage_budget=300), **{1: seen(1)[0], 2: seen(1)[0]}}
    assert divided(options, 1, some, on_cpu=False).storage_budget == 350


def test_ranks_that_looked_at_a_drive_at_different_moments_get_equal_shares() -> None:
    """Plans are for budgets: ranks with equal ones follow one plan."""
    looked = {0: seen(1)[0], 1: seen(1, free=900)[0]}
    assert [divided(Options(storage=(DRIVE,)), rank, looked, on_cpu=False).storage_budget for rank in looked] == [450, 450]


def test_budgets_that_are_given_must_fit_together() -> None:
    options = Options(storage=(DRIVE,), storage_budget=600, host_budget=400)
    with pytest.raises(
        OptionsError, match="option storage_budget: 2 ranks of this machine ask for 1,200 bytes .* 1,000 are free"
    ):
        divided(options, 0, seen(2, storage_budget=600), on_cpu=False)
    with pytest.raises(OptionsError, match="option host_budget: 3 ranks of this machine ask for 1,200 bytes together, but 1,000"):
        divided(options, 0, seen(3, host_budget=400), on_cpu=False)
    assert divided(options, 0, seen(1, storage_budget=600, host_budget=400), on_cpu=False) == options
    with pytest.raises(OptionsError, match="leave nothing of the share of main memory that each of 2 ranks has"):
        divided(Options(storage=(DRIVE,), host_budget=460), 0, seen(2, host_budget=460), on_cpu=True)


def test_memory_budgets_on_cpu_that_do_not_fit_together_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    """1000 bytes are available, and each rank has 100 already."""
    options = Options(storage=(DRIVE,), memory_budget=600)
    for rank in range(2):
        assert divided(options, rank, seen(2, memory_budget=600), on_cpu=True).memory_budget == 600
    assert not caplog.records
    divided(options, 1, seen(2, memory_budget=601), on_cpu=True)
    divided(options, 0, seen(2, memory_budget=601), on_cpu=False)
    assert not caplog.records, "rank 0 tells, and on a GPU they are budgets of other memory"
    divided(options, 0, seen(2, memory_budget=601), on_cpu=True)
    divided(options, 0, seen(2, memory_budget=590, host_budget=20), on_cpu=True)
    told = [record.message for record in caplog.records]
    assert [text.split("may fill ")[1].split("; ")[0] for text in told] == [
        "1,202 bytes of main memory together, but have 1,200",
        "1,220 bytes of main memory together, but have 1,200",
    ]


def test_io_threads_are_divided() -> None:
    assert [io_threads(Options(local_ranks=count)) for count in (1, 2, 8)] == [4, 2, 1]


def test_what_a_rank_sees_survives_the_way_to_the_others() -> None:
    one = DrivesAndMemory(
        drives=(3, 4), free=5, available=6, resident=7, memory_budget=9, host_budget=None, storage_budget=8, outputs=("/a",)
    )
    assert DrivesAndMemory.of_text(one.as_text()) == one
