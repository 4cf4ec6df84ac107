"""The pages of the documentation, taken apart: prose, code blocks, headings, links."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NOT_RUN = "# not run by the tests: "

_FENCE = re.compile(r"^ *```(\w*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Page:
    """One Markdown file. `name`: its path in the repository."""

    name: str

    @property
    def path(self) -> Path:
        return ROOT / self.name

    @cached_property
    def text(self) -> str:
        return self.path.read_text(encoding="utf-8")

    @cached_property
    def prose(self) -> str:
        """The text without code blocks."""
        return _FENCE.sub("", self.text)

    @cached_property
    def words(self) -> list[str]:
        """What stands in backticks in the prose."""
        return re.findall(r"(?<!`)`([^`\n]+)`(?!`)", self.prose)

    @cached_property
    def links(self) -> list[str]:
        """Targets of links, without those to other hosts."""
        targets = re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`\n]*`", "code", self.prose))
        return [target for target in targets if not re.match(r"[a-z]+:", target)]

    @cached_property
    def anchors(self) -> set[str]:
        """What GitHub and MkDocs call the headings."""
        headings = re.findall(r"^#+ (.+)$", self.prose, re.MULTILINE)
        return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}

    def code(self, language: str) -> Iterator[str]:
        """The code blocks of this language."""
        for found, code in _FENCE.findall(self.text):
            if found == language:
                yield code

    def table(self, first_heading: str) -> list[list[str]]:
        """The rows of the table whose first column has this heading."""
        lines = iter(self.text.splitlines())
        for line in lines:
            if line.startswith(f"| {first_heading} |"):
                next(lines)
                break
        rows = []
        for line in lines:
            if not line.startswith("|"):
                break
            rows.append([cell.strip() for cell in line.strip("|").split("|")])
        return rows


README = Page("README.md")
CONTRIBUTING = Page("CONTRIBUTING.md")
TRACES = Page("traces/README.md")
DOCS = {path.stem: Page(f"docs/{path.name}") for path in sorted((ROOT / "docs").glob("*.md"))}
PAGES = (README, CONTRIBUTING, TRACES, *DOCS.values())


def by_name(page: Page) -> str:
    return page.name


each_page = pytest.mark.parametrize("page", PAGES, ids=by_name)
