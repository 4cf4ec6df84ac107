"""The page of real models says what was found, of all that `make test-models` tries."""

from __future__ import annotations

import json

import pytest

from tools import models_page

from .pages import DOCS

FOUND = json.loads(models_page.RESULTS.read_text())


def test_the_page_is_what_was_found() -> None:
    assert DOCS["models"].text == models_page.page(FOUND), "run: python -m tools.models_page"


def test_every_trial_has_a_row() -> None:
    pytest.importorskip("transformers", reason="in the extra dev")
    from ..models.test_models import ROWS

    found = [(result["kind"], result["model"], result["codegen"]) for result in FOUND["results"]]
    assert sorted(found) == sorted(ROWS), "run: make test-models"
    shown = [tuple(row[:3:2]) for heading in ("model", "what the script does") for row in DOCS["models"].table(heading)]
    assert sorted(shown) == sorted(row[1:] for row in ROWS)
