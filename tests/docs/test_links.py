"""Each link of the README and of the documentation leads somewhere, also on a forge that shows files as they are."""

from __future__ import annotations

from urllib.parse import unquote, urlsplit

import pytest

from tests.docs.pages import DOCS, PAGES, REPOSITORY, Page


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_links(page: Page) -> None:
    broken = [target for target in page.targets if not _leads_somewhere(page, target)]
    assert not broken


def _leads_somewhere(page: Page, target: str) -> bool:
    parts = urlsplit(target)
    if parts.scheme:
        return parts.scheme == "https" and bool(parts.netloc)
    path = (page.path.parent / unquote(parts.path)).resolve() if parts.path else page.path
    if not path.exists() or not path.is_relative_to(REPOSITORY):
        return False
    return not parts.fragment or (path.suffix == ".md" and parts.fragment in Page(path).anchors)


def test_a_broken_link_is_found() -> None:
    page = Page(DOCS / "index.md")
    for target in ("nowhere.md", "options.md#nowhere", "#nowhere", "timeline.png#a", "../../outside", "http://a.b"):
        assert not _leads_somewhere(page, target)
    for target in ("options.md", "options.md#mode", "../README.md", "timeline.png", "#one-machine", "https://a.b/c#d"):
        assert _leads_somewhere(page, target)
