"""Names in the documentation are names of something: files, make targets, options, classes, commands, fields."""

from __future__ import annotations

import builtins
import re
import shlex
import tomllib
from collections.abc import Iterator
from dataclasses import fields
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import get_args

import pytest
import torch
import typer
from pydantic import BaseModel
from typer.main import get_command

import planner
import planner.errors
import teraio
from benchmarks.__main__ import DEFAULT, llama_parts, llama_scale_for, main, parts, scale_for
from benchmarks.alone import Runner
from benchmarks.emulated import WAYS, Emulation
from benchmarks.planner_cases import Selection
from examples.llama import SIZES
from planner.policies import POLICIES
from teraio.cli import commands
from teraio.options import Options
from teraio.watching import Status

from .pages import DOCS, PAGES, README, ROOT, TRACES, Page, each_page

TOP_LEVEL = ("planner", "runtime", "teraio", "tests", "traces", "benchmarks", "examples", "docs", "tools")
MADE_LATER = {"benchmarks/out"}
FOREIGN = {"DataCollatorWithFlattening", "DistributedDataParallel", "GradScaler", "ZeroRedundancyOptimizer"}
FORMATS = {"teraio.trace", "teraio.plan", "teraio.kept_plan"}


@cache
def classes() -> set[str]:
    """Classes and constants in capitals that the product or its tests define."""
    found: set[str] = set()
    for folder in ("planner", "runtime", "teraio", "tests"):
        for path in (ROOT / folder).rglob("*.py"):
            found |= set(re.findall(r"^(?:class )?([A-Z]\w+)\b", path.read_text(), re.MULTILINE))
    return found


@each_page
def test_files_exist(page: Page) -> None:
    for word in [*page.words, *re.findall(r"\b\w+/[\w/]+\.py\b", "".join(page.code("")))]:
        if word.split("/")[0] in TOP_LEVEL and re.fullmatch(r"[\w./-]+", word) and word not in MADE_LATER:
            assert (ROOT / word).exists(), f"{page.name}: {word}"


@each_page
def test_make_targets_exist(page: Page) -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    variables = set(re.findall(r"^([A-Z_]+) \?=", makefile, re.MULTILINE))
    for command in [*page.words, *"".join(page.code("")).splitlines()]:
        if command.startswith("make "):
            words = re.sub(r'".*?"', "", command).split("#")[0].split()[1:]
            assert words[0] in targets, f"{page.name}: {command}"
            assert all(word.partition("=")[0] in variables for word in words[1:]), f"{page.name}: {command}"


def test_the_public_ci_runs_what_ci_runs_and_targets_that_exist() -> None:
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    makefile = (ROOT / "Makefile").read_text()
    assert re.search(r"- run: .*\.ci/run$", workflow, re.MULTILINE)
    assert all(f"\n{target}:" in makefile for target in re.findall(r"- run: make ([\w-]+)", workflow))
    assert "exec make check" in (ROOT / ".ci" / "run").read_text()


@each_page
def test_options_classes_and_dotted_names_exist(page: Page) -> None:
    options = {"backend", *(field.name for field in fields(Options))}
    for word in page.words:
        if given := re.fullmatch(r'([a-z_]+)=(True|False|\d+|".*")', word):
            assert given[1] in options, f"{page.name}: {word}"
        elif re.fullmatch(r"[A-Z][a-z]+[A-Z]\w+", word) and word not in FOREIGN:
            known = word in classes() or any(hasattr(home, word) for home in (builtins, torch.optim, torch))
            assert known, f"{page.name}: {word}"
        elif dotted := re.fullmatch(r"((?:teraio|planner|runtime)(?:\.\w+)*)\.(\w+)(?:\(.*\))?", word):
            assert word in FORMATS or _exists(dotted[1], dotted[2]), f"{page.name}: {word}"


def _exists(module: str, name: str) -> bool:
    if module == "teraio" and name in teraio.__all__:
        return True
    path = ROOT / module.replace(".", "/") / name
    if path.is_dir() or path.with_suffix(".py").exists():
        return True
    return hasattr(import_module(module), name)


def test_modules_that_are_run_exist() -> None:
    for page in PAGES:
        for module in re.findall(r"python -m ([\w.]+)", page.text):
            path = ROOT / module.replace(".", "/")
            assert path.with_suffix(".py").exists() or (path / "__main__.py").exists() or module in ("pytest", "pip"), module


def test_the_architecture_shows_every_room() -> None:
    named = set(DOCS["architecture"].words)
    for package in ("planner", "runtime", "teraio"):
        for path in (ROOT / package).iterdir():
            room = f"{package}/{path.name}"
            if path.suffix == ".py" and path.name != "__init__.py" or path.is_dir() and (path / "__init__.py").exists():
                assert room in named, f"docs/architecture.md does not show {room}"


