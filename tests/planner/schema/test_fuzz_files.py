"""Wrong, damaged and hostile files give an error of one line that names the place, or can be worked with."""

from __future__ import annotations

import contextlib
import copy
import functools
import gzip
import io
import json
import operator
import os
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from planner import Budgets, Plan, PlanError, TeraioError, Trace, TraceError, plan, simulate
from planner.errors import FileFormatError
from planner.schema import MAX_NUMBER, MAX_TEXT_CHARACTERS, printable, read_format
from teraio import cli

from ...thoroughness import by_profile
from ..traces import HAND

ROOT = HAND.parents[1]
Model = type[Trace] | type[Plan]
Content = dict[Model, Any]
HOSTILE = [
    *"null true -1 0 1 0.0 -0.0 1.5 4294967296 1e18 1e300 1e400 -1e400 1e-20 1e-320 NaN -Infinity [] {} [0] [[]]".split(),
    *(str(MAX_NUMBER), str(1 << 63), "1" + "0" * 30, "1" + "0" * 400, "9" * 5000, f"[{MAX_NUMBER}]"),
    *('""', '"x"', '"\\ud800"', '"\\u0000\\u001b[2J\\n\\u202e"', json.dumps("x" * (MAX_TEXT_CHARACTERS + 1))),
    *('{"start": 0}', '{"a": 1, "a": 2}', "[" * 150 + "]" * 150, "[" * 2000 + "]" * 2000),
]


@pytest.fixture(scope="module")
def whole() -> Content:
    """The content of a trace file with all kinds of entries, and of a plan for it."""
    content = json.loads((HAND / "clean_and_dirty.json").read_text())
    del content["fingerprint"]
    common = dict(stage=3, blocks=[0], elements=5, device_seconds=0.5, host_seconds=0.5)
    content["subgroups"] = [dict(id=0, **common)]
    small = dict(id=2, name="small", kind="activation", size_bytes=0, persistent=False, reads=[2], writes=[1])
    content["blocks"].append(small)
    content["recompute"] = [dict(id=0, stage=1, blocks=[2], reads=[], duration_seconds=1.0, workspace_bytes=1)]
    content["not_recomputed"] = [dict(stage=0, reason="changes a block")]
    both = [f"{link['from']}->{link['to']}" for link in content["hardware"]["links"]]
    content["hardware"]["shared"] = [dict(name="bus", links=both, bytes_per_second=15.0)]
    made = plan(Trace.model_validate(content), Budgets(device_bytes=20, storage_bytes=10**6))
    assert len(made.moves) == 2 and made.initial and made.predicted is not None
    return {Trace: content, Plan: {**made.model_dump(mode="json"), "updates": [dict(subgroup=0, where="device")]}}


