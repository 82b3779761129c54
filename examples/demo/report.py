"""How a rank tells the demo what it does: lines of JSON in a file of its own.

Files, not pipes, because they pass through every way of starting a rank, and remain to be read after a
failure.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class RankResult:
    """What one rank measured.

    Args:
        parameters: Number of trained parameters.
        step_seconds: Duration of each step, from the end of the one before; one less than there were steps.
        communication_seconds: One all-reduce of as many bytes as there are gradients, with nothing else going
            on; None for a rank that trains alone.
        validation_loss: Mean cross-entropy in nats per character on the held-out files, after training.
        digests: SHA-256 of every tensor of the final ``state_dict``, by its name.
        weights: The final ``state_dict``, saved by rank 0.
    """

    parameters: int
    step_seconds: list[float]
    communication_seconds: float | None
    validation_loss: float
    digests: dict[str, str]
    weights: str | None


def report_path(folder: Path, rank: int) -> Path:
    """The report of one rank of the run in ``folder``."""
    return folder / f"rank{rank}.jsonl"


class ReportWriter:
    """The rank's side of a report.

    Args:
        path: The file; created if missing, else continued.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf-8")

    def step(self, step: int, loss: float) -> None:
        """Tells that ``step`` steps are done."""
        self._write({"event": "step", "step": step, "loss": loss})

    def result(self, result: RankResult) -> None:
        """Tells the outcome; nothing comes after it."""
        self._write({"event": "result", **asdict(result)})
        self._file.close()

    def _write(self, event: dict[str, Any]) -> None:
        self._file.write(json.dumps(event) + "\n")
        self._file.flush()


class ReportReader:
    """The demo's side of a report: keeps what is known so far.

    Args:
        path: The file; it need not exist yet.

    Attributes:
        step: Steps done.
        loss: Training loss of the last step; NaN before the first.
        result: The outcome, once it is there.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self.step = 0
        self.loss = float("nan")
        self.result: RankResult | None = None

    def poll(self) -> bool:
        """Takes in what was written since the last call.

        Returns:
            Whether there was anything new.
        """
        if not self._path.exists():
            return False
        with self._path.open("rb") as file:
            file.seek(self._offset)
            written = file.read()
        # The last line may be half-written; it stays for the next call.
        complete = written[: written.rfind(b"\n") + 1]
        self._offset += len(complete)
        for line in complete.splitlines():
            self._take(json.loads(line))
        return bool(complete)

    def _take(self, event: dict[str, Any]) -> None:
        if event.pop("event") == "step":
            self.step, self.loss = event["step"], event["loss"]
        else:
            self.result = RankResult(**event)
