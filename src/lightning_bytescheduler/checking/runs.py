"""One run of the user's training: how it is made, what it leaves in its folder, and whether it came through.

The user's command is started unchanged, in processes of its own, with our strategies registered in every Python of it;
a notebook's process is forked. Waits for these processes are bounded, and what is left of them is ended. A line on
stderr says what goes on.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NoReturn, TypeVar, cast

import msgspec

from lightning_bytescheduler.registration import CHECK_VARIABLE

_Kept = TypeVar("_Kept")

STARTED = "started.txt"
"""Made in a run's folder when Lightning was imported."""

PROGRESS = "progress.txt"
"""Where rank 0 says after which step it stands."""

OUTPUT = "output.txt"
"""What a run prints."""

LEFT_OUT = "left_out.txt"
"""Says which options of the script's strategy no run has."""

_RUN = "run.json"
_REFUSED = "refused.txt"  # says why the training cannot be checked

StrategyName = Literal["ddp", "configured", "strict", "undeferred"]

_SITE = Path(__file__).parent / "site"  # goes on the path of the user's processes
_POLL_SECONDS = 0.1
_LATE_SECONDS = 20.0  # for late ranks' records after rank 0 has ended, and for processes to end after all records
_TERMINATION_SECONDS = 10.0
_LOG_LINES = 15
_NO_FIT = "The script ended without a call of Trainer.fit; the check is for Lightning's Trainer."
_NO_HOOK = (
    "The command ended without importing lightning, or in a Python that ignores PYTHONPATH (options -I and -E do). "
    "Give the command that trains, such as `-- python train.py`."
)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSpec:
    """How a run is made.

    Attributes:
        strategy: ``"ddp"``; ``"configured"``, ``bytescheduler`` with the script's options or its defaults;
            ``"strict"``, always overlapped, each tensor behind a gate of its own and sizes that do not follow the link;
            ``"undeferred"``, the same with every update in the step itself, so that no read comes before it.
        steps: Optimizer steps after which the fit is stopped.
        seed: Of all random numbers; each rank adds its own number.
        devices: What replaces the Trainer's ``devices``, if anything.
        traced: Write down a digest of every weight after each step.
    """

    strategy: StrategyName
    steps: int
    seed: int = 20240
    devices: int | None = None
    traced: bool = False

    @property
    def scheduled(self) -> bool:
        """Whether ``bytescheduler`` trains."""
        return self.strategy != "ddp"


@dataclass(kw_only=True, slots=True)
class RankRecord:
    """What one rank wrote down. Digests and numbers are texts: equal texts are equal bits.

    Attributes:
        rank: The rank.
        world_size: How many there are.
        steps: Optimizer steps that were taken.
        losses: The loss of each batch, by ``float.hex``; none where ``training_step`` returns none.
        loss_steps: For each of them, how many optimizer steps had been taken before its forward pass.
        initial: Digests of the weights when training began, by name.
        weights: Digests of weights and buffers at the end, by name.
        optimizer: Digests of the optimizers' state and hyperparameters at the end, by name.
        metrics: Logged metrics at the end and each time they were logged, by name and time.
        seconds: Of each optimizer step.
        trace: Of a traced run: for each step its digests of weights.
        plan: What overlapped, in words; empty under ``ddp``.
        needs_norm: Whether updates needed to know the norm of all gradients.
        as_ddp: Whether steps were taken as DDP takes them at the end.
    """

    rank: int = 0
    world_size: int = 1
    steps: int = 0
    losses: list[str] = field(default_factory=list)
    loss_steps: list[int] = field(default_factory=list)
    initial: dict[str, str] = field(default_factory=dict)
    weights: dict[str, str] = field(default_factory=dict)
    optimizer: dict[str, str] = field(default_factory=dict)
    metrics: dict[str, str] = field(default_factory=dict)
    seconds: list[float] = field(default_factory=list)
    trace: dict[int, dict[str, str]] = field(default_factory=dict)
    plan: str = ""
    needs_norm: bool = False
    as_ddp: bool = False


def keep(value: object, path: Path) -> None:
    """Write a run or a record down; what is there is whole."""
    draft = path.with_suffix(".part")
    draft.write_bytes(msgspec.json.encode(value))
    draft.replace(path)


def kept(of: type[_Kept], path: Path) -> _Kept:
    """What :func:`keep` has written."""
    return msgspec.json.decode(path.read_bytes(), type=of)


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """How a run ended.

    Attributes:
        spec: How it was made.
        ranks: What each rank wrote down, by rank; empty unless all did.
        refused: Why the training cannot be checked, in words; empty if it can.
        error: What it failed with, in words; empty if it did not.
        left_out: Options of the script's strategy that it did not have.
    """

    spec: RunSpec
    ranks: list[RankRecord] = field(default_factory=list)
    refused: str = ""
    error: str = ""
    left_out: str = ""

    @property
    def first(self) -> RankRecord:
        """What rank 0 wrote down."""
        return self.ranks[0]


Poll = Callable[[], "int | None"]
"""Says what a run's first process exited with, ``None`` while it runs."""

Start = Callable[[RunSpec, Path], tuple[int, Poll]]
"""Starts a run's first process, at the head of a session of its own; takes the run and its folder, returns its id."""