@pytest.mark.parametrize("package", ["planner", "runtime", "teraio"])
def test_rooms_are_shown_in_the_order_of_their_imports(package: str) -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (layers,) = [contract["layers"] for contract in contracts if contract.get("containers") == [package]]
    section = DOCS["architecture"].text.split(f"### {package}:")[1].split("\n### ")[0].split("\n## ")[0]
    rows = [re.findall(rf"`{package}/(\w+)", row.split("|")[1]) for row in section.splitlines() if row.startswith("| `")]
    assert [set(row) for row in rows] == [set(layer.split(" | ")) for layer in layers]


def test_notes_are_where_the_architecture_says() -> None:
    rows = DOCS["architecture"].table("note")
    assert rows
    for title, path in rows:
        assert f"[Note: {title}]" in (ROOT / path.strip("`")).read_text(), title


def models(model: type[BaseModel]) -> Iterator[type[BaseModel]]:
    """The model and all models that its fields consist of."""
    yield model
    for field in model.model_fields.values():
        yield from _models_in(field.annotation)


def _models_in(annotation: object) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield from models(annotation)
    for argument in get_args(annotation):
        yield from _models_in(argument)


@pytest.mark.parametrize("file", [planner.Trace, planner.Plan])
def test_every_field_of_the_two_files_is_described(file: type[BaseModel]) -> None:
    for model in models(file):
        for name, field in model.model_fields.items():
            assert re.search(rf"\b{field.serialization_alias or name}\b", TRACES.text), f"{model.__name__}.{name}"


def test_every_field_of_the_status_is_described() -> None:
    named = DOCS["how-it-works"].words
    assert {field.name for field in fields(Status)} <= set(named)


def test_the_page_of_policies_lists_all() -> None:
    assert [row[0].strip("`") for row in DOCS["policies"].table("policy")] == list(POLICIES)


def test_arguments_of_the_command_line_exist() -> None:
    command = get_command(commands.app)
    known = {name: {option for each in sub.params for option in each.opts} for name, sub in command.commands.items()}  # type: ignore[attr-defined]
    rows = DOCS["plans-and-cli"].table("argument")
    shown: dict[str, set[str]] = {name: {"--output", "-o"} & options for name, options in known.items()}
    for arguments, where, _ in rows:
        names = re.findall(r"`([\w-]+)`", where)
        for name in known if where.startswith("all") else names:
            if not (where.startswith("all") and name in names):
                shown[name] |= set(re.findall(r"`(--[\w-]+)`", arguments))
    positional = {name: {option for option in options if option.startswith("-")} for name, options in known.items()}
    assert shown == positional


def known_parts() -> set[str]:
    """The parts of the benchmarks."""
    scale = scale_for("cpu", ROOT, 1)
    llamas = llama_scale_for("cpu", ROOT, 1, sizes=[], dtype=None, minutes=1, batch=None, context=None)
    return {*parts(scale, Selection(output=ROOT), Emulation(output=ROOT)), *llama_parts(Runner(llamas))}


def test_the_parts_of_the_benchmarks_are_explained() -> None:
    page = DOCS["benchmarks"]
    on_cpu, on_gpu, named = (
        [name for row in page.table(heading) for name in re.findall(r"`(\w+)`", row[0])]
        for heading in ("on the CPU", "part", "only if named")
    )
    assert on_gpu == list(DEFAULT["cuda"])
    assert set(on_cpu) == set(DEFAULT["cpu"])
    assert {*named, "rivals"} == known_parts() - {*on_cpu, *on_gpu}


def test_commands_of_the_benchmarks_are_understood() -> None:
    """Each row of the README's first table has one."""
    app = typer.Typer()
    app.command()(main)
    command, known = get_command(app), known_parts()
    of_rows = [row[-1].strip("`") for row in README.table("training")]
    commands = [*of_rows, *re.findall(r"`python -m benchmarks ([^`…]+)`", "".join(page.text for page in PAGES))]
    assert len(of_rows) > 10
    for each in commands:
        given = command.make_context("benchmarks", shlex.split(each)).params
        assert given["chosen"] and {*given["chosen"]} <= known, each
        assert {*(given["way"] or ())} <= {*WAYS} and {*(given["size"] or ())} <= {*SIZES}, each


def test_every_error_is_in_the_troubleshooting() -> None:
    page = DOCS["troubleshooting"]
    headings = set(re.findall(r"^## (\w+Error)$", page.text, re.MULTILINE))
    errors = {name for name, each in vars(planner.errors).items() if isinstance(each, type) and issubclass(each, Exception)}
    assert headings == errors - {"TeraioError"}
    assert "`TeraioError`" in page.text


@each_page
def test_pages_hold_no_path_of_a_machine(page: Page) -> None:
    assert not re.search(rf"{re.escape(str(Path.home()))}|/work/|/home/", page.text)
