"""What one training run is, in the form in which the demo hands it to the ranks."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from examples.demo.size import SMALL, TINY, GPTSize

RANKS = 2
SEED = 1

# No strategy at all: each rank trains by itself, which shows what computing alone costs.
ALONE = "alone"
DDP = "ddp"
BYTESCHEDULER = "bytescheduler"


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSpec:
    """One training run, the same for all of its ranks.

    Args:
        strategy: `ALONE`, `DDP` or `BYTESCHEDULER`.
        folder: Where the ranks leave reports, logs and weights; one run's own.
        steps: Optimizer steps.
        tiny: A model of toy size, to try the demo itself.
        nodes: As Lightning's ``num_nodes``.
        devices: As Lightning's ``devices``; ``nodes * devices`` is `RANKS`, or 1 for `ALONE`.
        bucket_mb: DDP's ``bucket_cap_mb``; None for DDP's default. For `DDP` only.
        timeline: Where `BYTESCHEDULER` writes its timeline.
    """

    strategy: str
    folder: Path
    steps: int
    tiny: bool = False
    nodes: int = 1
    devices: int = 1
    bucket_mb: float | None = None
    timeline: Path | None = None

    @property
    def size(self) -> GPTSize:
        """Dimensions of the model."""
        return TINY if self.tiny else SMALL

    @property
    def batch_size(self) -> int:
        """Windows per rank and step."""
        return 4 if self.tiny else 8

    @property
    def validation_batches(self) -> int:
        """Batches per rank of the validation after training."""
        return 2 if self.tiny else 16

    def save(self) -> Path:
        """Writes the specification into its folder.

        Returns:
            The file, for `load`.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / "run.json"
        path.write_text(json.dumps(asdict(self), default=str))
        return path

    @classmethod
    def load(cls, path: Path) -> RunSpec:
        """Reads what `save` wrote."""
        fields = json.loads(path.read_text())
        fields["folder"] = Path(fields["folder"])
        fields["timeline"] = fields["timeline"] and Path(fields["timeline"])
        return cls(**fields)