def make_run(start: Start, root: Path, spec: RunSpec, why: str, *, timeout: float, quiet: bool = False) -> RunResult:
    """Make a run; a line on stderr says so.

    Args:
        start: Starts the training.
        root: Takes the folder of each run.
        spec: The run.
        why: What it is for, in a few words.
        timeout: In seconds.
        quiet: Say nothing.
    """

    def tell(text: str) -> None:
        if not quiet:
            print(text, file=sys.stderr, flush=True)

    number = len(list(root.iterdir())) + 1
    label, folder = f"run {number}, {why}", root / f"run{number}"
    folder.mkdir()
    keep(spec, folder / _RUN)
    tell(f"{label} ...")
    began = time.monotonic()
    process, poll = start(spec, folder)
    try:
        code = wait_for(folder, poll, timeout=timeout)
    finally:
        end_processes(process, poll, folder)
    tell(f"{label}: {time.monotonic() - began:.0f} s")
    for written in folder.iterdir():
        if written.is_dir():  # by the training; records stay until the end
            shutil.rmtree(written, ignore_errors=True)
    return result_of(spec, folder, code=code, timeout=timeout)


def start_command(command: Sequence[str], _: RunSpec, folder: Path) -> tuple[int, Poll]:
    """See :data:`Start`; ``command`` is the user's, unchanged."""
    paths = [str(_SITE), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {
        "PYTHONHASHSEED": "0",
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # which makes it deterministic
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        CHECK_VARIABLE: str(folder / _RUN),
        "WANDB_MODE": "disabled",  # also where the script calls wandb.init itself
    }
    environment.pop("BYTESCHEDULER_TIMELINE", None)  # the user's file is not to be written over
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


def start_fork(train: Callable[[RunSpec, Path], None], spec: RunSpec, folder: Path) -> tuple[int, Poll]:
    """See :data:`Start`; ``train`` is called in a process that is forked from this one, and leads a session."""
    process = multiprocessing.get_context("fork").Process(target=train, args=(spec, folder), name="bytescheduler-check")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads that a fork leaves behind; none is needed
        process.start()
    return cast(int, process.pid), lambda: process.exitcode


def wait_for(folder: Path, poll: Poll, *, timeout: float) -> int | None:
    """Wait until the process has ended and every rank has written its record, or it is in vain.

    Returns:
        What it exited with; ``None`` if it has not.
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
    """What a run came to.

    Args:
        spec: How it was made.
        folder: Where it left its files.
        code: What its process exited with; ``None`` if it was ended after ``timeout`` seconds.
        timeout: In seconds.
    """
    records, errors = _records(folder), sorted(folder.glob("error*.txt"))
    if _are_all(records):
        ranks = sorted((kept(RankRecord, path) for path in records), key=lambda record: record.rank)
        return RunResult(spec=spec, ranks=ranks, left_out=_text(folder / LEFT_OUT))
    if refused := _text(folder / _REFUSED):
        return RunResult(spec=spec, refused=refused)
    if code is None:
        where = _text(folder / PROGRESS) or "before its first step"
        error = f"it did not end within {timeout:g} s, and stood {where} (--timeout allows more)"
    elif errors:
        error = errors[0].read_text()
    elif code == 0 and not records:
        return RunResult(spec=spec, refused=_NO_FIT if (folder / STARTED).exists() else _NO_HOOK)
    else:
        error = f"exit code {code}"
    # A progress bar writes over its line; the last state of it is enough.
    lines = [line.rstrip().rpartition("\r")[2] for line in _text(folder / OUTPUT).split("\n")]
    tail = [f"  | {line}" for line in lines if line][-_LOG_LINES:]
    return RunResult(spec=spec, error="\n".join([error, *tail]))


def refuse(folder: Path, reason: str) -> NoReturn:
    """End this process, as the training cannot be checked."""
    (folder / _REFUSED).write_text(reason)
    raise SystemExit(2)


def record_path(folder: Path, record: RankRecord) -> Path:
    """Where a rank's record goes; its name tells how many there are to be."""
    return folder / f"rank{record.rank}of{record.world_size}.json"


def _records(folder: Path) -> list[Path]:
    return list(folder.glob("rank*.json"))


def _are_all(records: Sequence[Path]) -> bool:
    return bool(records) and len(records) == int(records[0].stem.partition("of")[2])


def _text(path: Path) -> str:
    with contextlib.suppress(OSError):
        return path.read_bytes().decode(errors="replace")
    return ""


def end_processes(group: int, poll: Poll, folder: Path) -> None:
    """End what is left of a run: its process group, and ranks that have left the group.

    Args:
        group: The group's id.
        poll: Says what its first process exited with.
        folder: The run's; each of its processes has written down its id there.
    """
    _signal_all(group, folder, signal.SIGTERM)
    deadline = time.monotonic() + _TERMINATION_SECONDS
    while time.monotonic() < deadline and (poll() is None or _alive(group)):
        time.sleep(_POLL_SECONDS)
    _signal_all(group, folder, signal.SIGKILL)
    while poll() is None and time.monotonic() < deadline + _TERMINATION_SECONDS:
        time.sleep(_POLL_SECONDS)


def _alive(group: int) -> bool:
    """Whether a process of the group runs; what has ended and waits for nobody's attention is not waited for."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError):
            state, _, its_group, *_ = path.read_text().rpartition(")")[2].split()
            if int(its_group) == group and state not in "ZX":
                return True
    return False


def _signal_all(group: int, folder: Path, number: signal.Signals) -> None:
    with contextlib.suppress(OSError):
        os.killpg(group, number)
    for path in folder.glob("process*.txt"):
        with contextlib.suppress(OSError, ValueError):
            process = int(path.stem.removeprefix("process"))
            # Ids are used again: only a process that was started with this folder is one of the run's.
            if os.fsencode(folder.parent) in Path(f"/proc/{process}/environ").read_bytes():
                os.kill(process, number)
