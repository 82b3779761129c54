"""Runs that were never made: what a check would have found in their folders."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from lightning_bytescheduler.checking.runs import RankRecord, RunResult, RunSpec

__all__ = ["Trainings", "made"]

NAMES = tuple(f"layers.{index}.weight" for index in range(8))


def made(spec: RunSpec, *ranks: RankRecord, folder: Path = Path()) -> RunResult:
    return RunResult(spec=spec, folder=folder, ranks=list(ranks))


class Trainings:
    """Stands in for the processes: knows what a run of each kind would leave behind.

    Args:
        folder: For files of weights.
        stale: Parameters that are read too early from step 4 on, by their index, where all of them are deferred.
        world_size: Number of ranks.
        noisy: Whether each run has other losses.
        error: What runs of a strategy fail with, by the strategy.
    """

    def __init__(
        self,
        folder: Path,
        *,
        stale: tuple[int, ...] = (),
        world_size: int = 2,
        noisy: bool = False,
        sum_order: float = 0.0,
        needs_norm: bool = False,
        error: dict[str, str] | None = None,
        change: Callable[[RunSpec, RankRecord], RankRecord] = lambda _, record: record,
    ) -> None:
        self.folder = folder
        self.stale = {NAMES[index] for index in stale}
        self.world_size = world_size
        self.noisy = noisy
        self.sum_order = sum_order
        self.needs_norm = needs_norm
        self.error = error or {}
        self.change = change
        self.made: list[tuple[RunSpec, str]] = []

    def __call__(self, spec: RunSpec, why: str) -> RunResult:
        self.made.append((spec, why))
        folder = self.folder / str(len(self.made))
        folder.mkdir()
        if spec.strategy in self.error:
            return RunResult(spec=spec, folder=folder, error=self.error[spec.strategy])
        off = self._off(spec)
        losses = [1.0 / (step + 1) * (1.0 + (off(step))) for step in range(spec.steps)]
        value = losses[-1]
        torch.save({"weights": {name: torch.full((4,), value) for name in NAMES}}, folder / "state.pt")
        record = RankRecord(
            rank=0,
            world_size=self.world_size,
            strategy=spec.strategy,
            steps=spec.steps,
            losses=tuple(loss.hex() for loss in losses),
            loss_steps=tuple(range(spec.steps)),
            initial=dict.fromkeys(NAMES, "start"),
            weights=dict.fromkeys(NAMES, value.hex()),
            metrics={"loss": value.hex()},
            seconds=(0.2 if spec.scheduled else 0.3,) * spec.steps,
            trace={s: dict.fromkeys(NAMES, losses[s - 1].hex()) for s in range(1, spec.steps + 1)}
            if spec.traced
            else {},
            trained=NAMES,
            needs_norm=self.needs_norm and spec.scheduled,
        )
        record = self.change(spec, record)
        return made(spec, *(replace(record, rank=rank) for rank in range(self.world_size)), folder=folder)

    def _off(self, spec: RunSpec) -> Callable[[int], float]:
        noise = len(self.made) if self.noisy else 0
        order = self.sum_order if spec.scheduled or spec.nudged else 0.0
        deferred = spec.strategy in ("configured", "strict")
        reads = deferred and not self.stale <= set(spec.early)
        return lambda step: 0.01 * noise + order * min(step, 1) + (0.001 if reads and step >= 3 else 0.0)
