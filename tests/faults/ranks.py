"""Starts ranks as separate processes, the way SLURM does: a death does not end the siblings.

Importing torch and Lightning costs seconds of a core, so it is done once, in a process without threads that every rank
is forked from. A rank then runs the script from the start and ends as any script ends: with the interpreter's own
finalisation, which is part of what is tested.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.support.rank_pool import free_port

__all__ = ["Ended", "Nursery", "rank_environment"]

_NURSERY = Path(__file__).with_name("nursery.py")
_ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Ended:
    """How one rank ended.

    Attributes:
        code: Exit code; negative for the signal that killed it; ``None`` if it had to be killed by the test.
        ended: When, in seconds since the epoch.
        log: Everything it wrote.
    """

    code: int | None
    ended: float
    log: str

    def stamp(self, name: str) -> float | None:
        """When the rank wrote ``name``, in seconds since the epoch."""
        for line in self.log.splitlines():
            if line.startswith(f"{name} "):
                return float(line.split()[1])
        return None


def rank_environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    """What a launcher would set."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "NODE_RANK": "0",
        "GROUP_RANK": "0",
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        **quiet_environment(),
    }


def quiet_environment() -> dict[str, str]:
    """Ranks share the machine's cores, talk over the loopback device and find the package."""
    paths = [str(_ROOT / "src"), str(_ROOT), os.environ.get("PYTHONPATH", "")]
    return {
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "PYTHONUNBUFFERED": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }


class Nursery:
    """Forks ranks from a process that has imported everything."""

    def __init__(self) -> None:
        environment = {**os.environ, **quiet_environment()}
        self._process = subprocess.Popen(
            [sys.executable, str(_NURSERY)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={k: v for k, v in environment.items() if not k.startswith("BYTESCHEDULER_")},
            text=True,
        )
        self._ready = threading.Event()
        self._changed = threading.Condition()
        self._pids: dict[str, int] = {}
        self._ends: dict[str, tuple[int, float]] = {}
        self._started = 0
        self._listener = threading.Thread(target=self._listen, name="nursery-listener", daemon=True)
        self._listener.start()

    def run(
        self,
        script: Path,
        arguments: dict[str, Any],
        *,
        world_size: int,
        folder: Path,
        timeout: float,
        own_arguments: dict[int, dict[str, Any]] | None = None,
        await_only: int | None = None,
        meanwhile: Callable[[list[int]], object] | None = None,
    ) -> list[Ended]:
        """Run ``script`` on every rank until all have ended.

        Args:
            script: Gets its arguments as JSON in ``sys.argv[1]``.
            arguments: Arguments of every rank.
            world_size: Number of ranks.
            folder: For the logs.
            timeout: Longest wait, in seconds; those that have not ended by then are killed.
            own_arguments: Changes for single ranks.
            await_only: A rank at whose end all others are killed.
            meanwhile: Called with the ranks' process numbers once all have started.
        """
        port = free_port()
        names = []
        with self._changed:
            self._started += 1
            prefix = f"run{self._started}"
        for rank in range(world_size):
            name = f"{prefix}-rank{rank}"
            names.append(name)
            request = {
                "name": name,
                "script": str(script),
                "argument": json.dumps({**arguments, **(own_arguments or {}).get(rank, {})}),
                "environment": rank_environment(rank, world_size, port),
                "log": str(folder / f"{name}.log"),
                "folder": str(folder),
            }
            self._send(request)
        deadline = time.monotonic() + timeout
        awaited = names if await_only is None else [names[await_only]]
        try:
            self._await(self._pids, names, timeout)
            if meanwhile is not None:
                meanwhile([self._pids[name] for name in names])
            self._await(self._ends, awaited, max(0.0, deadline - time.monotonic()))
        finally:
            with self._changed:
                late = {name: self._pids[name] for name in names if name not in self._ends and name in self._pids}
            for pid in late.values():
                os.kill(pid, signal.SIGKILL)
        self._await(self._ends, names, 60.0)
        with self._changed:
            return [
                Ended(
                    code=None if name in late else self._ends[name][0],
                    ended=self._ends[name][1],
                    log=(folder / f"{name}.log").read_text(errors="replace"),
                )
                for name in names
            ]

    def close(self) -> None:
        """End the process, and with it every rank that still runs."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(10.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._listener.join(10.0)
        if self._process.stdout is not None:
            self._process.stdout.close()

    def __enter__(self) -> Nursery:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _await(self, told: Mapping[str, object], names: Sequence[str], timeout: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: all(name in told for name in names), timeout)

    def _send(self, request: dict[str, Any]) -> None:
        if self._process.stdin is None:
            raise RuntimeError("The nursery has no stdin.")
        with self._changed:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()

    def _listen(self) -> None:
        for line in self._process.stdout or ():
            message = json.loads(line)
            with self._changed:
                if "pid" in message:
                    self._pids[message["name"]] = message["pid"]
                else:
                    self._ends[message["name"]] = (message["code"], message["ended"])
                self._changed.notify_all()
