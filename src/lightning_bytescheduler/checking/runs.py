"""One run of the user's training: how it is made, what it leaves in its folder, and whether it came through.

The user's command is started unchanged, in processes of its own, with our strategies registered in every Python of it.
Waits for these processes are bounded, and what is left of them is ended. A line on stderr says what goes on.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal, NoReturn

import msgspec

from lightning_bytescheduler.registration import CHECK_VARIABLE

STARTED = "started.txt"
"""Made in a run's folder when Lightning was imported."""

_REFUSED = "refused.txt"
"""Where a run says why the training cannot be checked."""

StrategyName = Literal["ddp", "configured", "strict", "undeferred"]

_SITE = Path(__file__).parent / "site"  # goes on the path of the user's processes
_POLL_SECONDS = 0.1
_LATE_RANKS_SECONDS = 20.0  # after rank 0 has ended, for the others' records
_WHOLE_SECONDS = 20.0  # after all records are there, for the processes to end by themselves
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

    @property
    def timed(self) -> bool:
        """Whether its step times say something."""
        return self.strategy in ("ddp", "configured") and not self.traced

    def save(self, path: Path, folder: Path) -> None:
        """Write it, with the folder that takes what the run leaves behind."""
        path.write_bytes(msgspec.json.encode({"folder": str(folder), **asdict(self)}))

    @classmethod
    def load(cls, path: Path) -> tuple[RunSpec, Path]:
        """What :meth:`save` has written."""
        content = path.read_bytes()
        return msgspec.json.decode(content, type=cls), Path(msgspec.json.decode(content)["folder"])


@dataclass(frozen=True, kw_only=True, slots=True)
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

    rank: int
    world_size: int
    steps: int = 0
    losses: tuple[str, ...] = ()
    loss_steps: tuple[int, ...] = ()
    initial: dict[str, str] = field(default_factory=dict)
    weights: dict[str, str] = field(default_factory=dict)
    optimizer: dict[str, str] = field(default_factory=dict)
    metrics: dict[str, str] = field(default_factory=dict)
    seconds: tuple[float, ...] = ()
    trace: dict[int, dict[str, str]] = field(default_factory=dict)
    plan: str = ""
    needs_norm: bool = False
    as_ddp: bool = False

    def save(self, folder: Path) -> None:
        """Write it; what is there is whole."""
        path = folder / f"rank{self.rank}.json"
        draft = path.with_suffix(".part")
        draft.write_bytes(msgspec.json.encode(self, enc_hook=str))
        draft.replace(path)

    @classmethod
    def load(cls, path: Path) -> RankRecord:
        """What :meth:`save` has written."""
        return msgspec.json.decode(path.read_bytes(), type=cls)


@dataclass(kw_only=True)
class RunResult:
    """How a run ended.

    Attributes:
        spec: How it was made.
        ranks: What each rank wrote down, by rank; empty unless all did.
        refused: Why the training cannot be checked, in words; empty if it can.
        error: What it failed with, in words; empty if it did not.
        seconds: How long all of it took.
    """

    spec: RunSpec
    ranks: list[RankRecord] = field(default_factory=list)
    refused: str = ""
    error: str = ""
    seconds: float = 0.0

    @property
    def whole(self) -> bool:
        """Whether there is a record of every rank."""
        return bool(self.ranks)

    @property
    def first(self) -> RankRecord:
        """What rank 0 wrote down."""
        return self.ranks[0]


def _steps_taken(folder: Path) -> int | None:
    """How many steps rank 0 has said to have taken."""
    with contextlib.suppress(OSError, ValueError):
        return int((folder / "progress.txt").read_text())
    return None


def wait_for(folder: Path, poll: Callable[[], int | None], *, timeout: float) -> tuple[int | None, bool]:
    """Wait until the process has ended and every rank has written its record, or it is in vain.

    Args:
        folder: The run's.
        poll: Says what the process exited with, ``None`` while it runs.
        timeout: In seconds.

    Returns:
        What it exited with, if it has, and whether time ran out.
    """
    began = time.monotonic()
    ended = complete = world_size = None
    while True:
        now = time.monotonic()
        code = poll()
        records = list(folder.glob("rank*.json"))
        if records and world_size is None:
            world_size = RankRecord.load(records[0]).world_size
        if len(records) == world_size:
            complete = complete or now
            if code is not None or now - complete > _WHOLE_SECONDS:
                return code, False
        if code is not None:
            ended = ended or now
            if code != 0 or not records or now - ended > _LATE_RANKS_SECONDS:
                return code, False
        if now - began > timeout:
            return code, True
        time.sleep(_POLL_SECONDS)


