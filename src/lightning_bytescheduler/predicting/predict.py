"""``predict()``: measures a step of a user's module, and says what to expect of it on a network."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from lightning_bytescheduler.checks import require_whole
from lightning_bytescheduler.collectives.link_probe import probe_link
from lightning_bytescheduler.exceptions import OptionError, UnsupportedError
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
    link: LinkModel | None = None,
    workers: int | None = None,
    device: str | torch.device | None = None,
    precision: Any = None,
    gradient_clip_val: float | None = None,
    gradient_clip_algorithm: str | None = None,
    steps: int = STEPS,
    policies: Sequence[str] = (),
) -> Prediction:
    """Measure a few steps of a training, and say what to expect of it with each strategy on a network.

    Training happens on a copy: the module, the state of random numbers and of data loaders are left as they are. What
    was compiled in place, with ``Module.compile()``, runs uncompiled there. Print the answer, or take its figures.

    Args:
        module: What is trained.
        data: What its training data comes from: a DataLoader, a LightningDataModule, whatever ``Trainer.fit`` takes;
            left out where the module has a ``train_dataloader``.
        link: The network. Left out, it is measured by a handful of all-reduces over the default process group of
            torch.distributed, so that every process of the group has to call this function.
        workers: How many train together; by default those of the link.
        device: ``cpu`` or a CUDA device; by default CUDA where there is one.
        precision: As for the Trainer.
        gradient_clip_val: As for the Trainer.
        gradient_clip_algorithm: As for the Trainer.
        steps: How many steps to time; as many are watched layer by layer, after a warm-up.
        policies: Scheduling policies to play beside ByteScheduler's own, such as ``"fifo"``.

    Raises:
        OptionError: If an option's value is not allowed.
        UnsupportedError: If the training cannot be measured, there is no link to measure, or ``module`` is of the
            other package of Lightning.
    """
    require_whole("steps", steps, 1)
    require_same_package(module, "predict()")
    if not isinstance(module, pl.LightningModule):
        raise OptionError("module", module, "a LightningModule, as in predict(model, data, link=LinkModel(...))")
    where = _device(device)
    probed = link is None
    if link is None:
        link = _probed(where)
    elif not isinstance(link, LinkModel):
        allowed = 'a LinkModel, or left out to measure the link; such as LinkModel(workers=4, bandwidth="10Gbit/s")'
        raise OptionError("link", link, allowed)
    if workers is not None:
        link = replace(link, workers=workers)
    prediction.check(link, policies)
    options = {
        "precision": precision,
        "gradient_clip_val": gradient_clip_val,
        "gradient_clip_algorithm": gradient_clip_algorithm,
    }
    measured = measure_step(module, data, device=where, steps=steps, trainer_options=options)
    seconds: list[float] = []
    if probed:  # workers that take their steps together take the slowest one's time
        seconds = _of_all_workers(measured.profile.compute_seconds, where)
        measured = replace(measured, profile=measured.profile.scaled_to(max(seconds)))
    return prediction.predict(measured, link, policies=policies, worker_seconds=seconds)


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


def _probed(device: torch.device) -> LinkModel:
    """The link of the default process group."""
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() < 2:
        raise UnsupportedError(
            "There is no link to measure, as this process is alone: say what the link is like (on the command line "
            "with --bandwidth and --workers, in Python with link=LinkModel(...)), or start one process on each machine "
            "with torchrun."
        )
    world = dist.group.WORLD
    if world is None:
        raise UnsupportedError("torch.distributed has no default process group: call init_process_group first.")
    estimate = probe_link(world, device)
    return LinkModel.measured(workers=dist.get_world_size(), alpha=estimate.alpha, beta=estimate.beta)


def _of_all_workers(seconds: float, device: torch.device) -> list[float]:
    mine = torch.tensor([seconds], dtype=torch.float64, device=device)
    everybody = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everybody, mine)
    return [float(one.item()) for one in everybody]
