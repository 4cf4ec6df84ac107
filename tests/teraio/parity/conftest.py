"""Parity runs compute on one thread: small models gain little from more, and spinning threads cost much."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def on_one_thread(one_compute_thread: None) -> None:
    """All of them."""


@pytest.fixture
def fine_and_quick(finely_cut: None, quick_links: None) -> None:
    """For small budgets and few steps."""


@pytest.fixture
def eager_dropout() -> Iterator[None]:
    """Draw dropout masks as eager does, so that compiled and eager runs see the same ones."""
    with torch._inductor.config.patch(fallback_random=True):
        yield
