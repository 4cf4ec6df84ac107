"""Every real model has the same losses, gradients and parameters with half of its memory as with all of it, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="needs the extra models")

from .catalogue import MODELS  # noqa: E402
from .parity import case_of, check_half, of_libraries  # noqa: E402

pytestmark = [pytest.mark.usefixtures("fine_and_quick"), *of_libraries]


@pytest.mark.parametrize("name", MODELS)
def test_half_of_the_memory(name: str, tmp_path: Path, record_property: Callable[[str, object], None]) -> None:
    model = MODELS[name]
    pytest.importorskip(model.package, reason=f"needs {model.package}", exc_type=ImportError)
    record_property("row", ("model", name))
    found = check_half(case_of(model, planned=True), tmp_path)
    record_property("facts", {"kind": "model", "model": name, "package": model.package, **found})
