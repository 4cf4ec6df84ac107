"""Python's garbage collector, kept from searching again and again through what a training holds for long.

A process that trains holds one to two million objects: modules, graphs, what Dynamo knows. A full collection looks at all of
them, which takes some 0.3 s, and training makes enough new objects for one every 20 to 30 iterations. While an iteration is
repeated as planned, all that is there will stay, so it is *frozen*: collections look at newer objects only.
"""

from __future__ import annotations

import gc
from typing import Any

_IMMORTAL = 5_000
"""Python 3.12 counts what it never frees as frozen, too: 375 objects. A program that freezes has many more, also at its start."""


def frozen() -> bool:
    """Return whether objects are frozen."""
    return gc.get_freeze_count() > _IMMORTAL


class QuietCollector:
    """Freezes the objects that are there, once what is garbage has been collected. Begin and end it in any order, at any time."""

    def __init__(self) -> None:
        self._frozen = False

    def begin(self) -> None:
        """Collect garbage and freeze the rest, which takes a third of a second or so.

        Does nothing where the program has turned the collector off or has frozen objects: then it decides itself.
        """
        if gc.isenabled() and not frozen():
            gc.collect()  # what is garbage now would else stay as long as the rest
            gc.freeze()
            self._frozen = True

    def end(self) -> None:
        """Let the next full collection look at all objects again."""
        if self._frozen:
            self._frozen = False
            gc.unfreeze()


def all_objects(*classes: type, collected: bool = False) -> list[Any]:
    """Return all objects of these classes that the collector knows, also frozen ones, which `gc.get_objects` passes over.

    Goes through all objects of Python, which takes some tenths of a second. collected: collect garbage first, frozen or not.
    """
    again = frozen()
    gc.unfreeze()
    try:
        if collected:
            gc.collect()
        objects = gc.get_objects()
        # Objects are many, their types few, and not all types can be hashed. An object may say that it is of another type.
        types = {id(type(each)): type(each) for each in objects}
        wanted = {key for key, each in types.items() if issubclass(each, classes)}
        return [each for each in objects if id(type(each)) in wanted]
    finally:
        if again:
            gc.freeze()
