"""Ranks of one machine: where torchrun says that they stand, what they tell each other over one store, and what they log."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from planner import OptionsError, RankError
from teraio.options import parse_options
from teraio.ranks import RankGroup, RankPlace, only_first_rank_informs, rank_place

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="this torch has no torch.distributed")


def groups(count: int, *, timeout_seconds: float = 30.0) -> list[RankGroup]:
    store = dist.HashStore()
    places = [RankPlace(rank=rank, world_size=count, local_rank=rank, local_world_size=count) for rank in range(count)]
    return [RankGroup(store, place, timeout_seconds=timeout_seconds) for place in places]


def in_threads(work: Callable[[RankGroup], Any], ranks: list[RankGroup]) -> list[Any]:
    """Run the work of each rank in a thread; an error is its result."""
    found: list[Any] = [None] * len(ranks)

    def run(number: int) -> None:
        try:
            found[number] = work(ranks[number])
        except Exception as error:
            found[number] = error

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(ranks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_all_hear_what_all_tell() -> None:
    found = in_threads(lambda ranks: ranks.gather("numbers", str(10 * ranks.rank)), groups(3))
    assert found == [{0: "0", 1: "10", 2: "20"}] * 3


def test_the_log_says_once_whom_a_rank_waits_for(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr("teraio.ranks._TELL_SECONDS", 0.1)

    def work(ranks: RankGroup) -> dict[int, str]:
        time.sleep(0.5 * ranks.rank)
        return ranks.gather("numbers")

    assert in_threads(work, groups(2)) == [{0: "", 1: ""}] * 2
    (message,) = [record.getMessage() for record in caplog.records]
    assert message.startswith("waiting for rank 1 of this machine (numbers), at most 30 s: look at the output of these processes")
    assert message.endswith("wait for what this rank computes first, as in pipeline parallelism, give local_ranks=1")


def test_turns_are_in_the_order_of_the_ranks() -> None:
    order: list[int] = []

    def work(ranks: RankGroup) -> None:
        with ranks.turn("opening"):
            order.append(ranks.rank)

    in_threads(work, groups(4))
    assert order == [0, 1, 2, 3]


def test_one_rank_is_first() -> None:
    assert sorted(in_threads(lambda ranks: ranks.first("plan"), groups(3))) == [False, False, True]


def test_a_failure_reaches_those_who_wait() -> None:
    def work(ranks: RankGroup) -> None:
        with ranks.failing_together():
            if ranks.rank == 1:
                raise ValueError("no room")
            ranks.gather("opening")

    one, two, three = in_threads(work, groups(3))
    assert isinstance(two, ValueError)
    for error in (one, three):
        assert isinstance(error, RankError) and "rank 1 of this machine cannot train" in str(error)
        assert "ValueError: no room" in str(error)


def test_ranks_that_do_not_come_are_named() -> None:
    first, second, *_ = groups(4, timeout_seconds=0.1)
    second.tell("opening", "")
    with pytest.raises(RankError, match=r"rank 0 has waited 0 s for ranks 2, 3 of this machine \(opening\)"):
        first.gather("opening")


def test_a_store_that_is_gone_is_an_error_of_the_ranks() -> None:
    class Gone:
        def set(self, key: str, value: str) -> None:
            raise RuntimeError("connection reset")

    place = RankPlace(rank=1, world_size=2, local_rank=1, local_world_size=2)
    ranks = RankGroup(Gone(), place, timeout_seconds=1.0)  # type: ignore[arg-type]
    with pytest.raises(RankError, match="rank 1 lost the store of torch.distributed.*connection reset"):
        ranks.tell("status", "")
    ranks.fail("nobody hears it")  # a failure on the way out hides no other one


# -- where a process stands, and what it logs


def torchrun(monkeypatch: pytest.MonkeyPatch, rank: int, local_rank: int, world_size: int = 4, local_world_size: int = 2) -> None:
    place = {"rank": rank, "world_size": world_size, "local_rank": local_rank, "local_world_size": local_world_size}
    for name, number in place.items():
        monkeypatch.setenv(name.upper(), str(number))


def test_without_torchrun_there_is_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert rank_place() == RankPlace() and list(rank_place().neighbours) == [0]
    assert parse_options({}).local_ranks == 1


def test_neighbours_are_the_ranks_of_the_same_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    torchrun(monkeypatch, rank=3, local_rank=1)
    assert rank_place() == RankPlace(rank=3, world_size=4, local_rank=1, local_world_size=2)
    assert list(rank_place().neighbours) == [2, 3]


@pytest.mark.parametrize(("variable", "value"), [("RANK", "x"), ("RANK", ""), ("LOCAL_RANK", "2"), ("WORLD_SIZE", "1")])
def test_variables_that_make_no_sense_are_refused(monkeypatch: pytest.MonkeyPatch, variable: str, value: str) -> None:
    torchrun(monkeypatch, rank=3, local_rank=1)
    monkeypatch.setenv(variable, value)
    with pytest.raises(OptionsError, match="start with torchrun"):
        rank_place()


def test_paths_name_the_rank_and_options_may_say_another_number(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    torchrun(monkeypatch, rank=3, local_rank=1)
    (tmp_path / "drive1").mkdir()
    given = {"storage": f"{tmp_path}/drive{{local_rank}}", "trace_out": f"{tmp_path}/trace-{{rank}}.json"}
    options = parse_options(given)
    assert options.storage == (tmp_path / "drive1",) and options.trace_out == tmp_path / "trace-3.json"
    assert options.local_ranks == 2 and parse_options({"local_ranks": 1}).local_ranks == 1


def test_rank_0_informs_and_all_warn(caplog: pytest.LogCaptureFixture) -> None:
    for rank, expected in ((0, ["hello", "rank 0: take care"]), (1, ["rank 1: take care"])):
        logger = logging.getLogger(f"test of rank {rank}")
        logger.setLevel(logging.INFO)
        for _ in range(2):
            only_first_rank_informs(logger, RankPlace(rank=rank, world_size=2))
        caplog.clear()
        logger.info("hello")
        logger.warning("take %s", "care")
        assert [record.getMessage() for record in caplog.records] == expected
    alone = logging.getLogger("test of one rank")
    only_first_rank_informs(alone, RankPlace())
    assert not alone.filters
