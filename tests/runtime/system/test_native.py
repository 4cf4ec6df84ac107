"""C++ functions are compiled once for all processes, and without a look at the processor's vector instructions."""

from __future__ import annotations

import ctypes
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from torch._inductor.cpp_builder import CppBuilder
from torch._inductor.cpu_vec_isa import VecISA

from planner.errors import UnsupportedError
from runtime.system import native

FUNCTIONS: dict[str, native.Signature] = {"three": (ctypes.c_int, [])}


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that includes another one, and a cache folder that has nothing yet."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "value.h").write_text("int value() { return 3; }\n")
    path = tmp_path / "three.cpp"
    path.write_text('#include "value.h"\nextern "C" int three() { return value(); }\n')
    return path


def test_it_is_compiled_once_and_without_a_look_at_vector_instructions(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    builds: list[str] = []
    build = CppBuilder.build

    def counted(self: CppBuilder) -> None:
        builds.append(self.get_target_file_path())
        build(self)

    def looks(*_: object) -> bool:
        raise AssertionError("each look starts Python with PyTorch")

    monkeypatch.setattr(CppBuilder, "build", counted)
    monkeypatch.setattr(VecISA, "check_build", looks)
    for short in (False, True, False):
        assert native.load(source, FUNCTIONS, purpose="the test", short=short).three() == 3
    assert len(builds) == 1
    source.with_name("value.h").write_text("int value() { return 4; }\n")
    assert native.load(source, FUNCTIONS, purpose="the test").three() == 4, "what is included counts"


def test_threads_that_need_it_at_once_get_one_build(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    builds: list[str] = []
    build = CppBuilder.build

    def slow(self: CppBuilder) -> None:
        builds.append(self.get_target_file_path())
        build(self)
        time.sleep(0.2)  # the other thread comes meanwhile

    monkeypatch.setattr(CppBuilder, "build", slow)
    with ThreadPoolExecutor(2) as threads:
        libraries = list(threads.map(lambda _: native.load(source, FUNCTIONS, purpose="the test"), range(2)))
    assert [library.three() for library in libraries] == [3, 3]
    assert len(builds) == 1


def test_a_build_that_was_ended_is_done_again(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def half(self: CppBuilder) -> None:
        Path(self.get_target_file_path()).write_bytes(b"half of a library")
        raise KeyboardInterrupt

    with monkeypatch.context() as broken:
        broken.setattr(CppBuilder, "build", half)
        with pytest.raises(KeyboardInterrupt):
            native.load(source, FUNCTIONS, purpose="the test")
    assert native.load(source, FUNCTIONS, purpose="the test").three() == 3


def test_what_cannot_be_compiled_says_so(source: Path) -> None:
    source.write_text("no function")
    with pytest.raises(UnsupportedError, match=r"the test needs .* can build three\.cpp"):
        native.load(source, FUNCTIONS, purpose="the test")