def result_of(spec: RunSpec, folder: Path, *, code: int | None, timed_out: bool, timeout: float) -> RunResult:
    """What a run came to.

    Args:
        spec: How it was made.
        folder: Where it left its files.
        code: What its process exited with.
        timed_out: Whether it was ended for that.
        timeout: In seconds.
    """
    result = RunResult(spec=spec)
    records = _records(folder)
    if records and len(records) == records[0].world_size:
        result.ranks = records
        return result
    with contextlib.suppress(OSError):
        result.refused = (folder / _REFUSED).read_text()
        return result
    errors = [path.read_text() for path in sorted(folder.glob("error*.txt"))]
    told = _steps_taken(folder)
    if timed_out:
        where = "before its first step" if told is None else f"after step {told}"
        result.error = f"it did not end within {timeout:g} s, and stood {where} (--timeout allows more)"
    elif errors:
        result.error = errors[0]
    elif code == 0 and not records:
        result.refused = _NO_FIT if (folder / STARTED).exists() else _NO_HOOK
    else:
        result.error = f"exit code {code}"
    tail = _tail(folder / "output.txt")
    if result.error and tail:
        result.error += f"\n{tail}"
    return result


def refuse(folder: Path, reason: str) -> NoReturn:
    """End this process, as the training cannot be checked."""
    (folder / _REFUSED).write_text(reason)
    raise SystemExit(2)


def _records(folder: Path) -> list[RankRecord]:
    records = [RankRecord.load(path) for path in folder.glob("rank*.json")]
    return sorted(records, key=lambda record: record.rank)


def _tail(path: Path) -> str:
    with contextlib.suppress(OSError):
        # A progress bar writes over its line; the last state of it is enough.
        text = path.read_bytes().decode(errors="replace")
        lines = [line.rstrip().rsplit("\r", 1)[-1] for line in text.split("\n")]
        return "\n".join(f"  | {line}" for line in [line for line in lines if line][-_LOG_LINES:])
    return ""


def end_processes(group: int, poll: Callable[[], int | None], folder: Path) -> None:
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


Start = Callable[[RunSpec, Path, Path], tuple[int, Callable[[], "int | None"]]]
"""Starts a run's first process, at the head of a session of its own.

Takes the run, the path of its description and its folder. Returns the process's id, and what says its exit code,
``None`` while it runs.
"""


class Runs:
    """Makes runs of one training, in processes and a temporary folder that end with it. One line on stderr for each.

    Args:
        start: Starts the training.
        timeout: Of each run, in seconds.
        quiet: Say nothing.
    """

    def __init__(self, start: Start, *, timeout: float, quiet: bool = False) -> None:
        self._start = start
        self._timeout = timeout
        self._quiet = quiet
        self._root = Path(tempfile.mkdtemp(prefix="bytescheduler-check-"))
        self._count = 0

    def __call__(self, spec: RunSpec, why: str) -> RunResult:
        """Make one; see :data:`~lightning_bytescheduler.checking.procedure.Launch`."""
        self._count += 1
        folder = self._root / f"run{self._count}"
        folder.mkdir()
        path = folder.with_suffix(".json")
        spec.save(path, folder)
        label = f"run {self._count}, {why}"
        self._tell(f"{label} ...")
        began = time.monotonic()
        process, poll = self._start(spec, path, folder)
        try:
            code, timed_out = wait_for(folder, poll, timeout=self._timeout)
        finally:
            end_processes(process, poll, folder)
        result = result_of(spec, folder, code=code, timed_out=timed_out, timeout=self._timeout)
        result.seconds = time.monotonic() - began
        self._tell(f"{label}: {result.seconds:.0f} s")
        for written in folder.iterdir():
            if written.is_dir():  # by the training; records and weights stay until the end
                shutil.rmtree(written, ignore_errors=True)
        return result

    def _tell(self, text: str) -> None:
        if not self._quiet:
            print(text, file=sys.stderr, flush=True)

    def __enter__(self) -> Runs:
        return self

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self._root, ignore_errors=True)


def start_command(
    command: Sequence[str], spec: RunSpec, path: Path, folder: Path
) -> tuple[int, Callable[[], int | None]]:
    """See :data:`Start`; ``command`` is the user's, unchanged."""
    with open(folder / "output.txt", "wb") as output:
        process = subprocess.Popen(
            command,
            env=_environment(path),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    return process.pid, process.poll


def _environment(path: Path) -> dict[str, str]:
    environment = dict(os.environ)
    paths = [str(_SITE), *filter(None, [environment.get("PYTHONPATH")])]
    environment.update({"PYTHONPATH": os.pathsep.join(paths), CHECK_VARIABLE: str(path)})
    environment.setdefault("PYTHONHASHSEED", "0")
    environment.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # which makes it deterministic
    environment.pop("BYTESCHEDULER_TIMELINE", None)  # the user's file is not to be written over
    environment["WANDB_MODE"] = "disabled"  # also where the script calls wandb.init itself
    return environment
