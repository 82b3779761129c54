"""Tune credit and partition size while a model trains, on two processes of this machine.

From the repository's folder:

    python -m examples.tuning --output tuned

Then look at what was tried, and draw it:

    lightning-bytescheduler tuning tuned --png tuned/search.png

On one machine there is nothing to hide, so DDP's own steps win; over Ethernet they seldom do.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from lightning.pytorch import Trainer
from lightning.pytorch.loggers import CSVLogger

from examples.advised import make
from lightning_bytescheduler import ByteSchedulerStrategy, CreditTuner


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, and say what was found."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=400, help="steps of the training (default: %(default)s)")
    parser.add_argument("--output", default="tuned", help="the run's folder (default: %(default)s)")
    options = parser.parse_args(arguments)
    model, data = make()
    # A training of some hundred steps may lose more of its time to trials than one of many thousand.
    tuner = CreditTuner(trials=8, steps_per_trial=10, cost_share=0.2)
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy=ByteSchedulerStrategy(tuning="both"),
        callbacks=[tuner],
        max_steps=options.steps,
        max_epochs=-1,
        log_every_n_steps=10,
        logger=CSVLogger(options.output, name="", version=""),
        enable_progress_bar=False,
        enable_checkpointing=False,
    )
    trainer.fit(model, data)
    if trainer.is_global_zero:
        for entry in tuner.entries:
            print(f"step {entry.step}: {entry.kind}, {entry.point}, {1e3 * entry.time.seconds:.1f} ms")
        print(f"{'Settled on' if tuner.is_settled else 'At present'}: {tuner.current}.")


if __name__ == "__main__":
    main()
