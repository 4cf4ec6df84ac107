"""The files of a run are removed when it ends, however it ends. The tests use real processes and real signals."""

from __future__ import annotations

import fcntl
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from runtime.storage import PosixStore

from ..processes import Forking, Process

PRELUDE = """
import os, signal, sys, time
from runtime.storage import PosixStore
store = PosixStore([sys.argv[1]], budget_bytes=None)
store.allocate(1 << 20, "weights")
def say(word):
    print(word, flush=True)
"""
BY_OWNER = "the user {1} owns {0}, and can remove or exchange spill files in it: give a storage directory of your own"

Start = Callable[[str], Process]


@pytest.fixture
def start(forking: Forking, tmp_path: Path) -> Start:
    """Start a process with a store under `tmp_path`, which then runs `code`. Wait for its first line."""

    def begin(code: str) -> Process:
        process = forking.start(PRELUDE + code, tmp_path)
        assert process.stdout.readline() == "ready\n", process.errors.read_text()
        return process

    return begin


def left(parent: Path) -> list[str]:
    return [entry.name for entry in parent.iterdir()]


def opened(parent: Path) -> PosixStore:
    """Open a store, which first removes what dead runs have left."""
    return PosixStore([parent], budget_bytes=None)


WAIT = """
say('ready')
for _ in range(600):
    time.sleep(0.1)  # a signal just before a sleep does not end the sleep
"""


HANDLER = """
def handler(number, frame):
    sys.exit(7)
signal.signal(signal.SIGTERM, handler)
"""


@pytest.mark.parametrize(
    ("code", "sent", "status"),
    [
        ("say('ready')", None, 0),
        ("say('ready'); raise ValueError('in the middle')", None, 1),
        (WAIT, signal.SIGINT, -signal.SIGINT),
        (HANDLER + WAIT, signal.SIGTERM, 7),
    ],
    ids=["exit", "exception", "interrupt", "its own handler"],
)
def test_it_goes_however_the_program_ends_itself(
    start: Start, tmp_path: Path, code: str, sent: signal.Signals | None, status: int
) -> None:
    process = start(code)
    if sent is not None:
        process.signal(sent)
    assert process.wait() == status
    assert left(tmp_path) == []


def test_what_killed_runs_left_goes_at_the_next_start(start: Start, tmp_path: Path) -> None:
    living = start(WAIT)
    (of_the_living,) = left(tmp_path)
    killed = {number: start(WAIT) for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGHUP)}
    for number, process in killed.items():
        process.signal(number)
        assert process.wait() == -number
    of_the_killed = set(left(tmp_path)) - {of_the_living}
    assert len(of_the_killed) == 3 and all((tmp_path / each / "blocks.spill").exists() for each in of_the_killed)
    store = opened(tmp_path)
    assert set(left(tmp_path)) == {of_the_living, store.directories[0].name}
    store.close()
    living.signal(signal.SIGINT)
    living.wait()
    assert left(tmp_path) == []


def test_a_forked_child_keeps_the_parents_files(start: Start, tmp_path: Path) -> None:
    process = start("""
def leave(way):
    if way == "close":
        store.close()
    if way == "signal":
        os.kill(os.getpid(), signal.SIGTERM)
    sys.exit(0)
for way in ("exit", "close", "signal"):
    child = os.fork()
    if child == 0:
        leave(way)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status == (-signal.SIGTERM if way == "signal" else 0), (way, status)
    assert store.directories[0].is_dir() and list(store.directories[0].glob("*.spill")), way
say("ready")
time.sleep(60)
""")
    assert len(left(tmp_path)) == 1
    process.signal(signal.SIGINT)
    process.wait()
    assert left(tmp_path) == []


def test_a_forked_child_that_outlives_its_parent_keeps_neither_lock_nor_file(start: Start, tmp_path: Path) -> None:
    process = start("""
child = os.fork()
if not child:
    time.sleep(600)
    os._exit(0)
print("ready", child, sep="\\n", flush=True)
time.sleep(600)
""")
    child = int(process.stdout.readline())
    try:
        process.signal(signal.SIGKILL)
        process.wait()
        assert len(left(tmp_path)) == 1
        opened(tmp_path).close()
        assert left(tmp_path) == []
        held = [os.readlink(entry) for entry in Path(f"/proc/{child}/fd").iterdir()]
        assert not [path for path in held if path.startswith(str(tmp_path))]
    finally:
        os.kill(child, signal.SIGKILL)


def test_many_that_start_at_once_do_not_remove_each_others(forking: Forking, tmp_path: Path) -> None:
    code = """
for _ in range(30):
    other = PosixStore([sys.argv[1]], budget_bytes=None)
    assert store.directories[0].is_dir() and (other.directories[0] / "lock").exists()
    other.close()
"""
    processes = [forking.start(PRELUDE + code, tmp_path) for _ in range(4)]
    assert [(process.wait(), process.errors.read_text()) for process in processes] == [(0, "")] * 4
    assert left(tmp_path) == []


def test_a_directory_that_is_not_locked_yet_and_gone_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process cleans up between the creation of the directory and its lock."""
    real = Path.mkdir
    made: list[Path] = []

    def mkdir(path: Path, mode: int = 0o777) -> None:
        real(path, mode)
        made.append(path)
        if len(made) == 1:
            opened(tmp_path).close()

    monkeypatch.setattr(Path, "mkdir", mkdir)
    store = opened(tmp_path)
    assert store.directories == (made[-1],) and made[-1].is_dir() and len(made) == 3 and not made[0].exists()
    store.close()


@pytest.mark.parametrize(
    ("mode", "of_another_user", "warning"),
    [
        (0o755, False, None),
        (0o1777, False, None),
        (0o777, False, "every user can remove or exchange spill files in {}: chmod +t, or give another storage directory"),
        (0o755, True, BY_OWNER),
        (0o1777, True, BY_OWNER),
    ],
)
def test_a_directory_where_others_can_replace_files_is_told(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    mode: int,
    of_another_user: bool,
    warning: str | None,
) -> None:
    tmp_path.chmod(mode)
    if of_another_user:
        owner = tmp_path.stat().st_uid
        os.chown(tmp_path, 4711, -1) if owner == 0 else monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    opened(tmp_path).close()
    found = [record.getMessage() for record in caplog.records]
    assert found == ([] if warning is None else [warning.format(tmp_path, tmp_path.stat().st_uid)])


def test_its_lock_is_held_until_it_is_closed_and_signal_handlers_stay(tmp_path: Path) -> None:
    before = [signal.getsignal(number) for number in signal.valid_signals()]
    store = opened(tmp_path)
    assert [signal.getsignal(number) for number in signal.valid_signals()] == before
    (directory,) = store.directories
    with open(directory / "lock") as lock, pytest.raises(BlockingIOError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    opened(tmp_path).close()
    assert left(tmp_path) == [directory.name]
    store.close()
    assert left(tmp_path) == []


def test_only_what_looks_like_a_leftover_is_touched(tmp_path: Path) -> None:
    results = tmp_path / "teraio-2024-results"
    results.mkdir()
    (results / "loss.csv").touch()
    (tmp_path / f"teraio-1-{'0' * 16}").symlink_to(results)
    mixed = tmp_path / f"teraio-2-{'0' * 16}"
    mixed.mkdir()
    for name in ("lock", "blocks.spill", "notes.txt"):
        (mixed / name).touch()
    opened(tmp_path).close()
    assert (results / "loss.csv").exists() and (mixed / "notes.txt").exists()
    assert not (mixed / "blocks.spill").exists()
