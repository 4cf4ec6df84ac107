"""Pages of the documentation: code runs as it stands, links lead somewhere, messages and tables are what the code has."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from teraio.options import ExpertOptions, Options, kinds, variable_of
from tools import models_page, options_page, results_pages, versions

from ..runtime.processes import Forking
from .pages import DOCS, NOT_RUN, PAGES, README, ROOT, Page, by_name, each_page

# -- code: all of it compiles, and runs as it stands unless it says that it does not

EXAMPLES = [
    pytest.param(page, code, id=f"{page.name}-{number}")
    for page in PAGES
    for number, code in enumerate(page.code("python"), start=1)
]


SHORT_END = "import atexit, gc; atexit.register(gc.freeze)\n"  # no search of all objects, for which a fork copies its memory
QUICKLY = """
import functools, planner.policies as policies, runtime.transfer as transfer
policies.effort._BY_STAGES, policies.predictions.more_instants = (), lambda stages: ()
transfer.Engine.measure = functools.partialmethod(transfer.Engine.measure, 1 << 20)
"""
"""How good a plan is, how close its bound, and how fast the drive, no page says: none is searched or measured for long."""


@pytest.mark.parametrize(("page", "code"), EXAMPLES)
def test_examples_run_as_they_stand(page: Page, code: str, tmp_path: Path, forking: Forking) -> None:
    """Those of the README with Inductor's code; what Inductor makes of the stages is not the point of the others."""
    compile(code, "example", "exec")
    if code.startswith(NOT_RUN):
        return
    (tmp_path / "traces").symlink_to(ROOT / "traces")
    environment = {"PYTHONPATH": str(ROOT), **({} if page is README else {"TERAIO_CODEGEN": "eager"})}
    status, printed, errors = forking.run(f"import os; os.chdir({str(tmp_path)!r})\n{SHORT_END}{QUICKLY}{code}", **environment)
    assert status == 0, errors
    for line in code.splitlines():
        statement, _, wanted = line.partition("  # ")
        if statement.startswith("print(") and wanted:
            assert wanted in printed.splitlines()


def test_the_readme_has_one_example_and_it_runs() -> None:
    (code,) = README.code("python")
    assert not code.startswith(NOT_RUN) and "assert" in code


# -- links lead somewhere, on GitHub as well as in what MkDocs builds


@each_page
def test_every_link_resolves(page: Page) -> None:
    for link in page.links:
        path, _, anchor = link.partition("#")
        target = (page.path.parent / path).resolve() if path else page.path
        assert target.exists(), f"{page.name} links to {link}"
        if anchor:
            assert anchor in Page(str(target.relative_to(ROOT))).anchors, f"{page.name} links to {link}"


@pytest.mark.parametrize("page", DOCS.values(), ids=by_name)
def test_the_site_links_to_its_own_pages_only(page: Page) -> None:
    assert all(not link.startswith("..") for link in page.links)


def test_the_readme_leads_to_every_page_of_the_docs() -> None:
    linked = {Path(link.partition("#")[0]).stem for page in (README, DOCS["index"]) for link in page.links}
    assert DOCS.keys() - {"index"} <= linked


# -- messages that the troubleshooting page quotes are messages that the code has

GAP = "…"


def _text_of(node: ast.expr) -> str:
    """The text of a literal, with a gap for each value that is put into it."""
    if isinstance(node, ast.JoinedStr):
        return "".join(_text_of(part) for part in node.values)
    return str(node.value) if isinstance(node, ast.Constant) else GAP


@cache
def texts() -> tuple[str, ...]:
    """All literal texts in the three packages."""
    found = []
    for package in ("planner", "runtime", "teraio"):
        for path in sorted((ROOT / package).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.JoinedStr) or isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found.append(re.sub(r"%[.,\d]*[a-z]", GAP, _text_of(node)))
    return tuple(found)


def quoted() -> Iterator[str]:
    """Messages in the first column of the tables."""
    for line in DOCS["troubleshooting"].text.splitlines():
        first = line.strip("|").split("|")[0]
        if line.startswith("| `"):
            yield from re.findall(r"`([^`]+)`", first)
        if 'the log says "' in first:
            yield from re.findall(r'the log says "([^"]+)"', first)


