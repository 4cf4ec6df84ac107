"""An iteration that takes more than the budget is noticed, whatever else the process has allocated and frees."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from teraio.profiling import PeakWatch

BUDGET_BYTES = 100
MANAGED_BYTES = 20


@dataclass
class Memory:
    allocated_bytes: int
    peak_bytes: int = 0

    def reset_peak(self) -> None:
        self.peak_bytes = self.allocated_bytes

    def iterate(self, needed_bytes: int, *, freed_bytes: int = 0) -> None:
        """First something else goes, then an iteration needs so much beside what it had before."""
        self.allocated_bytes -= freed_bytes
        self.peak_bytes = max(self.peak_bytes, self.allocated_bytes + needed_bytes)


def watch(memory: Memory) -> PeakWatch:
    peaks = PeakWatch(memory, BUDGET_BYTES)
    peaks.begin(MANAGED_BYTES)
    return peaks


@pytest.mark.parametrize("beside", [0, 500, -15, -500], ids=["alone", "others", "some of it lent", "others' memory freed here"])
@pytest.mark.parametrize(("needed", "outgrown"), [(80, False), (81, True)])
def test_only_what_the_iteration_takes_counts(beside: int, needed: int, outgrown: bool) -> None:
    memory = Memory(allocated_bytes=MANAGED_BYTES + beside)
    peaks = watch(memory)
    memory.iterate(needed)
    assert peaks.outgrown(MANAGED_BYTES) is outgrown


def test_what_others_free_hides_nothing() -> None:
    memory = Memory(allocated_bytes=MANAGED_BYTES + 500)
    peaks = watch(memory)
    memory.iterate(10)
    assert not peaks.outgrown(MANAGED_BYTES)
    memory.iterate(81, freed_bytes=500)
    assert peaks.outgrown(MANAGED_BYTES)


def test_a_known_peak_is_no_news() -> None:
    memory = Memory(allocated_bytes=MANAGED_BYTES)
    peaks = watch(memory)
    answers = []
    for needed in (90, 90, 100, 102):
        memory.iterate(needed)
        answers.append(peaks.outgrown(MANAGED_BYTES))
    assert answers == [True, False, False, True]
