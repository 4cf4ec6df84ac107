"""A forked child of a process with a store keeps nothing of it, and takes nothing away. The tests use real processes."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from ..processes import Forking, Process

PRELUDE = """
import os, signal, sys, time
from runtime.storage import PosixStore
store = PosixStore([sys.argv[1]], budget_bytes=None)
store.allocate(1 << 20, "weights")
def say(word):
    print(word, flush=True)
"""

Start = Callable[[str], Process]


@pytest.fixture
def start(forking: Forking, tmp_path: Path) -> Start:
    """Start a process with a store under `tmp_path`, which then runs `code`. Wait for its first line."""

    def begin(code: str) -> Process:
        process = forking.start(PRELUDE + code, tmp_path)
        assert process.stdout.readline() == "ready\n", process.errors.read_text()
        return process

    return begin


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
    slot = store.allocate(1 << 20, "more")
    store.release(slot)
say("ready")
time.sleep(60)
""")
    assert not list(tmp_path.iterdir())
    process.signal(signal.SIGINT)
    process.wait()


def test_a_forked_child_that_outlives_its_parent_keeps_no_file(start: Start, tmp_path: Path) -> None:
    process = start("""
if not os.fork():
    print("ready", os.getpid(), sep="\\n", flush=True)
time.sleep(600)
""")
    child = int(process.stdout.readline())
    try:
        process.signal(signal.SIGKILL)
        process.wait()
        held = [os.readlink(entry) for entry in Path(f"/proc/{child}/fd").iterdir()]
        assert not [path for path in held if path.startswith(str(tmp_path))]
    finally:
        os.kill(child, signal.SIGKILL)
