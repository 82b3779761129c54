"""The README and the pages of the documentation, read as Markdown: their blocks of code, headings and links."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token

__all__ = ["DOCS", "PAGES", "REPOSITORY", "Block", "Page"]

REPOSITORY = Path(__file__).parents[2]
DOCS = REPOSITORY / "docs"

_MARKDOWN = MarkdownIt("commonmark").enable("table")
_PUNCTUATION = re.compile(r"[^\w\- ]")


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block of code.

    Attributes:
        language: The word after the fence; in braces, a directive of Sphinx.
        text: The content.
        line: The first line, from 1.
    """

    language: str
    text: str
    line: int


class Page:
    """One file.

    Args:
        path: Path of a Markdown file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = str(path.relative_to(REPOSITORY))
        self.text = path.read_text(encoding="utf-8")

    def __repr__(self) -> str:
        return self.name

    @cached_property
    def tokens(self) -> list[Token]:
        return _MARKDOWN.parse(self.text)

    @cached_property
    def blocks(self) -> list[Block]:
        return [
            Block(language=token.info.strip(), text=token.content, line=token.map[0] + 1)
            for token in self.tokens
            if token.type == "fence" and token.map is not None
        ]

    @cached_property
    def headings(self) -> list[str]:
        pairs = zip(self.tokens, self.tokens[1:], strict=False)
        return [_plain(inside) for token, inside in pairs if token.type == "heading_open"]

    @cached_property
    def anchors(self) -> set[str]:
        """Anchors that forges make of headings."""
        found: set[str] = set()
        for heading in self.headings:
            slug = _PUNCTUATION.sub("", heading.lower()).replace(" ", "-")
            number = next(n for n in range(len(self.headings) + 1) if _numbered(slug, n) not in found)
            found.add(_numbered(slug, number))
        return found

    @cached_property
    def targets(self) -> list[str]:
        """Of links and pictures."""
        return [str(target) for token in _all(self.tokens) if (target := token.attrGet("href") or token.attrGet("src"))]


def _all(tokens: list[Token]) -> Iterator[Token]:
    for token in tokens:
        yield token
        yield from _all(token.children or [])


def _plain(inline: Token) -> str:
    return "".join(token.content for token in inline.children or [])


def _numbered(slug: str, number: int) -> str:
    return f"{slug}-{number}" if number else slug


PAGES = [
    Page(path)
    for path in (REPOSITORY / "README.md", REPOSITORY / "benchmarks" / "README.md", *sorted(DOCS.glob("*.md")))
]
