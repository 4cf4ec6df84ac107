"""Memory that runs out at lines of the updates inside the backward pass: nothing is half updated, and training goes on."""

from __future__ import annotations

import linecache
import random
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType

import pytest

from ...line_tracing import ROOT, Place, can_run_out_of_memory, places_in, tracing
from ...thoroughness import by_profile
from ...training import MIB
from .interrupts import ShadowedTraining, no_hang, small

pytestmark = pytest.mark.usefixtures("fine_and_quick")

WATCHED = (
    "teraio/optimizer/overlapped_steps.py",
    "teraio/optimizer/final_gradients.py",
)
ENDINGS = {
    "for member in again:",
    "member.parameter.grad = slots[member.final.slot] = None",
    "self._pager.retire(read, changed, last_used=used_up)",
}
"""Lines that make no object, and the call that gives everything back: nothing else can be done if it cannot even begin."""
UNTIL_UPDATED_INSIDE = 5
"""Iterations until parameters are updated inside the backward pass."""


def _to_try(code: CodeType, line: int) -> bool:
    return can_run_out_of_memory(code, line) and linecache.getline(code.co_filename, line).strip() not in ENDINGS


def _failing(training: ShadowedTraining, place: Place, run: Callable[[], None]) -> bool:
    """Run `run()`, an iteration; at `place`, memory runs out, once. Return whether that ended it.

    An iteration whose step has not ended is ended by one.
    """
    try:
        with tracing_once(place):
            run()
    except MemoryError as error:
        if "_after" not in {frame.f_code.co_name for frame, _ in traceback.walk_tb(error.__traceback__)}:
            training.end_iteration()
        return True
    return False


@contextmanager
def tracing_once(place: Place) -> Iterator[None]:
    """Raise MemoryError at `place`, once."""
    raised = False

    def fail(here: Place) -> None:
        nonlocal raised
        if here == place and not raised:
            raised = True
            raise MemoryError(str(place))

    with tracing(WATCHED, fail, only=_to_try):
        yield


def test_training_goes_on_after_memory_ran_out_in_the_backward_pass(tmp_path: Path) -> None:
    training = ShadowedTraining(small(tmp_path, overlap_step=True, memory_budget=16 * MIB))
    for _ in range(UNTIL_UPDATED_INSIDE):
        training.step()
    places: dict[Place, None] = {}
    with no_hang():
        training.interrupted_step(lambda run: bool(places.update(places_in(WATCHED, run, only=_to_try))))
    lines = [linecache.getline(str(ROOT / place.file), place.line) for place in places]
    assert any("update_replicas(" in line for line in lines) and len(places) > 40
    hits = 0
    for place in by_profile(ci=random.Random(0).sample(list(places), 12), long=list(places)):
        try:
            hits += training.interrupted_step(lambda run, place=place: _failing(training, place, run))  # type: ignore[misc]
        except Exception as error:
            raise AssertionError(f"after memory ran out at {place}: {error!r}") from error
    assert hits
    training.finish()
