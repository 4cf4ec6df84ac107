"""The page of real models says what was found."""

from __future__ import annotations

import json

from tools import models_page

from .pages import DOCS

FOUND = json.loads(models_page.RESULTS.read_text())


def test_the_page_is_what_was_found() -> None:
    assert DOCS["models"].text == models_page.page(FOUND), "run: python -m tools.models_page"


def test_every_model_has_a_row() -> None:
    names = [result["model"] for result in FOUND["results"] if result["kind"] == "model"]
    assert sorted(row[0] for row in DOCS["models"].table("model")) == sorted(names)
    assert len(names) == len(set(names)) >= 17
