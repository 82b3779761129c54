"""The record of a search: one JSON object a line, appended as things happen."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from lightning_bytescheduler.exceptions import OptionError
from lightning_bytescheduler.tuning.measurement import StepTime
from lightning_bytescheduler.tuning.point import TuningPoint

__all__ = ["KINDS", "TrialEntry", "append_entries", "read_record"]

KINDS = ("start", "ddp", "guess", "search", "confirm", "chosen", "drift", "failed")
"""The point in force at the start, DDP's behaviour, a guess from outside, a point of the search, a point measured
again; the choice; the step time left what was chosen for; the search could not go on."""

_OUTCOMES = ("measured", "abandoned")


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialEntry:
    """What happened at one point, or what was decided.

    Attributes:
        search: Which search, from 0; another one follows a drift.
        kind: One of ``KINDS``.
        step: At which step it ended.
        credit: In parameters; ``None`` for plain DDP.
        partition_size: In parameters; ``None`` for plain DDP.
        step_seconds: Of a typical step.
        error_seconds: Standard error of ``step_seconds``.
        noise: Standard deviation of undisturbed steps, as a share of ``step_seconds``.
        steps: How many were measured.
        outcome: ``"measured"``, or ``"abandoned"`` if it was clearly worse or too costly to go on with.
        lost_seconds: Against the best that was known.
        note: For a reader; may be empty.
    """

    search: int
    kind: str
    step: int
    credit: int | None
    partition_size: int | None
    step_seconds: float
    error_seconds: float
    noise: float
    steps: int
    outcome: str = "measured"
    lost_seconds: float = 0.0
    note: str = ""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise OptionError("kind", self.kind, f"one of {', '.join(KINDS)}")
        if self.outcome not in _OUTCOMES:
            raise OptionError("outcome", self.outcome, f"one of {', '.join(_OUTCOMES)}")
        for option, least in (("search", 0), ("step", 0), ("steps", 0)):
            value = getattr(self, option)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise OptionError(option, value, f"a whole number, {least} or more")
        for option in ("step_seconds", "error_seconds", "noise", "lost_seconds"):
            value = getattr(self, option)
            # Compared this way round, so that "not a number" is refused.
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < float("inf"):
                raise OptionError(option, value, "a finite number, 0 or more")
        TuningPoint(credit=self.credit, partition_size=self.partition_size)

    @property
    def point(self) -> TuningPoint:
        """Where it was."""
        return TuningPoint(credit=self.credit, partition_size=self.partition_size)

    @property
    def step_time(self) -> StepTime:
        """What was measured."""
        return StepTime(self.step_seconds, self.error_seconds, self.noise * self.step_seconds, self.steps)

    @property
    def is_trial(self) -> bool:
        """Whether it is one of the points that count against the number of trials."""
        return self.kind in ("start", "ddp", "guess", "search")

    def state_dict(self) -> dict[str, Any]:
        """Plain types; also what a logger may want."""
        return asdict(self)


def append_entries(file: str | os.PathLike[str], entries: Iterable[TrialEntry]) -> None:
    """Add entries to a record; the file and its parent directories are created.

    Raises:
        OSError: If the file cannot be written.
    """
    target = Path(file)
    target.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(entry.state_dict()) + "\n" for entry in entries)
    with target.open("a", encoding="utf-8") as stream:
        stream.write(text)


def read_record(file: str | os.PathLike[str]) -> tuple[TrialEntry, ...]:
    """Read a record. A last line that was cut off, by a crash, is left out.

    Raises:
        OptionError: If the file is no record; names the line.
        OSError: If the file cannot be read.
    """
    lines = Path(file).read_bytes().split(b"\n")
    entries = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            entries.append(_entry(json.loads(line)))
        except (ValueError, TypeError) as error:
            if number == len(lines):
                break  # no newline after it
            raise OptionError("record", f"{os.fspath(file)}:{number}", f"lines of a tuning record ({error})") from error
    return tuple(entries)


def _entry(values: object) -> TrialEntry:
    if not isinstance(values, dict):
        raise TypeError("not a JSON object")
    known = {field.name for field in fields(TrialEntry)}
    # A newer version may say more.
    return TrialEntry(**{name: value for name, value in values.items() if name in known})
