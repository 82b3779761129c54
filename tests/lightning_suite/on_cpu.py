"""Runs on CPU what Lightning runs only with GPUs: most of its tests of ddp ask for GPUs without needing one.

Likewise tests that want a process of their own are not skipped: the script gives them one.
"""

from __future__ import annotations

import functools
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.utilities import testing

__all__ = ["ON_CPU", "STANDALONE", "skip_less", "train_on_cpu"]

# In the marks of the tests that are concerned.
ON_CPU = "on_cpu"
STANDALONE = "standalone"

_on_cpu = False


def skip_less() -> None:
    """Tests imported from now on are not skipped for want of GPUs or of a process; trainers obey `train_on_cpu`."""
    reasons_of, initialise = testing._runif_reasons, Trainer.__init__

    def fewer_reasons(
        *, min_cuda_gpus: int = 0, standalone: bool = False, **requirements: Any
    ) -> tuple[list[str], dict[str, bool]]:
        reasons, marks = reasons_of(**requirements)
        return reasons, marks | {ON_CPU: min_cuda_gpus > 0, STANDALONE: standalone}

    @functools.wraps(initialise)
    def init(self: Trainer, *args: Any, **kwargs: Any) -> None:
        if _on_cpu and kwargs.get("accelerator") in ("gpu", "cuda"):
            kwargs["accelerator"] = "cpu"
            if isinstance(kwargs.get("devices"), list):  # CPUs have no indices
                kwargs["devices"] = len(kwargs["devices"])
        initialise(self, *args, **kwargs)

    testing._runif_reasons = fewer_reasons
    Trainer.__init__ = init  # type: ignore[method-assign]


def train_on_cpu(on_cpu: bool) -> None:
    """Whether trainers that are made from now on take CPUs for GPUs."""
    global _on_cpu
    _on_cpu = on_cpu
