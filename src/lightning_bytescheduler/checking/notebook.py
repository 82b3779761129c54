"""``check()``: the same as the command for a trainer and a model that are there already, as in a notebook.

Each run is made in a process that is forked from this one: it has the objects as they are now, and nothing that it does
to them is seen here. Its ranks are forked from it, as ``ddp_notebook`` does.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist

from lightning_bytescheduler.checking.command import STEPS, TIMEOUT, check_numbers
from lightning_bytescheduler.checking.injected import watch_fits
from lightning_bytescheduler.checking.procedure import investigate
from lightning_bytescheduler.checking.recorder import strategy_for
from lightning_bytescheduler.checking.report import CheckReport
from lightning_bytescheduler.checking.runs import STARTED, Runs, RunSpec, refuse
from lightning_bytescheduler.exceptions import UnsupportedError
from lightning_bytescheduler.lightning_api import pl, trainer_module
from lightning_bytescheduler.registration import require_same_package

__all__ = ["check"]


def check(
    trainer: pl.Trainer,
    model: pl.LightningModule,
    train_dataloaders: Any = None,
    val_dataloaders: Any = None,
    datamodule: pl.LightningDataModule | None = None,
    *,
    steps: int = STEPS,
    devices: int | None = None,
    timeout: float = TIMEOUT,
    seed: int = 20240,
    progress: bool = True,
) -> CheckReport:
    """Train for some steps with ``ddp`` and with ``bytescheduler``, and compare; nothing here is changed by it.

    The strategy that ``trainer`` has is replaced, its DDP options are kept. Ranks compute with one thread each.

    Args:
        trainer: With the options of the training; it must not be in a fit.
        model: What is trained.
        train_dataloaders: As for ``Trainer.fit``.
        val_dataloaders: As for ``Trainer.fit``.
        datamodule: As for ``Trainer.fit``.
        steps: Optimizer steps of each run.
        devices: How many devices to train on, whatever ``trainer`` says.
        timeout: End a run after so many seconds; it counts as hanging.
        seed: Of all random numbers.
        progress: Say what is going on, on stderr.

    Returns:
        What was found. Print it; ``equal`` is the answer.

    Raises:
        OptionError: If an option's value is not allowed.
        UnsupportedError: If this process is one of several ranks, or cannot be forked; or ``trainer`` is of the other
            package of Lightning.
    """
    check_numbers(steps, devices, timeout, seed)
    require_same_package(trainer, "check()")
    if (dist.is_available() and dist.is_initialized()) or ("RANK" in os.environ and "WORLD_SIZE" in os.environ):
        raise UnsupportedError("check() starts the ranks itself: call it in one process, before any training with ddp.")
    if "fork" not in multiprocessing.get_all_start_methods():
        raise UnsupportedError("check() forks this process, which this platform cannot do. Use the command.")
    fit = partial(
        trainer.fit,
        model,
        train_dataloaders=train_dataloaders,
        val_dataloaders=val_dataloaders,
        datamodule=datamodule,
    )
    with Runs(partial(_start, trainer, fit), timeout=timeout, quiet=not progress) as launch:
        findings = investigate(launch, steps=steps, seed=seed, devices=devices)
    return CheckReport(findings=findings, steps=steps)


def _start(
    trainer: pl.Trainer, fit: Callable[[], None], spec: RunSpec, _: Path, folder: Path
) -> tuple[int, Callable[[], int | None]]:
    """See :data:`~lightning_bytescheduler.checking.runs.Start`."""
    process = multiprocessing.get_context("fork").Process(
        target=_train, args=(spec, folder, trainer, fit), name="bytescheduler-check"
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads that a fork leaves behind; none is needed
        process.start()
    return cast(int, process.pid), lambda: process.exitcode


def _train(spec: RunSpec, folder: Path, trainer: pl.Trainer, fit: Callable[[], None]) -> None:
    """In the forked process: fit with the strategy under check."""
    os.setsid()  # a group to be ended as a whole
    # What threads of this process were doing when it was forked is lost; one thread needs none of it.
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    os.environ.pop("BYTESCHEDULER_TIMELINE", None)
    (folder / STARTED).touch()
    with open(folder / "output.txt", "w", buffering=1) as output, contextlib.redirect_stdout(output):
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
        sys.stderr = output
        warnings.simplefilter("default")  # where the caller has made errors of them, forks end here
        _choose_strategy(spec, folder, trainer)
        watch_fits(spec, folder, pl.Trainer, lambda: None)
        # As found on the class now.
        pl.Trainer.fit(trainer, *fit.args, **fit.keywords)  # type: ignore[attr-defined]


def _choose_strategy(spec: RunSpec, folder: Path, trainer: pl.Trainer) -> None:
    connector = trainer._accelerator_connector
    try:
        strategy = strategy_for(spec, trainer.strategy, forked=True)
    except UnsupportedError as error:
        refuse(folder, str(error))
    devices: Any = trainer.num_devices if trainer.strategy.root_device.type == "cpu" else trainer.device_ids
    trainer._accelerator_connector = trainer_module._AcceleratorConnector(
        devices=spec.devices or devices,
        num_nodes=trainer.num_nodes,
        accelerator=trainer.accelerator,
        strategy=strategy,
        plugins=[trainer.precision_plugin, *filter(None, [connector.checkpoint_io])],
        sync_batchnorm=connector._layer_sync is not None,
        use_distributed_sampler=connector.use_distributed_sampler,
    )
