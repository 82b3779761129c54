"""Starts ranks, on this machine's loopback or as hosts on links of limited rate, and has them train in turns.

The same processes train all contenders, one after the other, so a machine that drifts affects all alike.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track

from benchmarks.delayed_link import DelayedLink
from benchmarks.rank import MARK
from benchmarks.shaped_link import ShapedLink, stop_sessions

__all__ = ["FIRST_PORT", "Job", "MeasurementFailed", "Place", "by_contender", "free_port", "in_turns", "ranks_of"]

REPOSITORY = Path(__file__).parents[1]
FIRST_PORT = 29_500
"""Of the rendezvous of the first job on links; each job has one of its own, at the next port."""

Job = dict[str, Any]
"""What a rank is asked for, or what it answers."""


class MeasurementFailed(RuntimeError):
    """Something could not be measured; what a rank complained of is on standard error."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where ranks run."""

    ranks: int = 2
    mbit: float | None = None  # rate of each host's link; None: loopback
    round_trip_seconds: float = 0.0  # between two hosts; 0: that of the machine itself
    each: int = 1  # ranks of a host; on loopback, more than one are as torchrun starts them on one machine
    spare: int = 0  # further hosts
    own_processors: bool = False  # each host, or rank on loopback, has its share, if there is one for each
    threads: int = 1  # of OpenMP, for each rank: idle ones spin, and take the processor from other ranks

    @property
    def hosts(self) -> int:
        """That ranks are on."""
        return self.ranks // self.each

    def environment(self, rank: int) -> dict[str, str]:
        """What tells a rank which one it is."""
        host, local = divmod(rank, self.each)
        found = {
            "WORLD_SIZE": self.ranks,
            "RANK": rank,
            "NODE_RANK": host,
            "GROUP_RANK": host,
            "LOCAL_RANK": local,
            "LOCAL_WORLD_SIZE": self.each,
            "NODES": self.hosts,
            "OMP_NUM_THREADS": self.threads,
            "TORCH_CPP_LOG_LEVEL": "ERROR",
        }
        if self.mbit is None:
            found |= {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
            if self.each > 1:
                found["TORCHELASTIC_RUN_ID"] = "benchmark"  # as under torchrun
        return {name: str(value) for name, value in found.items()}


class Ranks:
    """Ranks that train: the processes of each set, how many jobs each has, and the link that they are on, if any."""

    def __init__(self, sets: Sequence[Sequence[subprocess.Popen[bytes]]], jobs: int, link: ShapedLink | None) -> None:
        self.sets = sets
        self.jobs = jobs
        self.link = link

    def results(self, number: int = 0) -> Iterator[list[Job]]:
        """For each job of a set, in turn, what each rank answers; raises if a rank fails."""
        ranks = self.sets[number]
        for job in range(self.jobs):
            found = [_answer(rank) for rank in ranks]
            if None in found:
                stop_sessions(ranks)
                codes = [rank.wait() for rank in ranks]
                raise MeasurementFailed(
                    f"Ranks ended with codes {codes} in job {job}. Run one by hand: {ranks[0].args!r}"
                )
            yield [one for one in found if one is not None]
        if any(codes := [rank.wait() for rank in ranks]):
            raise MeasurementFailed(
                f"Ranks ended with codes {codes} after all jobs. Run one by hand: {ranks[0].args!r}"
            )


@contextmanager
def ranks_of(
    place: Place, work: Callable[[Job], Job], *sets: Sequence[Job], timeout: float | None = None
) -> Iterator[Ranks]:
    """Start ranks that call ``work``, a function of a module, for each job; after ``timeout`` seconds they are ended.

    Each set of jobs, of as many as the others, has ranks and hosts of its own, which train at the same time.
    """
    link: ShapedLink | None = None
    started: list[list[subprocess.Popen[bytes]]] = [[] for _ in sets]
    with ExitStack() as stack:
        stack.callback(lambda: stop_sessions([rank for ranks in started for rank in ranks]))
        if place.mbit is not None:
            link = stack.enter_context(_link(place, len(sets)))
        for number, jobs in enumerate(sets):
            words = [
                sys.executable,
                "-m",
                "benchmarks.rank",
                f"{work.__module__}:{work.__qualname__}",
                json.dumps(jobs),
            ]
            first = number * place.hosts
            shared = {"MASTER_PORT": str(free_port() if link is None else FIRST_PORT)}
            if link is not None:
                shared["MASTER_ADDR"] = link.address(first)
            for rank in range(place.ranks):
                host = rank // place.each
                # On loopback each rank has a share of its own.
                own, of = (rank, place.ranks) if link is None else (host, place.hosts)
                command = on_own_processors(words, own, of) if place.own_processors else words
                environment = {**place.environment(rank), **shared}
                # What ranks complain of goes where ours goes; an open standard input tells them that we live.
                streams: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "cwd": REPOSITORY}
                if link is not None:
                    child = link.popen(first + host, command, env=environment, **streams)
                else:
                    everything = {**os.environ, **environment}
                    child = subprocess.Popen(command, env=everything, start_new_session=True, **streams)
                started[number].append(child)
                for pipe in (child.stdin, child.stdout):
                    if pipe is not None:
                        stack.enter_context(pipe)
        if timeout is not None:
            timer = threading.Timer(timeout, lambda: stop_sessions([rank for ranks in started for rank in ranks]))
            timer.name, timer.daemon = "ranks-timeout", True
            timer.start()
            stack.callback(timer.cancel)
        yield Ranks(started, len(sets[0]), link)


