"""Memory that runs out in an I/O thread: the transfer ends all the same, and the link goes on."""

from __future__ import annotations

import linecache
import sys
import threading
from types import FrameType
from typing import Any

import pytest

from planner.errors import StorageError, StorageIOError
from runtime.storage import Chunk, Slot
from runtime.transfer import Transfer

from ...line_tracing import ROOT, Place, can_run_out_of_memory
from .gate import CHUNK, link_over, nothing, slot

WATCHED = str(ROOT / "runtime/transfer/link_queue.py")
BAD = "bad"


class Injector:
    """Collects the lines that I/O threads get to, and raises MemoryError at one of them, once."""

    def __init__(self, place: Place | None = None) -> None:
        self.places: dict[Place, None] = {}
        self.hit = False
        self._place = place
        line = linecache.getline(str(ROOT / place.file), place.line).strip() if place else ""
        self.before_it_is_told = line == "on_done(transfer)"  # what follows a transfer cannot even begin: the link says so

    def trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        name = frame.f_code.co_filename
        if name != WATCHED:
            return None
        if event == "line" and can_run_out_of_memory(frame.f_code, frame.f_lineno):
            place = Place(name.removeprefix(f"{ROOT}/"), frame.f_lineno)
            self.places[place] = None
            if place == self._place and not self.hit:
                self.hit = True
                sys.settrace(self.trace)  # a tracing function that raises is taken away
                raise MemoryError(str(place))
        return self.trace


def _move(slot: Slot, chunk: Chunk, address: int) -> None:
    if slot.name == BAD:
        raise StorageIOError(path="/nowhere", block=BAD, errno=5)


def _use(injector: Injector, monkeypatch: pytest.MonkeyPatch) -> None:
    """Transfers of one and of several chunks, on two drives, one of which fails. Raises AssertionError if one does not end."""
    told: list[str] = []
    with monkeypatch.context() as patch:
        patch.setattr(threading, "excepthook", lambda args: None)  # it is told by the link as well
        before = threading.gettrace()
        threading.settrace(injector.trace)
        try:
            link = link_over(_move, (0, 1), threads=1, stuck_after_seconds=30)
        finally:
            threading.settrace(before)  # type: ignore[arg-type]  # what `sys.settrace` takes as well

        def send(name: str, chunks: int) -> Transfer:
            where = slot(name, chunks * CHUNK, extents=chunks, drives=(0, 1))
            transfer: Transfer = link.submit(where, 0, lambda t: told.append(t.slot.name), ready=lambda: None)
            return transfer

        sent = [send("a", 1), send("b", 4), send(BAD, 4), send("c", 2)]
        for transfer in sent:
            assert transfer.ended.wait(10), f"{transfer} never ended"
        wrong = [t.slot.name for t in sent if t.error is not None and t.slot.name != BAD]
        assert len(wrong) <= (1 if injector.hit else 0) and sent[2].error is not None
        missing = {"a", "b", BAD, "c"} - set(told)
        assert len(told) == 4 - len(missing) and (not missing or injector.before_it_is_told)
        assert not link._moving and link.moved_bytes <= 11 * CHUNK
        reported = False
        for _ in range(2):  # an error of what follows a transfer is told once
            try:
                later = link.submit(slot("later", 2 * CHUNK, extents=2, drives=(0, 1)), 0, nothing)
                break
            except StorageError:
                assert injector.hit
                reported = True
        assert reported or not missing
        assert later.ended.wait(10) and later.error is None
        link.close(within_seconds=10)
        assert not any(thread.is_alive() for thread in link._threads)


def test_every_transfer_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    everywhere = Injector()
    _use(everywhere, monkeypatch)
    assert len(everywhere.places) > 25
    wrong: dict[Place, str] = {}
    for place in everywhere.places:
        injector = Injector(place)
        try:
            _use(injector, monkeypatch)
        except AssertionError as error:
            wrong[place] = str(error)[:200]
        assert injector.hit
    assert not wrong, "\n".join(f"{place} {why}" for place, why in wrong.items())
