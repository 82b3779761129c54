"""Processes that stay up for a whole test session and run functions on all ranks at once.

Importing costs seconds, so it is done once, in the fork server all ranks of all pools come from; it has no threads. A
case costs only its training. Lightning sees processes of another launcher, with the environment variables that it would
set.

The parent talks to each rank over a pipe of its own. A rank that raises, dies or does not answer fails the call with
everything that is known about it, and the next call gets new processes, as the others may be stuck in a collective.
"""

from __future__ import annotations

import ctypes
import faulthandler
import fcntl
import gc
import itertools
import multiprocessing
import os
import pickle
import random
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType
from typing import IO, Any, NamedTuple
from unittest.mock import patch

import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

__all__ = [
    "RankPool",
    "RanksFailed",
    "end_with_parent",
    "free_port",
    "let_go",
    "preload",
    "show_stacks",
    "threads_at_ends",
]

_PRELOADED = (
    "lightning.pytorch",
    "torch.distributed",
    "lightning_bytescheduler.ddp.fabric_strategy",
    "lightning_bytescheduler.ddp.strategy",
    "lightning_bytescheduler.diloco.strategy",
    "lightning_bytescheduler.tuning.credit_tuner",
    "tests.support.fit",
    "tests.support.models",
)
_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # ranks share the machine's cores
_GRACE_S = 5.0  # for the other ranks to answer too, once one has failed
_STOP_S = 5.0
_START_S = 300.0  # bounds a fork server that does not start


def let_go() -> None:
    """Give gloo's threads a moment to drop the last collective, before its group goes.

    With torch 2.6 a group that is destroyed in the same instant can hang: one of its threads wants the GIL to drop a
    tensor, and the thread that destroys the group holds it.
    """
    time.sleep(0.1)


def threads_at_ends(training: Callable[[], object]) -> list[int]:
    """How many threads there are at the end of each of four trainings, while Python collects nothing by itself.

    Args:
        training: Returns what ends up in objects that refer to each other.
    """
    gc.collect()
    gc.disable()
    try:
        return [_threads_at_end(training) for _ in range(4)]
    finally:
        gc.enable()


def _threads_at_end(training: Callable[[], object]) -> int:
    holder = [training()]
    holder.append(holder)
    return len(os.listdir("/proc/self/task"))


_default_groups = itertools.count()  # of this process; as many on each rank of a pool


def join_default_group(rank: int, *, world_size: int = 2) -> None:
    """Make a default group over gloo, under a name of its own.

    Torch's store does not tell two default groups apart that come one after the other in the same processes: a rank may
    find where the other one listened before.
    """
    store, _, _ = next(rendezvous("env://", rank=rank, world_size=world_size))
    name = f"default group {next(_default_groups)}"
    dist.init_process_group("gloo", store=dist.PrefixStore(name, store), rank=rank, world_size=world_size)


def preload(modules: Sequence[str] = _PRELOADED, *, now: bool) -> None:
    """Have the fork server import what ranks need, also if code that makes no ranks is the first to start it.

    Args:
        modules: What that is.
        now: Start it, with one thread for arithmetic.
    """
    multiprocessing.get_context("forkserver").set_forkserver_preload(list(modules))
    if now:
        with patch.dict(os.environ, _ONE_THREAD):
            forkserver.ensure_running()


def end_with_parent() -> None:
    """Have this process killed when its parent ends; on Linux."""
    ctypes.CDLL(None).prctl(_DEATH_SIGNAL, signal.SIGKILL)


class RanksFailed(AssertionError):
    """One or more ranks raised, died or did not answer; the message has their tracebacks."""


class _Rank(NamedTuple):
    process: BaseProcess
    pipe: Connection
    stacks: Path


