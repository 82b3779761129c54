"""``python -m tests.diloco.kill_coordinator``: a coordinator is killed at 50 random moments, and nothing is lost.

It is started anew from its state each time. A round that had ended, but whose state was not kept yet, is repeated, and
what workers had trained in it is gone with it; nothing else may be. Of one worker, whose steps are multiples of 1/1024,
the global weights are known whatever the rounds were: with an outer step of 1 and no momentum, the first ones less all
of its other steps, bit for bit. A step that is lost, or counted twice, shows in them. With more workers, the samples
that were merged are compared with those that they have trained on.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
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
    parser.add_argument(
        "--standby", action="store_true", help="another coordinator stands by, and takes over each time"
    )
    parser.add_argument(
        "--state-lease-s", type=float, default=15.0, help="that a standby waits for (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    console, moments = Console(stderr=True), random.Random(asked.seed)
    ports = [free_port() for _ in range(1 + asked.standby)]
    url = ",".join(f"http://127.0.0.1:{port}" for port in ports)
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log.txt"
        state = str(Path(folder) / "state")
        pair = Coordinators(ports, state, log, asked.state_lease_s)
        try:
            pair.until_there()
            workers = [ThreadWorker(url, f"w{n}", seconds=0.01, timeout=_START_S) for n in range(asked.workers)]
            with Progress(console=console) as progress:
                for _ in progress.track(range(asked.kills), description="kills"):
                    time.sleep(moments.uniform(0.2, 2.0))
                    pair.kill()
                    pair.until_merged()
                    for worker in workers:
                        if worker.error is not None:
                            raise worker.error
            for worker in workers:
                worker.steps = worker.taken + 20
            for worker in workers:
                worker.checked()
            time.sleep(1.0)
            status = pair.until_there()
        finally:
            pair.stop()
    gone = [worker.repeated() for worker in workers]
    taken, repeated = sum(worker.taken for worker in workers), sum(map(len, gone))
    rounds, merged = status["weights_version"], status["samples"]
    console.print(f"{rounds} rounds, {taken} steps, {repeated} of them in rounds that were repeated; {merged} samples")
    failed = merged != 2 * (taken - repeated)
    if asked.workers == 1:
        pairs = zip(workers[0].weights, workers[0].uninterrupted(without=gone[0]), strict=True)
        off = max(float((one - other).abs().max()) for one, other in pairs)
        console.print("weights: those of all others" if off == 0 else f"weights: off by {off:g}")
        failed |= off != 0
    return int(failed)


class Coordinators:
    """One that acts, and maybe one that stands by; each on a port of its own.

    Args:
        ports: Of each.
        state: Their folder.
        log: File for what they say.
        lease_s: Seconds without a word of one after which another one takes over.
    """

    def __init__(self, ports: list[int], state: str, log: Path, lease_s: float) -> None:
        self._state = state
        self._lease_s = lease_s
        self._log = log
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._acting = ports[0]
        for port in ports:
            self._start(port)
            if port == ports[0]:
                self.until_there()

    def kill(self) -> None:
        """Kill -9 the one that acts, and start it anew: where another one stands by, that one takes over."""
        process = self._processes[self._acting]
        process.send_signal(signal.SIGKILL)
        process.wait()
        others = [port for port in self._processes if port != self._acting]
        killed = self._acting
        if others:
            self._acting = others[0]
            self.until_there()
        self._start(killed)

    def until_there(self) -> dict[str, Any]:
        """The status of the one that acts, once it does."""
        deadline = time.monotonic() + _START_S
        while (found := _status(self._acting)) is None:
            if self._processes[self._acting].poll() is not None or time.monotonic() > deadline:
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
        for process in self._processes.values():
            process.kill()
            process.wait()

    def _start(self, port: int) -> None:
        options = {
            "--bind": f"127.0.0.1:{port}",
            "--state": self._state,
            "--samples-per-round": "20",
            "--outer-lr": "1",
            "--outer-momentum": "0",
            "--state-lease-s": str(self._lease_s),
        }
        words = [word for pair in options.items() for word in pair]
        words += ["--standby"] if set(self._processes) - {port} else []
        with self._log.open("ab") as out:
            self._processes[port] = subprocess.Popen(
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
