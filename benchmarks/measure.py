"""Runs contenders side by side: as many processes as ranks, the same ones for all contenders, in turn and in rounds."""

from __future__ import annotations

import json
import os
import random
import shutil
import socket
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.delayed_link import DelayedLink
from benchmarks.shaped_link import ShapedLink, stop_sessions

__all__ = ["Measured", "MeasurementFailed", "free_port", "measure", "ranks_of"]

_REPOSITORY = Path(__file__).parents[1]
# As torchrun does for several ranks on a host. Idle OpenMP threads spin, and take the processor from other ranks.
_ONE_THREAD = {"OMP_NUM_THREADS": "1"}


class MeasurementFailed(RuntimeError):
    """A rank failed; the message ends with what it said."""


@dataclass(kw_only=True)
class Measured:
    """One contender's steps, over all rounds.

    Attributes:
        seconds: Of each measured step on rank 0.
        round_medians: Median step of each round.
        bytes_per_step: What rank 0's interface sent; 0 on loopback.
        account: Seconds of a step on rank 0, on average in the last round, by what the training thread did besides
            computing: woken late, deferred steps, waits at gates; and the processor time of the whole process.
        compressed_share: Of the gradients' bytes that rank 0 sent, in each round.
    """

    seconds: list[float] = field(default_factory=list)
    round_medians: list[float] = field(default_factory=list)
    bytes_per_step: float = 0.0
    account: dict[str, float] = field(default_factory=dict)
    compressed_share: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        """The typical step, in seconds."""
        return statistics.median(self.seconds)


def measure(
    work: dict[str, Any],
    contenders: Sequence[str],
    *,
    workers: int,
    mbit: float | None,
    steps: int,
    rounds: int,
    round_trip_seconds: float = 0.0,
    on_contender: Callable[[str], None],
) -> dict[str, Measured]:
    """Measure ``contenders`` in turn, ``rounds`` times, so that a machine that drifts drifts for all.

    Args:
        work: ``{"emulated": ...}`` or ``{"model": ...}``, see ``rank.py``.
        contenders: Names.
        workers: Number of ranks.
        mbit: Rate of each rank's link; ``None`` for loopback.
        steps: Measured steps per contender and round.
        rounds: How often.
        round_trip_seconds: Between two ranks on links of limited rate; 0 for that of the machine itself.
        on_contender: Told when a contender has been measured once.

    Returns:
        What was measured, by contender.

    Raises:
        MeasurementFailed: If a rank fails.
    """
    found = {name: Measured() for name in contenders}
    specification = json.dumps({**work, "contenders": [*contenders] * rounds, "steps": steps})
    command = [sys.executable, "-m", "benchmarks.rank", specification]
    with ranks_of(command, workers, mbit, round_trip_seconds) as (ranks, _):
        output = ranks[0].stdout
        if output is None:
            raise MeasurementFailed("Rank 0 has no output.")
        for line in output:
            if not line.startswith(b"{"):
                continue
            result = json.loads(line)
            measured = found[result["contender"]]
            measured.seconds += result["seconds"]
            measured.round_medians.append(statistics.median(result["seconds"]))
            measured.bytes_per_step = result["bytes_per_step"]
            measured.account = result["account"]
            if result["compressed_share"] is not None:
                measured.compressed_share.append(result["compressed_share"])
            on_contender(result["contender"])
        codes = [rank.wait() for rank in ranks]
    if any(codes) or not all(measured.seconds for measured in found.values()):
        raise MeasurementFailed(f"Ranks ended with codes {codes}; rank 0 said nothing more. Run one by hand: {command}")
    return found


def free_port() -> int:
    """A free port, none of those that the system gives to outgoing connections: these could be taken in between."""
    for port in random.SystemRandom().sample(range(15_000, 32_768), 100):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise RuntimeError("None of 100 ports is free.")


@contextmanager
def ranks_of(
    command: list[str], workers: int, mbit: float | None, round_trip_seconds: float = 0.0
) -> Iterator[tuple[list[subprocess.Popen[bytes]], ShapedLink | None]]:
    """Start ``command`` once per rank, with rank 0's output in a pipe; yields the processes and their link, if any.

    Hosts on links have processors of their own where there are enough: as ranks of one host they would take them from
    each other. See `measure` for the other arguments.
    """

    def streams(rank: int) -> dict[str, Any]:
        # What ranks complain of goes where ours goes; an open standard input tells them that we live.
        return {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE if rank == 0 else subprocess.DEVNULL}

    if mbit is not None:
        with _link(workers, mbit, round_trip_seconds) as link:
            environment = {"NODES": str(workers), "TORCH_CPP_LOG_LEVEL": "ERROR", **_ONE_THREAD}
            ranks = [
                link.popen(n, _on_own_processors(command, n, workers), env=environment, cwd=_REPOSITORY, **streams(n))
                for n in range(workers)
            ]
            with ExitStack() as pipes:
                _close_later(pipes, ranks)
                yield ranks, link
        return
    port = free_port()
    ranks = []
    try:
        for rank in range(workers):
            variables = {
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "WORLD_SIZE": str(workers),
                "RANK": str(rank),
                "NODE_RANK": "0",
                "LOCAL_RANK": str(rank),
                "RANKS_PER_NODE": str(workers),
                "TORCHELASTIC_RUN_ID": "benchmark",  # as under torchrun: the ranks are started here, not by Lightning
                "LOCAL_WORLD_SIZE": str(workers),
                "GROUP_RANK": "0",
            }
            ranks.append(
                subprocess.Popen(
                    command,
                    env={**os.environ, **variables, **_ONE_THREAD},
                    cwd=_REPOSITORY,
                    start_new_session=True,
                    **streams(rank),
                )
            )
        with ExitStack() as pipes:
            _close_later(pipes, ranks)
            yield ranks, None
    finally:
        stop_sessions(ranks)


def _link(workers: int, mbit: float, round_trip_seconds: float) -> ShapedLink:
    if round_trip_seconds:
        return DelayedLink(workers, mbit, round_trip_seconds=round_trip_seconds)
    return ShapedLink(workers, mbit)


def _on_own_processors(command: list[str], host: int, hosts: int) -> list[str]:
    """``command`` on this host's share of the processors, if there is at least one for each."""
    processors = sorted(os.sched_getaffinity(0))
    share = len(processors) // hosts
    if not share or shutil.which("taskset") is None:
        return command
    own = processors[host * share : (host + 1) * share]
    return ["taskset", "--cpu-list", ",".join(map(str, own)), *command]


def _close_later(pipes: ExitStack, ranks: Sequence[subprocess.Popen[bytes]]) -> None:
    for rank in ranks:
        for pipe in (rank.stdin, rank.stdout):
            if pipe is not None:
                pipes.enter_context(pipe)
