"""DiLoCo with a coordinator while its machines die: ``python -m benchmarks.churn FAULT``.

Processes on this machine train a small network; a step takes a fixed time, by sleeping. After a calm while, faults
begin:

- ``kill``: a worker is killed (SIGKILL) and started anew, so many times an hour. Under torchrun, which restarts all
  ranks from the last checkpoint, the same happens to ``ddp`` for comparison.
- ``stop``: a worker stands still for 20 seconds (SIGSTOP), as often.
- ``cut`` (root): a worker's link is cut for 20 seconds, in network namespaces.
- ``coordinator``: the coordinator is killed and started anew from its state.

Written down: useful samples a second (those that became part of the weights), and their ratio to those of the calm
while (the goodput); whether all workers had the same weights after each round, by their sha256; how long rounds took
(median and longest), also as shares of the time until their deadline; how often a killed worker came back, and after
how many seconds, from its last step to its next (mostly the start of Python); how often samples were trained on; the
loss; the coordinator's memory. A batch is written down before its step's sleep, so that no kill takes it from the
record but one of those few microseconds.
"""

from __future__ import annotations

import argparse
import collections
import ctypes
import itertools
import json
import os
import random
import secrets
import shutil
import signal
import ssl
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from benchmarks.churn_worker import make_rows
from benchmarks.delayed_link import enter_network
from benchmarks.measure import free_port
from benchmarks.shaped_link import ShapedLink, stop_sessions

_REPOSITORY = Path(__file__).parents[1]
_SILENT_S = 20.0
_START_S = 180.0
_STEPS = 10_000_000

Process = subprocess.Popen[bytes]


class Fleet:
    """The processes of one run, each in a session of its own.

    Args:
        folder: For what they write.
        link: The hosts they run on, or ``None`` for this one.
    """

    def __init__(self, folder: Path, link: ShapedLink | None) -> None:
        self.folder = folder
        self.link = link
        self.running: dict[str, Process] = {}
        self._hosts: dict[str, int] = {}

    def start(self, name: str, command: Sequence[str], **environment: str) -> None:
        """Start a process, or start it anew; what it says goes into a file."""
        shared = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(_REPOSITORY / "src"), str(_REPOSITORY)])}
        with (self.folder / f"{name}.log").open("ab") as log:
            if self.link is None:
                self.running[name] = subprocess.Popen(
                    command,
                    env={**os.environ, **shared, **environment},
                    start_new_session=True,
                    stdout=log,
                    stderr=log,
                    cwd=_REPOSITORY,
                )
            else:
                host = self._hosts.setdefault(name, len(self._hosts))
                # Each is a training of its own, not a rank of one over all hosts.
                alone = {"MASTER_ADDR": "127.0.0.1", "NODE_RANK": "0", "RANK": "0", "WORLD_SIZE": "1"}
                self.running[name] = self.link.popen(
                    host, command, env={**shared, **alone, **environment}, stdout=log, stderr=log, cwd=_REPOSITORY
                )

    def host(self, name: str) -> int:
        """Where a process runs."""
        return self._hosts[name]

    def kill(self, name: str) -> None:
        """End a process as a machine that loses power does."""
        with suppress(ProcessLookupError):
            os.killpg(self.running[name].pid, signal.SIGKILL)
        self.running[name].wait()

    def signal(self, name: str, number: int) -> None:
        """Send a signal to a process and its children."""
        with suppress(ProcessLookupError):
            os.killpg(self.running[name].pid, number)

    def close(self) -> None:
        """End all."""
        for name in self.running:
            self.signal(name, signal.SIGCONT)
        stop_sessions(list(self.running.values()))


def _enter(namespace: str) -> None:
    """Have this thread, alone, see the network of a namespace."""
    with open(f"/var/run/netns/{namespace}") as file:
        enter_network(ctypes.CDLL(None, use_errno=True), file.fileno())


