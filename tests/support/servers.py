"""Parameter servers for trainings of a rank pool: real processes."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace

from tests.support.fit import Outcome, Recipe, Run, train

__all__ = ["ServedOutcome", "started_servers", "train_with_servers"]

_CLEAN = {"COVERAGE_PROCESS_START": ""}


@contextmanager
def started_servers(count: int) -> Iterator[list[subprocess.Popen[str]]]:
    """Processes of the command, for the training whose address is in the environment."""
    with tempfile.TemporaryFile("w+") as said:
        command = [sys.executable, "-m", "lightning_bytescheduler", "server"]
        servers = [
            subprocess.Popen(command, stdout=said, stderr=subprocess.STDOUT, text=True, env={**os.environ, **_CLEAN})
            for _ in range(count)
        ]
        try:
            yield servers
        finally:
            for server in servers:
                server.kill()
                server.wait()


@dataclass(frozen=True, kw_only=True)
class ServedOutcome:
    """What :func:`train_with_servers` ends with on one rank."""

    outcome: Outcome | None
    error: str
    seconds: float


def train_with_servers(rank: int, recipe: Recipe, run: Run, servers: int, *, kill_at: int = 0) -> ServedOutcome:
    """Train with servers of their own.

    Args:
        rank: Of the pool.
        recipe: What is trained.
        run: How.
        servers: Started by rank 0.
        kill_at: Batch after which rank 0 kills the last of them.
    """
    from lightning.pytorch import Callback

    begin, error, outcome = time.monotonic(), "", None
    with started_servers(servers if rank == 0 else 0) as processes:

        class Kill(Callback):
            def on_train_batch_end(self, trainer: object, module: object, out: object, batch: object, n: int) -> None:
                if n == kill_at and kill_at and processes:
                    processes[-1].kill()
                    processes[-1].wait()

        recipe = replace(recipe, callbacks=(*recipe.callbacks, Kill))
        try:
            outcome = train(rank, recipe, run)
        except Exception as raised:
            if not kill_at:
                raise
            error = f"{type(raised).__name__}: {raised}"
        if rank == 0:
            with suppress(subprocess.TimeoutExpired):
                for process in processes:
                    process.wait(0.01)
    return ServedOutcome(outcome=outcome, error=error, seconds=time.monotonic() - begin)
