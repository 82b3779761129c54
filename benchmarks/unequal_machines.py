"""Balanced batches against equal ones, on machines of unequal speed: ``python -m benchmarks.unequal_machines``.

Speeds are played by sleeping (``examples/unequal.py``); the text, the model's arithmetic and the communication are
real. Samples a second are those of the median step of the second half of a fit. Contenders take turns in the same
processes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as processes
from lightning.pytorch import Callback, Trainer
from torch.utils.data import DataLoader

from benchmarks.measure import free_port
from examples.demo.text import Windows, training_and_validation_text
from examples.unequal import LENGTH, Reader
from lightning_bytescheduler import ByteSchedulerStrategy

__all__: list[str] = []

_CONTENDERS: dict[str, dict[str, Any]] = {
    "ranks": {},
    "samples": {"weighting": "samples"},
    "balanced": {"weighting": "samples", "batch_size": "balanced"},
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """Machines, and how long they are watched.

    Attributes:
        speeds: Of the machines.
        sample_ms: What a sample takes a machine of speed 1.
        steps: Of a fit.
        slows: Step from which the last machine takes three times as long, if it does.
        contenders: Who is measured.
    """

    speeds: tuple[float, ...]
    sample_ms: float = 3.0
    steps: int = 80
    slows: int | None = None
    contenders: tuple[str, ...] = ("samples", "balanced")

    @property
    def ceiling(self) -> float:
        """How many times faster the best shares are than equal ones, if nothing but samples took time."""
        return sum(self.speeds) / len(self.speeds) / min(self.speeds)


CASES: dict[str, Case] = {
    "1:3": Case(speeds=(1.0, 3.0), sample_ms=10.0, steps=50),
    "1:8, four ranks": Case(speeds=(1.0, 8.0, 8.0, 8.0), sample_ms=48.0, steps=40),
    "alike": Case(speeds=(1.0, 1.0), steps=120, contenders=("ranks", "samples", "balanced")),
    "one slows": Case(speeds=(1.0, 1.0), sample_ms=1.5, steps=140, slows=60, contenders=("balanced",)),
}


@dataclass(kw_only=True)
class Fit:
    """What a rank saw of a fit, by step: seconds, samples of all ranks, seconds in which it did not compute."""

    seconds: list[float] = field(default_factory=list)
    shares: list[tuple[int, ...]] = field(default_factory=list)
    waited: list[float] = field(default_factory=list)


class _Watches(Callback):
    def __init__(self, case: Case, fit: Fit) -> None:
        self.case, self.fit, self.before = case, fit, 0.0

    def on_train_start(self, *_: Any) -> None:
        self.before = time.perf_counter()

    def on_train_batch_end(self, trainer: Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        now, strategy = time.perf_counter(), trainer.strategy
        assert isinstance(strategy, ByteSchedulerStrategy)
        self.fit.seconds.append(now - self.before)
        self.before = now
        plan, equal = strategy.plan, (len(batch[0]),) * len(self.case.speeds)
        self.fit.shares.append(plan.batch_shares if plan is not None and plan.batch_shares else equal)
        # Where a rank waits for another one, Lightning's own collectives are among the places.
        computed = module.seconds[trainer.global_rank] * len(batch[0])
        self.fit.waited.append(self.fit.seconds[-1] - computed)
        if trainer.global_step == self.case.slows:
            module.seconds[-1] *= 3.0


def _rank(rank: int, ranks: int, port: int, case: Case, rounds: int, out: str) -> None:
    os.environ.update(
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        WORLD_SIZE=str(ranks),
        NODE_RANK="0",
        LOCAL_RANK=str(rank),
        RANK=str(rank),
        LOCAL_WORLD_SIZE=str(ranks),
    )
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    data = Windows(training_and_validation_text()[0], LENGTH)
    fits: dict[str, list[dict[str, Any]]] = {name: [] for name in case.contenders}
    for number in range(rounds * len(case.contenders)):
        name = case.contenders[number % len(case.contenders)]
        fit = Fit()
        torch.manual_seed(1)
        trainer = Trainer(
            accelerator="cpu",
            devices=ranks,
            strategy=ByteSchedulerStrategy(mode="overlapped", tuning=False, **_CONTENDERS[name]),
            callbacks=[_Watches(case, fit)],
            max_steps=case.steps,
            max_epochs=-1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        seconds = [1e-3 * case.sample_ms / speed for speed in case.speeds]
        trainer.fit(Reader(seconds), DataLoader(data, batch_size=32, shuffle=True))
        fits[name].append(asdict(fit))
    Path(out, f"{rank}.json").write_text(json.dumps(fits))


def measure(case: Case, rounds: int = 1) -> list[dict[str, list[Fit]]]:
    """Fits by rank and contender."""
    ranks = len(case.speeds)
    with tempfile.TemporaryDirectory() as folder:
        processes.start_processes(
            _rank, args=(ranks, free_port(), case, rounds, folder), nprocs=ranks, start_method="spawn"
        )
        found = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(ranks)]
    return [{name: [Fit(**fit) for fit in fits] for name, fits in of_rank.items()} for of_rank in found]


def typical(fits: Sequence[Fit]) -> float:
    """Seconds of a step: the median of the second halves."""
    return statistics.median(s for fit in fits for s in fit.seconds[len(fit.seconds) // 2 :])


def draw(case: Case, found: list[dict[str, list[Fit]]], path: Path) -> None:
    """Shares and waiting over time, of the first balanced fit."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, (above, below) = pyplot.subplots(2, 1, sharex=True, figsize=(8, 5), layout="constrained")
    fits = [of_rank["balanced"][0] for of_rank in found]
    steps = range(1, len(fits[0].shares) + 1)
    for rank, fit in enumerate(fits):
        above.step(steps, [shares[rank] for shares in fit.shares], where="mid", label=f"rank {rank}")
        below.plot(steps, [1e3 * waited for waited in fit.waited], label=f"rank {rank}")
    for axes in (above, below):
        if case.slows is not None:
            axes.axvline(case.slows + 0.5, color="grey", linestyle=":")
        axes.legend(loc="upper left")
    above.set_ylabel("samples of a batch")
    below.set_ylabel("not computing (ms)")
    below.set_xlabel("step")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and say what was seen."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.unequal_machines", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES), metavar="CASE")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--png", type=Path, help="picture of shares and waiting where one machine slows")
    options = parser.parse_args(arguments)
    for name in options.only:
        case = CASES[name]
        found = measure(case, options.rounds)
        seconds = {contender: typical(found[0][contender]) for contender in case.contenders}
        first = case.contenders[0]
        for contender, step in seconds.items():
            print(
                f"{name}: {contender}: {1e3 * step:.1f} ms a step, {seconds[first] / step:.3f}x {first} "
                f"(ceiling {case.ceiling:.2f}), shares {found[0][contender][0].shares[-1]}",
                flush=True,
            )
        if case.slows is not None:
            shares = found[0]["balanced"][0].shares
            changed = next((n for n in range(case.slows, len(shares)) if shares[n] != shares[case.slows - 1]), None)
            print(f"{name}: slowed after step {case.slows}, other shares from step {changed and changed + 1} on")
            if options.png:
                draw(case, found, options.png)


if __name__ == "__main__":
    main()
