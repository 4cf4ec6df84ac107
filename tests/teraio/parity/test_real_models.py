"""A core of the real models of `tests/models`, without a plan. All of them, with plans and loops: `make test-models`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="in the extra dev")

from ...models.catalogue import CORE, MODELS  # noqa: E402
from ...models.parity import check_half, of_libraries  # noqa: E402

pytestmark = [pytest.mark.usefixtures("fine_and_quick"), *of_libraries]


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.long) if name == "T5" else name for name in CORE])
def test_half_of_the_memory(name: str, tmp_path: Path) -> None:
    check_half(replace(MODELS[name].case, steps=3, planned=False), tmp_path, "eager")  # type: ignore[type-var]
