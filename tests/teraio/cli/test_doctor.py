"""What the doctor finds on this machine, and on others that are worse off."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from planner.errors import UnsupportedError
from runtime.system import CudaPinner, storage_swap
from teraio.capturing import MachineDescription
from teraio.cli.doctor import Examination, Finding, examine

from ..conftest import RunCommand
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


def test_host_memory_that_the_driver_does_not_pin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CudaPinner, "_register", lambda *_: "CUDA error 304 (not permitted)")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    (pinned,) = named(examine([], CPU), "pinned memory")
    assert pinned.verdict == "slow" and "error 304" in pinned.found and "ulimit -l" in pinned.remedy


def test_this_machine_is_described_for_captures(run: RunCommand, tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    done = run("doctor", "--device", "cpu", "--storage", tmp_path, "--hardware-out", path)
    assert done.code == 0, done.err
    assert fact(done.out, "written") == str(path)
    described = MachineDescription.load(path)
    assert {"float32", "bfloat16"} <= described.flops_per_second.keys()
    assert {link.name for link in described.hardware.links} >= {"device->host", "storage->device"}
    assert described.hardware.host_update_elements_per_second
