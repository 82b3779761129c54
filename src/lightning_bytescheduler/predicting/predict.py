"""``predict()``: measures a step of a user's module, and says what to expect of it on a network."""

from __future__ import annotations

from typing import Any

import torch

from lightning_bytescheduler.checks import require_whole
from lightning_bytescheduler.exceptions import OptionError
from lightning_bytescheduler.lightning_api import pl
from lightning_bytescheduler.predicting import STEPS
from lightning_bytescheduler.predicting.profiled_fit import measure_step
from lightning_bytescheduler.registration import require_same_package
from lightning_bytescheduler.simulation import prediction
from lightning_bytescheduler.simulation.link import LinkModel
from lightning_bytescheduler.simulation.prediction import Prediction

__all__ = ["advise", "predict"]


def predict(
    module: pl.LightningModule,
    data: Any = None,
    *,
    link: LinkModel,
    device: str | torch.device | None = None,
    precision: Any = None,
    gradient_clip_val: float | None = None,
    gradient_clip_algorithm: str | None = None,
    steps: int = STEPS,
) -> Prediction:
    """Measure a few steps of a training, and say what to expect of it with each strategy on a network.

    Training happens on a copy: the module, the state of random numbers and of data loaders are left as they are. What
    was compiled in place, with ``Module.compile()``, runs uncompiled there. Print the answer, or take its figures.

    Args:
        module: What is trained.
        data: What its training data comes from: a DataLoader, a LightningDataModule, whatever ``Trainer.fit`` takes;
            left out where the module has a ``train_dataloader``.
        link: The network.
        device: ``cpu`` or a CUDA device; by default CUDA where there is one.
        precision: As for the Trainer.
        gradient_clip_val: As for the Trainer.
        gradient_clip_algorithm: As for the Trainer.
        steps: How many steps to time; as many are watched layer by layer, after a warm-up.

    Raises:
        OptionError: If an option's value is not allowed.
        UnsupportedError: If the training cannot be measured, or ``module`` is of the other package of Lightning.
    """
    require_whole("steps", steps, 1)
    require_same_package(module, "predict()")
    if not isinstance(module, pl.LightningModule):
        raise OptionError("module", module, "a LightningModule, as in predict(model, data, link=LinkModel(...))")
    where = _device(device)
    if not isinstance(link, LinkModel):
        raise OptionError("link", link, 'a LinkModel, such as LinkModel(workers=4, bandwidth="10Gbit/s")')
    prediction.check(link)
    options = {
        "precision": precision,
        "gradient_clip_val": gradient_clip_val,
        "gradient_clip_algorithm": gradient_clip_algorithm,
    }
    measured = measure_step(module, data, device=where, steps=steps, trainer_options=options)
    return prediction.predict(measured, link)


advise = predict
"""An older name of it."""


def _device(device: str | torch.device | None) -> torch.device:
    if device is None:
        return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError):
        found = None
    if found is None or found.type not in ("cpu", "cuda"):
        raise OptionError("device", device, "'cpu', 'cuda' or one CUDA device such as 'cuda:0'")
    if found.type == "cuda" and not torch.cuda.is_available():
        raise OptionError("device", device, "'cpu', as torch finds no CUDA device here")
    if found.type == "cuda" and found.index is None:
        return torch.device("cuda", torch.cuda.current_device())  # what sets the device wants to know which
    return found
