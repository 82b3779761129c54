"""What the test processes tell the script: lines of JSON in one file that every process of a test appends to."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["ARCHITECTURE_VARIABLE", "BASELINE_VARIABLE", "RECORD_VARIABLE", "Record", "read_events"]

RECORD_VARIABLE = "LIGHTNING_SUITE_RECORD"
BASELINE_VARIABLE = "LIGHTNING_SUITE_BASELINE"  # set: ddp stays ddp
ARCHITECTURE_VARIABLE = "LIGHTNING_SUITE_ARCHITECTURE"  # of the strategy, where tests do not say one


@dataclass(frozen=True)
class Record:
    """Where to write, and in which test's name. Pickled with a strategy, so that it reaches spawned ranks."""

    path: str
    test: str

    def write(self, kind: str, **details: Any) -> None:
        line = json.dumps({"kind": kind, "test": self.test, **details}) + "\n"
        descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        try:
            os.write(descriptor, line.encode())  # one write: lines of several ranks do not mix
        finally:
            os.close(descriptor)


def read_events(path: Path) -> Iterator[dict[str, Any]]:
    """Whole lines only: a process may be writing one."""
    if path.exists():
        for line in path.read_text().splitlines(keepends=True):
            if line.endswith("\n"):
                yield json.loads(line)
