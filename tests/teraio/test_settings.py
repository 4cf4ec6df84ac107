"""Options from environment variables and a file: their values, their order, and what is said of mistakes."""

from pathlib import Path
from typing import Any

import pytest

from planner import OptionsError
from teraio.options import Options, Share, parse_options


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests switch an option off by its variable."""
    monkeypatch.delenv("TERAIO_PLAN_CACHE")


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that TERAIO_CONFIG names; the test writes it."""
    path = tmp_path / "teraio.toml"
    monkeypatch.setenv("TERAIO_CONFIG", str(path))
    return path


@pytest.mark.parametrize(
    ("variable", "text", "expected"),
    [
        ("TERAIO_MEMORY_BUDGET", "12 GiB", {"memory_budget": 12 << 30}),
        ("TERAIO_MEMORY_BUDGET", "1000000", {"memory_budget": 1_000_000}),
        ("TERAIO_MEMORY_BUDGET", "50%", {"memory_budget": Share(0.5)}),
        ("TERAIO_STORAGE", "/tmp", {"storage": (Path("/tmp"),)}),
        ("TERAIO_STORAGE", '["/tmp", "/var/tmp"]', {"storage": (Path("/tmp"), Path("/var/tmp"))}),
        ("TERAIO_REPLAN", "false", {"replan": False}),
        ("TERAIO_DEBUG", "True", {"debug": True}),
        ("TERAIO_PROFILE_ITERATIONS", "5", {"profile_iterations": 5}),
        ("TERAIO_SOLVER_TIME_LIMIT", "2.5", {"solver_time_limit": 2.5}),
        ("TERAIO_CODEGEN", "eager", {"codegen": "eager"}),
        ("TERAIO_CODEGEN", "", {}),
        ("TERAIO_CONFIG", "", {}),
    ],
)
def test_values_of_variables(variable: str, text: str, expected: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, text)
    assert parse_options({}) == Options(**expected)


def test_code_wins_over_variables_and_variables_win_over_the_file(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config.write_text('memory_budget = "1GiB"\nstorage = ["/tmp"]\nprofile_iterations = 7\nreplan = false\n')
    monkeypatch.setenv("TERAIO_MEMORY_BUDGET", "2GiB")
    monkeypatch.setenv("TERAIO_STORAGE", "/var/tmp")
    found = parse_options({"memory_budget": "3GiB", "storage": None})
    assert found == Options(memory_budget=3 << 30, storage=(Path("/var/tmp"),), profile_iterations=7, replan=False)


@pytest.mark.parametrize(
    ("variable", "text", "message"),
    [
        ("TERAIO_MEMORY_BUDGTE", "1GiB", "unknown option 'memory_budgte'; valid options are checksums, codegen, debug"),
        ("TERAIO_MEMORY_BUDGET", "lots", "option memory_budget: found 'lots', wanted a number of bytes"),
        ("TERAIO_REPLAN", "no", "option replan: found 'no', wanted True or False"),
        ("TERAIO_STORAGE", "/no/such/folder", "option storage: /no/such/folder is not a directory; create it first"),
    ],
)
def test_mistakes_name_the_variable(variable: str, text: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, text)
    with pytest.raises(OptionsError) as caught:
        parse_options({})
    assert str(caught.value).startswith(f"environment variable {variable}: {message}")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"memory_budgte = 1", ": unknown option 'memory_budgte'; valid options are checksums"),
        (b"memory_budget = 0", ": option memory_budget: found 0, wanted a number of bytes"),
        (b"[teraio]\nreplan = false", ": unknown option 'teraio'"),
        (b"memory_budget = 24GiB", " is no TOML: "),
        (b"# \xff", " is no TOML: "),
    ],
)
def test_mistakes_name_the_file(content: bytes, message: str, config: Path) -> None:
    config.write_bytes(content)
    with pytest.raises(OptionsError) as caught:
        parse_options({})
    assert str(caught.value).startswith(f"{config}{message}")


def test_a_file_that_is_not_there(config: Path) -> None:
    with pytest.raises(OptionsError) as caught:
        parse_options({})
    assert str(caught.value) == f"environment variable TERAIO_CONFIG: cannot read {config}: No such file or directory"