class RankPool:
    """``world_size`` processes, started when first needed.

    Args:
        world_size: Number of ranks.
        preloaded: Modules that the fork server imports once for all ranks, if this pool is the first to start.
            Importing one starts no thread.
    """

    def __init__(self, world_size: int, *, preloaded: Sequence[str] = _PRELOADED) -> None:
        self.world_size = world_size
        self._preloaded = list(preloaded)
        self._ranks: list[_Rank] = []
        self._kept: dict[bytes, bytes] = {}
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def run(self, function: Callable[..., Any], /, *, timeout: float = 120.0, **arguments: Any) -> list[Any]:
        """Call ``function(rank, **arguments)`` on every rank at once.

        Args:
            function: Importable by name; what it takes and returns is pickled.
            timeout: Longest wait for all answers, in seconds.
            arguments: The same for every rank.

        Returns:
            The results, by rank.

        Raises:
            RanksFailed: With the traceback, exit code or stack of every rank that gave no result.
        """
        if not self._ranks:
            self._start()
        self._signal(signal.SIGCONT)
        message = pickle.dumps((function, arguments, 0.9 * timeout))
        answers: dict[int, tuple[bool, Any]] = {}
        for number, rank in enumerate(self._ranks):
            try:
                rank.pipe.send_bytes(message)
            except OSError:
                answers[number] = (False, self._epitaph(rank))
        self._collect(answers, time.monotonic() + timeout)
        if len(answers) == self.world_size and all(good for good, _ in answers.values()):
            self._signal(signal.SIGSTOP)
            return [answers[number][1] for number in range(self.world_size)]
        report = self._report(answers, timeout)
        self.stop(grace=0.0)  # the others may wait for one that failed
        raise RanksFailed(report)

    def run_once(self, function: Callable[..., Any], /, **arguments: Any) -> list[Any]:
        """As :meth:`run`, for calls with the same result each time: the second call is answered from memory.

        What is kept outlives the processes. Two calls are the same if what they hand over is, to the last byte when
        pickled; so not for functions that read a file.
        """
        call = pickle.dumps((function, arguments))
        if call not in self._kept:
            self._kept[call] = pickle.dumps(self.run(function, **arguments))
        results: list[Any] = pickle.loads(self._kept[call])
        return results

    def stop(self, grace: float = _STOP_S) -> None:
        """End the processes: politely, then by force; each by its own id."""
        self._signal(signal.SIGCONT)
        for rank in self._ranks:
            rank.pipe.close()  # an idle rank ends at the end of its pipe
        deadline = time.monotonic() + grace
        for rank in self._ranks:
            rank.process.join(max(0.0, deadline - time.monotonic()))
            if rank.process.is_alive():
                rank.process.kill()
                rank.process.join()
            rank.process.close()
        self._ranks = []
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def __enter__(self) -> RankPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _signal(self, number: signal.Signals) -> None:
        """Stop or continue the ranks: gloo's threads look for messages every few milliseconds, also in idle ranks."""
        for rank in self._ranks:
            if rank.process.pid is not None and rank.process.is_alive():
                os.kill(rank.process.pid, number)

    def _start(self) -> None:
        preload(self._preloaded, now=True)
        context = multiprocessing.get_context("forkserver")
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-")
        port = free_port()
        for number in range(self.world_size):
            ours, theirs = context.Pipe()
            stacks = Path(self._folder.name, f"stacks-{number}.txt")
            process = context.Process(
                target=_serve,
                args=(number, self.world_size, port, theirs, str(stacks)),
                name=f"rank-{number}-of-{self.world_size}",
                daemon=True,
            )
            process.start()
            theirs.close()
            self._ranks.append(_Rank(process, ours, stacks))
        self._await_start(time.monotonic() + _START_S)

    def _await_start(self, deadline: float) -> None:
        """Wait for the imports, so that no call's timeout includes them."""
        for number, rank in enumerate(self._ranks):
            try:
                if rank.pipe.poll(max(0.0, deadline - time.monotonic())):
                    rank.pipe.recv_bytes()
                    continue
                report = f"Rank {number} of {self.world_size} has not started within {_START_S:g} s."
            except (EOFError, OSError):
                report = f"Rank {number} of {self.world_size} did not start. {self._epitaph(rank)}"
            self.stop(grace=0.0)
            raise RanksFailed(report)

    def _collect(self, answers: dict[int, tuple[bool, Any]], deadline: float) -> None:
        """Fill in the answers that come before ``deadline``, or soon after the first failure."""
        while len(answers) < self.world_size:
            if any(not good for good, _ in answers.values()):
                deadline = min(deadline, time.monotonic() + _GRACE_S)
            waiting = {rank.pipe: n for n, rank in enumerate(self._ranks) if n not in answers}
            answered = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not answered:
                return
            for pipe in answered:
                number = waiting[pipe]  # type: ignore[index]
                try:
                    answers[number] = pickle.loads(pipe.recv_bytes())  # type: ignore[union-attr]
                except (EOFError, OSError):
                    answers[number] = (False, self._epitaph(self._ranks[number]))

    def _report(self, answers: dict[int, tuple[bool, Any]], timeout: float) -> str:
        silent = [number for number in range(self.world_size) if number not in answers]
        failed = [number for number in sorted(answers) if not answers[number][0]]
        parts = [f"Rank {number} of {self.world_size} failed:\n{answers[number][1]}" for number in failed]
        if silent:
            names = ", ".join(map(str, silent))
            after = f"within {timeout:g} s" if not failed else f"{_GRACE_S:g} s after the failure"
            parts.append(f"No answer {after} from rank {names} of {self.world_size}.")
            parts += [f"Rank {number} was at:\n{_read(self._ranks[number].stacks)}" for number in silent]
        return "\n\n".join(parts)

    def _epitaph(self, rank: _Rank) -> str:
        rank.process.join(_STOP_S)
        return f"The process ended with exit code {rank.process.exitcode}.\n{_read(rank.stacks)}"


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except FileNotFoundError:
        return ""


