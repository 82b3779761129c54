"""In each process of a script under check: replace the strategy, record the first fit, then end the process.

The registration of our strategies calls :func:`install` when a package's Trainer has been imported, if the environment
says so. The adapters are imported later, by the first Trainer, which decides from which package they come. In a fork of
a notebook's process, :func:`train_forked` does the same for a Trainer that exists.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import random
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy
import torch

from lightning_bytescheduler import registration
from lightning_bytescheduler.checking.report import OUTPUT, RunSpec, kept, refuse
from lightning_bytescheduler.exceptions import UnsupportedError

_SEED = 20240  # of all random numbers; each rank adds its own number


def install(pytorch: Any, *, forked: bool = False) -> None:
    """Change what Trainers do in this process, for the run that the environment variable names.

    Args:
        pytorch: ``lightning.pytorch`` or ``pytorch_lightning``. A script may import both, perhaps through a library.
        forked: Whether ranks are forked from this process, whatever the Trainer's strategy does.
    """
    path = Path(os.environ[registration.CHECK_VARIABLE])
    spec, folder = kept(RunSpec, path), path.parent
    os.environ.pop("BYTESCHEDULER_TIMELINE", None)  # the user's file must not be overwritten
    # Names this process to the check, which may have to end it: its process group may not be its parent's.
    (folder / f"process{os.getpid()}.txt").touch()
    _seed_everything(0)
    package: Any = pytorch.__name__.partition(".")[0]

    def decided() -> None:
        registration.use_package(package, f"The script trains with {package}")
        os.environ[registration.VARIABLE] = package  # for processes that this one starts

    fabric = "lightning.fabric" if package == "lightning" else "lightning_fabric"
    accelerators = importlib.import_module(f"{pytorch.__name__}.trainer.connectors.accelerator_connector")

    # The connector gets the Trainer's arguments with defaults and environment variables filled in.
    @_replaces(accelerators._AcceleratorConnector, "__init__")
    def connect(original: Callable[..., Any], connector: Any, **arguments: Any) -> None:
        try:
            decided()
            from lightning_bytescheduler.checking.recorder import strategy_for

            with contextlib.suppress(KeyError):  # an unknown strategy: Lightning raises its own error below
                arguments["strategy"] = strategy_for(spec, arguments.get("strategy"), forked=forked)
        except UnsupportedError as error:
            refuse(folder, str(error))
        if spec.devices is not None:
            arguments["devices"] = spec.devices
        original(connector, **arguments)

    def of_fabric(*_: Any, **__: Any) -> None:
        refuse(folder, "The script trains with Fabric. The check is for Lightning's Trainer.")

    importlib.import_module(fabric).Fabric.backward = of_fabric
    _watch_fits(spec, folder, pytorch.Trainer, decided)


def train_forked(trainer: Any, arguments: Sequence[Any], run: Path) -> None:
    """In a process that was forked for a run: fit, with the strategy under check and new ranks.

    Args:
        trainer: The Trainer.
        arguments: Those of ``Trainer.fit``.
        run: The file of the run's description.
    """
    from lightning_bytescheduler.lightning_api import pl, trainer_module

    os.setsid()  # a process group that can be ended as a whole
    # The fork has no threads of the notebook's process, so computing must not wait for them; one thread does not.
    torch.set_num_threads(1)
    os.environ |= {registration.CHECK_VARIABLE: str(run), "OMP_NUM_THREADS": "1"}
    sys.stdout = sys.stderr = open(run.parent / OUTPUT, "w", buffering=1)  # noqa: SIM115  # until the process ends
    for number in (1, 2):
        os.dup2(sys.stdout.fileno(), number)
    warnings.simplefilter("default")  # errors that the caller has made of warnings would end the fork
    install(pl, forked=True)
    connector = trainer._accelerator_connector
    trainer._accelerator_connector = trainer_module._AcceleratorConnector(
        devices=trainer.num_devices if trainer.strategy.root_device.type == "cpu" else trainer.device_ids,
        num_nodes=trainer.num_nodes,
        accelerator=trainer.accelerator,
        strategy=trainer.strategy,
        plugins=[trainer.precision_plugin, *filter(None, [connector.checkpoint_io])],
        sync_batchnorm=connector._layer_sync is not None,
        use_distributed_sampler=connector.use_distributed_sampler,
    )
    trainer.fit(*arguments)


def _replaces(owner: Any, name: str) -> Callable[[Callable[..., Any]], None]:
    """Replace a method by a function, which gets the original as its first argument.

    Signature, name and source of the method stay visible, as LightningCLI reads them.
    """
    original = getattr(owner, name)

    def by(function: Callable[..., Any]) -> None:
        @functools.wraps(original)
        def replaced(*arguments: Any, **options: Any) -> Any:
            return function(original, *arguments, **options)

        setattr(owner, name, replaced)

    return by


def _watch_fits(spec: RunSpec, folder: Path, trainer_class: Any, first: Callable[[], None]) -> None:
    """Record the first fit on every rank, and end the process after it.

    Args:
        spec: The run.
        folder: Folder for the records.
        trainer_class: The class whose fits are recorded.
        first: Called before the adapters are imported: a spawned rank gets a Trainer and does not construct one.
    """

    @_replaces(trainer_class, "fit")
    def fit(original: Callable[..., Any], trainer: Any, *arguments: Any, **options: Any) -> None:
        if trainer.num_nodes > 1 or trainer.world_size < 2:
            has = f"The script's Trainer has num_nodes={trainer.num_nodes} and {trainer.num_devices} devices on each"
            refuse(folder, f"{has}. The check needs two on one machine: `--devices 2`, or devices=2 in a notebook.")
        original(trainer, *arguments, **options)
        sys.stdout.flush()
        raise SystemExit(0)  # code after the fit may publish or overwrite something

    @_replaces(trainer_class, "_fit_impl")
    def fit_on_rank(original: Callable[..., Any], trainer: Any, model: Any, *arguments: Any, **options: Any) -> None:
        first()
        from lightning_bytescheduler.checking.recorder import Recorder

        recorder = Recorder(spec, folder)
        # A forked rank learns its global rank only later. On a single machine it equals the local rank.
        _seed_everything(int(os.environ.get("LOCAL_RANK", trainer.global_rank)))
        recorder.attach(trainer)
        try:
            original(trainer, model, *arguments, **options)
        except BaseException as error:
            recorder.failed(trainer, error)
            raise
        recorder.finish(trainer, model)


def _seed_everything(rank: int) -> None:
    """Seed all random numbers, so that each run of a training draws the same ones from here on."""
    random.seed(_SEED + rank)
    numpy.random.seed(_SEED + rank)
    torch.manual_seed(_SEED + rank)
    os.environ["PL_GLOBAL_SEED"] = str(_SEED)  # Lightning's samplers use it, the same on all ranks
    # An operation without a deterministic algorithm runs nevertheless. If its results differ, the check finds that
    # ddp is not reproducible.
    warnings.filterwarnings("ignore", message=".*deterministic", category=UserWarning)
    torch.backends.cudnn.benchmark = False
    torch.use_deterministic_algorithms(True, warn_only=True)
    setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)  # noqa: B010  # no types; it only takes time
