"""What was measured: one record for each thing that was compared, in one format, as lines of JSON and as tables."""

from __future__ import annotations

import json
import os
import platform
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import lightning as L
import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from lightning_bytescheduler import __version__

__all__ = ["Record", "Results", "append", "machine", "read", "record", "show"]


@dataclass(frozen=True, kw_only=True)
class Record:
    """One thing that was measured."""

    benchmark: str
    what: str  # such as the name of a contender
    setting: dict[str, Any]  # all that it was asked for
    medians: dict[str, float]  # by name, with the unit
    ratios: dict[str, float]  # medians of ratios to something else of the same run
    seen: dict[str, Any]  # the numbers of a median or a ratio under its name, and more
    machine: dict[str, Any] = field(default_factory=lambda: machine())


Results = tuple[str, list[Record]]
"""What is compared, with a title: a table."""

Numbers = Mapping[str, float | Sequence[float]]


def record(
    benchmark: str, what: str, setting: dict[str, Any], values: Numbers, ratios: Numbers | None = None, **seen: Any
) -> Record:
    """A record of numbers, of each of which it keeps the median; empty ones are left out."""
    kept: dict[str, Any] = {}

    def medians(numbers: Numbers) -> dict[str, float]:
        found = {}
        for name, value in numbers.items():
            if isinstance(value, int | float):
                found[name] = float(value)
            elif value:
                found[name] = statistics.median(value)
                kept[name] = list(value)
        return found

    first, second = medians(values), medians(ratios or {})
    return Record(benchmark=benchmark, what=what, setting=setting, medians=first, ratios=second, seen={**kept, **seen})


def machine() -> dict[str, Any]:
    """What results depend on."""
    return {
        "cores": len(os.sched_getaffinity(0)),
        "system": platform.system(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "lightning": L.__version__,
        "lightning_bytescheduler": __version__,
    }


def append(path: Path, records: Sequence[Record]) -> None:
    """Write records at the end of a file, a line for each; none that is there already."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(asdict(one), default=str) for one in records]
    known = set(path.read_text(encoding="utf-8").splitlines()) if path.exists() else set()
    with path.open("a", encoding="utf-8") as file:
        file.writelines(f"{line}\n" for line in lines if line not in known)


def read(path: Path) -> list[Record]:
    """All records of a file; none if there is no file."""
    if not path.exists():
        return []
    return [Record(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]


def show(console: Console, title: str, records: Sequence[Record]) -> None:
    """Print a table: a row for each record, with the least and the most of what was seen several times."""
    medians = dict.fromkeys(name for one in records for name in one.medians)
    ratios = dict.fromkeys(name for one in records for name in one.ratios)
    table = Table(title=escape(title), title_justify="left")
    table.add_column("")
    for name in (*medians, *ratios):
        table.add_column(escape(name), justify="right")
    for one in records:
        cells = [f"{one.medians[name]:,.4g}" if name in one.medians else "" for name in medians]
        table.add_row(escape(one.what), *cells, *(_ratio(one, name) for name in ratios))
    console.print(table)


def _ratio(one: Record, name: str) -> str:
    if name not in one.ratios:
        return ""
    seen = one.seen.get(name, [])
    return f"{one.ratios[name]:.3f}" + (f" ({min(seen):.3f} to {max(seen):.3f})" if len(seen) > 1 else "")