class Coordinated:
    """A coordinator and its workers."""

    def __init__(self, asked: argparse.Namespace, folder: Path, link: ShapedLink | None) -> None:
        self.asked = asked
        self.folder = folder
        self.fleet = Fleet(folder, link)
        self.names = [f"w{number}" for number in range(asked.workers)]
        self.rows = make_rows(folder / "rows", slices=asked.slices, samples=asked.samples)
        self.address = f"127.0.0.1:{free_port()}" if link is None else f"{link.address(0)}:7070"
        self.url = f"{'http' if link is None else 'https'}://{self.address}"
        self.guarded: dict[str, str] = {}  # what lets workers in, by option
        self._asks: urllib.request.OpenerDirector = urllib.request.build_opener()
        self._in_namespace: ThreadPoolExecutor | None = None
        if link is not None:
            self._guard(link)
        self.memory: list[tuple[float, int]] = []
        self.polls: list[tuple[float, dict[str, Any]]] = []

    def _guard(self, link: ShapedLink) -> None:
        """Make what is asked for beyond one machine; questions are asked from the coordinator's host."""
        certificates, token = self.folder / "certificates", self.folder / "token"
        command = [sys.executable, "-m", "lightning_bytescheduler", "certificates", str(certificates)]
        subprocess.run([*command, "--host", link.address(0)], check=True, stdout=subprocess.DEVNULL, cwd=_REPOSITORY)
        token.touch(mode=0o600)
        token.write_text(secrets.token_urlsafe(32))
        self.guarded = {"authority": str(certificates / "ca.pem"), "token_file": str(token)}
        context = ssl.create_default_context(cafile=self.guarded["authority"])
        self._asks = urllib.request.build_opener(urllib.request.HTTPSHandler(context=context))
        self._asks.addheaders = [("Authorization", f"Bearer {token.read_text()}")]
        self._in_namespace = ThreadPoolExecutor(1, initializer=_enter, initargs=(link.namespace(0),))

    def start(self) -> None:
        """Start all."""
        self.start_coordinator()
        for name in self.names:
            self.start_worker(name)

    def start_coordinator(self) -> None:
        """Start the coordinator, anew from its state if there is one."""
        options = {
            "--bind": self.address,
            "--state": str(self.folder / "state"),
            "--train": self.rows,
            "--samples-per-round": str(self.asked.round),
        }
        tls: list[str] = []
        if self.guarded:
            certificates = self.folder / "certificates"
            tls = ["--tls", str(certificates / "server.pem"), str(certificates / "server.key")]
            options["--token-file"] = self.guarded["token_file"]
        words = [*tls, *(word for pair in options.items() for word in pair)]
        self.fleet.start("coordinator", [sys.executable, "-m", "lightning_bytescheduler", "coordinator", *words])

    def start_worker(self, name: str) -> None:
        """Start a worker, or start it anew."""
        asked = {
            "url": self.url,
            "rows": self.rows,
            "folder": str(self.folder),
            "name": name,
            "step_s": self.asked.step_s,
            "batch": self.asked.batch,
            "steps": _STEPS,
            **self.guarded,
        }
        self.fleet.start(name, [sys.executable, "-m", "benchmarks.churn_worker", json.dumps(asked)])

    def poll(self) -> dict[str, Any] | None:
        """What the coordinator says of the run; ``None`` while it is away."""
        with suppress(OSError, ValueError):
            status = self._ask() if self._in_namespace is None else self._in_namespace.submit(self._ask).result()
            self.polls.append((time.monotonic(), status))
            with suppress(OSError):
                pid = self.fleet.running["coordinator"].pid
                pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
                self.memory.append((time.monotonic(), pages * os.sysconf("SC_PAGE_SIZE")))
            return status
        return None

    def _ask(self) -> dict[str, Any]:
        with self._asks.open(f"{self.url}/v1/status", timeout=5) as answer:
            status: dict[str, Any] = json.load(answer)
        return status

    def useful(self) -> int:
        """Samples that became part of the weights."""
        return int(self.polls[-1][1]["samples"]) if self.polls else 0


class Torchrun:
    """``ddp`` under torchrun, with checkpoints."""

    def __init__(self, asked: argparse.Namespace, folder: Path) -> None:
        self.asked = asked
        self.folder = folder
        self.fleet = Fleet(folder, None)
        self.names = [f"rank{number}" for number in range(asked.workers)]
        self.rows = make_rows(folder / "rows", slices=asked.slices, samples=asked.samples)

    def start(self) -> None:
        """Start all."""
        asked = {
            "url": "",
            "rows": self.rows,
            "folder": str(self.folder),
            "name": "",
            "step_s": self.asked.step_s,
            "batch": self.asked.batch,
            "steps": _STEPS,
            "save_every": self.asked.save_every,
        }
        self.fleet.start(
            "torchrun",
            [
                *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(self.asked.workers)),
                *("--max-restarts", "10000", "--master-port", str(free_port()), "--monitor-interval", "0.1"),
                *("-m", "benchmarks.churn_worker", json.dumps(asked)),
            ],
        )

    def useful(self) -> int:
        """Samples of the steps that are part of the weights now."""
        last = _last(self.folder / "rank0.jsonl", "step")
        return 0 if last is None else int(last["step"]) * self.asked.batch * self.asked.workers

    def kill(self, name: str) -> None:
        """Kill a rank; torchrun starts all anew."""
        last = _last(self.folder / f"{name}.jsonl", "pid")
        if last is not None:
            with suppress(ProcessLookupError):
                os.kill(int(last["pid"]), signal.SIGKILL)