def free_port() -> int:
    """A free port that no other test gets, whichever process it is in, and that the system gives to no connection."""
    said = _read(Path("/proc/sys/net/ipv4/ip_local_port_range")).split()  # nothing on macOS
    first, last = 10_000, int(said[0]) if said else 32_768
    with open(Path(tempfile.gettempdir()) / f"bytescheduler-test-ports-{os.getuid()}", "a+") as given:
        fcntl.flock(given, fcntl.LOCK_EX)
        given.seek(0)
        latest = int(given.read() or random.SystemRandom().randrange(first, last))
        for step in range(1, last - first):
            port = first + (latest + step - first) % (last - first)
            with socket.socket() as probe, suppress(OSError):
                probe.bind(("0.0.0.0", port))
                given.truncate(0)
                given.write(str(port))
                return port
    raise RuntimeError(f"None of the ports from {first} to {last} is free.")


_stack_files: list[IO[str]] = []  # of this process, if it is a rank


def show_stacks() -> None:
    """Have a rank's stacks shown if it dies of a signal; Lightning puts the signals' defaults back after each fit."""
    faulthandler.disable()
    for stack_file in _stack_files:
        faulthandler.enable(stack_file, all_threads=True)


def _serve(rank: int, world_size: int, port: int, pipe: Connection, stacks: str) -> None:
    """A rank's main loop."""
    if sys.platform == "linux":
        end_with_parent()  # a stopped rank sees no end of its pipe
    os.environ.update(
        LOCAL_RANK=str(rank),
        RANK=str(rank),
        NODE_RANK="0",
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        GLOO_SOCKET_IFNAME="lo",
        **_ONE_THREAD,
    )
    for name in list(os.environ):
        if name.startswith("BYTESCHEDULER_") and name != "BYTESCHEDULER_LIGHTNING":
            del os.environ[name]
    os.environ["BYTESCHEDULER_CREDIT_TUNING"] = "0"  # clocks decide nothing, unless a test asks for it
    stack_file = open(stacks, "w")  # noqa: SIM115  # open for as long as the process lives
    _stack_files.append(stack_file)
    gc.freeze()  # modules: what is collected is what tests have made
    pipe.send_bytes(b"ready")
    while True:
        try:
            message = pipe.recv_bytes()
        except EOFError:
            return
        try:
            function, arguments, patience = pickle.loads(message)
            show_stacks()
            # Not on a signal: Lightning puts back the handlers that Python knows of, which are not faulthandler's.
            faulthandler.dump_traceback_later(patience, file=stack_file)
            answer = (True, function(rank, **arguments))
        except BaseException:
            answer = (False, traceback.format_exc())
        faulthandler.cancel_dump_traceback_later()
        try:
            packed = pickle.dumps(answer)
        except BaseException:
            packed = pickle.dumps((False, f"The result cannot be pickled.\n{traceback.format_exc()}"))
        try:
            pipe.send_bytes(packed)
        except OSError:
            return
