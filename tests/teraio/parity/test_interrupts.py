"""Ctrl-C at every line of teraio's own code: afterwards training goes on in the same process, with the right numbers."""

from __future__ import annotations

import random
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

import pytest
import torch

import teraio
from teraio.optimizer.subgroup_steps import GradientVersions

from ...line_tracing import ROOT, Place, places_in
from ...thoroughness import by_profile, every_other
from ...training import MIB, forget
from .interrupts import WATCHED, ShadowedTraining, interrupted_at, no_hang, small

pytestmark = pytest.mark.usefixtures("fine_and_quick")

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
    hits = 0
    for place in _sample(list(places), 8, part):
        try:
            hits += training.interrupted_step(lambda run, place=place: interrupted_at(place, run))  # type: ignore[misc]
        except Exception as error:
            raise AssertionError(f"after an interrupt at {place}: {error!r}") from error
    assert hits  # some lines run at times only
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


def test_the_optimizer_keeps_its_parameters_if_its_own_call_is_interrupted(tmp_path: Path) -> None:
    """teraio's hook has updated all parameters, and leaves nothing to do for the call of PyTorch."""
    training = ShadowedTraining(small(tmp_path))
    training.step()

    def trace(frame: FrameType, event: str, argument: object) -> None:
        if frame.f_code is step.__code__ and not any(p.requires_grad for p in frame.f_locals["self"].param_groups[0]["params"]):
            signal.raise_signal(signal.SIGINT)

    def interrupted(run: Callable[[], None]) -> bool:
        sys.settrace(trace)
        try:
            run()
        except KeyboardInterrupt:
            return True
        finally:
            sys.settrace(None)
        return False

    step = torch.optim.Adam.step.__wrapped__  # type: ignore[attr-defined]
    while hasattr(step, "__wrapped__"):
        step = step.__wrapped__
    assert training.interrupted_step(interrupted)
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
