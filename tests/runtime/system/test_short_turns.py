"""Short turns of Python's threads last as long as somebody needs them."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from runtime.system import short_turns

USUAL, SHORT = 0.005, 0.0005


@pytest.fixture(autouse=True)
def interval(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As if no store of another test were still open."""
    monkeypatch.setattr(short_turns, "_count", 0)
    before = sys.getswitchinterval()
    sys.setswitchinterval(USUAL)
    yield
    sys.setswitchinterval(before)


def test_until_the_last_one_has_ended() -> None:
    short_turns.begin()
    short_turns.begin()
    assert sys.getswitchinterval() == SHORT
    short_turns.end()
    assert sys.getswitchinterval() == SHORT
    short_turns.end()
    assert sys.getswitchinterval() == USUAL


@pytest.mark.parametrize("own", [0.0001, 0.02])
def test_what_somebody_else_has_set_stays(own: float) -> None:
    short_turns.begin()
    sys.setswitchinterval(own)
    short_turns.end()
    assert sys.getswitchinterval() == pytest.approx(own, rel=0.02)


def test_shorter_turns_stay() -> None:
    sys.setswitchinterval(0.0001)
    short_turns.begin()
    assert sys.getswitchinterval() == pytest.approx(0.0001, rel=0.02)
    short_turns.end()
    assert sys.getswitchinterval() == pytest.approx(0.0001, rel=0.02)
