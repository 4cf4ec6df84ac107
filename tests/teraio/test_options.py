"""The options: good, bad and odd values from code, variables and a file, and the wording of the refusals."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from planner import OptionsError
from teraio.options import Options, Share, kinds, parse_bytes, parse_options

NAMES = list(kinds())
MAX_CHARACTERS = 600


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests switch an option off by its variable."""
    monkeypatch.delenv("TERAIO_PLAN_CACHE")


def refusal(given: Any) -> str | None:
    """The message of the refusal, which is one short line that can be printed; None if the options are taken."""
    try:
        parse_options(given)
    except OptionsError as error:
        message = str(error)
        assert len(message) < MAX_CHARACTERS and message.isprintable()
        message.encode()
        return message
    return None


BYTES = "wanted a number of bytes from 1 to 2^63 - 1, or text such as '24GiB' or '500MB'"
COUNT = "wanted a whole number of at least 1"
SECONDS = "wanted a positive number of seconds"
SWITCH = "wanted True or False"
CUDA_GRAPHS = "uses CUDA graphs, which need tensors that never move"

GOOD: list[tuple[str, Any, Any]] = [
    ("memory_budget", "24GiB", 24 << 30),
    ("memory_budget", " 12.5 % ", Share(0.125)),
    ("host_budget", "500MB", 500_000_000),
    ("storage", Path("/tmp/../tmp"), (Path("/tmp"),)),
    ("storage", ["/tmp", "/var/tmp"], (Path("/tmp"), Path("/var/tmp"))),
    ("storage_budget", "1.5 TiB", 3 << 39),
    ("storage_timeout", 600, 600.0),
    *(("storage_path", name, name) for name in ("auto", "posix", "buffered", "kvikio", "staged")),
    ("checksums", True, True),
    ("debug", True, True),
    ("profile_iterations", 1, 1),
    ("plan", __file__, Path(__file__)),
    ("replan", False, False),
    *(("plan_cache", name, name) for name in ("read-write", "read", "off")),
    ("trace_out", "/tmp/trace.json", Path("/tmp/trace.json")),
    ("plan_out", Path("plan.json"), Path("plan.json")),
    ("codegen", "eager", "eager"),
    ("mode", "max-autotune-no-cudagraphs", "max-autotune-no-cudagraphs"),
    ("optimizer", "off", "off"),
    ("overlap_step", True, True),
    ("host_updates", False, False),
    ("recompute", "off", "off"),
    ("tiles", "off", "off"),
    ("tiles", "3 MiB", 3 << 20),
    ("local_ranks", 8, 8),
    ("rank_timeout", 30, 30.0),
    ("solver_time_limit", 0.25, 0.25),
]

BAD: list[tuple[str, Any, str]] = [
    *(("memory_budget", value, f"found {value!r}, {BYTES}") for value in (0, -1, 2.5e9, True, "lots", "%")),
    ("memory_budget", "0%", "found '0%', wanted more than 0 % and at most 100 %"),
    ("host_budget", "50%", f"found '50%', {BYTES}"),
    ("storage", [], "found an empty list, wanted one or several directories"),
    ("storage", ["/tmp", None], "found None, wanted a path"),
    ("storage", "/no/such/folder", "/no/such/folder is not a directory; create it first"),
    ("storage", ["/tmp", "/tmp/../tmp"], "a directory is given twice in /tmp, /tmp"),
    ("storage", "/tmp/\0", "found '/tmp/\\x00': no file can have this name"),
    ("storage_budget", [1], f"found [1], {BYTES}"),
    ("storage_timeout", float("inf"), f"found inf, {SECONDS}"),
    ("storage_path", ["posix"], "found ['posix'], wanted 'auto', 'posix', 'buffered', 'kvikio' or 'staged'"),
    ("checksums", 1, f"found 1, {SWITCH}"),
    ("debug", 1, f"found 1, {SWITCH}"),
    *(("profile_iterations", value, f"found {value!r}, {COUNT}") for value in (0, 1.0, True, "3")),
    ("profile_iterations", 2**31, "found 2147483648, wanted less than 2^31"),
    ("plan", "/no/such/plan.json", "there is no file /no/such/plan.json"),
    ("replan", "no", f"found 'no', {SWITCH}"),
    ("plan_cache", True, "found True, wanted 'read-write', 'read' or 'off'"),
    ("trace_out", "/no/such/trace.json", "there is no directory /no/such; create it first"),
    ("plan_out", False, "found False, wanted a path"),
    ("codegen", "triton", "found 'triton', wanted 'inductor' or 'eager'"),
    ("mode", "fast", "found 'fast', wanted 'default' or 'max-autotune-no-cudagraphs'"),
    ("mode", "max-autotune", f"'max-autotune' {CUDA_GRAPHS}; give 'max-autotune-no-cudagraphs'"),
    ("mode", "reduce-overhead", f"'reduce-overhead' {CUDA_GRAPHS}; leave it out"),
    ("optimizer", False, "found False, wanted 'auto' or 'off'"),
    ("overlap_step", "auto", f"found 'auto', {SWITCH}"),
    ("host_updates", 0, f"found 0, {SWITCH}"),
    ("recompute", "on", "found 'on', wanted 'auto' or 'off'"),
    ("tiles", "on", "found 'on', wanted 'auto', 'off', a number of bytes, or text such as '24GiB'"),
    ("local_ranks", "2", f"found '2', {COUNT}"),
    ("rank_timeout", 0, f"found 0, {SECONDS}"),
    *(("solver_time_limit", value, f"found {value!r}, {SECONDS}") for value in (0, float("nan"), "30s", True)),
]


