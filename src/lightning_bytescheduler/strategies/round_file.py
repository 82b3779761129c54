"""The file in which worker 0 keeps what each worker did in each round."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import IO

import lightning.pytorch as pl

from lightning_bytescheduler.diloco import RoundRecord, write_round
from lightning_bytescheduler.diloco.round_record import RECORD_NAME

__all__ = ["RoundFile"]

log = logging.getLogger(__name__)


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
