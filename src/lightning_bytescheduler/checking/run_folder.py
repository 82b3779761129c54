"""What a run leaves in its folder, and whether it came through; bounded waits for its processes."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

from lightning_bytescheduler.checking.run_spec import RankRecord, RunResult, RunSpec

__all__ = ["end_processes", "result_of", "steps_taken", "wait_for"]

_POLL_SECONDS = 0.1
_LATE_RANKS_SECONDS = 20.0  # after rank 0 has ended, for the others' records
_WHOLE_SECONDS = 20.0  # after all records are there, for the processes to end by themselves
_TERMINATION_SECONDS = 10.0
_LOG_LINES = 15


def steps_taken(folder: Path) -> int | None:
    """How many steps rank 0 has said to have taken."""
    with contextlib.suppress(OSError, ValueError):
        return int((folder / "progress.txt").read_text())
    return None


def wait_for(
    folder: Path, poll: Callable[[], int | None], *, timeout: float, tell: Callable[[int], None]
) -> tuple[int | None, bool]:
    """Wait until the process has ended and every rank has written its record, or it is in vain.

    Args:
        folder: The run's.
        poll: Says what the process exited with, ``None`` while it runs.
        timeout: In seconds.
        tell: Told how many steps were taken.

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
        taken = steps_taken(folder)
        if taken is not None:
            tell(taken)
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
    result = RunResult(spec=spec, folder=folder)
    records = _records(folder)
    if records and len(records) == records[0].world_size:
        result.ranks = records
        return result
    with contextlib.suppress(OSError):
        result.refused = (folder / "refused.txt").read_text()
        return result
    errors = [path.read_text() for path in sorted(folder.glob("error*.txt"))]
    told = steps_taken(folder)
    if timed_out:
        where = "before its first step" if told is None else f"after step {told}"
        result.error = f"it did not end within {timeout:g} s, and stood {where} (--timeout allows more)"
    elif errors:
        result.error = errors[0]
    elif code == 0 and not records:
        result.refused = _NO_FIT if (folder / "started.txt").exists() else _NO_HOOK
    else:
        result.error = f"exit code {code}"
    tail = _tail(folder / "output.txt")
    if result.error and tail:
        result.error += f"\n{tail}"
    return result


_NO_FIT = "The script ended without a call of Trainer.fit."
_NO_HOOK = (
    "The command ended without importing lightning, or in a Python that ignores PYTHONPATH (options -I and -E do). "
    "Give the command that trains, such as `-- python train.py`."
)


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