def test_no_option_is_untested_and_none_means_the_default() -> None:
    assert {name for name, _, _ in GOOD} == {name for name, _, _ in BAD} == set(NAMES)
    assert parse_options(None) == parse_options({}) == parse_options(dict.fromkeys(NAMES)) == Options()


@pytest.mark.parametrize(("name", "value", "expected"), GOOD)
def test_good_values(name: str, value: Any, expected: Any) -> None:
    parsed = parse_options({name: value})
    found = getattr(parsed, name)
    assert found == expected and type(found) is type(expected)
    others = {other: getattr(parsed, other) for other in NAMES if other != name}
    assert others == {other: getattr(Options(), other) for other in others}


def test_bad_values() -> None:
    for name, value, message in BAD:
        assert refusal({name: value}) == f"option {name}: {message}"
    mode = "max-autotune-no-cudagraphs"
    assert (
        refusal({"codegen": "eager", "mode": mode}) == f"option mode: {mode!r} is for codegen='inductor'; leave out one of them"
    )


def test_storage_that_may_not_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path or not mode & os.W_OK)  # root may write anywhere
    with pytest.raises(OptionsError, match="option storage: no permission to write to"):
        parse_options({"storage": tmp_path})


def test_relative_paths_home_and_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "drive").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "drive")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for given_path in ("drive", "~/link"):
        assert parse_options({"storage": given_path}).storage == ((tmp_path / "drive").resolve(),)
    with pytest.raises(OptionsError, match="given twice"):
        parse_options({"storage": ["~/link", "~/drive"]})


@pytest.mark.parametrize("name", ["memory_budgets", "Memory_budget", "", 3])
def test_unknown_names_list_the_valid_ones(name: Any) -> None:
    assert refusal({"memory_budget": 1, name: 1}) == f"unknown option {name!r}; valid options are {', '.join(sorted(NAMES))}"


@pytest.mark.parametrize(
    ("name", "instead"), [("live", "teraio.on_iteration"), ("plan_cache_folder", "XDG_CACHE_HOME"), ("user_writes", "found out")]
)
def test_removed_options_say_what_there_is_instead(name: str, instead: str, monkeypatch: pytest.MonkeyPatch) -> None:
    message = refusal({name: True})
    assert message is not None and message.startswith(f"option {name} was removed: ") and instead in message
    monkeypatch.setenv(f"TERAIO_{name.upper()}", "1")
    assert refusal({}) == f"environment variable TERAIO_{name.upper()}: {message}"


@pytest.mark.parametrize("value", ["1PB", "GiB", "1e9", "-1GiB", "1,000", "0.4", None, "٣GiB"])
def test_no_sizes(value: Any) -> None:
    with pytest.raises(OptionsError) as caught:
        parse_bytes("size", value)
    assert str(caught.value) == f"option size: found {value!r}, {BYTES}"


# -- variables and the file


@pytest.mark.parametrize(
    ("variable", "text", "expected"),
    [
        ("TERAIO_MEMORY_BUDGET", "12 GiB", {"memory_budget": 12 << 30}),
        ("TERAIO_STORAGE", "/tmp", {"storage": (Path("/tmp"),)}),
        ("TERAIO_STORAGE", '["/tmp", "/var/tmp"]', {"storage": (Path("/tmp"), Path("/var/tmp"))}),
        ("TERAIO_REPLAN", "false", {"replan": False}),
        ("TERAIO_REPLAN", "False", {"replan": False}),
        ("TERAIO_SOLVER_TIME_LIMIT", "2.5", {"solver_time_limit": 2.5}),
        ("TERAIO_CODEGEN", "", {}),
    ],
)
def test_values_of_variables(variable: str, text: str, expected: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, text)
    assert parse_options({}) == Options(**expected)


def test_code_wins_over_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERAIO_MEMORY_BUDGET", "2GiB")
    monkeypatch.setenv("TERAIO_STORAGE", "/var/tmp")
    found = parse_options({"memory_budget": "3GiB", "storage": None})
    assert found == Options(memory_budget=3 << 30, storage=(Path("/var/tmp"),))


@pytest.mark.parametrize(
    ("variable", "text", "message"),
    [
        ("TERAIO_MEMORY_BUDGTE", "1GiB", "unknown option 'memory_budgte'; valid options are checksums, codegen, debug"),
        ("TERAIO_CONFIG", "options.toml", "option config was removed: teraio.compile(model, **options) takes"),
        ("TERAIO_STORAGE", "/no/such/folder", "option storage: /no/such/folder is not a directory; create it first"),
    ],
)
def test_mistakes_name_the_variable(variable: str, text: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, text)
    assert (refusal({}) or "").startswith(f"environment variable {variable}: {message}")


# -- odd values: each is taken, or ends in one short line that names the option


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


TEXTS = ["~no-such-user/x", "n" * 300, "/tmp/" + "n" * 300, "a\0b", "\ud800", "/tmp/\udc80", "9" * 6000, "1" * 5000 + "%", "٣%"]
TEXTS += ["x" * 5000, "12\n13", "{rank}" * 100, "\x1b[31m", "1." + "0" * 5000, "[" * 5000, "1\ndebug = true", "é" * 400]
VALUES = [10**6000, -(10**6000), float("nan"), 1e308, b"/tmp", nested(5000), [["/tmp"]], {"a": 1}, Loud(), [Loud()], object]
ODD = st.one_of(
    st.sampled_from([*TEXTS, *VALUES]),
    st.text(st.characters(), max_size=20),
    st.integers(),
    st.floats(),
    st.lists(st.sampled_from(TEXTS), max_size=3),
)


@given(name=st.sampled_from(NAMES), value=ODD)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_values_in_code(name: str, value: Any) -> None:
    message = refusal({name: value})
    assert message is None or f"option {name}: " in message
