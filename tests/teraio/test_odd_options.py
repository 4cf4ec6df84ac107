"""Odd values of options, from code, variables and a file: each is taken, or ends in one short line that names the option."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from planner import OptionsError
from teraio.options import Options, parse_options
from teraio.ranks import rank_place

NAMES = sorted(Options.__dataclass_fields__)
MAX_CHARACTERS = 600


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests switch an option off by its variable."""
    monkeypatch.delenv("TERAIO_PLAN_CACHE")


class Loud:
    """Raises wherever it is asked."""

    def __eq__(self, other: object) -> bool:
        raise ValueError("never equal")

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        raise RuntimeError("no repr")


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


TEXTS = [
    "~no-such-user/x",
    "n" * 300,
    "/tmp/" + "n" * 300,
    "a\0b",
    "\ud800",
    "/tmp/\udc80",
    "9" * 6000,
    "1" * 5000 + "%",
    "٣GiB",
    "٣",
]
TEXTS += ["x" * 5000, "12\n13", "{rank}" * 100, "\x1b[31m", "1." + "0" * 5000]
VALUES = [
    10**400,
    10**6000,
    -(10**6000),
    float("nan"),
    1e308,
    b"/tmp",
    nested(5000),
    [["/tmp"]],
    {"a": 1},
    Loud(),
    [Loud()],
    object,
]
ODD = st.one_of(
    st.sampled_from(TEXTS),
    st.sampled_from(VALUES),
    st.text(st.characters(), max_size=20),
    st.integers(),
    st.floats(),
    st.lists(st.sampled_from(TEXTS), max_size=3),
)


def refusal(given: dict[Any, Any]) -> str | None:
    """The message of the refusal, which is one short line that can be printed; None if the options are taken."""
    try:
        parse_options(given)
    except OptionsError as error:
        message = str(error)
        assert len(message) < MAX_CHARACTERS and message.isprintable()
        message.encode()
        return message
    return None


@given(name=st.sampled_from(NAMES), value=ODD)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_values_in_code(name: str, value: Any) -> None:
    message = refusal({name: value})
    assert message is None or f"option {name}: " in message


@pytest.mark.parametrize("name", NAMES)
def test_each_option_with_each_odd_value(name: str) -> None:
    for value in (*TEXTS, *VALUES):
        message = refusal({name: value})
        if isinstance(value, str):
            fits = name in ("trace_out", "plan_out", "plan_cache_folder")
        else:
            fits = isinstance(value, float) and name in ("storage_timeout", "rank_timeout", "solver_time_limit")
        assert message is not None or fits


@pytest.mark.parametrize("value", ["٣GiB", "٣%", "1２KB"])
def test_digits_of_other_scripts_are_no_digits(value: str) -> None:
    assert refusal({"memory_budget": value}) is not None


@given(name=st.one_of(st.text(max_size=20), st.just("n" * 5000), st.just(10**6000), st.just("\ud800")))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_unknown_names(name: Any) -> None:
    assert name in NAMES or refusal({name: 1}) is not None


@pytest.mark.parametrize(
    "value", ["[" * 5000, "9" * 6000, "1\ndebug = true", "~no-such-user", "é" * 400, "{" * 3000, "\udc80", "x" * 5000]
)
@pytest.mark.parametrize("name", ["memory_budget", "storage", "profile_iterations", "plan"])
def test_variables(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(f"TERAIO_{name.upper()}", value)
    message = refusal({})
    assert message is not None and f"TERAIO_{name.upper()}: option {name}: " in message


def test_a_variable_with_an_odd_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERAIO_" + "n" * 5000, "1")
    assert refusal({}) is not None


@pytest.mark.parametrize(
    "content",
    [b"storage = " + b"[" * 5000, b"profile_iterations = " + b"9" * 6000, b"\xff", b"a" * 5000 + b" = 1", b'plan = "a\\u0000b"'],
)
def test_files(content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "teraio.toml"
    file.write_bytes(content)
    monkeypatch.setenv("TERAIO_CONFIG", str(file))
    message = refusal({})
    assert message is not None and str(file) in message


@pytest.mark.parametrize("name", ["~no-such-user/teraio.toml", "n" * 300, "/dev/null", "/tmp", "\udc80"])
def test_names_of_files(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERAIO_CONFIG", name)
    assert "TERAIO_CONFIG" in (refusal({}) or "")


@pytest.mark.parametrize("value", ["٣", "9" * 6000, "1 ", "\udc80" * 5000])
def test_ranks(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, value)
    with pytest.raises(OptionsError, match="wanted a number") as caught:
        rank_place()
    assert len(str(caught.value)) < MAX_CHARACTERS
