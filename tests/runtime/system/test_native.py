"""C++ functions come with a wheel, or are compiled once for all processes."""

from __future__ import annotations

import ctypes
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from planner.errors import UnsupportedError
from runtime.system import compilation, native

TEXT = 'extern "C" int three() { return 3; }\n'
FUNCTIONS: dict[str, native.Signature] = {"three": (ctypes.c_int, [])}


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file, and a cache folder that has nothing yet."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    path = tmp_path / "three.cpp"
    path.write_text(TEXT)
    return path


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The commands that compiled something, so far. Each takes a while, so that other threads come meanwhile."""
    commands: list[list[str]] = []
    build = compilation.compile_library

    def counted(command: list[str]) -> None:
        commands.append(command)
        build(command)
        time.sleep(0.2)

    monkeypatch.setattr(compilation, "compile_library", counted)
    return commands


def three(source: Path, short: bool = False) -> int:
    return int(native.load(source, FUNCTIONS, purpose="the test", short=short).three())


def test_it_is_compiled_once(source: Path, builds: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where two threads need it at once. Another text, or another torch in the same place, gets a build of its own."""
    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(three, [source] * 2)) == [3, 3]
    assert [three(source, short) for short in (True, False)] == [3, 3] and len(builds) == 1
    source.write_text(TEXT.replace("3", "4"))
    assert three(source) == 4 and len(builds) == 2
    monkeypatch.setattr(torch, "__version__", "2.999.0")
    assert three(source) == 4 and len(builds) == 3


def test_a_build_that_was_ended_is_done_again(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def half(command: list[str]) -> None:
        Path(command[command.index("-o") + 1]).write_bytes(b"half of a library")
        raise KeyboardInterrupt

    with monkeypatch.context() as broken:
        broken.setattr(compilation, "compile_library", half)
        with pytest.raises(KeyboardInterrupt):
            three(source)
    assert three(source) == 3


def test_what_cannot_be_compiled_says_so(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source.write_text("no function")
    with pytest.raises(UnsupportedError, match=r"the test needs .* can build three\.cpp .*three\.cpp:1:1: error"):
        three(source)
    monkeypatch.setenv("CXX", "no-such-compiler -O1")
    with pytest.raises(UnsupportedError, match=r"No such file.*'no-such-compiler'.*; install g\+\+"):
        three(source)


# -- what a wheel brings


def test_what_came_with_the_wheel_is_not_compiled(source: Path, builds: list[list[str]]) -> None:
    shipped = source.with_name("three.so")
    compilation.compile_library(compilation.command(source, shipped, None))
    source.write_text(TEXT.replace("3", "4"))  # to see which of them it is
    assert three(source) == 3 and len(builds) == 1


def test_what_came_for_a_newer_system_is_compiled_here_instead(source: Path) -> None:
    source.with_name("three.so").write_bytes(b"no library of this system")
    assert three(source) == 3


def test_a_library_that_knows_pytorchs_objects_is_for_releases_of_one_minor_version(tmp_path: Path) -> None:
    source = tmp_path / "swap.cpp"
    source.write_text("#include <c10/core/StorageImpl.h>\n")
    names = [compilation.shipped_name(source, version) for version in ("2.13.0", "2.13.1+cpu", "2.14.0+cu130")]
    assert names == ["swap.torch-2.13.so", "swap.torch-2.13.so", "swap.torch-2.14.so"]
    between = ("2.13.0a0+git5c48869", "2.14.0.dev20260801+cpu", "2.14.0rc1")
    assert [compilation.shipped_name(source, version) for version in between] == [None] * 3
