"""``check``: the command, and the function of a notebook."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_bytescheduler.checking.report import CheckReport, investigate
from lightning_bytescheduler.checking.runs import Start, make_run, start_command, start_fork
from lightning_bytescheduler.checks import is_whole, require_positive, require_whole
from lightning_bytescheduler.exceptions import OptionError, UnsupportedError
from lightning_bytescheduler.registration import require_same_package

if TYPE_CHECKING:
    from lightning_bytescheduler.lightning_api import pl

_STEPS = 50
_TIMEOUT = 600.0
_TERMINATED = 128 + signal.SIGTERM  # as a shell says of what that ended


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "--steps", type=int, default=_STEPS, metavar="N", help=f"optimizer steps of each run (default: {_STEPS})"
    )
    parser.add_argument("--devices", type=int, metavar="N", help="train on so many devices, whatever the Trainer says")
    parser.add_argument(
        "--timeout",
        type=float,
        default=_TIMEOUT,
        metavar="SECONDS",
        help=f"end a run after so long; it counts as hanging (default: {_TIMEOUT:g})",
    )
    parser.add_argument("--seed", type=int, default=20240, metavar="N", help="of all random numbers (default: 20240)")
    parser.add_argument(
        "command",
        nargs=argparse.REMAINDER,
        metavar="-- COMMAND",
        help="what trains, such as: -- python train.py --lr 1",
    )


def run(options: argparse.Namespace) -> int:
    """Do what the command was asked for, and print the answer; the runs end with it, also after a SIGTERM.

    Args:
        options: The parsed arguments.

    Returns:
        The exit code.

    Raises:
        OptionError: If an argument is not allowed.
        UnsupportedError: If this process is one of several ranks.
        OSError: If the command cannot be started.
    """
    _check_numbers(options.steps, options.devices, options.timeout, options.seed)
    command = options.command[1:] if options.command[:1] == ["--"] else list(options.command)
    if not command:
        raise OptionError("command", "", "the command that trains, such as `-- python train.py`")
    _refuse_ranks(
        "The check starts the ranks itself and was started as one of several. Start it once, with the launcher "
        "behind it: lightning-bytescheduler check -- torchrun --nproc-per-node 2 train.py"
    )
    if command[0].endswith(".py"):
        if not os.path.exists(command[0]):
            raise OptionError("command", command[0], "a script that is there, or another command that trains")
        command.insert(0, sys.executable)
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(_TERMINATED))
    try:
        report = _report(partial(start_command, command), options.steps, options.devices, options.timeout, options.seed)
    finally:
        signal.signal(signal.SIGTERM, before)
    print(report.text())
    return report.exit_code


def check(
    trainer: pl.Trainer,
    model: pl.LightningModule,
    train_dataloaders: Any = None,
    val_dataloaders: Any = None,
    datamodule: pl.LightningDataModule | None = None,
    *,
    steps: int = _STEPS,
    devices: int | None = None,
    timeout: float = _TIMEOUT,
    seed: int = 20240,
    progress: bool = True,
) -> CheckReport:
    """Train for some steps with ``ddp`` and with ``bytescheduler``, and compare; nothing here is changed by it.

    Each run is made in a process that is forked from this one, and so are its ranks, as ``ddp_notebook`` does: it has
    the objects as they are now. The strategy that ``trainer`` has is replaced, its DDP options are kept. Ranks compute
    with one thread each.

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
    _check_numbers(steps, devices, timeout, seed)
    require_same_package(trainer, "check()")
    _refuse_ranks("check() starts the ranks itself: call it in one process, before any training with ddp.")
    if not hasattr(os, "fork"):
        raise UnsupportedError("check() forks this process, which this platform cannot do. Use the command.")
    from lightning_bytescheduler.checking.injected import train_forked  # imports torch

    data = {"train_dataloaders": train_dataloaders, "val_dataloaders": val_dataloaders, "datamodule": datamodule}
    start = partial(start_fork, partial(train_forked, trainer, model, data))
    return _report(start, steps, devices, timeout, seed, quiet=not progress)


def _report(
    start: Start, steps: int, devices: int | None, timeout: float, seed: int, *, quiet: bool = False
) -> CheckReport:
    with tempfile.TemporaryDirectory(prefix="bytescheduler-check-", ignore_cleanup_errors=True) as root:
        launch = partial(make_run, start, Path(root), timeout=timeout, quiet=quiet)
        return investigate(launch, steps=steps, seed=seed, devices=devices)


def _check_numbers(steps: object, devices: object, timeout: object, seed: object) -> None:
    """Refuse numbers that make no sense."""
    require_whole("steps", steps, 1)
    if devices is not None:
        require_whole("devices", devices, 2)
    require_positive("timeout", timeout, of="seconds")
    if not is_whole(seed) or seed >= 2**31:
        raise OptionError("seed", seed, "a whole number from 0 to 2147483647")


def _refuse_ranks(instead: str) -> None:
    """Refuse to be one of several ranks."""
    distributed: Any = sys.modules.get("torch.distributed")  # a group exists only where it was imported
    if ("RANK" in os.environ and "WORLD_SIZE" in os.environ) or (
        distributed is not None and distributed.is_available() and distributed.is_initialized()
    ):
        raise UnsupportedError(instead)