def _last(path: Path, key: str) -> dict[str, Any] | None:
    """The last whole line of a file that has a key."""
    with suppress(OSError), path.open("rb") as file:
        file.seek(max(path.stat().st_size - 20_000, 0))
        for line in reversed(file.read().splitlines()):
            with suppress(ValueError):
                read: dict[str, Any] = json.loads(line)
                if key in read:
                    return read
    return None


class Faults:
    """When who fails.

    Args:
        seconds: Between two faults, on average.
        seed: Of the moments.
    """

    def __init__(self, seconds: float, seed: int) -> None:
        self._random = random.Random(seed)
        self._seconds = seconds
        self.at = time.monotonic() + self._wait()
        self.done = 0
        self._later: list[tuple[float, Callable[[], object]]] = []

    def _wait(self) -> float:
        return self._random.uniform(0.5, 1.5) * self._seconds

    def choose(self, names: Sequence[str]) -> str:
        """Whom it hits."""
        return self._random.choice(names)

    def later(self, seconds: float, then: Callable[[], object]) -> None:
        """Heal what was done, after a while."""
        self._later.append((time.monotonic() + seconds, then))

    def due(self) -> bool:
        """Whether it is time for one."""
        now = time.monotonic()
        for moment, then in [one for one in self._later if one[0] <= now]:
            then()
            self._later.remove((moment, then))
        if now < self.at:
            return False
        self.at = now + self._wait()
        self.done += 1
        return True

    def heal(self) -> None:
        """Undo all that is under way."""
        for _, then in self._later:
            then()
        self._later = []


def _strike(run: Coordinated | Torchrun, fault: str, faults: Faults) -> None:
    name = faults.choose(run.names)
    fleet = run.fleet
    if isinstance(run, Torchrun):
        run.kill(name)
    elif fault == "kill":
        fleet.kill(name)
        run.start_worker(name)
    elif fault == "stop":
        fleet.signal(name, signal.SIGSTOP)
        faults.later(_SILENT_S, lambda: fleet.signal(name, signal.SIGCONT))
    elif fault == "cut" and fleet.link is not None:
        namespace = fleet.link.namespace(fleet.host(name))
        switch = ["ip", "netns", "exec", namespace, "ip", "link", "set", "eth0"]
        subprocess.run([*switch, "down"], check=True)
        faults.later(_SILENT_S, lambda: subprocess.check_call([*switch, "up"]))
    elif fault == "coordinator":
        fleet.kill("coordinator")
        run.start_coordinator()


def watch(run: Coordinated | Torchrun, asked: argparse.Namespace, fault: str, console: Console) -> dict[str, Any]:
    """Run calmly, then with faults; returns what was seen."""
    run.start()
    began = time.monotonic()
    while run.useful() < asked.warm_up * asked.round:
        time.sleep(0.5)
        if isinstance(run, Coordinated):
            run.poll()
        if time.monotonic() - began > _START_S:
            raise RuntimeError(f"Nothing was trained within {_START_S:.0f} s; see the files in {run.folder}.")
    marks = [(time.monotonic(), run.useful())]
    calm, rough = asked.calm_minutes * 60, asked.minutes * 60
    faults: Faults | None = None
    with Progress(console=console, transient=True) as progress:
        bar = progress.add_task(f"{type(run).__name__.lower()}, {fault}", total=calm + rough)
        while (past := time.monotonic() - marks[0][0]) < calm + rough:
            time.sleep(0.25)
            progress.update(bar, completed=past)
            if isinstance(run, Coordinated):
                run.poll()
            if past > calm and faults is None:
                marks.append((time.monotonic(), run.useful()))
                faults = Faults(3600 / asked.events_per_hour, asked.seed)
            if faults is not None and faults.due():
                _strike(run, fault, faults)
    marks.append((time.monotonic(), run.useful()))
    if faults is not None:
        faults.heal()
    rates = [(end[1] - start[1]) / (end[0] - start[0]) for start, end in itertools.pairwise(marks)]
    seen: dict[str, Any] = {
        "run": type(run).__name__.lower(),
        "fault": fault,
        "events": 0 if faults is None else faults.done,
        "calm_samples_per_s": rates[0],
        "rough_samples_per_s": rates[-1],
        "goodput": rates[-1] / rates[0],
        "ideal_samples_per_s": asked.workers * asked.batch / asked.step_s,
    }
    if isinstance(run, Coordinated):
        seen |= _examined(run)
    return seen


