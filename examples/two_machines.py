"""Two machines and the network between them: which strategy pays? One small GPT is trained with each, in turn.

Start it on both, with the first one's address; the first prints a table:

    torchrun --nnodes 2 --node-rank 0 --master-addr 192.168.1.10 --master-port 29500 -m examples.two_machines
    torchrun --nnodes 2 --node-rank 1 --master-addr 192.168.1.10 --master-port 29500 -m examples.two_machines

It begins with one machine alone, and goes on with DDP, ``bytescheduler``, compression and DiLoCo, each with the same
number of steps. As root, ``python -m examples.two_machines --mbit 1000`` plays both machines on this one.
"""

from __future__ import annotations

import argparse
import logging
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import lightning as L
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader

from benchmarks.models import validation_windows
from benchmarks.ranks import on_own_processors
from benchmarks.shaped_link import ShapedLink
from examples.demo.model import CharacterGPT
from examples.demo.size import SMALL, TINY
from examples.demo.text import Windows, training_and_validation_text
from lightning_bytescheduler import ByteSchedulerStrategy, DiLoCoStrategy

ROUND = 20  # steps of a round of DiLoCo, and between two looks at the clock

ALONE, DILOCO = "one machine alone", f"diloco, every {ROUND} steps"
STRATEGIES: dict[str, Callable[[], Any]] = {
    ALONE: lambda: "auto",
    "ddp": lambda: "ddp",
    "ddp, buckets of 2 MB": lambda: DDPStrategy(bucket_cap_mb=2, gradient_as_bucket_view=True),
    "bytescheduler": lambda: ByteSchedulerStrategy(),
    "bytescheduler, int8": lambda: ByteSchedulerStrategy(compression="int8"),
    "bytescheduler, int4": lambda: ByteSchedulerStrategy(compression="int4"),
    DILOCO: lambda: DiLoCoStrategy(inner_steps=ROUND, wire_dtype="int8"),
}
_OF_A_LAUNCH = ("WORLD_SIZE", "RANK", "NODE_RANK", "GROUP_RANK", "LOCAL_RANK", "TORCHELASTIC_RUN_ID")


class Pace(L.Callback):
    """Notes when rounds end."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step % ROUND == 0:
            self.ends.append(time.perf_counter())

    @property
    def step_seconds(self) -> float:
        """Of a step: the median over the rounds of the second half, in which sizes and modes have been chosen."""
        settled = self.ends[(len(self.ends) - 1) // 2 :]
        return statistics.median(end - start for start, end in pairwise(settled)) / ROUND


def train(strategy: Any, asked: argparse.Namespace, **place: Any) -> tuple[float, float]:
    """Train from the beginning; returns the seconds of a step, and the validation loss."""
    L.seed_everything(1, verbose=False)
    size = TINY if asked.tiny else SMALL
    training, validation = (Windows(text, size.context) for text in training_and_validation_text())
    pace = Pace()
    trainer = L.Trainer(
        strategy=strategy,
        max_steps=asked.steps,
        val_check_interval=asked.steps,
        check_val_every_n_epoch=None,
        callbacks=[pace],
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
        **place,
    )
    trainer.fit(
        CharacterGPT(size, steps=asked.steps),
        DataLoader(training, batch_size=asked.batch, shuffle=True, drop_last=True),
        DataLoader(validation_windows(validation, 128), batch_size=16),
    )
    return pace.step_seconds, float(trainer.callback_metrics["validation_loss"])


def compare(asked: argparse.Namespace) -> None:
    """Train with all strategies, as one of the ranks that torchrun has started."""
    first, ranks, local = os.environ["RANK"] == "0", int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_WORLD_SIZE"])
    launch = {name: os.environ.pop(name) for name in _OF_A_LAUNCH if name in os.environ}
    found = {}
    for name, strategy in STRATEGIES.items():
        if first:
            print(f"{name} ...", flush=True)
        place = {"devices": 1, "num_nodes": 1}
        if name != ALONE:
            place = {"devices": local, "num_nodes": ranks // local}
            os.environ |= launch
        if name == DILOCO:  # makes a process group for each worker, and the others have one for all
            dist.barrier()
            dist.destroy_process_group()
        found[name] = (place["devices"] * place["num_nodes"], *train(strategy(), asked, **place))
    if first:
        print(f"\n{'':24}{'a step':>10}{'samples/s':>11}{'over one':>10}{'over ddp':>10}{'loss':>8}")
        speeds = {name: size * asked.batch / seconds for name, (size, seconds, _) in found.items()}
        for name, (_, seconds, loss) in found.items():
            over = (speeds[name] / speeds[other] for other in (ALONE, "ddp"))
            ratios = "".join(f"{ratio:9.2f}x" for ratio in over)
            print(f"{name:24}{1e3 * seconds:7.0f} ms{speeds[name]:11.1f}{ratios}{loss:8.3f}")


def play(mbit: float, arguments: Sequence[str]) -> int:
    """Start both machines on this one, each with its share of the processors, and with a limited link between them."""
    script = ["-m", "examples.two_machines", *arguments]
    place: dict[str, Any] = {"env": {"OMP_NUM_THREADS": "1"}, "cwd": Path(__file__).parents[1]}
    with ShapedLink(2, mbit) as link:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", f"--master-addr={link.address(0)}"]
        both = [
            link.popen(host, on_own_processors([*torchrun, f"--node-rank={host}", *script], host, 2), **place)
            for host in range(2)
        ]
        return max(one.wait() for one in both)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m examples.two_machines", description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200, help="of each training (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=8, help="of each rank (default: %(default)s)")
    parser.add_argument("--tiny", action="store_true", help="a model to try the script itself with")
    parser.add_argument("--mbit", type=float, help="play both machines here, with such a link between them (root)")
    asked = parser.parse_args(arguments)
    if asked.mbit and "RANK" not in os.environ:
        return play(asked.mbit, sys.argv[1:] if arguments is None else arguments)
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    compare(asked)
    return 0


if __name__ == "__main__":
    sys.exit(main())
