"""The pages of `docs/frameworks`: their examples run as they stand, and what they say of other ways is true.

Each runs in a process of its own, which fails where a package is missing.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ..docs.pages import ROOT, Page

PAGES = [Page(f"docs/frameworks/{path.name}") for path in sorted((ROOT / "docs" / "frameworks").glob("*.md"))]
EXAMPLES = [pytest.param(code, id=page.path.stem) for page in PAGES for code in page.code("python")]
CLOSED_LISTS = {
    "accelerate": """
from accelerate import Accelerator
Accelerator(dynamo_backend="teraio")
""",
    "trainer": """
import torch
from transformers import Trainer, TrainingArguments
arguments = TrainingArguments(output_dir="out", torch_compile=True, torch_compile_backend="teraio", use_cpu=True)
Trainer(model=torch.nn.Linear(2, 2), args=arguments)
""",
}


def run(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Stages run operator by operator: what Inductor makes of them is not the point."""
    set_here = {"PYTHONPATH": str(ROOT), "TERAIO_CODEGEN": "eager", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, cwd=folder, env={**os.environ, **set_here}, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("code", EXAMPLES)
def test_the_example_runs_as_it_stands(code: str, tmp_path: Path) -> None:
    ran = run(code, tmp_path)
    assert ran.returncode == 0, ran.stderr


def test_every_framework_has_an_example() -> None:
    assert {example.id for example in EXAMPLES} == {"trainer", "accelerate", "lightning", "trl", "peft"}


@pytest.mark.parametrize("code", CLOSED_LISTS.values(), ids=list(CLOSED_LISTS))
def test_frameworks_take_no_backend_that_they_do_not_list(code: str, tmp_path: Path) -> None:
    assert "'TERAIO' is not a valid DynamoBackend" in run(code, tmp_path).stderr
