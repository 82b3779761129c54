"""The tests that are left out, each with its reason."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Skip", "SkipFileError", "read_skips", "skip_of", "stale_skips"]


class SkipFileError(ValueError):
    """A line of the file of skips cannot be read."""


@dataclass(frozen=True)
class Skip:
    """Leaves out the tests whose id matches.

    Attributes:
        pattern: A test's id from ``tests_pytorch`` on, where ``*`` stands for anything; brackets mean themselves.
        reason: Why the test says nothing about our strategy, or what we do otherwise on purpose.
    """

    pattern: str
    reason: str

    def matches(self, test: str) -> bool:
        expression = ".*".join(re.escape(part) for part in self.pattern.split("*"))
        return re.fullmatch(expression, test.removeprefix("tests_pytorch/")) is not None


def read_skips(path: Path) -> list[Skip]:
    """Each line is ``pattern | reason``; empty lines and those that begin with ``#`` do not count.

    Raises:
        SkipFileError: Names the line.
    """
    skips = []
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        if not line.strip() or line.startswith("#"):
            continue
        pattern, separator, reason = (part.strip() for part in line.partition(" | "))
        if not (pattern and separator and reason):
            raise SkipFileError(f"{path.name}, line {number}: expected 'pattern | reason', got {line!r}.")
        skips.append(Skip(pattern, reason))
    return skips


def skip_of(test: str, skips: Iterable[Skip]) -> Skip | None:
    """The first skip that matches."""
    return next((skip for skip in skips if skip.matches(test)), None)


def stale_skips(skips: Iterable[Skip], tests: Iterable[str]) -> list[Skip]:
    """Skips that match no test."""
    known = list(tests)
    return [skip for skip in skips if not any(skip.matches(test) for test in known)]
