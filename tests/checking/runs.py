"""Runs that were never made: what a check would have found in their folders."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from lightning_bytescheduler.checking.report import RankRecord, RunResult, RunSpec

__all__ = ["Trainings", "made"]

NAMES = tuple(f"layers.{index}.weight" for index in range(8))


def made(spec: RunSpec, *ranks: RankRecord) -> RunResult:
    return RunResult(spec=spec, ranks=list(ranks))


class Trainings:
    """Stands in for the processes: knows what a run of each kind would leave behind.

    Args:
        stale: Whether a parameter is read too early from step 4 on where updates are deferred.
        world_size: Number of ranks.
        noisy: Whether each run has other losses.
        sum_order: By how much the losses of ``bytescheduler`` are off, as a share.
        needs_norm: Whether updates wait for the norm of all gradients.
        error: What runs of a strategy fail with, by the strategy.
        change: Of what a run has written down.
    """

    def __init__(
        self,
        *,
        stale: bool = False,
        world_size: int = 2,
        noisy: bool = False,
        sum_order: float = 0.0,
        needs_norm: bool = False,
        error: dict[str, str] | None = None,
        change: Callable[[RunSpec, RankRecord], RankRecord] = lambda _, record: record,
    ) -> None:
        self.stale = stale
        self.world_size = world_size
        self.noisy = noisy
        self.sum_order = sum_order
        self.needs_norm = needs_norm
        self.error = error or {}
        self.change = change
        self.made: list[tuple[RunSpec, str]] = []

    def __call__(self, spec: RunSpec, why: str) -> RunResult:
        self.made.append((spec, why))
        if spec.strategy in self.error:
            return RunResult(spec=spec, error=self.error[spec.strategy])
        off = self._off(spec)
        losses = [1.0 / (step + 1) * (1.0 + (off(step))) for step in range(spec.steps)]
        value = losses[-1]
        record = RankRecord(
            rank=0,
            world_size=self.world_size,
            steps=spec.steps,
            losses=tuple(loss.hex() for loss in losses),
            loss_steps=tuple(range(spec.steps)),
            initial=dict.fromkeys(NAMES, "start"),
            weights=dict.fromkeys(NAMES, value.hex()),
            metrics={"loss": value.hex()},
            trace={s: dict.fromkeys(NAMES, losses[s - 1].hex()) for s in range(1, spec.steps + 1)},
            needs_norm=self.needs_norm and spec.strategy != "ddp",
        )
        return made(spec, *(self.change(spec, replace(record, rank=rank)) for rank in range(self.world_size)))

    def _off(self, spec: RunSpec) -> Callable[[int], float]:
        noise = len(self.made) if self.noisy else 0
        order = self.sum_order if spec.strategy != "ddp" else 0.0
        reads = self.stale and spec.strategy in ("configured", "strict")
        return lambda step: 0.01 * noise + order * min(step, 1) + (0.001 if reads and step >= 3 else 0.0)
