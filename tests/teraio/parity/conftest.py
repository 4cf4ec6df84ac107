"""Parity runs compute on one thread: small models gain little from more, and spinning threads cost much."""

from __future__ import annotations

import functools

import pytest

from runtime.transfer.engine import Engine
from teraio.stages import compile as compile_module


@pytest.fixture(autouse=True)
def on_one_thread(one_compute_thread: None) -> None:
    """All of them."""


@pytest.fixture
def fine_and_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs are cut wherever they can be, so that small budgets do; the links are measured in a hurry."""
    monkeypatch.setattr(compile_module, "CutPolicy", functools.partial(compile_module.CutPolicy, shortest_seconds=1e-9))
    monkeypatch.setattr(Engine, "measure", functools.partialmethod(Engine.measure, 1 << 20))
