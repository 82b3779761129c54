"""DiLoCo with a coordinator while its machines die.

Processes on this machine train a small network; a step takes a fixed time, by sleeping. After a calm while, faults
begin:

- ``kill``: a worker is killed (SIGKILL) and started anew, so many times an hour.
- ``stop``: a worker stands still for 20 seconds (SIGSTOP), as often.
- ``coordinator``: the coordinator is killed and started anew from its state.

Useful samples are those that became part of the weights; their rate over that of the calm while is the goodput. Also
noted: the share of live workers whose update is in each merge, rounds after which workers had different weights (by
their sha256), and how long rounds took.
"""

from __future__ import annotations

import argparse
import collections
import hashlib
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO, Any

import lightning as L
import numpy as np
import torch
from rich.console import Console
from rich.progress import Progress
from torch import Tensor, nn

from benchmarks.rank import fit
from benchmarks.ranks import REPOSITORY, MeasurementFailed, free_port
from benchmarks.record import Record, Results, record
from benchmarks.shaped_link import stop_sessions
from lightning_bytescheduler import DiLoCoStrategy, SliceDataModule

_SILENT_S = 20.0
_START_S = 180.0
_STEPS = 10_000_000
_FEATURES = 16
_COORDINATOR = "coordinator"


class _Network(L.LightningModule):
    """A few thousand parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(_FEATURES, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))

    def training_step(self, rows: Tensor, batch_idx: int) -> Tensor:
        found = self.layers(rows[:, :_FEATURES].float()).flatten()
        return nn.functional.mse_loss(found, rows[:, _FEATURES].float())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=2e-3)


class _Journal(L.Callback):
    """Makes steps as slow as asked for, and writes down which weights each round began with."""

    def __init__(self, file: IO[str], step_s: float) -> None:
        self.file, self.step_s = file, step_s
        self.rounds = 0
        self.began = 0.0

    def on_train_batch_start(self, *_: Any) -> None:
        self.began = time.monotonic()

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        strategy = trainer.strategy
        assert isinstance(strategy, DiLoCoStrategy)
        known = strategy.statistics
        if known is not None and known.rounds != self.rounds:
            self.rounds = known.rounds
            sha = hashlib.sha256()
            for name, tensor in strategy.lightning_module_state_dict().items():
                sha.update(name.encode())
                sha.update(tensor.contiguous().numpy().tobytes())
            line = {"round": int(strategy.progress()["round"]), "sha256": sha.hexdigest()}
            self.file.write(json.dumps(line) + "\n")
            self.file.flush()
        time.sleep(max(self.began + self.step_s - time.monotonic(), 0.0))


def work(*, url: str, rows: str, folder: str, name: str, step_s: float, batch: int) -> None:
    """Train with a coordinator until this process is ended."""
    torch.set_num_threads(1)
    torch.manual_seed(1)
    with Path(folder, f"{name}.jsonl").open("a", encoding="utf-8") as file:
        data = SliceDataModule(rows, batch_size=batch, cache=f"{folder}/cache/{name}")
        strategy = DiLoCoStrategy(coordinator={"url": url, "name": name})
        journal = _Journal(file, step_s)
        fit(_Network(), strategy, data, callbacks=[journal], max_steps=_STEPS, default_root_dir=folder)


def make_rows(folder: Path, *, slices: int, samples: int) -> str:
    """Write slices of samples of a function to learn; returns what is opened."""
    rng = np.random.default_rng(1)
    mixing = rng.normal(size=(_FEATURES, 4))
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(slices):
        features = rng.normal(size=(samples, _FEATURES))
        target = np.tanh(features @ mixing).prod(axis=1) + 0.01 * rng.normal(size=samples)
        np.save(folder / f"rows-{number:04}.npy", np.column_stack([features, target]))
    return f"{folder}/*.npy"


class _Run:
    """A coordinator and its workers, each a process with a session of its own; what they say goes into files."""

    def __init__(self, asked: argparse.Namespace, folder: Path) -> None:
        self.asked, self.folder = asked, folder
        self.names = [f"w{number}" for number in range(asked.workers)]
        self.rows = make_rows(folder / "rows", slices=asked.slices, samples=asked.samples)
        self.address = f"127.0.0.1:{free_port()}"
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        self.status: dict[str, Any] = {}

    def start(self, name: str) -> None:
        """Start a worker, or the coordinator, anew; the coordinator from its state if there is one."""
        if name == _COORDINATOR:
            words = ["lightning_bytescheduler", "coordinator", "--bind", self.address, "--train", self.rows]
            words += ["--state", str(self.folder / "state"), "--samples-per-round", str(self.asked.round)]
        else:
            asked = {"url": f"http://{self.address}", "rows": self.rows, "folder": str(self.folder), "name": name}
            asked |= {"step_s": self.asked.step_s, "batch": self.asked.batch}
            words = ["benchmarks.churn", json.dumps(asked)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        with (self.folder / f"{name}.log").open("ab") as log:
            place: dict[str, Any] = {"stdout": log, "stderr": log, "cwd": REPOSITORY, "env": environment}
            self.running[name] = subprocess.Popen([sys.executable, "-m", *words], start_new_session=True, **place)

    def signal(self, name: str, number: int) -> None:
        """Send a signal to a process and its children."""
        with suppress(ProcessLookupError):
            os.killpg(self.running[name].pid, number)

    def restart(self, name: str) -> None:
        """End a process as a machine that loses power does, and start it anew."""
        self.signal(name, signal.SIGKILL)
        self.running[name].wait()
        self.start(name)

    def useful(self) -> int:
        """Samples that became part of the weights, as the coordinator last said."""
        place = f"http://{self.address}/v1/status"
        with suppress(OSError, ValueError), urllib.request.urlopen(place, timeout=5) as answer:  # it may be away
            self.status = json.load(answer)
        return int(self.status.get("samples", 0))

    def close(self) -> None:
        """End all."""
        for name in self.running:
            self.signal(name, signal.SIGCONT)
        stop_sessions(list(self.running.values()))


class _Faults:
    """Which fault of a run comes when."""

    def __init__(self, run: _Run) -> None:
        self.run, self.kind = run, run.asked.fault
        self.random = random.Random(run.asked.seed)
        self.at = self._next()
        self.events = 0
        self.stopped: list[tuple[float, str]] = []  # until when, and which

    def _next(self) -> float:
        return time.monotonic() + self.random.uniform(0.5, 1.5) * 3600 / self.run.asked.events_per_hour

    def happen(self) -> None:
        """Let happen what is due."""
        now = time.monotonic()
        for until, name in [one for one in self.stopped if one[0] <= now]:
            self.run.signal(name, signal.SIGCONT)
            self.stopped.remove((until, name))
        if now < self.at:
            return
        self.at = self._next()
        self.events += 1
        name = self.random.choice(self.run.names)
        if self.kind == "stop":
            self.run.signal(name, signal.SIGSTOP)
            self.stopped.append((now + _SILENT_S, name))
        else:
            self.run.restart(_COORDINATOR if self.kind == "coordinator" else name)


def watch(run: _Run, asked: argparse.Namespace) -> Record:
    """Run calmly, then with faults; returns what was seen."""
    for name in (_COORDINATOR, *run.names):
        run.start(name)
    began = time.monotonic()
    while run.useful() < asked.warm_up * asked.round:
        time.sleep(0.5)
        if time.monotonic() - began > _START_S:
            raise MeasurementFailed(f"Nothing was trained within {_START_S:.0f} s; --keep FOLDER keeps what was said.")
    marks = [(time.monotonic(), run.useful())]
    calm, rough = asked.calm_minutes * 60, asked.minutes * 60
    faults: _Faults | None = None
    with Progress(console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task(asked.fault, total=calm + rough)
        while (past := time.monotonic() - marks[0][0]) < calm + rough:
            time.sleep(0.25)
            progress.update(bar, completed=past)
            samples = run.useful()
            if past > calm and faults is None:
                marks.append((time.monotonic(), samples))
                faults = _Faults(run)
            if faults is not None:
                faults.happen()
    marks.append((time.monotonic(), run.useful()))
    rates = [(end[1] - start[1]) / (end[0] - start[0]) for start, end in itertools.pairwise(marks)]
    ended = run.status.get("rounds", [])
    different = _different(run)
    values = {
        "events": 0 if faults is None else faults.events,
        "calm [samples/s]": rates[0],
        "with faults [samples/s]": rates[-1],
        "without waiting [samples/s]": asked.workers * asked.batch / asked.step_s,
        "a round [s]": [one["seconds"] for one in ended],
        "participation": [one["participation"] for one in ended],
        "rounds with different weights": len(different),
    }
    setting = {name: value for name, value in vars(asked).items() if name not in ("keep", "out")}
    more = {"different": different, "status": run.status}
    return record("churn", asked.fault, setting, values, {"goodput": rates[-1] / rates[0]}, **more)


def _different(run: _Run) -> Sequence[int]:
    """Rounds with which workers began with different weights."""
    weights: dict[int, set[str]] = collections.defaultdict(set)
    for name in run.names:
        for line in (run.folder / f"{name}.jsonl").read_text().splitlines():
            with suppress(ValueError):  # a kill leaves half a line
                read = json.loads(line)
                weights[read["round"]].add(read["sha256"])
    return sorted(number for number, found in weights.items() if len(found) > 1)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("fault", choices=["kill", "stop", "coordinator"])
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--minutes", type=float, default=10.0, help="minutes with faults (default: %(default)s)")
    parser.add_argument("--calm-minutes", type=float, default=3.0, help="before (default: %(default)s)")
    parser.add_argument("--events-per-hour", type=float, default=125.0)
    parser.add_argument("--step-s", type=float, default=0.25)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--round", type=int, default=1280, help="samples of a round (default: %(default)s)")
    parser.add_argument("--slices", type=int, default=64)
    parser.add_argument("--samples", type=int, default=500, help="samples of a slice (default: %(default)s)")
    parser.add_argument("--warm-up", type=int, default=3, help="rounds (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", type=Path, help="folder for what the processes write")


def measure(options: argparse.Namespace) -> Iterator[Results]:
    """Run workers with a coordinator."""
    with ExitStack() as stack:
        folder = (options.keep or Path(stack.enter_context(tempfile.TemporaryDirectory()))) / "churn"
        shutil.rmtree(folder, ignore_errors=True)
        run = _Run(options, folder)
        stack.callback(run.close)
        yield f"{options.workers} workers, {options.fault}", [watch(run, options)]


if __name__ == "__main__":
    work(**json.loads(sys.argv[1]))
