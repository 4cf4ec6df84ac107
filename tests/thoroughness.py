"""How much of something a test does: little by default, more under `make test-long`."""

from __future__ import annotations

from typing import Any, TypeVar

import pytest
from hypothesis import settings

T = TypeVar("T")


def by_profile(*, ci: T, long: T) -> T:
    """Return `long` if `tests/conftest.py` has loaded the profile of that name, else `ci`. For the heads of test files too."""
    return long if settings.get_current_profile_name() == "long" else ci


def every_other(*cases: Any) -> list[Any]:
    """Return parameters for `pytest.mark.parametrize`: the first, third, fifth … case by default, all under `make test-long`."""
    return [case if number % 2 == 0 else _long(case) for number, case in enumerate(cases)]


def _long(case: Any) -> Any:
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.long)
