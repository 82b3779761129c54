"""``check``: the command, the function for notebooks, and how they run the user's training.

The user's command is started unchanged, in processes of its own, with our strategies registered in each of its Python
processes. A notebook's process is forked. Waits for these processes are bounded, and processes that are left over are
ended. Messages on stderr tell the progress.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from lightning_bytescheduler.checking.report import (
    OUTPUT,
    PROGRESS,
    REFUSED,
    CheckReport,
    RankRecord,
    RunResult,
    RunSpec,
    investigate,
    keep,
    kept,
)
from lightning_bytescheduler.checks import require_positive, require_whole
from lightning_bytescheduler.exceptions import OptionError, UnsupportedError
from lightning_bytescheduler.registration import CHECK_VARIABLE, require_same_package

if TYPE_CHECKING:
    from lightning_bytescheduler.lightning_api import pl

_STEPS = 50
_TIMEOUT = 600.0
_TERMINATED = 128 + signal.SIGTERM  # the exit code that a shell reports after a SIGTERM
_RUN = "run.json"
_SITE = Path(__file__).parent / "site"  # goes on the path of the user's processes
_POLL_SECONDS = 0.1
_LATE_SECONDS = 20.0  # for late ranks' records after rank 0 has ended, and for processes to end after all records
_TERMINATION_SECONDS = 10.0
_LOG_LINES = 15
_NO_FIT = (
    "The command ended without a call of Trainer.fit, or in a Python that ignores PYTHONPATH (options -I and -E do). "
    "The check is for Lightning's Trainer: give the command that trains, such as `-- python train.py`."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "--steps", type=int, default=_STEPS, metavar="N", help=f"optimizer steps of each run (default: {_STEPS})"
    )
    parser.add_argument("--devices", type=int, metavar="N", help="train on so many devices, whatever the Trainer says")
    hangs = f"end a run after so long; it counts as hanging (default: {_TIMEOUT:g})"
    parser.add_argument("--timeout", type=float, default=_TIMEOUT, metavar="SECONDS", help=hangs)
    trains = "the command that trains, such as: -- python train.py --lr 1"
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="-- COMMAND", help=trains)


def run(options: argparse.Namespace) -> int:
    """Run the check and print its result. A SIGTERM ends the run in progress, too.

    Args:
        options: The parsed arguments.

    Returns:
        The exit code.

    Raises:
        OptionError: If an argument is not allowed.
        UnsupportedError: If this process is one of several ranks.
        OSError: If the command cannot be started.
    """
    command = options.command[1:] if options.command[:1] == ["--"] else list(options.command)
    if not command:
        raise OptionError("command", "", "the command that trains, such as `-- python train.py`")
    if command[0].endswith(".py"):
        if not os.path.exists(command[0]):
            raise OptionError("command", command[0], "a script that is there, or another command that trains")
        command.insert(0, sys.executable)
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(_TERMINATED))
    try:
        report = _report(partial(start_command, command), options.steps, options.devices, options.timeout)
    finally:
        signal.signal(signal.SIGTERM, before)
    print(report)
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
) -> CheckReport:
    """Train for some steps with ``ddp`` and with ``bytescheduler``, and compare. Changes nothing in this process.

    Each run is made in a fork of this process, and so are its ranks, as with ``ddp_notebook``: it has the objects as
    they are now. The Trainer's strategy is replaced; its DDP options are kept. Each rank computes with one thread.

    Args:
        trainer: A Trainer with the options of the training; it must not be in a fit.
        model: The model to train.
        train_dataloaders: As for ``Trainer.fit``.
        val_dataloaders: As for ``Trainer.fit``.
        datamodule: As for ``Trainer.fit``.
        steps: Optimizer steps of each run.
        devices: Number of devices to train on, instead of the Trainer's.
        timeout: Seconds after which a run is ended; it then counts as hanging.

    Returns:
        The result. Print it; ``equal`` is the answer.

    Raises:
        OptionError: If an option's value is not allowed, or the first argument is no Trainer.
        UnsupportedError: If this process is one of several ranks, or ``trainer`` is from the other package of
            Lightning.
    """
    require_same_package(trainer, "check()")
    from lightning_bytescheduler.checking.injected import train_forked  # imports torch
    from lightning_bytescheduler.lightning_api import pl

    if not isinstance(trainer, pl.Trainer):
        raise OptionError("trainer", trainer, "a Trainer, as in check(trainer, model, ...)")
    arguments = (model, train_dataloaders, val_dataloaders, datamodule)
    return _report(partial(start_fork, partial(train_forked, trainer, arguments)), steps, devices, timeout)


def _report(start: Start, steps: int, devices: int | None, timeout: float) -> CheckReport:
    require_whole("steps", steps, 1)
    if devices is not None:
        require_whole("devices", devices, 2)
    require_positive("timeout", timeout, of="seconds")
    if "WORLD_SIZE" in os.environ and {"RANK", "LOCAL_RANK"} & os.environ.keys():
        raise UnsupportedError(
            "The check starts the ranks itself, and this process is one of several or has trained with ddp. Start it "
            "once, with the launcher behind it: lightning-bytescheduler check -- torchrun --nproc-per-node 2 train.py. "
            "In a notebook, restart the kernel first."
        )
    with tempfile.TemporaryDirectory(prefix="bytescheduler-check-", ignore_cleanup_errors=True) as root:
        launch = partial(make_run, start, Path(root), timeout=timeout)
        return investigate(launch, steps=steps, devices=devices)


# ── Runs ────────────────────────────────────────────────────────────────────────────────────────────


Poll = Callable[[], "int | None"]
"""Returns the exit code of a run's first process; ``None`` while it runs."""

