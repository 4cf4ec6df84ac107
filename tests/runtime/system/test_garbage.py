"""The garbage collector passes over what a training holds while its iterations repeat, and over nothing that is made later."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from runtime.system import QuietCollector, all_objects


class Loop:
    """An object that only the collector can free, once nobody has it."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def nothing_stays_frozen() -> Iterator[None]:
    assert gc.isenabled() and not gc.get_freeze_count()
    yield
    gc.enable()
    gc.unfreeze()


def test_only_what_was_there_before_is_passed_over() -> None:
    collector = QuietCollector()
    old = Loop()
    collector.begin()
    new = Loop()
    of_old, of_new = weakref.ref(old), weakref.ref(new)
    del old, new
    gc.collect()
    assert of_new() is None and of_old() is not None
    collector.end()
    gc.collect()
    assert of_old() is None and not gc.get_freeze_count()


def test_garbage_is_collected_first() -> None:
    garbage = weakref.ref(Loop())
    QuietCollector().begin()
    assert garbage() is None


@pytest.mark.parametrize("decided", ["disabled", "frozen"])
def test_a_program_that_has_decided_itself_is_left_alone(decided: str) -> None:
    if decided == "disabled":
        gc.disable()
    else:
        gc.freeze()
    before = gc.get_freeze_count()
    collector = QuietCollector()
    collector.begin()
    collector.end()
    assert gc.isenabled() == (decided != "disabled") and gc.get_freeze_count() == before


def test_a_search_through_all_objects_sees_the_frozen_ones() -> None:
    old = Loop()
    QuietCollector().begin()
    assert not any(each is old for each in gc.get_objects())
    assert any(each is old for each in all_objects())
    assert gc.get_freeze_count() and not any(each is old for each in gc.get_objects())
