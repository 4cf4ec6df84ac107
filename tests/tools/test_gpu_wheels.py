"""The list of packages that a bare GPU machine lacks is complete, and what is missing is said."""

from __future__ import annotations

import re
import tomllib
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tools import gpu_wheels

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
ON_THE_MACHINE = set(
    "networkx numpy psutil xxhash rich markdown-it-py mdurl pygments typer click shellingham annotated-doc "
    "typing-extensions filelock fsspec jinja2 markupsafe sympy mpmath setuptools pytest hypothesis transformers".split()
)
"""What such a machine has, as far as teraio needs it."""


def holds(requirement: Requirement) -> bool:
    return requirement.marker is None or requirement.marker.evaluate({"extra": ""})


def needs(names: list[str]) -> set[str]:
    """Return the names of these packages and of all that they need, here."""
    found: set[str] = set()
    while names:
        name = names.pop()
        if name in found:
            continue
        try:
            requirements = distribution(name).requires or []
        except PackageNotFoundError:
            continue  # needed on other systems only
        found.add(name)
        names += [each.name.lower().replace("_", "-") for each in map(Requirement, requirements) if holds(each)]
    return found


def test_all_that_teraio_needs_is_on_the_machine_or_listed() -> None:
    needed = needs([gpu_wheels.name_of(each) for each in PROJECT["dependencies"]]) - needs(["torch"])
    listed = {wheel.name for wheel in gpu_wheels.wheels() if wheel.part == "teraio"}
    assert needed - ON_THE_MACHINE == listed


def test_packages_that_go_together_have_the_versions_that_they_ask_for() -> None:
    listed = {wheel.name: wheel.requirement for wheel in gpu_wheels.wheels()}
    asked = [each.replace(" ", "") for each in distribution("pydantic").requires or []]
    assert listed["pydantic-core"] in asked and listed["pydantic"] == f"pydantic=={distribution('pydantic').version}"


def test_what_is_missing_is_named_with_the_reason(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(gpu_wheels, "is_installed", lambda name: name not in ("pydantic-core", "rapids-logger"))
    assert not gpu_wheels.report(), "teraio itself lacks one"
    said = capsys.readouterr().err
    assert re.search(r"nothing runs without:\n  pydantic-core==\S+ +pydantic imports it", said)
    assert re.search(r"\"kvikio\" and its tests do not run without:\n  rapids-logger==\S+ +libkvikio links against it", said)
    monkeypatch.setattr(gpu_wheels, "is_installed", lambda name: True)
    assert gpu_wheels.report() and capsys.readouterr().err == ""
