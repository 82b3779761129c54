"""What to expect of a model on a network, as figures: what was measured, what follows from it, what is recommended."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lightning_bytescheduler.advice.expectations import BYTESCHEDULER, DDP, DDP_BEST, Expectation, MeasuredStep
from lightning_bytescheduler.checks import require_one_of
from lightning_bytescheduler.simulation.link import LinkModel

__all__ = ["AdviceFigures"]

_EQUAL = 1.03  # steps that differ by less than this are the same, as far as a model of a network can tell
_MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class AdviceFigures:
    """What to expect, as numbers.

    Attributes:
        measured: The model's step on one worker; of several, on the slowest.
        link: The network.
        expectations: One for each strategy.
        ceiling_seconds: Seconds that no order of these bytes can get a step below.
        communication_seconds: Seconds of sending all gradients once, with nothing else to do.
        worker_seconds: Seconds of a step on each worker, where several were measured.
    """

    measured: MeasuredStep
    link: LinkModel
    expectations: tuple[Expectation, ...]
    ceiling_seconds: float
    communication_seconds: float
    worker_seconds: tuple[float, ...] = ()

    @property
    def compute_seconds(self) -> float:
        """Seconds of a step on one worker that talks to nobody."""
        return self.measured.profile.compute_seconds

    @property
    def limited_by(self) -> str:
        """``"link"`` if communication cannot be hidden whatever the order, else ``"compute"``."""
        return "link" if self.ceiling_seconds > _EQUAL * self.compute_seconds else "compute"

    @property
    def recommended(self) -> Expectation:
        """Of the strategies that train as ``ddp`` does the simplest that is within 3% of the fastest."""
        exact = [self.of(strategy) for strategy in (DDP, DDP_BEST, BYTESCHEDULER)]
        fastest = min(expected.step_seconds for expected in exact)
        return next(expected for expected in exact if expected.step_seconds <= _EQUAL * fastest)

    @property
    def line(self) -> str:
        """The line of Python that does what is recommended."""
        recommended = self.recommended
        if recommended.strategy == BYTESCHEDULER:
            return 'trainer = L.Trainer(strategy="bytescheduler")'
        if recommended.strategy == DDP or recommended.bucket_bytes is None:
            return 'trainer = L.Trainer(strategy="ddp")'
        return f"trainer = L.Trainer(strategy=DDPStrategy(bucket_cap_mb={recommended.bucket_bytes / _MIB:g}))"

    def of(self, strategy: str) -> Expectation:
        """What is expected of a strategy.

        Raises:
            OptionError: If there is none of this name.
        """
        by_name = {expected.strategy: expected for expected in self.expectations}
        return by_name[require_one_of("strategy", strategy, by_name)]

    def efficiency(self, step_seconds: float) -> float:
        """Share of a step that computes: how much of the workers' joint speed is left."""
        return self.compute_seconds / step_seconds

    def speedup(self, step_seconds: float) -> float:
        """How many times as many samples all workers train on as one alone does."""
        return self.link.workers * self.efficiency(step_seconds)

    def samples_per_second(self, step_seconds: float) -> float | None:
        """Of all workers together; ``None`` if the batch does not show how many samples it has."""
        if self.measured.batch_size is None:
            return None
        return self.link.workers * self.measured.batch_size / step_seconds

    def figures(self) -> dict[str, Any]:
        """The figures as what JSON can hold; times in seconds, bandwidth in bytes per second."""
        measured, link = self.measured, self.link
        return {
            "model": measured.profile.name,
            "device": measured.device,
            "batch_size": measured.batch_size,
            "parameter_bytes": measured.profile.parameter_bytes,
            "workers": link.workers,
            "bandwidth": link.bandwidth,
            "latency": link.latency,
            "compute_seconds": self.compute_seconds,
            "waiting_seconds": measured.waiting,
            "communication_seconds": self.communication_seconds,
            "ceiling_seconds": self.ceiling_seconds,
            "worker_seconds": list(self.worker_seconds),
            "limited_by": self.limited_by,
            "recommended": self.recommended.strategy,
            "line": self.line,
            "unused_parameters": list(measured.unused),
            "synchronised_because": list(measured.synchronised_because),
            "norm_needed_by": list(measured.norm_needed_by),
            "strategies": [
                {
                    "strategy": expected.strategy,
                    "step_seconds": expected.step_seconds,
                    "efficiency": self.efficiency(expected.step_seconds),
                    "samples_per_second": self.samples_per_second(expected.step_seconds),
                    "same_training": expected.same_training,
                    "bucket_bytes": expected.bucket_bytes,
                    "inner_steps": expected.inner_steps,
                }
                for expected in self.expectations
            ],
            "layers": [
                {
                    "name": layer.name,
                    "parameter_bytes": layer.parameter_bytes,
                    "forward_seconds": layer.forward_seconds,
                    "backward_seconds": layer.backward_seconds,
                }
                for layer in measured.profile.layers
            ],
        }
