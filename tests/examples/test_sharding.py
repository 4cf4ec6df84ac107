"""The command that trains a Llama, in two ranks that torchrun starts."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from .test_train_llama import call

ROOT = Path(__file__).resolve().parents[2]


def test_without_torchrun_it_says_how_to_start_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    outcome = call("--fsdp")
    assert outcome.exit_code == 2
    assert "torchrun --nproc-per-node 2 -m examples.train_llama --fsdp" in " ".join(outcome.output.split())


@pytest.mark.long
def test_two_ranks_share_a_llama_and_move_tensors(tmp_path: Path) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    tiers = ["--memory-budget", "88MiB", "--storage", str(tmp_path), "--codegen", "eager"]
    trained = subprocess.run(
        [*launcher, "-m", "examples.train_llama", "--fsdp", "--steps", "9", "--batch", "2", "--context", "64", *tiers],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "COLUMNS": "300"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert trained.returncode == 0, trained.stdout + trained.stderr
    lines = trained.stdout.splitlines()
    assert [line.split()[0] for line in lines[:9]] == [str(number) for number in range(1, 10)], "ranks other than 0 print nothing"
    assert "budget 88 MiB" in trained.stdout
    moved = next(line for line in lines if "storage->device" in line)
    assert not moved.endswith(" 0 MiB")
    assert not list(tmp_path.iterdir())
