"""Workers of unequal speed train one model on real text, with hardly any communication.

    python -m examples.diloco

Two processes on this machine train a small GPT on the Python standard library's source. The second takes three times as
long for a step, as an older machine would; here it sleeps. A round is over when both together have processed so many
windows: the scheduler tells each how many steps to take, so that neither waits for the other. Afterwards,

    lightning-bytescheduler rounds diloco_output/rounds.jsonl --png diloco_output/rounds.png

draws what each of them did. With ``--inner muon`` each worker trains its layers' matrices by Muon.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch.utils.data import DataLoader, Subset

from examples.demo.model import CharacterGPT
from examples.demo.size import SMALL, TINY
from examples.demo.text import Windows, training_and_validation_text
from lightning_bytescheduler import DiLoCoStrategy
from lightning_bytescheduler.diloco.round_record import read_rounds, waiting_share

BATCH_SIZE = 8


class SlowWorker(L.Callback):
    """Makes each step of all workers but the first take ``slowness`` times as long."""

    def __init__(self, slowness: float) -> None:
        self.slowness = slowness
        self.began = 0.0

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        self.began = time.perf_counter()

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_rank > 0:
            time.sleep((self.slowness - 1) * (time.perf_counter() - self.began))


class MuonInside(CharacterGPT):
    """Trained by Muon and AdamW."""

    def configure_optimizers(self) -> Any:
        from examples.muon import MuonAndAdamW  # needs torch 2.9

        matrices = [weight for weight in self.blocks.parameters() if weight.ndim == 2]
        return MuonAndAdamW(self.parameters(), matrices=matrices, lr=1e-3)


def options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m examples.diloco", description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=2, help="processes (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=200, help="steps of the fastest worker (default: %(default)s)")
    parser.add_argument("--windows", type=int, default=320, help="that end a round (default: %(default)s)")
    parser.add_argument(
        "--slowness",
        type=float,
        default=3.0,
        help="how many times slower all workers but the first are (default: %(default)s)",
    )
    parser.add_argument("--wire", default="bf16", choices=["fp32", "bf16", "int8", "int4"])
    parser.add_argument("--fragments", type=int, default=1, help="sent in turn, one a round (default: %(default)s)")
    parser.add_argument("--overlap", type=int, default=0, help="steps while a fragment travels (default: %(default)s)")
    parser.add_argument("--inner", default="adamw", choices=["adamw", "muon"], help="optimizer (default: %(default)s)")
    parser.add_argument("--tiny", action="store_true", help="a model to try the example itself with")
    parser.add_argument("--output", type=Path, default=Path("diloco_output"))
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    asked = options(arguments)
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")
    torch.set_num_threads(1)
    L.seed_everything(1, verbose=False)
    size = TINY if asked.tiny else SMALL
    training, validation = (Windows(text, size.context) for text in training_and_validation_text())
    trainer = L.Trainer(
        accelerator="cpu",
        devices=asked.workers,
        strategy=DiLoCoStrategy(
            samples_per_round=asked.windows,
            wire_dtype=asked.wire,
            fragments=asked.fragments,
            overlap_steps=asked.overlap,
        ),
        max_steps=asked.steps,
        val_check_interval=max(asked.steps // 4, 1),
        log_every_n_steps=5,
        callbacks=[SlowWorker(asked.slowness)],
        default_root_dir=asked.output,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    kind = MuonInside if asked.inner == "muon" else CharacterGPT
    trainer.fit(
        kind(size, steps=asked.steps),
        DataLoader(training, batch_size=BATCH_SIZE, shuffle=True),
        DataLoader(Subset(validation, range(16 * BATCH_SIZE)), batch_size=BATCH_SIZE),
    )
    if trainer.is_global_zero:
        rounds = read_rounds(asked.output / "rounds.jsonl")
        print(f"\nvalidation loss {float(trainer.callback_metrics['validation_loss']):.3f}")
        print(f"{len(rounds)} rounds; workers waited for {waiting_share(rounds):.1%} of their time")
        for name in sorted({worker.worker for one in rounds for worker in one.workers}):
            parts = [worker for one in rounds for worker in one.workers if worker.worker == name]
            windows = sum(part.samples for part in parts)
            print(f"{name}: {sum(part.steps for part in parts)} steps, {windows} windows")


if __name__ == "__main__":
    main()
