"""The contract that rooms are entered by their `__init__`, on a small package."""

from __future__ import annotations

from itertools import count
from pathlib import Path

import grimp
import pytest

from tools.rooms_contract import imports_past_the_door

_numbers = count()


def build(files: dict[str, str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, grimp.ImportGraph]:
    """Write a package of these files, with PACKAGE replaced by its name. Return that name and its import graph."""
    package = f"house_{next(_numbers)}"
    for name, text in {"__init__.py": "", **files}.items():
        path = folder / package / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text.replace("PACKAGE", package))
    monkeypatch.syspath_prepend(folder)
    return package, grimp.build_graph(package, cache_dir=None)


KITCHEN = {"kitchen/__init__.py": "from PACKAGE.kitchen.stove import cook\n", "kitchen/stove.py": "def cook() -> None: ...\n"}


@pytest.mark.parametrize(
    ("line", "past"),
    [
        ("from PACKAGE.kitchen.stove import cook", True),
        ("from PACKAGE.kitchen import cook", False),
        ("from PACKAGE.kitchen import stove", False),
    ],
)
def test_an_import_past_the_init_is_found(line: str, past: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = KITCHEN | {"hall/__init__.py": "", "hall/guest.py": f"{line}\n"}
    package, graph = build(files, tmp_path, monkeypatch)
    found = imports_past_the_door(graph, frozenset({package}))
    assert found == [(f"{package}.hall.guest", f"{package}.kitchen.stove")] * past
    assert imports_past_the_door(graph, frozenset({"another"})) == []
