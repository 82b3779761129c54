"""Parameter servers for trainings of a rank pool: real processes."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import IO
from unittest.mock import patch

from torch.distributed import rendezvous

from tests.support.fit import Outcome, Recipe, Run, train

__all__ = ["ServedOutcome", "on_nodes", "started_servers", "train_with_servers"]

_CLEAN = {"COVERAGE_PROCESS_START": ""}
_START_S = 100.0
_starts = itertools.count()  # of this process; as many on each rank of a pool


@contextmanager
def started_servers(count: int, *, ready: bool = False) -> Iterator[list[subprocess.Popen[str]]]:
    """Processes of the command, for the training whose address is in the environment.

    Args:
        count: Number of them.
        ready: Wait until all have signed on; the training's store is there already.
    """
    with tempfile.TemporaryFile("w+") as said:
        command = [sys.executable, "-m", "lightning_bytescheduler", "server"]
        servers = [
            subprocess.Popen(command, stdout=said, stderr=subprocess.STDOUT, text=True, env={**os.environ, **_CLEAN})
            for _ in range(count)
        ]
        try:
            if ready:
                _await_ready(said, servers)
            yield servers
        finally:
            for server in servers:
                server.kill()
                server.wait()


def _await_ready(said: IO[str], servers: list[subprocess.Popen[str]]) -> None:
    deadline = time.monotonic() + _START_S
    while True:
        said.seek(0)
        text = said.read()
        if text.count("is ready for the training") == len(servers):
            return
        assert all(server.poll() is None for server in servers), text
        assert time.monotonic() < deadline, f"not ready after {_START_S:g} s: {text}"
        time.sleep(0.1)


@contextmanager
def _after_the_servers(rank: int, count: int) -> Iterator[list[subprocess.Popen[str]]]:
    """Have every rank's training begin when its servers have started, which a busy machine takes long for."""
    size = int(os.environ["LOCAL_WORLD_SIZE"])  # see on_nodes
    store, _, _ = next(rendezvous("env://", rank=rank, world_size=size))  # the training's own, as long as it is held
    begun = f"servers have started {next(_starts)}"
    with started_servers(count if rank == 0 else 0, ready=True) as processes:
        if rank == 0:
            store.set(begun, "")
        store.wait([begun], timedelta(seconds=2 * _START_S))
        yield processes


@contextmanager
def on_nodes(rank: int, nodes: int) -> Iterator[None]:
    """Make a rank of the pool belong to one of several equal nodes, as the environment says."""
    each = int(os.environ["LOCAL_WORLD_SIZE"]) // nodes  # of the pool; Lightning takes WORLD_SIZE away after a fit
    place = {"NODE_RANK": str(rank // each), "LOCAL_RANK": str(rank % each), "LOCAL_WORLD_SIZE": str(each)}
    with patch.dict(os.environ, place):
        yield


@dataclass(frozen=True, kw_only=True)
class ServedOutcome:
    """What :func:`train_with_servers` ends with on one rank."""

    outcome: Outcome | None
    error: str
    seconds: float


def train_with_servers(
    rank: int,
    recipe: Recipe,
    run: Run,
    servers: int,
    *,
    kill_at: int = 0,
    pause_at: int = 0,
    pause_s: float = 0.0,
    nodes: int = 1,
    timeouts: tuple[float, ...] = (),
) -> ServedOutcome:
    """Train with servers of their own.

    Args:
        rank: Rank of the pool.
        recipe: What is trained.
        run: How it is trained.
        servers: Number of servers, started by rank 0.
        kill_at: Batch after which rank 0 kills the last of them.
        pause_at: Batch after which rank 0 stops the last of them, as a machine without time for it would.
        pause_s: For how long; for good if 0.
        nodes: On which the pool's ranks count as being, as many on each.
        timeouts: Of the strategy on each rank, in seconds; none of it goes by while the servers start.
    """
    from lightning.pytorch import Callback

    error, outcome = "", None
    started = _after_the_servers(rank, servers) if timeouts else started_servers(servers if rank == 0 else 0)
    with started as processes, on_nodes(rank, nodes):
        begin = time.monotonic()

        class Kill(Callback):
            def on_train_batch_end(self, trainer: object, module: object, out: object, batch: object, n: int) -> None:
                if n == kill_at and kill_at and processes:
                    processes[-1].kill()
                    processes[-1].wait()
                if n == pause_at and pause_at and processes:
                    processes[-1].send_signal(signal.SIGSTOP)
                    if pause_s:
                        threading.Timer(pause_s, processes[-1].send_signal, (signal.SIGCONT,)).start()

        if timeouts:
            run = replace(run, options={**run.options, "timeout": timedelta(seconds=timeouts[rank])})
        trainer = {"num_nodes": nodes, **recipe.trainer}
        recipe = replace(recipe, callbacks=(*recipe.callbacks, Kill), trainer=trainer)
        try:
            outcome = train(rank, recipe, run)
        except Exception as raised:
            if not (kill_at or (pause_at and not pause_s)):
                raise
            error = f"{type(raised).__name__}: {raised}"
        if rank == 0:
            with suppress(subprocess.TimeoutExpired):
                for process in processes:
                    process.wait(0.01)
    return ServedOutcome(outcome=outcome, error=error, seconds=time.monotonic() - begin)