def _examined(run: Coordinated) -> dict[str, Any]:
    """What the workers' journals and the coordinator's status say."""
    weights: dict[int, set[str]] = collections.defaultdict(set)
    synchronised = 0
    losses: list[tuple[float, float]] = []
    trained: collections.Counter[int] = collections.Counter()
    away: list[float] = []
    for name in run.names:
        before: dict[str, Any] = {}
        for line in (run.folder / f"{name}.jsonl").read_bytes().splitlines():
            with suppress(ValueError):
                read = json.loads(line)
                if "sha256" in read:
                    weights[read["round"]].add(read["sha256"])
                    synchronised += 1
                elif "loss" in read:
                    losses.append((read["t"], read["loss"]))
                    trained.update(read["numbers"])
                    if before.get("pid", read["pid"]) != read["pid"]:
                        away.append(read["t"] - before["t"])
                    before = read
    losses.sort()
    tenth = max(len(losses) // 10, 1)
    memory = [size / 1e6 for _, size in run.memory]
    half = len(memory) // 2
    last = run.polls[-1][1] if run.polls else {}
    ended = last.get("rounds", [])
    rounds = [one["seconds"] for one in ended]
    # The share of the time that each had.
    used = {one["round"]: one["seconds"] / one["deadline"] for one in ended if one["deadline"] is not None}
    slices = last.get("slices") or {}
    return {
        "rounds": len(weights),
        "synchronised": synchronised,
        "rounds_with_different_weights": sorted(number for number, found in weights.items() if len(found) > 1),
        "loss_first_tenth": statistics.fmean(loss for _, loss in losses[:tenth]),
        "loss_last_tenth": statistics.fmean(loss for _, loss in losses[-tenth:]),
        "round_s": [statistics.median(rounds), max(rounds)] if rounds else None,
        "share_of_the_time_until_the_deadline": [statistics.median(used.values()), max(used.values())]
        if used
        else None,
        "rounds_after_their_deadline": [number for number, share in used.items() if share > 1],
        "restart_s": [len(away), statistics.fmean(away)] if away else None,
        "epochs_of_the_data": slices.get("epoch"),
        "samples_left_out": slices.get("dropped"),
        "times_each_sample_was_written_down": [min(trained.values()), max(trained.values())],
        "samples_never_written_down": run.asked.slices * run.asked.samples - len(trained),
        "memory_mb_half_way": memory[half] if memory else None,
        "memory_mb_at_the_end": memory[-1] if memory else None,
        "last_status": last or None,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.churn", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("fault", choices=["kill", "stop", "cut", "coordinator"])
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--minutes", type=float, default=10.0, help="with faults (default: %(default)s)")
    parser.add_argument("--calm-minutes", type=float, default=3.0, help="before (default: %(default)s)")
    parser.add_argument("--events-per-hour", type=float, default=125.0)
    parser.add_argument("--step-s", type=float, default=0.25)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--round", type=int, default=1280, help="samples of a round (default: %(default)s)")
    parser.add_argument("--slices", type=int, default=64)
    parser.add_argument("--samples", type=int, default=500, help="of a slice (default: %(default)s)")
    parser.add_argument("--warm-up", type=int, default=3, help="rounds (default: %(default)s)")
    parser.add_argument("--save-every", type=int, default=20, help="steps, under torchrun (default: %(default)s)")
    parser.add_argument(
        "--runs",
        choices=["coordinator", "torchrun", "both"],
        default="coordinator",
        help="torchrun: ddp with checkpoints (kill only; default: %(default)s)",
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", type=Path, help="folder for what the processes write")
    asked = parser.parse_args(arguments)
    if asked.runs != "coordinator" and asked.fault != "kill":
        parser.error(f"--runs {asked.runs} is for kill: torchrun has nothing for {asked.fault}")
    console = Console()
    with ExitStack() as stack:
        root = asked.keep or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        link = stack.enter_context(ShapedLink(hosts=asked.workers + 1, mbit=1000)) if asked.fault == "cut" else None
        makes: dict[str, Callable[[Path], Coordinated | Torchrun]] = {
            "coordinator": lambda folder: Coordinated(asked, folder, link),
            "torchrun": lambda folder: Torchrun(asked, folder),
        }
        for name in makes if asked.runs == "both" else [asked.runs]:
            shutil.rmtree(root / name, ignore_errors=True)
            run = makes[name](root / name)
            try:
                seen = watch(run, asked, asked.fault, console)
            finally:
                run.fleet.close()
            console.print_json(json.dumps(seen))


if __name__ == "__main__":
    main()