def places(content: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the place of every field and entry, at any depth."""
    entries = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    for key, value in entries:
        yield (*place, key)
        yield from places(value, (*place, key))


def holder_of(content: Any, place: tuple[Any, ...]) -> Any:
    """Return the object or list that has the field or entry at `place`."""
    return functools.reduce(operator.getitem, place[:-1], content)


def replaced(content: Any, place: tuple[Any, ...], token: str) -> str:
    """Return the file's text with the value at `place` replaced by `token`, which need not be JSON."""
    changed = copy.deepcopy(content)
    holder_of(changed, place)[place[-1]] = "@here@"
    return json.dumps(changed).replace('"@here@"', token)


def one_line(path: Path, error: TeraioError) -> None:
    message = str(error)
    assert message.startswith(f"{path}: ") and len(message) < 2500
    assert message.isprintable(), repr(message)


def load(path: Path, model: Model) -> Trace | Plan | None:
    """Return what the file holds, or None if it is refused with a proper message."""
    try:
        return model.load(path)
    except FileFormatError as error:
        assert type(error) is (TraceError if model is Trace else PlanError)
        one_line(path, error)
        return None


def teraio(*arguments: object) -> tuple[int, str, str]:
    """Run a command in this process. Return its exit code and what it printed; an error is one proper line."""
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        patch.setattr(sys, "excepthook", sys.excepthook)  # typer replaces it
        patch.setattr(sys, "argv", ["teraio", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
    code, problem = int(ended.value.code or 0), err.getvalue()
    if code:
        assert problem.startswith("teraio: ") and problem.count("\n") == 1 and len(problem) < 2500
        assert problem[:-1].isprintable()
    return code, out.getvalue(), problem


def work_with(path: Path, model: Model, trace: Path) -> None:
    """Do everything that the commands do with a file that can be read, except solving. trace: one that `plan` was made for."""
    assert teraio("inspect", path)[0] == 0
    made = path
    if model is Trace:
        trace, made = path, path.with_name("made.json")
        if teraio("plan", path, "--device", 20, "--storage", 10**6, "--policy", "belady", "-o", made)[0]:
            return
    teraio("simulate", trace, made)
    teraio("inspect", made, "--trace", trace)


@pytest.mark.parametrize("model", [Trace, Plan])
def test_hostile_values_at_every_place(tmp_path: Path, whole: Content, model: Model) -> None:
    path, trace = tmp_path / "file.json", tmp_path / "trace.json"
    trace.write_text(json.dumps(whole[Trace]))
    refused, taken = 0, 0
    chance = random.Random(1)
    tokens = by_profile(ci=len(HOSTILE) // 5, long=len(HOSTILE))
    for place in places(whole[model]):
        for token in chance.sample(HOSTILE, tokens):
            path.write_text(replaced(whole[model], place, token))
            loaded = load(path, model)
            if loaded is None:
                refused += 1
                if chance.random() < 0.01:
                    assert teraio("inspect", path)[0] == 1
                continue
            taken += 1
            if chance.random() < 0.1:
                work_with(path, model, trace)
    share = tokens / len(HOSTILE)
    assert refused > 1500 * share and taken > 100 * share, "the changes reach the models' rules, and some are harmless"


HALF = MAX_NUMBER // 2
"""Two such blocks fit into the largest budget."""


@pytest.mark.parametrize(
    ("size", "seconds", "rate", "refused"),
    [
        (HALF, 1e18, 1e-60, True),
        (HALF, 1e-60, 1e-60, True),
        (HALF, 1e-60, 1e18, False),
        (1, 1e18, 1e18, False),
        (1, 1e-6, 1e6, False),
    ],
)
def test_numbers_up_to_the_limits_are_planned(
    tmp_path: Path, whole: Content, size: int, seconds: float, rate: float, refused: bool
) -> None:
    """Sizes, times and rates are as large or as small as a file allows. A plan that no file can hold is refused."""
    content = copy.deepcopy(whole[Trace])
    content["subgroups"] = []
    for stage in content["stages"]:
        stage.update(duration_seconds=seconds, workspace_bytes=size if stage["workspace_bytes"] else 0)
    for block in content["blocks"]:
        block["size_bytes"] = size
    for link in content["hardware"]["links"]:
        link["bytes_per_second"] = rate
    content["hardware"]["shared"][0]["bytes_per_second"] = rate
    trace, path = tmp_path / "trace.json", tmp_path / "plan.json"
    trace.write_text(json.dumps(content))
    loaded = Trace.load(trace)
    assert teraio("inspect", trace)[0] == 0
    for policy in ("belady", "ilp", "g10"):
        if refused:
            with pytest.raises(
                PlanError, match=r"in predicted\.\w+_seconds: the number .*; at most 9,223,372,036,854,775,807 is allowed"
            ):
                plan(loaded, Budgets(device_bytes=2 * size), policy=policy, time_limit_seconds=5)
            continue
        made = plan(loaded, Budgets(device_bytes=2 * size), policy=policy, time_limit_seconds=5)
        assert loaded.ideal_seconds <= simulate(loaded, made).iteration_seconds < float("inf")
        made.save(path)
        assert Plan.load(path) == made
        for code, out, _ in (teraio("simulate", trace, path), teraio("inspect", path, "--trace", trace)):
            assert code == 0 and out.count("critical path  ") == 1


def test_budgets_beyond_what_a_file_holds_are_refused(whole: Content) -> None:
    trace = Trace.model_validate(whole[Trace])
    assert plan(trace, Budgets(device_bytes=MAX_NUMBER), policy="belady").moves == ()
    with pytest.raises(PlanError, match="budgets.device_bytes: the number 9223372036854775808; at most 9,223"):
        plan(trace, Budgets(device_bytes=MAX_NUMBER + 1), policy="belady")


# single faults, and where the message says they are


@pytest.mark.parametrize(
    ("token", "message"),
    [
        ("1" + "0" * 30, "blocks.1.size_bytes: the number 1000000000000000000000000000000; at most 9,223,372,036,854,775,807"),
        ("9" * 5000, "a number has thousands of digits"),
        ("1e400", "blocks.1.size_bytes: the number inf; at most"),
        ("1e-320", "blocks.1.size_bytes: the number 1e-320; it may be 0, or at least 1e-60"),
        ("NaN", "blocks.1.size_bytes: Input should be a valid integer"),
        ('"' + "x" * 4097 + '"', "blocks.1.size_bytes: a text of 4,097 characters; at most 4,096"),
        ('1, "size_bytes": 1', "blocks.1.size_bytes: given more than once"),
        ("[" * 100_000, "nests too deeply"),
        ('"\\ud800"', "line 1"),
        ('"\n"', "malformed JSON at line 1 column"),
        ('1, "\\u001b[2Jfield": 1', "blocks.1.\\x1b[2Jfield: Extra inputs are not permitted"),
    ],
)
def test_the_place_of_a_fault(tmp_path: Path, whole: Content, token: str, message: str) -> None:
    path = tmp_path / "trace.json"
    path.write_text(replaced(whole[Trace], ("blocks", 1, "size_bytes"), token))
    with pytest.raises(TraceError, match=re.escape(message)) as caught:
        Trace.load(path)
    one_line(path, caught.value)


def test_a_byte_order_mark_is_ignored(tmp_path: Path, whole: Content) -> None:
    path = tmp_path / "trace.json"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(whole[Trace]).encode())
    assert Trace.load(path) == Trace.model_validate(whole[Trace]) and read_format(path) == "teraio.trace"


def test_a_long_text_is_not_quoted_whole() -> None:
    assert printable("a\x1b[0m\n\x9b\u202e\ud800") == "a\\x1b[0m\\n\\x9b\\u202e\\ud800"
    assert printable("x" * 11, most=10) == "xxxxxxxxxx… (11 characters)"


# what must neither hang nor fill the memory


LOADS_WITHIN_1_GIB = """
import resource, sys
from planner import Plan, Trace
from planner.errors import FileFormatError
resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
for path in sys.argv[1:]:
    try:
        (Plan if "plan" in path.rpartition("/")[2] else Trace).load(path)
    except FileFormatError as error:
        print(error)
"""


def loads_within_1_gib(*paths: Path, seconds: float = 60) -> list[str]:
    """Return the errors of loading files, one after the other, in a process with limited address space and time."""
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"}
    command = [sys.executable, "-c", LOADS_WITHIN_1_GIB, *map(str, paths)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=seconds)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.splitlines()


def test_what_could_hang_or_fill_the_memory_is_refused_at_once(tmp_path: Path) -> None:
    """4 GiB of blanks packed into four megabytes; a million values; values of which each would get a list of 900 keys: 4 GB."""
    head = '{"format": "teraio.trace", "version": 1, '
    bomb, many, deep, pipe, packed = (tmp_path / name for name in ("bomb.json.gz", "many.json", "deep.json", "pipe", "pipe.gz"))
    bomb.write_bytes(gzip.compress(b" " * (64 << 20)) * 64)
    assert bomb.stat().st_size < 5_000_000
    many.write_text(head + '"blocks": [' + "[]," * 1_000_000 + "0]}")
    deep.write_text(head + '"name": ' + "[" * 900 + "0," * 600_000 + "1e400" + "]" * 900 + "}")
    os.mkfifo(pipe)
    os.mkfifo(packed)
    errors = loads_within_1_gib(bomb, many, deep, pipe, packed, Path("/dev/zero"), Path("/dev/null"))
    assert len(errors) == 7
    assert "more than 67,108,864 bytes when unpacked, and at most 67,108,864 are read" in errors[0]
    assert re.search(r"about 2,000,0\d\d values, and at most 1,000,000 are read", errors[1])
    assert "the number inf; at most" in errors[2]
    assert all("it is a device or a pipe; give the name of a regular file" in error for error in errors[3:])


def test_a_huge_plain_file_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "huge.json"
    with path.open("wb") as stream:
        stream.truncate(1 << 40)
    for load_it in (Trace.load, Plan.load, read_format):
        with pytest.raises(TeraioError, match=r"1,099,511,627,776 bytes, and at most .* are read"):
            load_it(path)


LISTS: dict[Model, list[tuple[Any, ...]]] = {
    Trace: [
        *((field,) for field in ("stages", "blocks", "subgroups", "recompute", "not_recomputed")),
        *(("hardware", "links"), ("hardware", "shared"), ("blocks", 0, "reads")),
    ],
    Plan: [(field,) for field in ("moves", "initial", "updates", "recompute")],
}


@pytest.mark.parametrize("model", LISTS)
def test_many_faults_are_not_collected(tmp_path: Path, whole: Content, model: Model) -> None:
    """490,000 objects without fields, just within the limit: reporting what each of them lacks would take gigabytes."""
    places = LISTS[model][:: by_profile(ci=4, long=1)]
    paths = [tmp_path / f"{model.__name__.lower()}.{number}.json" for number in range(len(places))]
    for path, place in zip(paths, places, strict=True):
        path.write_text(replaced(whole[model], place, "[" + "{}," * 489_999 + "{}]"))
    for place, message in zip(places, loads_within_1_gib(*paths, seconds=200), strict=True):
        where = ".".join(map(str, place))
        assert re.search(rf" {re.escape(where)}\.0(\.\w+)?: ", message) and f"{where}.1" not in message
        assert "at most 1,000,000 are read" not in message


def test_problems_are_counted_not_listed(whole: Content, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text(replaced(whole[Trace], ("blocks",), "[{}]"))
    with pytest.raises(TraceError, match=r"blocks\.0\.id: Field required; .*; and 2 more$") as caught:
        Trace.load(path)
    one_line(path, caught.value)
    assert str(caught.value).count(";") == 5
