"""Every link between the pages leads somewhere, on GitHub as well as in what MkDocs builds."""

from __future__ import annotations

from pathlib import Path

import pytest

from .pages import DOCS, PAGES, README, ROOT, Page


def by_name(page: Page) -> str:
    return page.name


@pytest.mark.parametrize("page", PAGES, ids=by_name)
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