def has(text: str, message: str) -> bool:
    """Whether the pieces of the message between its gaps are in the text, in this order."""
    position = 0
    for piece in filter(None, (piece.strip() for piece in message.split(GAP))):
        position = text.find(piece, position)
        if position < 0:
            return False
        position += len(piece)
    return True


def test_quoted_messages_exist() -> None:
    messages = [message for message in quoted() if " " in message]
    assert len(messages) > 40, "most rows quote a message"
    for message in messages:
        assert any(has(text, message) for text in texts()), f"docs/troubleshooting.md quotes {message!r}, which no text has"


# -- options

REMEDY = "run: python -m tools.options_page"


def test_pages_and_types_are_what_the_options_say() -> None:
    assert DOCS["options"].text == options_page.page(), REMEDY
    assert README.text == options_page.with_table(README.text), REMEDY
    assert options_page.GIVEN.read_text() == options_page.given(), REMEDY


def test_every_option_is_listed_and_the_readme_shows_the_six_that_matter() -> None:
    names = {*kinds()}
    front, expert = ([option.name for option in options_page.options(kind)] for kind in (Options, ExpertOptions))
    assert len(front) == 14 and sorted([*front, *expert]) == sorted(names)
    assert names <= DOCS["options"].anchors
    assert {variable_of(name) for name in names} <= set(DOCS["options"].words)
    assert len(README.table("option")) == len(options_page.IMPORTANT) == 6


# -- real models: what was found, of all that `make test-models` tries

FOUND = json.loads(models_page.RESULTS.read_text())


def test_the_page_of_models_is_what_was_found() -> None:
    assert DOCS["models"].text == models_page.page(FOUND), "run: python -m tools.models_page"


def test_every_trial_has_a_row() -> None:
    pytest.importorskip("transformers", reason="in the extra dev")
    from ..models.test_models import ROWS

    found = [(result["kind"], result["model"], result["codegen"]) for result in FOUND["results"]]
    assert sorted(found) == sorted(ROWS), "run: make test-models"
    shown = [tuple(row[:3:2]) for heading in ("model", "what the script does") for row in DOCS["models"].table(heading)]
    assert sorted(shown) == sorted(row[1:] for row in ROWS)


# -- versions, and results of benchmarks


def test_the_page_of_versions_is_what_was_found() -> None:
    assert DOCS["versions"].text == versions.page(json.loads(versions.FOUND.read_text())), "run: make test-versions"


def test_what_is_made_of_result_files_is_up_to_date() -> None:
    remedy = "run: python -m tools.results_pages"
    assert DOCS["trends"].text == results_pages.trends_page(results_pages.result_files()), remedy
    assert README.text == results_pages.with_table(README.text), remedy


def test_every_result_file_is_named_by_a_page() -> None:
    text = "".join(page.text for page in PAGES)
    assert [file for file in results_pages.result_files() if file not in text] == [], "name them, or remove them"


# -- the notebook runs from its first cell to its last, without Jupyter, and shows the page at its end

LAYERS = "in range(10))"
"""Of the notebook's model; half of them show the same in half the time."""
NOTEBOOK = ROOT / "examples" / "half_the_memory.ipynb"
IPYTHON = """
import sys, types
shown = []
sys.modules["IPython"] = sys.modules["IPython.display"] = types.SimpleNamespace(HTML=shown.append)
"""


def test_the_notebook_runs(tmp_path: Path, forking: Forking) -> None:
    cells = [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]
    assert not any(cell["outputs"] or cell["execution_count"] for cell in cells), "no results of some machine"
    code = "\n".join(["".join(cell["source"]) for cell in cells])
    assert LAYERS in code
    code = code.replace(LAYERS, "in range(5))")
    begin = f"import os; os.chdir({str(tmp_path)!r})\n{IPYTHON}{SHORT_END}"
    status, printed, errors = forking.run(f"{begin}\n{code}\nprint(len(shown[0]) > 10_000)", TERAIO_CODEGEN="eager")
    assert (status, printed.splitlines()[-1:]) == (0, ["True"]), errors
    assert "phase 'planned'" in printed and ": after " in printed
