"""Parity runs compute on one thread: small models gain little from more, and spinning threads cost much."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
import torch

from teraio.registry import REGISTRY
from teraio.stages import CutPolicy


@pytest.fixture(autouse=True)
def on_one_thread(one_compute_thread: None) -> None:
    """All of them."""


@pytest.fixture
def fine_and_quick(monkeypatch: pytest.MonkeyPatch, quick_links: None) -> None:
    """Graphs are cut wherever they can be, so that small budgets do."""
    policy = CutPolicy(shortest_seconds=1e-9)
    monkeypatch.setattr(REGISTRY, "parts", dataclasses.replace(REGISTRY.parts, cut_policy=policy))


@pytest.fixture
def eager_dropout() -> Iterator[None]:
    """Draw dropout masks as eager does, so that compiled and eager runs see the same ones."""
    with torch._inductor.config.patch(fallback_random=True):
        yield
