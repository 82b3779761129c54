"""Runs on CPU what Lightning runs only with GPUs: most of its tests of ddp ask for GPUs without needing one."""

from __future__ import annotations

import functools
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.utilities import testing

__all__ = ["ON_CPU", "ask_for_no_gpus", "train_on_cpu"]

ON_CPU = "on_cpu"  # in the marks of the tests that are concerned

_on_cpu = False


def ask_for_no_gpus() -> None:
    """Tests that are imported from now on are not skipped for want of GPUs, and trainers obey `train_on_cpu`."""
    reasons_of, initialise = testing._runif_reasons, Trainer.__init__

    def without_gpus(*, min_cuda_gpus: int = 0, **requirements: Any) -> tuple[list[str], dict[str, bool]]:
        reasons, marks = reasons_of(**requirements)
        return reasons, marks | ({ON_CPU: True} if min_cuda_gpus else {})

    @functools.wraps(initialise)
    def init(self: Trainer, *args: Any, **kwargs: Any) -> None:
        if _on_cpu and kwargs.get("accelerator") in ("gpu", "cuda"):
            kwargs["accelerator"] = "cpu"
        initialise(self, *args, **kwargs)

    testing._runif_reasons = without_gpus
    Trainer.__init__ = init  # type: ignore[method-assign]


def train_on_cpu(on_cpu: bool) -> None:
    """Whether trainers that are made from now on take CPUs for GPUs."""
    global _on_cpu
    _on_cpu = on_cpu
