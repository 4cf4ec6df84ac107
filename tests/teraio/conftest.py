"""Every test under tests/teraio begins and ends without runtimes, compiled graphs or a used random state."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import teraio


@pytest.fixture(autouse=True)
def fresh_process_state() -> Iterator[None]:
    """Drop all runtimes and compiled code before and after the test, and seed torch."""
    _forget()
    yield
    _forget()


def _forget() -> None:
    teraio.reset()
    torch._dynamo.reset()
    torch.manual_seed(0)
