"""DiLoCo against strategies that communicate in every step, on a slow link: ``python -m benchmarks.diloco``.

Two hosts of unequal speed train a small GPT on real text, on links shaped by network namespaces (root only). The slow
one sleeps in every step. Each contender trains until it reaches the validation loss that ``ddp`` has after N steps, or
its time is up. Time is that of training: validations are left out. Printed, for each: seconds to that loss, samples a
second, the loss at as many samples as ``ddp`` has processed, and the share of the time that training waited for updates
or for a round to start.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch.utils.data import DataLoader, Subset

from benchmarks.contenders import CONTENDERS
from benchmarks.shaped_link import ShapedLink
from examples.demo.model import CharacterGPT
from examples.demo.size import VOCABULARY, GPTSize
from examples.demo.text import Windows, training_and_validation_text
from lightning_bytescheduler import DiLoCoStrategy

_SIZE = GPTSize(context=64, width=288, heads=8, layers=5)
_WARM_UP_STEPS = 10
_VALIDATION_WINDOWS = 64
_FIRST_LOSS = math.log(VOCABULARY)  # of weights that know nothing
_SYNCHRONOUS = ["ddp", "ddp, bf16 on the wire", "bytescheduler"]


class Model(CharacterGPT):
    """With a learning rate that does not depend on how long the training will be."""

    def __init__(self, learning_rate: float) -> None:
        super().__init__(_SIZE, steps=1)
        self.learning_rate = learning_rate

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.learning_rate)
        warm_up = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / _WARM_UP_STEPS))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": warm_up, "interval": "step"}}


class Curve(L.Callback):
    """Notes time, samples and loss at each validation, and ends the training when it is good enough or too long."""

    def __init__(self, asked: dict[str, Any]) -> None:
        self.asked = asked
        self.points: list[tuple[float, int, float]] = []
        self.trained = 0.0
        self.since: float | None = None

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        if self.since is None:
            self.since = time.perf_counter()
        if trainer.global_rank > 0:
            time.sleep(self.asked["sleep"])

    def on_validation_start(self, *_: Any) -> None:
        if self.since is not None:
            self.trained += time.perf_counter() - self.since
            self.since = None

    def on_validation_end(self, trainer: L.Trainer, *_: Any) -> None:
        loss = float(trainer.callback_metrics["validation_loss"])
        strategy = trainer.strategy
        if isinstance(strategy, DiLoCoStrategy):
            samples = 0 if strategy.statistics is None else strategy.statistics.merged_samples
        else:
            samples = trainer.global_step * 2 * self.asked["batch"]
        self.points.append((self.trained, samples, loss))
        enough = self.asked["samples"] and samples < self.asked["samples"]  # for the loss at equal samples
        if (loss <= self.asked["loss"] and not enough) or self.trained > self.asked["seconds"]:
            trainer.should_stop = True


def train(asked: dict[str, Any]) -> None:
    """One rank of one contender; rank 0 prints its curve as JSON."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    L.seed_everything(asked["seed"], verbose=False)
    strategy: Any = DiLoCoStrategy(**asked["diloco"]) if "diloco" in asked else CONTENDERS[asked["name"]].strategy()
    curve = Curve(asked)
    training, validation = (Windows(text, _SIZE.context) for text in training_and_validation_text())
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        num_nodes=2,
        strategy=strategy,
        max_steps=asked["steps"],
        max_epochs=-1,
        val_check_interval=asked["validate"],
        check_val_every_n_epoch=None,
        callbacks=[curve],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        default_root_dir=asked["folder"],
    )
    step = max(len(validation) // _VALIDATION_WINDOWS, 1)
    trainer.fit(
        Model(asked["learning_rate"]),
        DataLoader(training, batch_size=asked["batch"], shuffle=True),
        DataLoader(Subset(validation, range(0, step * _VALIDATION_WINDOWS, step)), batch_size=16),
    )
    if trainer.is_global_zero:
        waited = None
        if isinstance(strategy, DiLoCoStrategy) and strategy.statistics is not None:
            waited = (strategy.statistics.exchange_s + strategy.statistics.start_s) / max(curve.trained, 1e-9)
        print("CURVE" + json.dumps({"points": curve.points, "waited": waited}), flush=True)


def measure(options: argparse.Namespace, asked: dict[str, Any]) -> dict[str, Any]:
    """Train one contender on a link of its own; returns its curve."""
    environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(["src", "."])}
    with ShapedLink(hosts=2, mbit=options.mbit) as link:
        ranks = [
            link.popen(
                host,
                [sys.executable, "-m", "benchmarks.diloco", "--rank", json.dumps(asked)],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
            for host in range(2)
        ]
        out, errors = ranks[0].communicate(timeout=options.seconds + 120)
        ranks[1].communicate(timeout=60)
    for line in out.decode().splitlines():
        if line.startswith("CURVE"):
            curve: dict[str, Any] = json.loads(line.removeprefix("CURVE"))
            return curve
    raise RuntimeError(f"{asked['name']} has failed:\n{errors.decode()[-3000:]}")


def at_loss(points: Sequence[Sequence[float]], loss: float) -> float | None:
    """Seconds until the loss was reached, or ``None``."""
    return next((seconds for seconds, _, reached in points if reached <= loss), None)


def at_samples(points: Sequence[Sequence[float]], samples: float) -> float | None:
    """The loss at so many samples, between the two validations next to it; ``None`` beyond the last."""
    for before, after in itertools.pairwise(points):
        if before[1] <= samples <= after[1]:
            share = (samples - before[1]) / max(after[1] - before[1], 1)
            return float(before[2] + share * (after[2] - before[2]))
    return None


def _diloco(options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """DiLoCo's contenders: at each H of the grid, with equal steps, and with rounds as long that nobody waits in."""
    outer = {"outer_lr": options.outer_lr, "outer_momentum": options.outer_momentum, "wire_dtype": options.wire}
    made: dict[str, dict[str, Any]] = {}
    for steps in options.grid:
        samples = round(steps * options.batch * (1 + options.ratio))
        made[f"diloco, H={steps}"] = {"inner_steps": steps, "equal_steps": True, **outer}
        made[f"diloco by pace, {samples} samples"] = {"samples_per_round": samples, **outer}
    return made


def _run_seed(options: argparse.Namespace, seed: int) -> list[dict[str, Any]]:
    shared = {
        "seed": seed,
        "batch": options.batch,
        "learning_rate": options.learning_rate,
        "sleep": (options.ratio - 1) * options.step_ms / 1e3,
        "folder": str(options.folder),
        "seconds": options.seconds,
        "samples": 0,
    }
    baseline = measure(
        options,
        {**shared, "name": "ddp", "steps": options.steps, "validate": max(options.steps // 4, 1), "loss": -1.0},
    )
    target, samples = baseline["points"][-1][2], baseline["points"][-1][1]
    rows = [{"seed": seed, "name": "ddp", "target": target, "samples": samples, **baseline}]
    _show(rows[0])
    runs: dict[str, dict[str, Any]] = {
        name: {"name": name, "validate": max(options.steps // 10, 1)} for name in _SYNCHRONOUS[1:]
    }
    for name, strategy in _diloco(options).items():
        every = strategy.get("inner_steps") or round(strategy["samples_per_round"] / (1 + 1 / options.ratio))
        runs[name] = {"name": name, "diloco": strategy, "validate": max(every // 2, 1)}
    for name, run in runs.items():
        if options.only and not any(part in name for part in options.only):
            continue
        least = samples if "diloco" in run else 0
        curve = measure(
            options, {**shared, **run, "steps": 20 * options.steps + 1000, "loss": target, "samples": least}
        )
        rows.append({"seed": seed, "name": name, "target": target, "samples": samples, **curve})
        _show(rows[-1])
    return rows


def _show(row: dict[str, Any]) -> None:
    points = row["points"]
    seconds = at_loss(points, row["target"])
    equal = points[-1][2] if row["name"] == "ddp" else at_samples([(0.0, 0, _FIRST_LOSS), *points], row["samples"])
    cells = [
        f"seed {row['seed']}",
        f"{row['name']:<36}",
        f"{'-' if seconds is None else f'{seconds:.1f}':>7} s to a loss of {row['target']:.3f}",
        f"{points[-1][1] / max(points[-1][0], 1e-9):7.1f} samples/s",
        f"loss {'-' if equal is None else f'{equal:.3f}'} at {row['samples']} samples",
        "" if row.get("waited") is None else f"waited {row['waited']:.0%}",
    ]
    print("  ".join(cells), flush=True)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.diloco", description=__doc__.split("\n\n")[0])
    parser.add_argument("--steps", type=int, default=30, help="N: of ddp (default: %(default)s)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--grid", type=int, nargs="+", default=[16, 64], metavar="H")
    parser.add_argument("--mbit", type=float, default=50.0)
    parser.add_argument("--ratio", type=float, default=3.0, help="of the two workers' steps (default: %(default)g)")
    parser.add_argument("--step-ms", type=float, default=100.0, help="a step of the fast one, on this machine")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--outer-lr", type=float, default=0.7)
    parser.add_argument("--outer-momentum", type=float, default=0.9)
    parser.add_argument("--wire", default="bf16")
    parser.add_argument("--seconds", type=float, default=150.0, help="longest training of a contender")
    parser.add_argument("--only", nargs="*", default=[], help="besides ddp: contenders with this in their names")
    parser.add_argument("--folder", type=Path, default=Path("benchmarks/results/diloco"))
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what was asked for; returns the exit code."""
    options = _options(arguments)
    if options.rank is not None:
        train(json.loads(options.rank))
        return 0
    available, reason = ShapedLink.available()
    if not available:
        print(f"{reason} Nothing was measured.")
        return 1
    options.folder.mkdir(parents=True, exist_ok=True)
    rows = [row for seed in options.seeds for row in _run_seed(options, seed)]
    (options.folder / "curves.json").write_text(json.dumps(rows))
    for name in dict.fromkeys(row["name"] for row in rows):
        times = [at_loss(row["points"], row["target"]) for row in rows if row["name"] == name]
        reached = [seconds for seconds in times if seconds is not None]
        if reached:
            print(f"{name:<36} median {statistics.median(reached):.1f} s, {len(reached)} of {len(times)} got there")
    return 0


if __name__ == "__main__":
    sys.exit(main())
