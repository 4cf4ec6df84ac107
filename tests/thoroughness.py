"""How much of something a test does: little by default, more under `make test-long`."""

from __future__ import annotations

from typing import TypeVar

from hypothesis import settings

T = TypeVar("T")


def by_profile(*, ci: T, long: T) -> T:
    """Return `ci`, or `long` where hypothesis' profile "long" is loaded, which `tests/conftest.py` decides before any test is read."""
    return long if settings.get_current_profile_name() == "long" else ci
