"""In each of the user's processes: the strategy is replaced, the first fit recorded, and the process ended after it."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric import Fabric
from lightning.pytorch.trainer import trainer as trainer_module

from lightning_bytescheduler.checking.chosen_strategy import strategy_for
from lightning_bytescheduler.checking.recorder import Recorder
from lightning_bytescheduler.checking.run_spec import SPEC_VARIABLE, RunSpec
from lightning_bytescheduler.exceptions import UnsupportedError

__all__ = ["install", "refuse", "refuse_foreign", "seed_everything", "watch_fits"]

STARTED = "started.txt"
"""Made when Lightning was imported."""

REFUSED = "refused.txt"
"""Where a run says why the training cannot be checked."""

_FOREIGN = (
    "The script trains with the separate 'pytorch_lightning' package, which lightning-bytescheduler does not extend. "
    "Use `import lightning as L` (or `from lightning import pytorch as pl`)."
)
_FABRIC = "The script trains with Fabric, which has no strategy 'bytescheduler'. The check is for Lightning's Trainer."


def install() -> None:
    """Take over what this process does with Lightning, as the environment says."""
    spec, folder = RunSpec.load(Path(os.environ[SPEC_VARIABLE]))
    (folder / STARTED).touch()
    choose_strategies(spec, folder)
    watch_fits(spec, folder)
    _patch(Fabric, "backward", lambda _: _refusing(folder, _FABRIC))


def refuse_foreign() -> None:
    """See to it that ``pytorch_lightning``'s Trainer says why it is not checked."""
    _, folder = RunSpec.load(Path(os.environ[SPEC_VARIABLE]))
    _patch(sys.modules["pytorch_lightning"].Trainer, "fit", lambda _: _refusing(folder, _FOREIGN))


def refuse(folder: Path, reason: str) -> None:
    """End this process, as the training cannot be checked."""
    (folder / REFUSED).write_text(reason)
    raise SystemExit(2)


def _refusing(folder: Path, reason: str) -> Callable[..., None]:
    return lambda *_, **__: refuse(folder, reason)


def _patch(owner: Any, name: str, around: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace a method; signature, name and source stay visible, as LightningCLI reads them."""
    original = getattr(owner, name)
    setattr(owner, name, wraps(original)(around(original)))


def choose_strategies(spec: RunSpec, folder: Path) -> None:
    """Have each Trainer made from here on use the strategy under check."""

    def connect(original: Callable[..., Any]) -> Callable[..., Any]:
        # Arguments of the Trainer arrive here with defaults and variables of the environment in place.
        def connected(connector: Any, **arguments: Any) -> None:
            try:
                arguments["strategy"] = strategy_for(spec, arguments.get("strategy"))
            except UnsupportedError as error:
                refuse(folder, str(error))
            except KeyError:
                pass  # no strategy has this name, and Lightning says so
            if spec.devices is not None:
                arguments["devices"] = spec.devices
            original(connector, **arguments)

        return connected

    _patch(trainer_module._AcceleratorConnector, "__init__", connect)


def watch_fits(spec: RunSpec, folder: Path) -> None:
    """Record the first fit on every rank, and end the process after it."""

    def fit(original: Callable[..., Any]) -> Callable[..., Any]:
        def checked(trainer: pl.Trainer, *arguments: Any, **options: Any) -> None:
            if trainer.num_nodes > 1:
                refuse(
                    folder,
                    f"The script's Trainer has num_nodes={trainer.num_nodes}, and the check drives one machine. Let "
                    "the script take num_nodes=1 for it.",
                )
            if trainer.world_size < 2:
                refuse(
                    folder,
                    "The script's Trainer has 1 device, where there is nothing to communicate. Give the check "
                    "`--devices 2` (in a notebook: devices=2).",
                )
            original(trainer, *arguments, **options)
            sys.stdout.flush()
            raise SystemExit(0)  # what comes after the fit may publish or overwrite something

        return checked

    def fit_on_rank(original: Callable[..., Any]) -> Callable[..., Any]:
        def recorded(trainer: pl.Trainer, model: pl.LightningModule, *arguments: Any, **options: Any) -> None:
            recorder = Recorder(spec, folder)
            # A forked rank learns its number only later; on one machine it is the local one.
            seed_everything(spec, int(os.environ.get("LOCAL_RANK", trainer.global_rank)))
            recorder.attach(trainer)
            try:
                original(trainer, model, *arguments, **options)
            except BaseException as error:
                recorder.failed(trainer, error)
                raise
            recorder.finish(trainer, model)

        return recorded

    _patch(pl.Trainer, "fit", fit)
    _patch(pl.Trainer, "_fit_impl", fit_on_rank)


def seed_everything(spec: RunSpec, rank: int) -> None:
    """Whatever a training leaves to chance is the same in each run from here on."""
    import numpy

    seed = spec.seed + rank
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    os.environ["PL_GLOBAL_SEED"] = str(spec.seed)  # Lightning's samplers take it, on all ranks the same
    if spec.deterministic:
        torch.set_num_threads(1)
        torch.backends.cudnn.benchmark = False
        torch.use_deterministic_algorithms(True, warn_only=True)
