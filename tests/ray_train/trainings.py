"""What Ray runs on its workers, and what the same training comes to without Ray."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

SAMPLES = 96
BATCH = 8  # of all ranks
EPOCHS = 2
OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "bytescheduler": {"mode": "overlapped", "weighting": "samples", "batch_size": "global"},
    "diloco": {"inner_steps": 2, "equal_steps": True},
}
STEPS = EPOCHS * SAMPLES // BATCH
EVERY = {"bytescheduler": 4, "diloco": 3}
"""Steps from one checkpoint to the next."""
DIES = {"bytescheduler": STEPS // 2 + 2, "diloco": 10}
"""Steps after which a worker dies: in the middle of the second epoch, after a checkpoint of there."""
ALONE = {"bytescheduler": STEPS * 3 // 4, "diloco": 10}
"""Steps after which a lone worker waits: later than the first checkpoint that it has reported."""


class Numbered(Dataset[tuple[Tensor, Tensor, int]]):
    """Points of a function, with their numbers."""

    def __init__(self) -> None:
        self.inputs = torch.rand(SAMPLES, 6, generator=torch.Generator().manual_seed(1)) * 2 - 1

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, int]:
        return self.inputs[index], self.inputs[index].sin().sum(0, keepdim=True), index


class Learner(LightningModule):
    """Learns the function."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))

    def training_step(self, batch: tuple[Tensor, Tensor, Tensor], batch_idx: int) -> Tensor:
        return nn.functional.mse_loss(self.layers(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class Records(Callback):
    """Writes down which samples this rank takes, and what the weights are at the end.

    Args:
        folder: One file for each process.
        attempt: When it began, in nanoseconds, the same on all ranks.
    """

    def __init__(self, folder: Path, attempt: int = 0) -> None:
        self.folder = folder
        self.file = folder / f"{attempt}.{os.getpid()}"

    def on_train_batch_start(self, trainer: Trainer, _: Any, batch: Any, batch_idx: int) -> None:
        taken = " ".join(map(str, batch[2].tolist()))
        with self.file.open("a") as file:
            file.write(f"{trainer.global_step},{ranks_of(trainer)},{taken}\n")

    def on_train_end(self, trainer: Trainer, module: LightningModule) -> None:
        torch.save(module.state_dict(), self.folder / f"weights.{trainer.global_rank}")


class Reports(Callback):
    """Reports a checkpoint to Ray every few steps, in the middle of an epoch too.

    Args:
        every: So many.
    """

    def __init__(self, every: int) -> None:
        self.every = every

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step % self.every == 0:
            self._report(trainer)

    def _report(self, trainer: Trainer) -> None:
        import ray.train

        with tempfile.TemporaryDirectory() as folder:
            trainer.save_checkpoint(os.path.join(folder, "checkpoint.ckpt"))
            first = ray.train.get_context().get_world_rank() == 0
            checkpoint = ray.train.Checkpoint.from_directory(folder) if first else None
            ray.train.report({"step": trainer.global_step}, checkpoint=checkpoint)


class Dies(Callback):
    """Kills its process once: in the attempt that began without a checkpoint.

    Args:
        step: After so many steps.
    """

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        import ray.train

        first = ray.train.get_context().get_world_rank() == 1 and ray.train.get_checkpoint() is None
        if first and trainer.global_step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


class WaitsAlone(Callback):
    """A lone worker goes no further than this: it waits until Ray ends it, as there is another machine.

    Args:
        step: After so many steps.
    """

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        time.sleep(0.2)  # as machines go while it trains
        if ranks_of(trainer) == 1 and trainer.global_step == self.step:
            time.sleep(300)


def ranks_of(trainer: Trainer) -> int:
    """How many train."""
    return int(getattr(trainer.strategy, "ranks", trainer.world_size))


def fit(
    strategy: Any,
    plugins: list[Any],
    callbacks: list[Callback],
    folder: str,
    resume: Any = None,
    devices: Any = "auto",
) -> Any:
    """What a script of Lightning's has between its imports and its end."""
    torch.manual_seed(7)
    torch.set_num_threads(1)
    trainer = Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=strategy,
        plugins=plugins,
        callbacks=callbacks,
        default_root_dir=folder,
        max_epochs=EPOCHS,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    if plugins:
        from ray.train.lightning import prepare_trainer

        trainer = prepare_trainer(trainer)
    trainer.fit(Learner(), DataLoader(Numbered(), batch_size=BATCH, shuffle=True), ckpt_path=resume)
    return trainer


def on_worker(asked: Mapping[str, Any]) -> None:
    """For ``TorchTrainer``.

    Args:
        asked: ``strategy`` by name, ``folder`` for records; and if wanted ``reports``, ``dies``, ``waits_alone``.
    """
    import ray.train
    import torch.distributed as dist
    from ray.train.lightning import RayLightningEnvironment

    from lightning_bytescheduler.ray import RayByteSchedulerStrategy, RayDiLoCoStrategy

    name = asked["strategy"]
    began = [time.time_ns()]
    dist.broadcast_object_list(began)
    callbacks: list[Callback] = [Records(Path(asked["folder"]), began[0])]
    callbacks += [Reports(EVERY[name])] if asked.get("reports") else []
    callbacks += [Dies(DIES[name])] if asked.get("dies") else []
    callbacks += [WaitsAlone(ALONE[name])] if asked.get("waits_alone") else []
    made = {"bytescheduler": RayByteSchedulerStrategy, "diloco": RayDiLoCoStrategy}[name]
    strategy = made(**OPTIONS[name])
    checkpoint = ray.train.get_checkpoint()
    ranks = dist.get_world_size()
    if checkpoint is None:
        fit(strategy, [RayLightningEnvironment()], callbacks, asked["folder"])
    else:
        with checkpoint.as_directory() as saved:
            resume = os.path.join(saved, "checkpoint.ckpt")
            fit(strategy, [RayLightningEnvironment()], callbacks, asked["folder"], resume)
    assert dist.get_world_size() == ranks, "Ray has its group back"


class Saves(Reports):
    """Keeps the same checkpoints without Ray.

    Args:
        every: See Reports.
        folder: Where.
    """

    def __init__(self, every: int, folder: Path) -> None:
        super().__init__(every)
        self.folder = folder

    def _report(self, trainer: Trainer) -> None:
        trainer.save_checkpoint(self.folder / f"{trainer.global_step}.ckpt")


def without_ray(rank: int, strategy: str, folder: str, resume: str | None = None, ranks: int = 2) -> None:
    """The same training on ranks that are there already, or on the first one of them."""
    import torch.distributed as dist

    from lightning_bytescheduler import ByteSchedulerStrategy, DiLoCoStrategy

    if rank >= ranks:
        return
    made = {"bytescheduler": ByteSchedulerStrategy, "diloco": DiLoCoStrategy}[strategy]
    callbacks = [Records(Path(folder)), Saves(EVERY[strategy], Path(folder))]
    with patch.dict(os.environ, {} if ranks > 1 else {"WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}):
        fit(made(**OPTIONS[strategy]), [], callbacks, folder, resume, devices=ranks)
    if dist.is_initialized():
        dist.destroy_process_group()


def taken(folder: Path) -> dict[int, list[int]]:
    """Samples by step, of the attempt that took it last."""
    found: dict[int, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for file in folder.glob("[0-9]*.[0-9]*"):
        for line in file.read_text().splitlines():
            step, _, samples = line.split(",")
            found[int(step)][int(file.stem)] += map(int, samples.split())
    return {step: of[max(of)] for step, of in sorted(found.items())}


def attempts(folder: Path) -> list[tuple[int, int]]:
    """Of each attempt, how many ranks there were, and the step that it began with."""
    found: dict[int, tuple[int, int]] = {}
    for file in folder.glob("[0-9]*.[0-9]*"):
        if file.stat().st_size:
            step, ranks, _ = file.read_text().split("\n", 1)[0].split(",")
            found[int(file.stem)] = int(ranks), int(step)
    return [found[began] for began in sorted(found)]


def numbers_of_ranks(folder: Path) -> list[int]:
    """How many ranks trained, one after the other."""
    seen = [ranks for ranks, _ in attempts(folder)]
    return [ranks for index, ranks in enumerate(seen) if index == 0 or ranks != seen[index - 1]]
