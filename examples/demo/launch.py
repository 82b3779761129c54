"""Starts the ranks of a run, follows them to their end, and turns what goes wrong into one clear message."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.shaped_link import ShapedLink, stop_sessions
from examples.demo.report import RankResult, ReportReader, report_path
from examples.demo.run_spec import RunSpec

REPOSITORY = Path(__file__).parents[2]
# Longer than a start, a step and a validation take even on a busy machine.
SILENCE_SECONDS = 120.0

_POLL_SECONDS = 0.1
_LINES_OF_LOG = 15
# What another launcher may have left in the environment would make the ranks look for one another elsewhere.
_LAUNCHER_VARIABLES = frozenset(
    {"GROUP_RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "RANK", "WORLD_SIZE"}
)

OnStep = Callable[[int, float], None]


class RunFailed(RuntimeError):
    """A process of a run failed or hangs; the message says which one and shows the end of its log."""


@dataclass(frozen=True, slots=True)
class RankProcess:
    """A started process of a run.

    Args:
        title: Its name in messages.
        popen: The process, leader of its own session.
        log: Where its output goes.
    """

    title: str
    popen: subprocess.Popen[bytes]
    log: Path


def train(
    specs: Sequence[RunSpec],
    link: ShapedLink | None,
    on_step: OnStep,
    silence_seconds: float = SILENCE_SECONDS,
) -> list[RankResult]:
    """Runs trainings side by side, in processes of their own.

    Args:
        specs: The trainings; more than one only to load every core alike.
        link: Where to start the ranks of a training of several nodes, one per host. A training of one node is
            started as Lightning users do: as one process, which launches the others.
        on_step: Called with the steps done and the loss of rank 0 of the first training.
        silence_seconds: Fail when no rank of the first training reports anything for so long.

    Returns:
        The results of all ranks, in the order of the trainings.

    Raises:
        RunFailed: If a process fails, hangs, or ends without a result.
    """
    readers = []
    with contextlib.ExitStack() as stack:
        processes = []
        for spec in specs:
            for rank in range(spec.nodes * spec.devices):
                report_path(spec.folder, rank).unlink(missing_ok=True)
                readers.append(ReportReader(report_path(spec.folder, rank)))
            processes += stack.enter_context(_started(spec, link))
        _follow(processes, readers, on_step, silence_seconds)
    return [reader.result for reader in readers if reader.result is not None]


@contextmanager
def _started(spec: RunSpec, link: ShapedLink | None) -> Iterator[list[RankProcess]]:
    """The processes of a run, ended when the block is left."""
    argv = [sys.executable, "-m", "examples.demo.worker", str(spec.save().resolve())]
    processes: list[RankProcess] = []
    try:
        for node in range(spec.nodes):
            log = spec.folder / f"node{node}.log"
            title = f"{spec.folder.name}, host {node}" if spec.nodes > 1 else spec.folder.name
            with log.open("wb") as output:
                popen = _popen(argv, output.fileno(), node, link if spec.nodes > 1 else None)
            processes.append(RankProcess(title, popen, log))
        yield processes
    finally:
        stop_sessions([process.popen for process in processes])
        for process in processes:
            if process.popen.stdin is not None:
                process.popen.stdin.close()


def _popen(argv: Sequence[str], output: int, node: int, link: ShapedLink | None) -> subprocess.Popen[bytes]:
    # One thread per rank: a rank has one core. The worker takes the end of its standard input for our end.
    threads = {"OMP_NUM_THREADS": "1"}
    if link is not None:
        return link.popen(node, argv, threads, cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=output, stderr=output)
    inherited = {name: value for name, value in os.environ.items() if name not in _LAUNCHER_VARIABLES}
    return subprocess.Popen(
        argv,
        env={**inherited, **threads},
        cwd=REPOSITORY,
        stdin=subprocess.PIPE,
        stdout=output,
        stderr=output,
        start_new_session=True,
    )


def _follow(
    processes: Sequence[RankProcess], readers: Sequence[ReportReader], on_step: OnStep, silence_seconds: float
) -> None:
    """Waits until every process has ended well and every rank has reported its result."""
    last_news = time.monotonic()
    while True:
        # Asked before the reports are read: what a process wrote before it ended must not be missed.
        codes = [process.popen.poll() for process in processes]
        news = [reader.poll() for reader in readers]
        if any(news):
            last_news = time.monotonic()
            on_step(readers[0].step, readers[0].loss)
        failed = [(process, code) for process, code in zip(processes, codes, strict=True) if code]
        if failed:
            raise RunFailed("\n\n".join(f"{p.title}: the process {_ended(c)}.{_tail(p.log)}" for p, c in failed))
        if all(code == 0 for code in codes):
            break
        if time.monotonic() - last_news > silence_seconds:
            raise RunFailed(
                f"No rank reported anything for {silence_seconds:.0f} s, after step {readers[0].step}. "
                f"The run was stopped.{_logs(processes)}"
            )
        time.sleep(_POLL_SECONDS)
    silent = [rank for rank, reader in enumerate(readers) if reader.result is None]
    if silent:
        raise RunFailed(f"The run ended without a result of rank {silent[0]}.{_logs(processes)}")


def _ended(code: int) -> str:
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit status {code}"


def _logs(processes: Sequence[RankProcess]) -> str:
    return "".join(f"\n\n{process.title}:{_tail(process.log)}" for process in processes)


def _tail(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-_LINES_OF_LOG:]
    shown = "".join(f"\n    {line}" for line in lines) or "\n    (empty)"
    return f" The end of its log {log}:{shown}"
