"""What training scripts do gives the same numbers with half of the memory as with all of it, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="needs the extra models")

from .loops import LOOPS  # noqa: E402
from .parity import check_half, of_libraries  # noqa: E402

pytestmark = [pytest.mark.usefixtures("fine_and_quick"), *of_libraries]


@pytest.mark.parametrize("name", LOOPS)
def test_half_of_the_memory(name: str, tmp_path: Path, record_property: Callable[[str, object], None]) -> None:
    loop = LOOPS[name]
    pytest.importorskip(loop.package, reason=f"needs {loop.package}", exc_type=ImportError)
    record_property("row", ("loop", name))
    found = check_half(loop.case, tmp_path, loop.codegen)
    record_property("facts", {"kind": "loop", "model": name, "package": loop.package, **found})
