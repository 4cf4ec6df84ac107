"""Code in the documentation: all of it compiles, and runs as it stands unless it says that it does not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from .pages import NOT_RUN, PAGES, README, ROOT

EXAMPLES = [
    pytest.param(code, id=f"{page.name}-{number}") for page in PAGES for number, code in enumerate(page.code("python"), start=1)
]
RUNNABLE = [example for example in EXAMPLES if not str(example.values[0]).startswith(NOT_RUN)]


@pytest.mark.parametrize("code", EXAMPLES)
def test_examples_compile(code: str) -> None:
    compile(code, "example", "exec")


@pytest.mark.parametrize("code", RUNNABLE)
def test_examples_run_as_they_stand(code: str, tmp_path: Path) -> None:
    (tmp_path / "traces").symlink_to(ROOT / "traces")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    ran = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=280, check=False
    )
    assert ran.returncode == 0, ran.stderr
    for line in code.splitlines():
        statement, _, printed = line.partition("  # ")
        if statement.startswith("print(") and printed:
            assert printed in ran.stdout.splitlines()


def test_the_readme_has_one_example_and_it_runs() -> None:
    (code,) = README.code("python")
    assert not code.startswith(NOT_RUN) and "assert" in code
