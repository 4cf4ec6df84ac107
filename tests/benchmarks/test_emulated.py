"""The emulated benchmark, without the emulated GPU: what it asks for, what it shows, what it says where it cannot run."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import emulated
from benchmarks.emulated import Emulation, Ran
from examples.training import Report, Step
from planner.errors import TeraioError
from teraio.capturing.hardware import MachineDescription
from tools.made_up_cuda.build import BuildError
from tools.made_up_cuda.emulated import build

GB = 10**9


def ran(seconds: list[float], **found: float) -> Ran:
    """Return a training whose groups of iterations took these seconds."""
    waits = ("awaited_copies", "awaited_host", "awaited_python", "waited_for_processor")
    none = dict.fromkeys((*waits, "collections", "collect_seconds", "retries", "reserved"), 0.0)
    steps = [Step(loss=0.0, seconds=each, tokens=8192, phase="", resident_bytes={}, optimizer_seconds=0.0) for each in seconds]
    return Ran(steps=steps, report=Report(peak_bytes=10 * GB, rest_bytes=0, parameters=1, status={"emulated": {**none, **found}}))


def test_the_host_tier_is_no_larger_than_the_machine_allows(tmp_path: Path) -> None:
    machine = MachineDescription.load("rtx4090")
    options = emulated._options(machine, 50 * GB, 100 * GB, "host", tmp_path)
    assert options == {"codegen": "eager", "memory_budget": 50 * GB, "host_budget": 48 * GB}
    options = emulated._options(machine, 50 * GB, 100 * GB, "host and storage", tmp_path)
    assert options["host_budget"] == 25 * GB and options["storage"] == str(tmp_path)


def test_the_fastest_group_counts_and_reserved_bytes_are_held_against_the_budget() -> None:
    time, reserved = emulated._figures("a", ran([0.3, 0.2], reserved=6 * GB), ran([0.1]), 5 * GB)
    assert time.value == 0.2 and "0.500 of the unconstrained speed" in time.note
    assert reserved.value == 1.2 and reserved.met is False


def test_what_did_not_run_is_shown_with_its_reason() -> None:
    (figure,) = emulated._figures("a", "no memory", ran([0.1]), 5 * GB)
    assert figure.value is None and figure.note == "no memory"


def test_what_the_emulated_gpu_lacks_is_said_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def installed_torch() -> None:
        raise BuildError("this torch is built without CUDA")

    monkeypatch.setattr(build, "installed_torch", installed_torch)
    with pytest.raises(TeraioError, match="^no emulated GPU: this torch is built without CUDA$"):
        emulated.measure(Emulation(output=tmp_path))