def in_turns(
    place: Place, work: Callable[[Job], Job], jobs: Sequence[Job], *, title: str = "", timeout: float | None = None
) -> Iterator[list[Job]]:
    """Do jobs one after the other in the same processes; gives what each rank answers, and shows how far it is."""
    with ranks_of(place, work, jobs, timeout=timeout) as ranks:
        bar: dict[str, Any] = {"total": len(jobs), "console": Console(stderr=True), "transient": True}
        yield from track(ranks.results(), title or "measuring", **bar)


def by_contender(
    place: Place, work: Callable[[Job], Job], contenders: Sequence[str], *, rounds: int = 1, title: str, **job: Any
) -> dict[str, list[list[Job]]]:
    """The same job for each contender, in turn and in rounds; what all ranks answered in each round, by contender."""
    jobs = [{**job, "contender": name} for _ in range(rounds) for name in contenders]
    found: dict[str, list[list[Job]]] = {name: [] for name in contenders}
    for one, answers in zip(jobs, in_turns(place, work, jobs, title=title), strict=True):
        found[one["contender"]].append(answers)
    return found


def free_port() -> int:
    """A free port, none of those that the system gives to outgoing connections: these could be taken in between."""
    for port in random.SystemRandom().sample(range(15_000, 32_768), 100):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise RuntimeError("None of 100 ports is free.")


def on_own_processors(command: list[str], host: int, hosts: int) -> list[str]:
    """``command`` on this host's share of the processors, if there is at least one for each."""
    processors = sorted(os.sched_getaffinity(0))
    share = len(processors) // hosts
    if not share or shutil.which("taskset") is None:
        return command
    own = processors[host * share : (host + 1) * share]
    return ["taskset", "--cpu-list", ",".join(map(str, own)), *command]


def _link(place: Place, sets: int) -> ShapedLink:
    hosts, mbit = place.hosts * sets + place.spare, place.mbit or 0.0
    if place.round_trip_seconds:
        return DelayedLink(hosts, mbit, round_trip_seconds=place.round_trip_seconds)
    return ShapedLink(hosts, mbit)


def _answer(rank: subprocess.Popen[bytes]) -> Job | None:
    """The next answer of a rank; ``None`` at its end."""
    mark = MARK.encode()
    for line in rank.stdout or ():
        if line.startswith(mark):
            answer: Job = json.loads(line.removeprefix(mark))
            return answer
    return None
