"""The same program at every budget, and the same bits from one run to the next."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def comparable(same_program_at_every_budget: None, deterministic: None) -> None:
    """Both for every test of this folder."""
