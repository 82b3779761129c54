"""Counters of the scheduler, readable at any time."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields


@dataclass(slots=True)
class SchedulerStatistics:
    """Running totals of one rank since the start of ``fit``.

    Attributes:
        steps: Optimizer steps.
        overlapped_steps: Steps with at least one update deferred past the step's end.
        updates: Parameter updates, deferred or not.
        deferred_updates: Parameter updates applied after ``optimizer.step`` had returned.
        bytes_sent: Bytes this rank sent for gradients, ``2(n-1)/n`` per byte reduced; compressed bytes for compressed
            gradients.
        bytes_uncompressed: What ``bytes_sent`` would be without compression.
        bytes_compressed: The part of ``bytes_uncompressed`` that travelled compressed.
        sub_tasks: Partitions sent.
        communication_s: Seconds during which at least one partition was in flight.
        exposed_s: Seconds the training waited for gradients, at gates and at the end of backward passes; log, metrics
            and timeline use this figure.
        gate_wait_s: The part of ``exposed_s`` spent at gates in the forward pass.
        deferred_step_s: Seconds spent in deferred optimizer steps.
        codec_s: Seconds spent encoding, summing and decoding gradients, on other threads than the training's.
        residual_squares: Squared norm of what compression left out on this rank, summed over steps, in units of
            gradients divided by the number of ranks.
    """

    steps: int = 0
    overlapped_steps: int = 0
    updates: int = 0
    deferred_updates: int = 0
    bytes_sent: float = 0.0
    bytes_uncompressed: float = 0.0
    bytes_compressed: float = 0.0
    sub_tasks: int = 0
    communication_s: float = 0.0
    exposed_s: float = 0.0
    gate_wait_s: float = 0.0
    deferred_step_s: float = 0.0
    codec_s: float = 0.0
    residual_squares: float = 0.0

    @property
    def compression_ratio(self) -> float:
        """How many times fewer bytes travel than uncompressed; 1 before the first step."""
        return self.bytes_uncompressed / self.bytes_sent if self.bytes_sent else 1.0

    @property
    def compressed_share(self) -> float:
        """Fraction of the gradients' bytes that travelled compressed; 0 before the first step."""
        return self.bytes_compressed / self.bytes_uncompressed if self.bytes_uncompressed else 0.0

    @property
    def residual_norm(self) -> float:
        """Norm of what compression left out, as the root mean square over steps; 0 before the first step."""
        return math.sqrt(max(self.residual_squares, 0.0) / self.steps) if self.steps else 0.0

    @property
    def deferred_share(self) -> float:
        """Fraction of all updates that were deferred; 0 before the first step."""
        return self.deferred_updates / self.updates if self.updates else 0.0

    @property
    def exposed_ms(self) -> float:
        """Mean milliseconds per step that the training waited for gradients; 0 before the first step."""
        return 1e3 * self.exposed_s / self.steps if self.steps else 0.0

    def copy(self) -> SchedulerStatistics:
        """Return a snapshot."""
        return SchedulerStatistics(**{f.name: getattr(self, f.name) for f in fields(self)})

    def since(self, earlier: SchedulerStatistics) -> SchedulerStatistics:
        """Return the difference to an earlier snapshot."""
        return SchedulerStatistics(**{f.name: getattr(self, f.name) - getattr(earlier, f.name) for f in fields(self)})
