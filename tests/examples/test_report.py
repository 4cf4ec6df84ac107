"""The demo's verdict: every way to fail is noticed, and a good run passes."""

from typing import Any

import pytest

from examples.report import Run, faults, losses_table, summary_table
from examples.training import Report, Step

MIB = 2**20


def run(losses: list[float], *, peak_bytes: int, status: dict[str, Any] | None, phase: str = "") -> Run:
    resident = {"VmHWM": peak_bytes, "VmRSS": peak_bytes, "RssAnon": peak_bytes, "RssFile": 0, "RssShmem": 0}
    steps = tuple(Step(loss=loss, seconds=1.0, tokens=64, phase=phase, resident_bytes=resident) for loss in losses)
    report = Report(peak_bytes=peak_bytes, rest_bytes=0, parameters=1_000_000, status=status)
    return Run(name="a run", steps=steps, report=report)


def status(**changes: Any) -> dict[str, Any]:
    moved = {"device->storage": 5 * MIB, "storage->device": 5 * MIB}
    return {"moved_bytes": moved, "device_peak_bytes": 30 * MIB, "device_budget_bytes": 30 * MIB, **changes}


FIRST = run([3.0, 2.5], peak_bytes=100 * MIB, status=None)


def second(losses: tuple[float, ...] = (3.0, 2.5), peak_bytes: int = 50 * MIB, phase: str = "planned", **changes: Any) -> Run:
    return run(list(losses), peak_bytes=peak_bytes, status=status(**changes), phase=phase)


def test_equal_losses_in_half_the_memory_pass() -> None:
    assert faults(FIRST, second()) == []


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (second((3.0, 2.50001)), "losses of iteration 2 disagree: 2.5 and 2.50001"),
        (second((3.0, float("nan"))), "losses of iteration 2 disagree: 2.5 and nan"),
        (second(peak_bytes=51 * MIB), "peaked at 51 MiB, over half of the first run's, 50 MiB"),
        (second(device_peak_bytes=31 * MIB), "took 31 MiB, over their budget of 30 MiB"),
        (second(moved_bytes={"device->storage": 0}), "nothing was moved"),
        (second(phase="profile"), "use more iterations"),
        (run([3.0, 2.5], peak_bytes=1, status=None), "nothing was moved"),
    ],
)
def test_each_fault_is_named(other: Run, message: str) -> None:
    assert any(message in fault for fault in faults(FIRST, other))


def test_a_run_that_lacks_iterations_is_not_compared() -> None:
    with pytest.raises(ValueError, match="shorter"):
        faults(FIRST, second((3.0,)))


def test_tables_show_a_run_of_every_kind() -> None:
    assert losses_table(FIRST, second()).row_count == 2
    assert summary_table(FIRST, second()).row_count == 12
