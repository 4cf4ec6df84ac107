"""Every option with good and bad values, and the wording of the refusals."""

import ast
import os
from dataclasses import FrozenInstanceError, fields
from pathlib import Path
from typing import Any

import pytest

from planner import OptionsError
from teraio import options
from teraio.options import Options, Share, parse_bytes, parse_options

NAMES = [field.name for field in fields(Options)]


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests switch an option off by its variable."""
    monkeypatch.delenv("TERAIO_PLAN_CACHE")


GOOD: list[tuple[str, Any, Any]] = [
    ("memory_budget", 1, 1),
    ("memory_budget", "24GiB", 24 << 30),
    ("memory_budget", "50%", Share(0.5)),
    ("memory_budget", " 12.5 % ", Share(0.125)),
    ("memory_budget", "100%", Share(1.0)),
    ("host_budget", "500MB", 500_000_000),
    ("storage", "/tmp", (Path("/tmp"),)),
    ("storage", Path("/tmp/../tmp"), (Path("/tmp"),)),
    ("storage", ["/tmp", "/var/tmp"], (Path("/tmp"), Path("/var/tmp"))),
    ("storage", ("/var/tmp",), (Path("/var/tmp"),)),
    ("storage_budget", "1.5 TiB", 3 << 39),
    ("profile_iterations", 1, 1),
    ("plan", __file__, Path(__file__)),
    *(("plan_cache", name, name) for name in ("read-write", "read", "off")),
    ("plan_cache_folder", "/tmp/plans", Path("/tmp/plans")),
    ("live", True, True),
    ("replan", True, True),
    ("replan", False, False),
    ("trace_out", "/tmp/trace.json", Path("/tmp/trace.json")),
    ("plan_out", Path("plan.json"), Path("plan.json")),
    ("user_writes", "detect", "detect"),
    ("user_writes", "assume", "assume"),
    ("codegen", "inductor", "inductor"),
    ("codegen", "eager", "eager"),
    ("mode", "default", "default"),
    ("mode", "max-autotune-no-cudagraphs", "max-autotune-no-cudagraphs"),
    ("optimizer", "auto", "auto"),
    ("host_updates", False, False),
    ("optimizer", "off", "off"),
    ("recompute", "auto", "auto"),
    ("recompute", "off", "off"),
    ("overlap_step", True, True),
    ("overlap_step", False, False),
    ("solver_time_limit", 5, 5.0),
    ("solver_time_limit", 0.25, 0.25),
    ("storage_timeout", 600, 600.0),
    ("rank_timeout", 30, 30.0),
    ("local_ranks", 8, 8),
    *(("storage_path", name, name) for name in ("auto", "posix", "buffered", "kvikio", "staged")),
    ("checksums", True, True),
    ("unlink_spill_files", True, True),
    ("checksums", False, False),
    ("unlink_spill_files", False, False),
    ("debug", True, True),
]

BYTES = "wanted a number of bytes from 1 to 2^63 - 1, or text such as '24GiB' or '500MB'"
BAD: list[tuple[str, Any, str]] = [
    ("memory_budget", 0, f"found 0, {BYTES}"),
    ("memory_budget", -1, f"found -1, {BYTES}"),
    ("memory_budget", 2.5e9, f"found 2500000000.0, {BYTES}"),
    ("memory_budget", True, f"found True, {BYTES}"),
    ("memory_budget", "lots", f"found 'lots', {BYTES}"),
    ("memory_budget", "0%", "found '0%', wanted more than 0 % and at most 100 %"),
    ("memory_budget", "101%", "found '101%', wanted more than 0 % and at most 100 %"),
    ("memory_budget", "%", f"found '%', {BYTES}"),
    ("host_budget", "", f"found '', {BYTES}"),
    ("host_budget", "50%", f"found '50%', {BYTES}"),
    ("storage", [], "found an empty list, wanted one or several directories"),
    ("storage", "", "found '', wanted a path"),
    ("storage", 7, "found 7, wanted a path"),
    ("storage", ["/tmp", None], "found None, wanted a path"),
    ("storage", "/no/such/folder", "/no/such/folder is not a directory; create it first"),
    ("storage", __file__, f"{__file__} is not a directory; create it first"),
    ("storage", ["/tmp", "/tmp/../tmp"], "a directory is given twice in /tmp, /tmp"),
    ("storage_budget", "0 GiB", f"found '0 GiB', {BYTES}"),
    ("storage_budget", [1], f"found [1], {BYTES}"),
    ("storage_timeout", 0, "found 0, wanted a positive number of seconds"),
    ("storage_timeout", float("inf"), "found inf, wanted a positive number of seconds"),
    ("storage_path", "direct", "found 'direct', wanted 'auto', 'posix', 'buffered', 'kvikio' or 'staged'"),
    ("storage_path", ["posix"], "found ['posix'], wanted 'auto', 'posix', 'buffered', 'kvikio' or 'staged'"),
    ("checksums", 1, "found 1, wanted True or False"),
    ("unlink_spill_files", 1, "found 1, wanted True or False"),
    ("checksums", "yes", "found 'yes', wanted True or False"),
    ("unlink_spill_files", "yes", "found 'yes', wanted True or False"),
    ("debug", 1, "found 1, wanted True or False"),
    ("replan", 1, "found 1, wanted True or False"),
    ("replan", "no", "found 'no', wanted True or False"),
    ("profile_iterations", 0, "found 0, wanted a whole number of at least 1"),
    ("profile_iterations", 1.0, "found 1.0, wanted a whole number of at least 1"),
    ("profile_iterations", True, "found True, wanted a whole number of at least 1"),
    ("profile_iterations", "3", "found '3', wanted a whole number of at least 1"),
    ("plan", "/no/such/plan.json", "there is no file /no/such/plan.json"),
    ("plan", "/tmp", "there is no file /tmp"),
    ("plan", {}, "found {}, wanted a path"),
    ("trace_out", "/no/such/trace.json", "there is no directory /no/such; create it first"),
    ("trace_out", False, "found False, wanted a path"),
    ("plan_out", "/no/such/plan.json", "there is no directory /no/such; create it first"),
    ("host_updates", "no", "found 'no', wanted True or False"),
    ("user_writes", "never", "found 'never', wanted 'detect' or 'assume'"),
    ("optimizer", "on", "found 'on', wanted 'auto' or 'off'"),
    ("optimizer", False, "found False, wanted 'auto' or 'off'"),
    ("codegen", "triton", "found 'triton', wanted 'inductor' or 'eager'"),
    ("codegen", 1, "found 1, wanted 'inductor' or 'eager'"),
    ("codegen", ["eager"], "found ['eager'], wanted 'inductor' or 'eager'"),
    ("mode", "fast", "found 'fast', wanted 'default' or 'max-autotune-no-cudagraphs'"),
    ("mode", ["default"], "found ['default'], wanted 'default' or 'max-autotune-no-cudagraphs'"),
    (
        "mode",
        "max-autotune",
        "'max-autotune' uses CUDA graphs, which need tensors that never move; give 'max-autotune-no-cudagraphs'",
    ),
    ("mode", "reduce-overhead", "'reduce-overhead' uses CUDA graphs, which need tensors that never move; leave it out"),
    ("recompute", "on", "found 'on', wanted 'auto' or 'off'"),
    ("recompute", False, "found False, wanted 'auto' or 'off'"),
    ("overlap_step", 1, "found 1, wanted True or False"),
    ("overlap_step", "auto", "found 'auto', wanted True or False"),
    ("live", "yes", "found 'yes', wanted True or False"),
    ("plan_cache", "write", "found 'write', wanted 'read-write', 'read' or 'off'"),
    ("plan_cache", True, "found True, wanted 'read-write', 'read' or 'off'"),
    ("plan_cache_folder", 3, "found 3, wanted a path"),
    ("solver_time_limit", 0, "found 0, wanted a positive number of seconds"),
    ("solver_time_limit", float("nan"), "found nan, wanted a positive number of seconds"),
    ("solver_time_limit", float("inf"), "found inf, wanted a positive number of seconds"),
    ("solver_time_limit", "30s", "found '30s', wanted a positive number of seconds"),
    ("rank_timeout", 0, "found 0, wanted a positive number of seconds"),
    ("local_ranks", 0, "found 0, wanted a whole number of at least 1"),
    ("local_ranks", "2", "found '2', wanted a whole number of at least 1"),
    ("solver_time_limit", True, "found True, wanted a positive number of seconds"),
]


def test_no_option_is_untested() -> None:
    assert {name for name, _, _ in GOOD} == {name for name, _, _ in BAD} == set(NAMES)


@pytest.mark.parametrize(("name", "value", "expected"), GOOD)
def test_good_values(name: str, value: Any, expected: Any) -> None:
    parsed = parse_options({name: value})
    found = getattr(parsed, name)
    assert found == expected and type(found) is type(expected)
    others = {other: getattr(parsed, other) for other in NAMES if other != name}
    assert others == {other: getattr(Options(), other) for other in others}


@pytest.mark.parametrize(("name", "value", "message"), BAD)
def test_bad_values(name: str, value: Any, message: str) -> None:
    with pytest.raises(OptionsError) as caught:
        parse_options({name: value})
    assert str(caught.value) == f"option {name}: {message}"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_storage_that_may_not_be_written(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(OptionsError, match="option storage: no permission to write to"):
        parse_options({"storage": tmp_path})


def test_a_relative_directory_stays_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "drive").mkdir()
    monkeypatch.chdir(tmp_path)
    assert parse_options({"storage": "drive"}).storage == ((tmp_path / "drive").resolve(),)


def test_home_is_expanded_and_links_are_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "drive").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "drive")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert parse_options({"storage": "~/link"}).storage == ((tmp_path / "drive").resolve(),)
    with pytest.raises(OptionsError, match="given twice"):
        parse_options({"storage": ["~/link", "~/drive"]})


@pytest.mark.parametrize("name", ["memory_budgets", "Memory_budget", "", 3])
def test_unknown_names_list_the_valid_ones(name: Any) -> None:
    with pytest.raises(OptionsError) as caught:
        parse_options({"memory_budget": 1, name: 1})
    assert str(caught.value) == f"unknown option {name!r}; valid options are {', '.join(sorted(NAMES))}"


def test_a_mode_of_inductor_needs_inductor() -> None:
    with pytest.raises(OptionsError) as caught:
        parse_options({"mode": "max-autotune-no-cudagraphs", "codegen": "eager"})
    assert str(caught.value) == ("option mode: 'max-autotune-no-cudagraphs' is for codegen='inductor'; leave out one of them")


def test_none_means_the_default() -> None:
    assert parse_options(None) == parse_options({}) == parse_options(dict.fromkeys(NAMES)) == Options()


def test_equal_options_are_one_key_and_do_not_change() -> None:
    first, second = parse_options({"storage": "/tmp"}), parse_options({"storage": ["/tmp"]})
    assert first == second and hash(first) == hash(second)
    with pytest.raises(FrozenInstanceError):
        first.memory_budget = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    ("value", "size_bytes"),
    [
        (12, 12),
        ("12", 12),
        ("12B", 12),
        ("1kB", 1_000),
        ("1 KiB", 1_024),
        (" 2 mb ", 2_000_000),
        ("2MiB", 2 << 20),
        ("3GB", 3_000_000_000),
        ("0.5GiB", 1 << 29),
        ("1TB", 10**12),
        ("1tib", 1 << 40),
        ("9007199254740993", (1 << 53) + 1),
        ("9223372036854775807", (1 << 63) - 1),
    ],
)
def test_sizes(value: int | str, size_bytes: int) -> None:
    assert parse_bytes("size", value) == size_bytes


@pytest.mark.parametrize("value", ["1PB", "GiB", "1e9", "-1GiB", "1,000", "1.GiB", "0.4", "1 Gi B", None, 1.0, b"1"])
def test_no_sizes(value: Any) -> None:
    with pytest.raises(OptionsError) as caught:
        parse_bytes("size", value)
    assert str(caught.value) == f"option size: found {value!r}, {BYTES}"


def test_every_option_is_explained() -> None:
    tree = ast.parse(Path(options.__file__).read_text())
    body = next(node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Options")
    explained = {
        node.target.id
        for node, after in zip(body, body[1:], strict=False)
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
        if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) and after.value.value
    }
    assert explained == set(NAMES)
