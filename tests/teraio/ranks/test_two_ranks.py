"""Two ranks under gloo on this machine: budgets divided, one plan, and what happens when one of them fails."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from planner import OptionsError, RankError
from teraio.options import parse_options
from teraio.ranks import RankGroup, RankPlace, rank_place

from ...training import MIB
from ..rank_processes import Ranks
from .cases import Answer, alone, killed, started_again, trained

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="this torch has no torch.distributed")


@pytest.fixture
def options(tmp_path: Path) -> dict[str, Any]:
    return {"memory_budget": 16 * MIB, "storage": str(tmp_path), "rank_timeout": 280.0}


def free_bytes(folder: Path) -> int:
    return shutil.disk_usage(folder).free


def infos(answer: Answer) -> list[str]:
    return [text for level, text in answer["log"] if level == "INFO"]


def test_ranks_divide_the_machine_and_follow_one_plan(ranks: Ranks, options: dict[str, Any], tmp_path: Path) -> None:
    """Although rank 1 is slower."""
    files = {"trace_out": str(tmp_path / "trace-{rank}.json"), "plan_out": str(tmp_path / "plan-{local_rank}.json")}
    answers = ranks.run(trained, options=[{**options, **files}] * 2, pause=(0.0, 0.05))
    assert [answer.get("error") for answer in answers] == [None, None], answers
    assert [answer["status"]["phase"] for answer in answers] == ["planned", "planned"]
    assert sum(answer["made"] for answer in answers) == 1
    assert answers[0]["moves"] == answers[1]["moves"] != []
    assert [answer["threads"] for answer in answers] == [2, 2]
    assert sum(answer["storage_bytes"] for answer in answers) <= free_bytes(tmp_path) * 1.1
    assert all(link["alone_bytes_per_second"] for answer in answers for link in answer["links"])
    assert [answer["phases"] for answer in answers] == [[["planned"], ["planned"]]] * 2
    assert infos(answers[0]) and not infos(answers[1])
    assert all((tmp_path / f"plan-{rank}.json").exists() for rank in range(2))


def test_plans_may_arrive_at_different_times(ranks: Ranks, options: dict[str, Any]) -> None:
    """Rank 1 profiles for five iterations more, and gets the plan that rank 0 has made meanwhile."""
    longer = {**options, "profile_iterations": 8}
    answers = ranks.run(trained, options=[options, longer], steps=18)
    assert [answer["status"]["phase"] for answer in answers] == ["planned", "planned"]
    assert [answer["made"] for answer in answers] == [1, 0]
    assert any("ranks 1 have not asked for the same plan" in text for _, text in answers[0]["log"])


def test_a_second_start_follows_the_plan_of_the_first(ranks: Ranks, options: dict[str, Any], tmp_path: Path) -> None:
    """Although the ranks divide what is free on the drive, which is a little less then."""
    kept = {**options, "plan_cache": "read-write", "profile_iterations": 1}
    assert sum(answer["made"] for answer in ranks.run(started_again, kept, steps=10, folder=tmp_path)) == 1
    (tmp_path / "another file").write_bytes(bytes(4 * MIB))
    answers = ranks.run(started_again, kept, steps=4, folder=tmp_path)
    assert [(answer["made"], answer["status"]["phase"]) for answer in answers] == [(0, "planned")] * 2, answers
    assert any("the plan of an earlier start fits" in text for text in infos(answers[0]))


def test_ranks_with_other_budgets_plan_for_themselves(ranks: Ranks, options: dict[str, Any]) -> None:
    answers = ranks.run(trained, options=[options, {**options, "memory_budget": 12 * MIB}])
    assert [answer["status"]["phase"] for answer in answers] == ["planned", "planned"]
    assert [answer["made"] for answer in answers] == [1, 1]
    warnings = [text for level, text in answers[1]["log"] if level == "WARNING"]
    assert warnings and all(text.startswith("rank 1: ") for text in warnings)


def test_a_rank_without_room_ends_both(ranks: Ranks, options: dict[str, Any]) -> None:
    answers = ranks.run(trained, options=[options, {**options, "memory_budget": MIB}])
    assert [answer["error"] for answer in answers] == ["RankError", "BudgetError"]
    assert "rank 1 of this machine cannot train, so rank 0 does not either: BudgetError: " in answers[0]["message"]


def test_files_and_budgets_of_all_ranks_are_checked(ranks: Ranks, options: dict[str, Any], tmp_path: Path) -> None:
    same = ranks.run(trained, options=[{**options, "trace_out": str(tmp_path / "trace.json")}] * 2)
    assert [answer["error"] for answer in same] == ["OptionsError"] * 2
    assert f"ranks 0 and 1 of this machine both write {tmp_path / 'trace.json'}; put {{rank}}" in same[0]["message"]
    much = ranks.run(trained, options=[{**options, "storage_budget": int(free_bytes(tmp_path) * 0.7)}] * 2)
    assert [answer["error"] for answer in much] == ["OptionsError"] * 2
    assert "option storage_budget: 2 ranks of this machine ask for" in much[1]["message"]


def test_a_rank_that_trains_alone_waits_for_none(ranks: Ranks, options: dict[str, Any]) -> None:
    answers = ranks.run(alone, options={**options, "local_ranks": 1})
    assert [answer.get("error") for answer in answers] == [None, None]
    assert [answer["runs"] for answer in answers] == [1, 0]


def test_a_killed_rank_is_named_and_leaves_no_files(ranks: Ranks, options: dict[str, Any], tmp_path: Path) -> None:
    storage = tmp_path / "1"
    storage.mkdir()
    (tmp_path / "0").mkdir()
    found, nothing = ranks.run_killing(
        1, killed, options=[{**options, "storage": str(tmp_path / "{rank}"), "rank_timeout": 2.0}] * 2
    )
    assert nothing is None
    assert found["error"] == "RankError"
    assert "rank 0 has waited 2 s for rank 1 of this machine" in found["message"]
    assert not list(storage.iterdir())


# -- where torchrun says that ranks stand, what they tell each other over one store, and what they log


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


def test_the_log_says_once_whom_a_rank_waits_for(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr("teraio.ranks._TELL_SECONDS", 0.1)

    def work(ranks: RankGroup) -> dict[int, str]:
        time.sleep(0.5 * ranks.rank)
        return ranks.gather("numbers")

    assert in_threads(work, groups(2)) == [{0: "", 1: ""}] * 2
    (message,) = [record.getMessage() for record in caplog.records]
    assert message.startswith("waiting for rank 1 of this machine (numbers), at most 30 s: look at the output of these processes")
    assert message.endswith("wait for what this rank computes first, as in pipeline parallelism, give local_ranks=1")


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


@pytest.fixture
def torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    """This is the second rank of the second of two machines."""
    for name, number in {"RANK": 3, "WORLD_SIZE": 4, "LOCAL_RANK": 1, "LOCAL_WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(number))


def test_without_torchrun_there_is_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert rank_place() == RankPlace() and list(rank_place().neighbours) == [0]
    assert parse_options({}).local_ranks == 1


@pytest.mark.parametrize(("variable", "value"), [("RANK", "x"), ("RANK", ""), ("LOCAL_RANK", "2"), ("WORLD_SIZE", "1")])
def test_variables_that_make_no_sense_are_refused(
    torchrun: None, monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(OptionsError, match="start with torchrun"):
        rank_place()


def test_paths_name_the_rank_and_options_may_say_another_number(torchrun: None, tmp_path: Path) -> None:
    (tmp_path / "drive1").mkdir()
    given = {"storage": f"{tmp_path}/drive{{local_rank}}", "trace_out": f"{tmp_path}/trace-{{rank}}.json"}
    options = parse_options(given)
    assert options.storage == (tmp_path / "drive1",) and options.trace_out == tmp_path / "trace-3.json"
    assert options.local_ranks == 2 and parse_options({"local_ranks": 1}).local_ranks == 1
