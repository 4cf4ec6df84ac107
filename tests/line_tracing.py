"""Something at every line of some files: what tests do that inject interrupts and errors."""

from __future__ import annotations

import dis
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import teraio

ROOT = Path(teraio.__file__).parents[1]


class Place(NamedTuple):
    """A line of a file, which is relative to the repository."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


@contextmanager
def tracing(
    watched: Sequence[str], at_line: Callable[[Place], None], *, only: Callable[[CodeType, int], bool] = lambda *_: True
) -> Iterator[None]:
    """Call `at_line` before each line that this thread runs of those files whose names begin with one of `watched`.

    only: which lines of a function to take. What `at_line` raises, that line raises; no line is traced after that.
    """
    prefixes = tuple(str(ROOT / name) for name in watched)
    short: dict[str, str | None] = {}

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        name = frame.f_code.co_filename
        if name not in short:
            short[name] = str(Path(name).relative_to(ROOT)) if name.startswith(prefixes) else None
        file = short[name]
        if file is None:
            return None
        if event == "line" and only(frame.f_code, frame.f_lineno):
            at_line(Place(file, frame.f_lineno))
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


def places_in(watched: Sequence[str], run: Callable[[], None], **settings: Any) -> dict[Place, None]:
    """Return the lines of the watched files that `run()` gets to, in order. settings: of `tracing`."""
    found: dict[Place, None] = {}
    with tracing(watched, lambda place: found.setdefault(place), **settings):
        run()
    return found


def out_of_memory_at(watched: Sequence[str], place: Place, run: Callable[[], None]) -> bool:
    """Run `run()`; when it gets to `place`, that line raises MemoryError, once. Return whether that ended it."""
    raised = False

    def fail(here: Place) -> None:
        nonlocal raised
        if here == place and not raised:
            raised = True
            raise MemoryError(str(place))

    try:
        with tracing(watched, fail, only=can_run_out_of_memory):
            run()
    except MemoryError:
        return True
    return False


def can_run_out_of_memory(code: CodeType, line: int) -> bool:
    """Whether a line makes an object. It may then want memory from the system, however rarely.

    Lines that enter and leave a context do not count: an error before the call that leaves it is beyond what Python undoes.
    """
    found = _operations(code).get(line, frozenset())
    return not found & _CONTEXTS and any(name.startswith(_MAKING) for name in found)


_CONTEXTS = frozenset({"BEFORE_WITH", "LOAD_SPECIAL"})
_MAKING = ("BINARY_", "BUILD_", "CALL", "FORMAT_", "GET_ITER", "LIST_", "MAKE_", "MAP_", "DICT_", "SET_", "STORE_SUBSCR")


@functools.cache
def _operations(code: CodeType) -> dict[int, frozenset[str]]:
    found: dict[int, set[str]] = {}
    line = 0
    for instruction in dis.get_instructions(code):
        line = (instruction.positions.lineno if instruction.positions else None) or line
        found.setdefault(line, set()).add(instruction.opname)
    return {line: frozenset(names) for line, names in found.items()}
