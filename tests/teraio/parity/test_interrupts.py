"""Ctrl-C and errors at every line of teraio's own code: then training goes on in the same process, with the right numbers."""

from __future__ import annotations

import linecache
import random
import signal
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType

import pytest

import teraio
from teraio.optimizer.subgroup_steps import GradientVersions

from ...line_tracing import ROOT, Place, can_run_out_of_memory, places_in
from ...thoroughness import by_profile, every_other
from ...training import MIB, forget
from .interrupts import WATCHED, ShadowedTraining, acting_at, interrupted_at, no_hang, small

pytestmark = pytest.mark.usefixtures("fine_and_quick", "few_slices")

TIERS = {"storage": {}, "host": {"host_budget": 8 * MIB}}
UNTIL_PLANNED = 6
"""Iterations until a plan is followed."""


@pytest.fixture(autouse=True)
def ctrl_c_raises() -> Iterator[None]:
    """The handler of SIGINT as in any program."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    handler = signal.signal(signal.SIGINT, before)
    assert handler is signal.default_int_handler  # teraio gave it back


PARTS = by_profile(ci=1, long=8)
"""So many tests share the lines: each is far from the time limit then."""


def _sample(places: list[Place], count: int, part: int) -> list[Place]:
    """Return `count` of the places in the profile "ci"; all of this part, which is one of `PARTS`, in the profile "long"."""
    return by_profile(ci=random.Random(0).sample(places, min(count, len(places))), long=places[part::PARTS])


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("tier", every_other(*TIERS))
def test_training_goes_on_after_ctrl_c_at_any_line_of_an_iteration(tmp_path: Path, tier: str, part: int) -> None:
    training = ShadowedTraining(small(tmp_path, **TIERS[tier]))
    for _ in range(UNTIL_PLANNED):
        training.step()
    assert teraio.status()[0].phase == "planned"
    places: dict[Place, None] = {}
    training.interrupted_step(lambda run: bool(places.update(places_in(WATCHED, run))))
    assert len(places) > 1000
    training.interrupt_at(_sample(list(places), 8, part), interrupted_at)
    training.finish()


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("tier", every_other(*reversed(TIERS)))
def test_training_goes_on_after_ctrl_c_at_any_line_of_the_start(tmp_path: Path, tier: str, part: int) -> None:
    """Compiling, opening the tiers, the first iterations and the end."""
    options = small(tmp_path, **TIERS[tier])

    def train() -> None:
        training = ShadowedTraining(options)
        training.step()
        training.finish()

    with no_hang():
        places = list(places_in(WATCHED, train))
        for place in _sample(places, 1, part):
            interrupted_at(place, train)
            forget()
            assert not list(tmp_path.iterdir()), place
            train()


class Timeout(Exception):
    """Raised by the handler of a test's timer."""


def test_a_timer_that_raises_at_random_times(tmp_path: Path) -> None:
    """As people limit the time of a cell or a request. It spares what is not teraio's."""
    training = ShadowedTraining(small(tmp_path, **TIERS["host"]))
    for _ in range(UNTIL_PLANNED):
        training.step()
    chance, watched = random.Random(0), tuple(str(ROOT / name) for name in WATCHED)

    def ring(number: int, frame: FrameType | None) -> None:
        while frame is not None and not frame.f_code.co_filename.startswith(watched):
            frame = frame.f_back
        if frame is not None:
            raise Timeout

    def timed(run: Callable[[], None]) -> bool:
        signal.setitimer(signal.ITIMER_REAL, chance.uniform(0.001, 0.2), 0.02)
        try:
            run()
        except Timeout:
            return True
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        return False

    before = signal.signal(signal.SIGALRM, ring)
    try:
        hits = sum(training.interrupted_step(timed) for _ in range(by_profile(ci=4, long=200)))
        assert signal.getsignal(signal.SIGALRM) is ring
    finally:
        signal.signal(signal.SIGALRM, before)
    assert hits
    training.finish()


def test_an_error_of_teraio_s_own_code_after_an_update(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as memory that runs out: nothing stays held, and training goes on."""
    training = ShadowedTraining(small(tmp_path))
    training.step()

    def fail(*_: object) -> None:
        raise MemoryError

    def failing(run: Callable[[], None]) -> bool:
        with monkeypatch.context() as patch, pytest.raises(MemoryError):
            patch.setattr(GradientVersions, "unchanged", fail)
            run()
        return True

    assert training.interrupted_step(failing)
    training.finish()


# -- memory that runs out at lines of the updates inside the backward pass: nothing is half updated

INSIDE = (
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


def test_training_goes_on_after_memory_ran_out_in_the_backward_pass(tmp_path: Path) -> None:
    """An iteration whose step has not ended is ended by one."""
    training = ShadowedTraining(small(tmp_path, overlap_step=True, memory_budget=16 * MIB))
    for _ in range(UNTIL_UPDATED_INSIDE):
        training.step()
    places: dict[Place, None] = {}
    with no_hang():
        training.interrupted_step(lambda run: bool(places.update(places_in(INSIDE, run, only=_to_try))))
    lines = [linecache.getline(str(ROOT / place.file), place.line) for place in places]
    assert any("update_replicas(" in line for line in lines) and len(places) > 40

    def run_out() -> None:
        raise MemoryError

    def failing(place: Place, run: Callable[[], None]) -> bool:
        try:
            acting_at(place, run, run_out, INSIDE, only=_to_try)
        except MemoryError as error:
            if "_after" not in {frame.f_code.co_name for frame, _ in traceback.walk_tb(error.__traceback__)}:
                training.end_iteration()
            return True
        return False

    training.interrupt_at(by_profile(ci=random.Random(0).sample(list(places), 12), long=list(places)), failing)
    training.finish()
