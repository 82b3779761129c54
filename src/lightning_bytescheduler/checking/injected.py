"""In each of the user's processes: the strategy is replaced, the first fit recorded, and the process ended after it.

The registration of our strategies calls :func:`install` when a package's Trainer has been imported, where the
environment says so. The adapters are imported later, by the first Trainer, which decides whose names they take.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import os
import random
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import torch

from lightning_bytescheduler import registration
from lightning_bytescheduler.checking.runs import STARTED, RunSpec, refuse
from lightning_bytescheduler.exceptions import UnsupportedError

__all__ = ["install", "watch_fits"]


def install(pytorch: Any) -> None:
    """Take over what Trainers do, as the environment says.

    Args:
        pytorch: ``lightning.pytorch`` or ``pytorch_lightning``; a script may import both, as when a library does.
    """
    spec, folder = RunSpec.load(Path(os.environ[registration.CHECK_VARIABLE]))
    (folder / STARTED).touch()
    # Should this process have to be ended: it may be in another process group than its parent.
    (folder / f"process{os.getpid()}.txt").touch()
    _seed_everything(spec, 0)
    _seed_generators(spec)
    package: Any = pytorch.__name__.partition(".")[0]

    def decided() -> None:
        try:
            registration.use_package(package, f"The script trains with {package}")
        except UnsupportedError as error:
            refuse(folder, str(error))
        os.environ[registration.VARIABLE] = package  # for processes that this one starts

    def connect(original: Callable[..., Any]) -> Callable[..., Any]:
        # Arguments of the Trainer arrive here with defaults and variables of the environment in place.
        def connected(connector: Any, **arguments: Any) -> None:
            decided()
            from lightning_bytescheduler.checking.recorder import strategy_for

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

    def of_fabric(*_: Any, **__: Any) -> None:
        refuse(folder, "The script trains with Fabric. The check is for Lightning's Trainer.")

    fabric = "lightning.fabric" if package == "lightning" else "lightning_fabric"
    importlib.import_module(fabric).Fabric.backward = of_fabric
    connector = importlib.import_module(f"{pytorch.__name__}.trainer.connectors.accelerator_connector")
    _patch(connector._AcceleratorConnector, "__init__", connect)
    watch_fits(spec, folder, pytorch.Trainer, decided)


def _patch(owner: Any, name: str, around: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace a method; signature, name and source stay visible, as LightningCLI reads them."""
    original = getattr(owner, name)
    setattr(owner, name, functools.wraps(original)(around(original)))


def watch_fits(spec: RunSpec, folder: Path, trainer_class: Any, first: Callable[[], None]) -> None:
    """Record the first fit on every rank, and end the process after it.

    Args:
        spec: The run.
        folder: Takes the records.
        trainer_class: Whose fits are recorded.
        first: Called before the adapters are imported; a rank that is spawned makes no Trainer, but gets one.
    """

    def fit(original: Callable[..., Any]) -> Callable[..., Any]:
        def checked(trainer: Any, *arguments: Any, **options: Any) -> None:
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
        def recorded(trainer: Any, model: Any, *arguments: Any, **options: Any) -> None:
            first()
            from lightning_bytescheduler.checking.recorder import Recorder

            recorder = Recorder(spec, folder)
            # A forked rank learns its number only later; on one machine it is the local one.
            _seed_everything(spec, int(os.environ.get("LOCAL_RANK", trainer.global_rank)))
            recorder.attach(trainer)
            try:
                original(trainer, model, *arguments, **options)
            except BaseException as error:
                recorder.failed(trainer, error)
                raise
            recorder.finish(trainer, model)

        return recorded

    _patch(trainer_class, "fit", fit)
    _patch(trainer_class, "_fit_impl", fit_on_rank)


def _seed_everything(spec: RunSpec, rank: int) -> None:
    """Whatever a training leaves to chance is the same in each run from here on."""
    seed = spec.seed + rank
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    os.environ["PL_GLOBAL_SEED"] = str(spec.seed)  # Lightning's samplers take it, on all ranks the same
    # What has no deterministic algorithm is run all the same; that ddp differs from itself then is found.
    warnings.filterwarnings("ignore", message=".*deterministic", category=UserWarning)
    torch.backends.cudnn.benchmark = False
    torch.use_deterministic_algorithms(True, warn_only=True)
    setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)  # noqa: B010  # no types; it only takes time


def _seed_generators(spec: RunSpec) -> None:
    """Have generators of numpy that would ask the system for a seed get one from here, each its own."""
    make, number = numpy.random.default_rng, itertools.count()

    @functools.wraps(make)
    def default_rng(*arguments: Any, **options: Any) -> Any:
        if arguments[:1] in ((), (None,)) and options.get("seed") is None:
            return make([spec.seed, next(number)])
        return make(*arguments, **options)

    numpy.random.default_rng = default_rng
