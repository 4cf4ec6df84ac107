"""What the documentation says about options is what `Options` says."""

from __future__ import annotations

from teraio.options import ExpertOptions, Options, kinds, variable_of
from tools import options_page

from .pages import DOCS, README

NAMES = {*kinds()}
REMEDY = "run: python -m tools.options_page"


def test_the_page_is_what_the_options_say() -> None:
    assert DOCS["options"].text == options_page.page(), REMEDY


def test_the_readme_s_table_is_what_the_options_say() -> None:
    assert README.text == options_page.with_table(README.text), REMEDY


def test_the_types_of_keywords_are_what_the_options_say() -> None:
    assert options_page.GIVEN.read_text() == options_page.given(), REMEDY


def test_the_page_lists_every_option() -> None:
    front, expert = ([option.name for option in options_page.options(kind)] for kind in (Options, ExpertOptions))
    assert len(front) == 13 and sorted([*front, *expert]) == sorted(NAMES)
    assert NAMES <= DOCS["options"].anchors
    assert {variable_of(name) for name in NAMES} <= set(DOCS["options"].words)


def test_the_readme_shows_the_six_that_matter() -> None:
    assert len(README.table("option")) == len(options_page.IMPORTANT) == 6


def test_values_and_defaults_are_shown_for_people() -> None:
    known = {option.name: option for kind in (Options, ExpertOptions) for option in options_page.options(kind)}
    assert known["memory_budget"].values == 'bytes, or text such as `"24GiB"` or `"50%"`'
    assert known["host_budget"].values == 'bytes, or text such as `"24GiB"`'
    assert known["codegen"].values == '`"inductor"`, `"eager"`'
    assert known["codegen"].default == '`"inductor"`'
    assert known["solver_time_limit"].default == "`30`"
    assert known["trace_out"].default == "not written"
    assert all("Default:" not in option.description for option in known.values())
