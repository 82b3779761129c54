"""The record of a run's rounds: what each worker did when. One line of JSON per round, written by worker 0.

Times are seconds of the batch scheduler's clock, when its messages came in. Limits: where sending overlaps with
training, a worker trains while it is recorded as sending, waiting or receiving.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Annotated, Literal, TypeAlias

import msgspec

from lightning_bytescheduler.checks import read_lines
from lightning_bytescheduler.exceptions import OptionError

log = logging.getLogger(__name__)

RECORD_NAME = "rounds.jsonl"
"""What a training calls the file."""

Activity = Literal["receiving", "working", "sending", "waiting"]

_Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]


class WorkerRound(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One worker's part in a round.

    Attributes:
        worker: Who.
        steps: Taken.
        samples: Processed.
        merged: Whether its pseudo-gradient became part of the weights.
        spans: What it did, from when, until when.
    """

    worker: str
    steps: _Count
    samples: _Count
    merged: bool
    spans: tuple[tuple[Activity, float, float], ...]

    def seconds(self, activity: Activity) -> float:
        """Time spent on one kind of activity."""
        return sum(end - start for kind, start, end in self.spans if kind == activity)


class LateUpdate(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A pseudo-gradient that came after its round was over, during this one, and was dropped.

    Attributes:
        worker: Whose.
        round: In which it was made.
        samples: Processed for it.
    """

    worker: str
    round: _Count
    samples: _Count


class RoundRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One round.

    Attributes:
        round: Its number, from 1.
        start: When workers were told to start.
        end: When its pseudo-gradients were merged.
        decided: When its end was scheduled, or ``None`` if that was not needed.
        workers: Those who took part; who has left before the end was decided, only if what it sent was there.
        late: What came during this round and belonged to an earlier one.
        deadline: Until when pseudo-gradients were waited for at the longest, with the whole grace, or ``None`` where
            nothing was decided.
        metrics: Means over the round and all workers, by name; finite.
    """

    round: _Count
    start: float
    end: float
    decided: float | None
    workers: tuple[WorkerRound, ...]
    late: tuple[LateUpdate, ...] = ()
    deadline: float | None = None
    metrics: dict[str, float] = {}  # copied for each record

    @property
    def samples(self) -> int:
        """That became part of the weights."""
        return sum(worker.samples for worker in self.workers if worker.merged)

    @property
    def merged(self) -> tuple[str, ...]:
        """Whose pseudo-gradients became part of the weights."""
        return tuple(worker.worker for worker in self.workers if worker.merged)


def waiting_share(rounds: Iterable[RoundRecord]) -> float:
    """Share of the workers' time that they waited for each other; 0 without any time."""
    workers = [worker for record in rounds for worker in record.workers]
    total = sum(end - start for worker in workers for _, start, end in worker.spans)
    return sum(worker.seconds("waiting") for worker in workers) / total if total else 0.0


def read_rounds(path: str | os.PathLike[str]) -> list[RoundRecord]:
    """Read the rounds of a run; see ``read_lines``."""
    return read_lines(path, _read, "a file of rounds")


def _read(line: bytes) -> RoundRecord:
    record = _DECODER.decode(line)
    if record.start > record.end:
        raise ValueError("it ends before it starts")
    return record


_DECODER = msgspec.json.Decoder(RoundRecord)


class RoundFile:
    """Where a training writes its rounds. For one thread; a disk that is full does not end the training.

    Args:
        path: Of the file, or ``None`` to write nothing.
        append: Whether to go on with what is there.
        option: The option that named the file, if the user did: then it is opened at once.

    Raises:
        OptionError: If a file that the user named cannot be written.
    """

    def __init__(self, path: Path | None, *, append: bool, option: str = "") -> None:
        self._path = path
        self._mode = "a" if append else "w"
        self._file: IO[str] | None = None
        if option and path is not None:
            try:
                self._file = self._open(path)
            except OSError as error:
                raise OptionError(option, os.fspath(path), f"a file that can be written ({error.strerror})") from error

    def write(self, record: RoundRecord) -> None:
        """Append a round."""
        if self._path is None:
            return
        try:
            if self._file is None:
                self._file = self._open(self._path)
            self._file.write(msgspec.json.encode(record).decode() + "\n")
            self._file.flush()  # it is there if the run dies
        except OSError as error:
            log.warning("Rounds are not recorded any more: %s", error)
            self._path = None

    def _open(self, path: Path) -> IO[str]:
        path.parent.mkdir(parents=True, exist_ok=True)
        return path.open(self._mode, encoding="utf-8")

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None
