"""What the monitor logs, and what of it the progress bar shows."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_bytescheduler import OptionError, PerformanceMonitor


class Strategy:
    """What the monitor uses of a strategy."""

    def report_batch(self, *, samples: int, loss: float | None) -> None:
        self.samples = samples

    def progress(self) -> dict[str, float]:
        return {"round": 3.0, "loss": 0.5}


def logged(monitor: PerformanceMonitor) -> dict[str, bool]:
    """By name, whether the progress bar shows it."""
    shown: dict[str, bool] = {}

    def log_dict(values: dict[str, float], *, prog_bar: bool, **_: Any) -> None:
        shown.update(dict.fromkeys(values, prog_bar))

    trainer: Any = SimpleNamespace(strategy=Strategy(), log_every_n_steps=1, barebones=False, global_step=4)
    module: Any = SimpleNamespace(log_dict=log_dict)
    monitor.on_train_batch_end(trainer, module, torch.tensor(1.0), torch.ones(8, 2), 0)
    assert trainer.strategy.samples == 8
    return shown


def test_what_tells_of_the_round_is_in_the_progress_bar() -> None:
    assert logged(PerformanceMonitor()) == {"diloco/round": True, "diloco/loss": False}


def test_nothing_is_logged_without_metrics() -> None:
    assert logged(PerformanceMonitor(log_metrics=False)) == {}


def test_its_option_is_checked() -> None:
    with pytest.raises(OptionError, match="log_metrics='yes'"):
        PerformanceMonitor(log_metrics="yes")  # type: ignore[arg-type]
