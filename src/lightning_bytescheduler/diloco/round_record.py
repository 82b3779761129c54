"""The file in which worker 0 keeps what each worker did in each round.

The record of a run's rounds: what each worker did when. One line of JSON per round.

Times are seconds of the batch scheduler's clock, when its messages came in. Limits: where sending overlaps with
training, a worker trains while it is recorded as sending, waiting or receiving.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Literal, get_args

import lightning.pytorch as pl

from lightning_bytescheduler.exceptions import OptionError

__all__ = [
    "RECORD_NAME",
    "Activity",
    "RoundFile",
    "RoundRecord",
    "WorkerRecord",
    "read_rounds",
    "waiting_share",
    "write_round",
]

log = logging.getLogger(__name__)

RECORD_NAME = "rounds.jsonl"
"""What a training calls the file."""

Activity = Literal["receiving", "working", "sending", "waiting"]


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerRecord:
    """One worker's part in a round.

    Attributes:
        worker: Who.
        steps: Taken.
        samples: Processed.
        merged: Whether its update became part of the weights.
        spans: What it did, from when, until when.
    """

    worker: str
    steps: int
    samples: int
    merged: bool
    spans: tuple[tuple[Activity, float, float], ...]

    def seconds(self, activity: Activity) -> float:
        """Time spent on one kind of activity."""
        return sum(end - start for kind, start, end in self.spans if kind == activity)


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundRecord:
    """One round.

    Attributes:
        round: Its number, from 1.
        start: When workers were told to start.
        end: When its updates were merged.
        decided: When its end was scheduled, or ``None`` if that was not needed.
        workers: Those who took part, until they left.
    """

    round: int
    start: float
    end: float
    decided: float | None
    workers: tuple[WorkerRecord, ...]

    @property
    def samples(self) -> int:
        """That became part of the weights."""
        return sum(worker.samples for worker in self.workers if worker.merged)

    @property
    def merged(self) -> tuple[str, ...]:
        """Whose updates became part of the weights."""
        return tuple(worker.worker for worker in self.workers if worker.merged)


def waiting_share(rounds: Iterable[RoundRecord]) -> float:
    """Share of the workers' time that they waited for each other; 0 without any time."""
    workers = [worker for record in rounds for worker in record.workers]
    total = sum(end - start for worker in workers for _, start, end in worker.spans)
    return sum(worker.seconds("waiting") for worker in workers) / total if total else 0.0


def write_round(record: RoundRecord, file: IO[str]) -> None:
    """Append a round to an open text file, and see to it that it is there if the run dies."""
    file.write(json.dumps(asdict(record), allow_nan=False) + "\n")
    file.flush()


def read_rounds(path: str | os.PathLike[str]) -> list[RoundRecord]:
    """Read the rounds of a run. The last line may be cut short, as when the run has died.

    Raises:
        OptionError: If the file is not the record of a run; names the line.
        OSError: If it cannot be read.
    """
    text = Path(path).read_text(encoding="utf-8", errors="replace")
    lines = text.split("\n")
    records = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            records.append(_record(json.loads(line)))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            if number == len(lines) and records:
                break
            allowed = f"a file of rounds, one to a line, which line {number} is not"
            raise OptionError("record", os.fspath(path), allowed) from error
    return records


def _record(values: dict[str, object]) -> RoundRecord:
    def worker(fields: dict[str, object]) -> WorkerRecord:
        spans = fields.pop("spans")
        if not isinstance(spans, list) or any(kind not in get_args(Activity) for kind, _, _ in spans):
            raise ValueError("spans")
        read = WorkerRecord(
            spans=tuple((kind, float(start), float(end)) for kind, start, end in spans),
            **fields,  # type: ignore[arg-type]
        )
        if not isinstance(read.worker, str) or not isinstance(read.steps + read.samples, int):
            raise ValueError("worker")
        return read

    workers = values.pop("workers")
    if not isinstance(workers, list):
        raise ValueError("workers")
    record = RoundRecord(workers=tuple(worker(fields) for fields in workers), **values)  # type: ignore[arg-type]
    if not isinstance(record.round, int) or not record.start <= record.end:
        raise ValueError("round")
    return record


class RoundFile:
    """Written by one thread; a disk that is full must not end a training.

    Args:
        path: Of the file, or ``None`` to write nothing.
        append: Whether to go on with what is there.
    """

    def __init__(self, path: Path | None, *, append: bool) -> None:
        self._path = path
        self._mode = "a" if append else "w"
        self._file: IO[str] | None = None

    @classmethod
    def for_training(cls, trainer: pl.Trainer, path: str | None, *, resumed: bool) -> RoundFile:
        """The file of a run: as the user said, or in the run's folder. Trial runs have none. Called on all ranks."""
        if trainer.fast_dev_run or trainer.barebones:  # type: ignore[attr-defined]
            return cls(None, append=False)
        folder = trainer.log_dir or trainer.default_root_dir  # the answer travels among the ranks of a worker
        if not trainer.is_global_zero:
            return cls(None, append=False)
        return cls(Path(folder) / RECORD_NAME if path is None else Path(path), append=resumed)

    def write(self, record: RoundRecord) -> None:
        """Append a round."""
        if self._path is None:
            return
        try:
            if self._file is None:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._file = self._path.open(self._mode, encoding="utf-8")
            write_round(record, self._file)
        except OSError as error:
            log.warning("Rounds are not recorded any more: %s", error)
            self._path = None

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None
