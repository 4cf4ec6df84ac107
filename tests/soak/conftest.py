"""Fixtures of the soak tests, and the figures that they report, which are printed at the end.

By default the tests are short, so that they can be tried in seconds; `TEST_PROFILE=long` is what `make soak` runs.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ..teraio.conftest import finely_cut, fresh_process_state, one_compute_thread, planning_in_process, quick_links
from ..teraio.parity.conftest import eager_dropout, fine_and_quick, on_one_thread

__all__ = [
    "eager_dropout",
    "fine_and_quick",
    "finely_cut",
    "fresh_process_state",
    "on_one_thread",
    "one_compute_thread",
    "planning_in_process",
    "quick_links",
]


@pytest.fixture
def report(record_property: Callable[[str, object], None]) -> Callable[..., None]:
    """Adds figures to what is printed at the end: `report(iterations=2000)`."""

    def add(**figures: object) -> None:
        for name, figure in figures.items():
            record_property(name.replace("_", " "), figure)

    return add


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the figures, also of a test that failed."""
    for outcome in ("passed", "failed"):
        for test in terminalreporter.getreports(outcome):
            if test.when == "call" and test.user_properties:
                terminalreporter.section(f"{test.nodeid.split('::')[-1]} ({outcome})")
                for name, figure in test.user_properties:
                    terminalreporter.write_line(f"{name}: {figure}")
