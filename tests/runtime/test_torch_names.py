"""This PyTorch has every private name that the product uses, no other is used, and what is not known is refused by a line."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from planner.errors import UnsupportedError
from runtime import torch_names

ROOT = Path(__file__).parents[2]
LISTS = (torch_names._NAMES, torch_names._OF_CUDA, torch_names._OF_COMPILER)


def used(tree: ast.Module) -> Iterator[str]:
    """Yield the full names, below `torch`, of what is imported from modules of PyTorch, and of chains of attributes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            yield from (f"{node.module}.{each.name}" for each in node.names)
        elif isinstance(node, ast.Attribute) and re.fullmatch(r"torch(\.\w+)+", name := ast.unparse(node)):
            yield name


def is_private(name: str) -> bool:
    parts = name.split(".")
    return any(re.match("_[^_]", part) for part in parts) and parts[1] != "ops"  # operators have schemas of their own


def test_code_uses_no_private_name_of_torch_that_is_not_listed() -> None:
    listed = {f"{module}.{name}" for names in LISTS for module, each in names.items() for name in each.split()}
    found = {
        name
        for package in ("runtime", "teraio")
        for file in (ROOT / package).rglob("*.py")
        for name in used(ast.parse(file.read_text()))
        if is_private(name)
    }
    unknown = {
        name for name in found - listed if not any(name.startswith(f"{each}.") or each.startswith(f"{name}.") for each in listed)
    }
    assert not unknown, "list them in runtime/torch_names.py"
    assert listed <= found, "nothing uses these"


def test_this_torch_has_all_names() -> None:
    torch_names.require_known()
    torch_names.require_compiler()


@pytest.mark.parametrize("missing", ["torch._C._gone", "torch._guards.gone", "torch.gone.name", "torch._C._gone.name"])
def test_a_name_that_is_gone_is_named(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, _, name = missing.rpartition(".")
    monkeypatch.setattr(torch_names, "_NAMES", {"torch._ops": "OpOverload", module: name})
    with pytest.raises(
        UnsupportedError, match=rf"uses {missing}, and torch {torch.__version__[:4]}.* has no .*: use torch 2.11 to"
    ):
        torch_names.require_known()


@pytest.mark.parametrize(
    ("where", "value", "message"),
    [
        ("torch.__version__", "2.10.1+cpu", r"works with torch 2.11 to .*, and this is torch 2.10.1\+cpu: pip install"),
        ("torch.__version__", "1.13.0", "this is torch 1.13.0"),
        ("sys.platform", "darwin", "trains on Linux, and this system is darwin"),
    ],
)
def test_what_is_not_supported_is_refused_by_a_line(
    where: str, value: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{torch_names.__name__}.{where}", value)
    with pytest.raises(UnsupportedError, match=message):
        torch_names.require_known()


def test_only_the_runtime_imports_what_other_systems_lack() -> None:
    """It refuses these systems first, so that they get that line and no ModuleNotFoundError."""
    files = {path for package in ("planner", "teraio") for path in (ROOT / package).rglob("*.py")}
    assert not [path for path in files if re.search(r"^ *(import|from) (fcntl|resource|pwd|termios)\b", path.read_text(), re.M)]


@pytest.mark.parametrize("version", ["2.12.0a0+git5c48869", "2.16.0.dev20270101", "3.0.0"])
def test_newer_versions_are_tried(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    torch_names.require_known()
