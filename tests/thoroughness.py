"""How much of something a test does: little by default, more under `make test-long`."""

from __future__ import annotations

from typing import TypeVar

from hypothesis import settings

T = TypeVar("T")


def by_profile(*, ci: T, long: T) -> T:
    """Return `long` if `tests/conftest.py` has loaded the profile of that name, else `ci`. For the heads of test files too."""
    return long if settings.get_current_profile_name() == "long" else ci
