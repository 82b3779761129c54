"""The answer: what to expect of a model on a network, as figures and in words."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_bytescheduler.advice.expectations import (
    BYTESCHEDULER,
    DDP,
    DDP_BEST,
    Expectation,
    MeasuredStep,
    ceiling,
    communication_seconds,
    expectations,
)
from lightning_bytescheduler.advice.picture import draw_advice
from lightning_bytescheduler.advice.words import sentences, table
from lightning_bytescheduler.exceptions import OptionError
from lightning_bytescheduler.simulation.link import LinkModel

__all__ = ["Advice", "check_link", "give_advice"]

_EQUAL = 1.03  # steps that differ by less than this are the same, as far as a model of a network can tell
_MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class Advice:
    """What to expect. Prints as text.

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
        names = {expected.strategy: expected for expected in self.expectations}
        if strategy not in names:
            raise OptionError("strategy", strategy, f"one of {', '.join(map(repr, names))}")
        return names[strategy]

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

    def table(self) -> list[tuple[str, ...]]:
        """The figures as rows of text, headings first."""
        return table(self)

    def text(self) -> str:
        """The advice in plain words, a paragraph a line."""
        return "\n".join(sentences(self))

    def __str__(self) -> str:
        return self.text()

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

    def save(self, file: str | os.PathLike[str]) -> None:
        """Write the figures as JSON; ``lightning-bytescheduler predict --profile`` reads the layers from it.

        Raises:
            OSError: If the file cannot be written.
        """
        figures = {"name": self.measured.profile.name, **self.figures()}
        Path(file).write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")

    def draw(self, out: str | os.PathLike[str]) -> None:
        """Draw the strategies' step times, and the ceiling.

        Args:
            out: The file to write; its suffix names the format (png, svg, pdf, ...). Parent directories are created.

        Raises:
            ImportError: If matplotlib is not installed; the message names the extra to install.
            OptionError: If matplotlib does not know the suffix.
            OSError: If the file cannot be written.
        """
        draw_advice(self, out)


def give_advice(measured: MeasuredStep, link: LinkModel, *, worker_seconds: Sequence[float] = ()) -> Advice:
    """Say what to expect of a measured model on a link.

    Args:
        measured: The model.
        link: The network.
        worker_seconds: Of a step on each worker, where several were measured.

    Raises:
        OptionError: If there are less than two workers, or the link reduces by servers.
    """
    check_link(link)
    return Advice(
        measured=measured,
        link=link,
        expectations=expectations(measured, link),
        ceiling_seconds=ceiling(measured, link),
        communication_seconds=communication_seconds(measured.profile, link),
        worker_seconds=tuple(worker_seconds),
    )


def check_link(link: LinkModel) -> None:
    """Refuse networks there is nothing to say about.

    Raises:
        OptionError: If there are less than two workers, or the link reduces by servers.
    """
    if link.workers < 2:
        raise OptionError("workers", link.workers, "2 or more: one worker has nobody to talk to")
    if link.algorithm == "push_pull":
        raise OptionError("algorithm", link.algorithm, "'ring' or 'halving_doubling': training has no servers here")
