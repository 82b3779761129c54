"""What ``benchmarks.diloco`` has measured, kept in a file from run to run."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.report import machine

__all__ = ["Kept", "Row", "at_loss", "at_samples"]

Row = dict[str, Any]
"""One contender with one seed: ``seed``, ``name``, ``asked``, ``points`` (seconds, samples, loss), and more."""


class Kept:
    """Rows by figure, in a JSON file, so that a benchmark goes on where it was interrupted.

    Args:
        path: Of the file; need not exist.
        figure: Which rows these are.
    """

    def __init__(self, path: Path, figure: str) -> None:
        self._path = path
        self._content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        self._figure: dict[str, Any] = self._content.setdefault(figure, {"rows": []})

    @property
    def rows(self) -> list[Row]:
        """What was measured."""
        rows: list[Row] = self._figure["rows"]
        return rows

    def find(self, seed: int, name: str) -> Row | None:
        """What was measured of a contender with a seed, if it was."""
        return next((row for row in self.rows if (row["seed"], row["name"]) == (seed, name)), None)

    def add(self, row: Row) -> None:
        """Keep a row, in place of an older one, and write the file."""
        older = self.find(row["seed"], row["name"])
        if older is not None:
            self.rows.remove(older)
        self.rows.append(row)
        self._write()

    def conclude(self, summary: dict[str, Any]) -> None:
        """Keep what the rows come to."""
        self._figure["summary"] = summary
        self._write()

    def _write(self) -> None:
        self._content["machine"] = machine()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        new = self._path.with_suffix(".new")
        new.write_text(json.dumps(self._content, indent=1) + "\n", encoding="utf-8")
        new.replace(self._path)


def at_loss(points: Sequence[Sequence[float]], loss: float) -> float | None:
    """Seconds until the loss was reached, or ``None``."""
    return next((seconds for seconds, _, reached in points if reached <= loss), None)


def at_samples(points: Sequence[Sequence[float]], samples: float) -> float | None:
    """The loss at so many samples, between the validations next to it; ``None`` before the first and after the last."""
    for before, after in itertools.pairwise([points[0], *points]):
        if before[1] <= samples <= after[1]:
            share = (samples - before[1]) / max(after[1] - before[1], 1)
            return float(before[2] + share * (after[2] - before[2]))
    return None
