"""A core of the real models of `tests/models`, without a plan. All of them, with plans and loops: `make test-models`."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="in the extra dev")

from ...models.catalogue import MODELS  # noqa: E402
from ...models.parity import case_of, check_half, of_libraries  # noqa: E402

pytestmark = [pytest.mark.usefixtures("fine_and_quick"), *of_libraries]


CORE = [name for name, model in MODELS.items() if model.core]
LONG = "T5"


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.long) if name == LONG else name for name in CORE])
def test_half_of_the_memory(name: str, tmp_path: Path) -> None:
    check_half(case_of(MODELS[name], steps=3), tmp_path, "eager")
