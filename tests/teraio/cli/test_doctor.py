"""What the doctor finds on this machine, and on others that are worse off."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import psutil
import pytest
import torch

from planner.errors import StorageError, UnsupportedError
from runtime.system import storage_swap
from teraio.capturing import MachineDescription
from teraio.cli import doctor
from teraio.cli.doctor import Examination, Finding, examine

from ...runtime.memory import refuse_direct_io
from ..conftest import RunCommand
from ..fake_cuda import FakeCuda
from ..traces import fact

CPU = torch.device("cpu")


def named(found: Examination, what: str) -> list[Finding]:
    return [finding for finding in found.findings if finding.what == what]


def test_this_machine_has_what_training_needs(tmp_path: Path) -> None:
    found = examine([tmp_path], CPU)
    assert found.healthy
    names = {"Python", "PyTorch", "C++ functions", "C++ compiler", "solver", "GPU", "processor", "host memory"}
    assert names | {f"storage {tmp_path}"} == {f.what for f in found.findings}
    speed, room = named(found, f"storage {tmp_path}")[0], named(found, f"storage {tmp_path}")[-1]
    assert "GB/s" in speed.found and "free" in room.found
    assert all(finding.effect and finding.remedy for finding in found.findings if finding.verdict == "slow")


def test_a_missing_directory_and_an_unknown_device(run: RunCommand, tmp_path: Path) -> None:
    done = run("doctor", "--device", "cpu", "--storage", tmp_path / "none", "--json")
    assert done.code == 1
    (finding,) = (each for each in json.loads(done.out)["findings"] if each["what"].startswith("storage"))
    assert finding["verdict"] == "missing" and finding["remedy"] == f"mkdir -p {tmp_path / 'none'}"
    assert "wanted cpu or cuda" in run("doctor", "--device", "abacus").err


def test_a_drive_that_is_fast_and_one_that_cannot_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_SLOW", 0.0)
    speed = named(examine([tmp_path], CPU), f"storage {tmp_path}")[0]
    assert speed.verdict == ("slow" if "'buffered'" in speed.found else "ok")
    monkeypatch.setattr(doctor, "choose_path", Mock(side_effect=StorageError("no path leads there")))
    missing = named(examine([tmp_path], CPU), f"storage {tmp_path}")[0]
    assert (missing.verdict, missing.found) == ("missing", "no path leads there")


def test_without_a_compiler_or_the_gpu_of_its_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    def address(storage: torch.UntypedStorage) -> int:
        raise UnsupportedError("giving tensors other memory needs Linux and a C++ compiler")

    monkeypatch.setattr(storage_swap, "address", address)
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    found = examine([], CPU)
    assert not found.healthy
    (functions,), (compiler,), (gpu,) = (named(found, what) for what in ("C++ functions", "C++ compiler", "GPU"))
    assert "g++" in functions.remedy and compiler.found == "none" and 'codegen="eager"' in compiler.effect
    assert gpu.verdict == "missing" and "nvidia-smi" in gpu.remedy


@pytest.mark.parametrize("pins", [True, False])
def test_a_gpu_and_host_memory_that_its_driver_pins_or_not(pins: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    FakeCuda(monkeypatch).pins = pins
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    found = examine([], CPU)
    (gpu,), (kvikio,), (pinned,) = (named(found, what) for what in ("GPU 0", "KvikIO", "pinned memory"))
    assert gpu.found == "made up, 16.0 GiB, 16.0 GiB free"
    assert kvikio.verdict == "ok" or kvikio.remedy == "pip install kvikio-cu13"
    assert pinned.verdict == "ok" if pins else "error 1" in pinned.found and "ulimit -l" in pinned.remedy


def test_this_machine_is_described_for_captures(run: RunCommand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here one whose drives are main memory, and whose processor has nothing else to do."""
    monkeypatch.setattr(psutil, "disk_partitions", lambda all: [SimpleNamespace(mountpoint="/", fstype="tmpfs")])
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0))
    refuse_direct_io(monkeypatch)
    path = tmp_path / "machine.json"
    done = run("doctor", "--device", "cpu", "--storage", tmp_path, "--hardware-out", path)
    assert done.code == 0, done.err
    told = " ".join(done.out.split())
    assert "the file system is tmpfs: it is memory, not a drive" in told and "it is busy" not in told
    assert "the path 'posix' is not used" in told and "give a directory on a file system with direct I/O" in told
    assert fact(done.out, "written") == str(path)
    described = MachineDescription.load(path)
    assert {"float32", "bfloat16"} <= described.flops_per_second.keys()
    assert {link.name for link in described.hardware.links} >= {"device->host", "storage->device"}
    assert described.hardware.host_update_elements_per_second
