"""``python -m tests.diloco.kill_coordinator``: a coordinator is killed at 50 random moments, and nothing is lost.

It is started anew from its state each time. A round that had ended, but whose state was not kept yet, is repeated, and
what workers have trained since the state before it is given up; nothing else may be. Of one worker, whose steps are
multiples of 1/1024, the global weights are known whatever the rounds were: with an outer step of 1 and no momentum, the
first ones less all of its other steps, bit for bit. A step that is lost, or counted twice, shows in them. With more
workers, the samples that were merged are compared with those that they have trained on.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from tests.diloco.coordinated_workers import ThreadWorker
from tests.support.rank_pool import free_port

_START_S = 60.0


def main() -> int:
    """Run it; 1 if anything is lost."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    console, moments = Console(stderr=True), random.Random(asked.seed)
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log.txt"
        state = str(Path(folder) / "state")
        coordinator = Coordinator(port, state, log)
        try:
            coordinator.until_there()
            workers = [ThreadWorker(url, f"w{n}", seconds=0.01, timeout=_START_S) for n in range(asked.workers)]
            with Progress(console=console) as progress:
                for _ in progress.track(range(asked.kills), description="kills"):
                    time.sleep(moments.uniform(0.2, 2.0))
                    coordinator.kill()
                    coordinator.until_merged()
                    for worker in workers:
                        if worker.error is not None:
                            raise worker.error
            for worker in workers:
                worker.steps = worker.taken + 20
            for worker in workers:
                worker.checked()
            time.sleep(1.0)
            status = coordinator.until_there()
        finally:
            coordinator.stop()
    gone = [worker.given_up() for worker in workers]
    taken, lost = sum(worker.taken for worker in workers), sum(map(len, gone))
    rounds, merged = status["weights_version"], status["samples"]
    console.print(f"{rounds} rounds, {taken} steps, {lost} of them given up; {merged} samples")
    failed = merged != 2 * (taken - lost)
    if asked.workers == 1:
        pairs = zip(workers[0].weights, workers[0].uninterrupted(without=gone[0]), strict=True)
        off = max(float((one - other).abs().max()) for one, other in pairs)
        console.print("weights: those of all others" if off == 0 else f"weights: off by {off:g}")
        failed |= off != 0
    return int(failed)


class Coordinator:
    """One process at a time.

    Args:
        port: The port that it listens at.
        state: The folder of its state.
        log: File for its output.
    """

    def __init__(self, port: int, state: str, log: Path) -> None:
        self._port = port
        self._state = state
        self._log = log
        self._process = self._start()

    def kill(self) -> None:
        """Kill -9 it, and start it anew."""
        self._process.kill()
        self._process.wait()
        self._process = self._start()

    def until_there(self) -> dict[str, Any]:
        """Its status, once it has one."""
        deadline = time.monotonic() + _START_S
        while (found := _status(self._port)) is None:
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"The coordinator did not start:\n{self._log.read_text()[-3000:]}")
            time.sleep(0.05)
        return found

    def until_merged(self) -> None:
        """Until the run has gone on."""
        first = self.until_there()["weights_version"]
        deadline = time.monotonic() + _START_S
        while self.until_there()["weights_version"] <= first:
            if time.monotonic() > deadline:
                raise RuntimeError(f"No round has ended within {_START_S:.0f} s:\n{self._log.read_text()[-3000:]}")
            time.sleep(0.05)

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()

    def _start(self) -> subprocess.Popen[bytes]:
        options = {
            "--bind": f"127.0.0.1:{self._port}",
            "--state": self._state,
            "--samples-per-round": "20",
            "--outer-lr": "1",
            "--outer-momentum": "0",
        }
        words = [word for pair in options.items() for word in pair]
        with self._log.open("ab") as out:
            return subprocess.Popen(
                [sys.executable, "-m", "lightning_bytescheduler", "coordinator", *words],
                stdout=out,
                stderr=out,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )


def _status(port: int) -> dict[str, Any] | None:
    with (
        suppress(OSError, ValueError),
        urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/status", timeout=5) as answer,
    ):
        found: dict[str, Any] = json.load(answer)
        return found
    return None


if __name__ == "__main__":
    sys.exit(main())