Start = Callable[[RunSpec, Path], tuple[int, Poll]]
"""Starts a run's first process as the leader of a new session. Takes the run and its folder; returns id and poll."""


def make_run(start: Start, root: Path, spec: RunSpec, why: str, *, timeout: float) -> RunResult:
    """Make a run, and announce it on stderr.

    Args:
        start: Starts the training.
        root: Folder for the folders of all runs.
        spec: The run.
        why: The run's purpose, in a few words.
        timeout: In seconds.
    """
    number = len(list(root.iterdir())) + 1
    label, folder = f"run {number}, {why}", root / f"run{number}"
    folder.mkdir()
    keep(spec, folder / _RUN)
    print(f"{label} ...", file=sys.stderr, flush=True)
    began = time.monotonic()
    process, poll = start(spec, folder)
    try:
        code = wait_for(folder, poll, timeout=timeout)
    finally:
        end_processes(process, poll, folder)
    print(f"{label}: {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    for written in folder.iterdir():
        if written.is_dir():  # made by the training; records stay until the end
            shutil.rmtree(written, ignore_errors=True)
    return result_of(spec, folder, code=code, timeout=timeout)


def start_command(command: Sequence[str], _: RunSpec, folder: Path) -> tuple[int, Poll]:
    """A :data:`Start` for a command; ``command`` is the user's, unchanged."""
    paths = [str(_SITE), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {
        "PYTHONHASHSEED": "0",
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # makes cuBLAS deterministic
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        CHECK_VARIABLE: str(folder / _RUN),
        "WANDB_MODE": "disabled",  # also for scripts that call wandb.init themselves
    }
    with open(folder / OUTPUT, "wb") as output:
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    return process.pid, process.poll


def start_fork(train: Callable[[Path], None], _: RunSpec, folder: Path) -> tuple[int, Poll]:
    """A :data:`Start` by fork: ``train`` is called in a fork of this process, with the file of the run."""
    process = multiprocessing.get_context("fork").Process(target=train, args=(folder / _RUN,))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # about threads that a fork leaves behind; none is needed
        process.start()
    return cast(int, process.pid), lambda: process.exitcode


def wait_for(folder: Path, poll: Poll, *, timeout: float) -> int | None:
    """Wait until the process has ended and all ranks' records are written. Give up if it fails or time runs out.

    Returns:
        The exit code of the process; ``None`` if it has not ended.
    """
    deadline = time.monotonic() + timeout
    late = None
    while True:
        code, records = poll(), _records(folder)
        if code is not None and (code != 0 or not records or _are_all(records)):
            return code
        if late is None and (code is not None or _are_all(records)):
            late = time.monotonic() + _LATE_SECONDS
        if time.monotonic() > min(deadline, late or deadline):
            return code
        time.sleep(_POLL_SECONDS)


def result_of(spec: RunSpec, folder: Path, *, code: int | None, timeout: float) -> RunResult:
    """The result of a run.

    Args:
        spec: The run's description.
        folder: The folder with its files.
        code: The exit code of its process; ``None`` if it was ended after ``timeout`` seconds.
        timeout: In seconds.
    """
    records, errors = _records(folder), sorted(folder.glob("error*.txt"))
    if _are_all(records):
        ranks = sorted((kept(RankRecord, path) for path in records), key=lambda record: record.rank)
        return RunResult(spec=spec, ranks=ranks)
    if refused := _text(folder / REFUSED):
        return RunResult(spec=spec, refused=refused)
    if code is None:
        where = _text(folder / PROGRESS) or "before its first step"
        error = f"it did not end within {timeout:g} s, and stood {where} (a longer timeout allows more)"
    elif errors:
        error = errors[0].read_text()
    elif code == 0 and not records:
        return RunResult(spec=spec, refused=_NO_FIT)
    else:
        error = f"exit code {code}"
    # A progress bar overwrites its line; only its last state is kept.
    lines = [line.rstrip().rpartition("\r")[2] for line in _text(folder / OUTPUT).split("\n")]
    tail = [f"  | {line}" for line in lines if line][-_LOG_LINES:]
    return RunResult(spec=spec, error="\n".join([error, *tail]))


def _records(folder: Path) -> list[Path]:
    return list(folder.glob("rank*.json"))


def _are_all(records: Sequence[Path]) -> bool:
    return bool(records) and len(records) == int(records[0].stem.partition("of")[2])


def _text(path: Path) -> str:
    with contextlib.suppress(OSError):
        return path.read_bytes().decode(errors="replace")
    return ""


def end_processes(group: int, poll: Poll, folder: Path) -> None:
    """End the remaining processes of a run: its process group, and ranks that have left the group.

    Args:
        group: The group's id.
        poll: Returns the exit code of the first process.
        folder: The run's folder, in which each of its processes has written its id.
    """
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(OSError):
            os.killpg(group, number)
        for path in folder.glob("process*.txt"):
            with contextlib.suppress(OSError, ValueError):
                process = int(path.stem.removeprefix("process"))
                # Ids are reused: only a process that was started with this folder belongs to the run.
                if os.fsencode(folder.parent) in Path(f"/proc/{process}/environ").read_bytes():
                    os.kill(process, number)
        deadline = time.monotonic() + _TERMINATION_SECONDS
        while time.monotonic() < deadline and (poll() is None or _alive(group)):
            time.sleep(_POLL_SECONDS)


def _alive(group: int) -> bool:
    """Whether a process of the group runs. Ended processes that were not collected do not count."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError):
            state, _, its_group, *_ = path.read_text().rpartition(")")[2].split()
            if int(its_group) == group and state not in "ZX":
                return True
    return False
