"""Where torchrun says that a process stands, and what that does to options."""

import pytest

from planner import OptionsError
from teraio.options import parse_options
from teraio.ranks import RankPlace, rank_place


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


def test_paths_name_the_rank_and_options_may_say_another_number(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:  # type: ignore[no-untyped-def]
    torchrun(monkeypatch, rank=3, local_rank=1)
    (tmp_path / "drive1").mkdir()
    given = {"storage": f"{tmp_path}/drive{{local_rank}}", "trace_out": f"{tmp_path}/trace-{{rank}}.json"}
    options = parse_options(given)
    assert options.storage == (tmp_path / "drive1",) and options.trace_out == tmp_path / "trace-3.json"
    assert options.local_ranks == 2 and parse_options({"local_ranks": 1}).local_ranks == 1
