"""What each rank may use of memory and drives, in numbers."""

from dataclasses import replace
from pathlib import Path

import pytest

from planner import OptionsError
from teraio.machine.budgets import ResolvedBudgets, SeenByRank, resolve_budgets
from teraio.machine.machine import io_threads
from teraio.options import Options, Share

DRIVE = Path("/drive")


def seen(count: int, **fields: object) -> dict[int, SeenByRank]:
    known = {"drives": (1,), "free": 1000, "available": 1000, "resident": 100} | fields
    return dict.fromkeys(range(count), SeenByRank(**known))  # type: ignore[arg-type]


def on_gpus(count: int, **fields: object) -> dict[int, SeenByRank]:
    return seen(count, **{"gpu": 800, "gpu_free": 700} | fields)


def test_the_default_on_cpu_is_a_share_of_what_is_available() -> None:
    options = Options(storage=(DRIVE,))
    assert resolve_budgets(options, 0, seen(2)).device == 450
    assert resolve_budgets(options, 0, seen(4)).device == 225
    half = Options(storage=(DRIVE,), memory_budget=Share(0.5))
    assert resolve_budgets(half, 1, seen(2)).device == 300  # of 1000 + 2 x 100
    given = Options(storage=(DRIVE,), memory_budget=77)
    assert resolve_budgets(given, 1, seen(2)).device == 77


def test_one_process_alone_has_all_of_it() -> None:
    assert resolve_budgets(Options(storage=(DRIVE,)), 0, seen(1)) == ResolvedBudgets(device=900)
    assert resolve_budgets(Options(host_budget=300), 0, seen(1)) == ResolvedBudgets(device=600, host=300)
    assert resolve_budgets(Options(storage=(DRIVE,), memory_budget=Share(0.5)), 0, seen(1)).device == 550
    assert resolve_budgets(Options(), 0, seen(1)) == ResolvedBudgets()


def test_the_memory_of_a_gpu_is_not_divided() -> None:
    options = Options(storage=(DRIVE,))
    assert resolve_budgets(options, 1, on_gpus(2)).device == 630
    assert resolve_budgets(replace(options, memory_budget=Share(0.5)), 1, on_gpus(2)).device == 400
    assert resolve_budgets(replace(options, memory_budget=77), 1, on_gpus(2)).device == 77
    assert resolve_budgets(Options(), 0, on_gpus(1)) == ResolvedBudgets()


def test_a_host_tier_that_nobody_asked_for_is_a_share_on_gpus() -> None:
    options = Options(memory_budget=100)
    assert resolve_budgets(options, 0, on_gpus(1)) == ResolvedBudgets(device=100, host=500)
    assert resolve_budgets(options, 0, on_gpus(4)) == ResolvedBudgets(device=100, host=125)
    with pytest.raises(OptionsError, match="there is no lower tier"):
        resolve_budgets(options, 0, seen(4))


def test_drives_are_divided_among_those_that_use_them() -> None:
    options = Options(storage=(DRIVE,))
    assert resolve_budgets(options, 0, on_gpus(2)).storage == 500
    own = {0: SeenByRank(drives=(1,), free=1000, available=1, gpu=9), 1: SeenByRank(drives=(2,), free=800, available=1, gpu=9)}
    assert resolve_budgets(options, 1, own).storage is None
    some = {0: SeenByRank(drives=(1,), free=1000, available=1, storage_budget=300), **{1: seen(1)[0], 2: on_gpus(1)[0]}}
    assert resolve_budgets(options, 2, some).storage == 350


def test_ranks_that_looked_at_a_drive_at_different_moments_get_equal_shares() -> None:
    """Plans are for budgets: ranks with equal ones follow one plan."""
    looked = {0: seen(1)[0], 1: seen(1, free=900)[0]}
    assert [resolve_budgets(Options(storage=(DRIVE,)), rank, looked).storage for rank in looked] == [450, 450]


def test_budgets_that_are_given_must_fit_together() -> None:
    options = Options(storage=(DRIVE,), storage_budget=600, host_budget=400)
    with pytest.raises(
        OptionsError, match="option storage_budget: 2 ranks of this machine ask for 1,200 bytes .* 1,000 are free"
    ):
        resolve_budgets(options, 0, on_gpus(2, storage_budget=600))
    with pytest.raises(OptionsError, match="option host_budget: 3 ranks of this machine ask for 1,200 bytes together, but 1,000"):
        resolve_budgets(options, 0, on_gpus(3, host_budget=400))
    alone = resolve_budgets(options, 0, on_gpus(1, storage_budget=600, host_budget=400))
    assert alone == ResolvedBudgets(device=630, host=400, storage=600)
    with pytest.raises(OptionsError, match="460 bytes leave nothing of the 450 bytes of main memory that this process may take"):
        resolve_budgets(Options(storage=(DRIVE,), host_budget=460), 0, seen(2, host_budget=460))


def test_memory_budgets_on_cpu_that_do_not_fit_together_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    """1000 bytes are available, and each rank has 100 already."""
    options = Options(storage=(DRIVE,), memory_budget=600)
    for rank in range(2):
        assert resolve_budgets(options, rank, seen(2, memory_budget=600)).device == 600
    assert not caplog.records
    resolve_budgets(options, 1, seen(2, memory_budget=601))
    resolve_budgets(options, 0, on_gpus(2, memory_budget=601))
    assert not caplog.records, "rank 0 tells, and on a GPU they are budgets of other memory"
    resolve_budgets(options, 0, seen(2, memory_budget=601))
    resolve_budgets(options, 0, seen(2, memory_budget=590, host_budget=20))
    told = [record.message for record in caplog.records]
    assert [text.split("may fill ")[1].split("; ")[0] for text in told] == [
        "1,202 bytes of main memory together, but have 1,200",
        "1,220 bytes of main memory together, but have 1,200",
    ]


def test_io_threads_are_divided() -> None:
    assert [io_threads(Options(local_ranks=count)) for count in (1, 2, 8)] == [4, 2, 1]


def test_what_a_rank_sees_survives_the_way_to_the_others() -> None:
    one = SeenByRank(
        drives=(3, 4),
        free=5,
        available=6,
        resident=7,
        gpu=2,
        gpu_free=1,
        memory_budget=9,
        storage_budget=8,
        outputs=("/a",),
    )
    assert SeenByRank.of_text(one.as_text()) == one
