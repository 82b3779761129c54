"""A training script in which one rank fails, or all end in order. What happens is said in JSON in ``sys.argv[1]``."""

from __future__ import annotations

import fcntl
import gc
import json
import os
import signal
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_bytescheduler import ByteSchedulerStrategy, CreditTuner, LaunchOrderError, SchedulerClosedError
from lightning_bytescheduler.collectives.push_pull import NodePushPull
from lightning_bytescheduler.collectives.route import AllReduce, Served
from lightning_bytescheduler.ddp import steps, wire
from lightning_bytescheduler.ddp.gates import GatedParameter
from lightning_bytescheduler.failures import board
from tests.faults.bounds import set_bounds

__all__: list[str] = []

Options = dict[str, Any]
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", "1"))  # Lightning takes it back when it is done


class Boom:
    """Happens once, at one place, on one rank, in one step."""

    def __init__(self, options: Options) -> None:
        self.place: str = options.get("where", "")
        self.step: int = options.get("step", 3)
        self.kind: str = options.get("kind", "raise")
        self.ranks: list[int] = options.get("ranks", [])
        self.behind: bool = options.get("behind", False)  # the others have ended this batch by then
        self.happened = False
        self.current_step = 0

    def __call__(self, place: str) -> None:
        if self.happened or place != self.place or self.current_step < self.step or own_rank() not in self.ranks:
            return
        self.happened = True
        if self.behind:
            self.await_the_others()
        say(f"FAILED_AT {time.time()}")
        if self.kind == "raise":
            raise ValueError("boom")
        if self.kind == "exit":
            os._exit(1)
        if self.kind == "sleep":
            while True:
                time.sleep(1.0)
        if self.kind == "pause":
            time.sleep(7.0)
            return
        if self.kind == "order":
            raise LaunchOrderError("the ranks run different programs")
        os.kill(os.getpid(), getattr(signal, self.kind))

    def batch_ended(self) -> None:
        """Tell the rank that waits in :meth:`await_the_others`."""
        if self.behind:
            Path(f"ended-{self.current_step}-{own_rank()}").touch()

    def await_the_others(self) -> None:
        deadline = time.monotonic() + 60.0
        others = [Path(f"ended-{self.step}-{rank}") for rank in range(WORLD_SIZE) if rank != own_rank()]
        while time.monotonic() < deadline and not all(file.exists() for file in others):
            time.sleep(0.01)


def own_rank() -> int:
    return int(os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0")))


def live(rank: int) -> int:
    """Take a lock that is free once this rank's process has ended, or wait until another rank's has."""
    lock = os.open(f"lives-{rank}", os.O_CREAT | os.O_RDWR)
    fcntl.flock(lock, fcntl.LOCK_EX)
    return lock


class FailingBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, boom: Boom) -> Tensor:
        ctx.boom = boom
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        ctx.boom("backward")
        return gradients[0], None


class Middle(nn.Module):
    def __init__(self, width: int, boom: Boom) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.boom = boom

    def forward(self, value: Tensor) -> Tensor:
        self.boom("forward")
        hidden: Tensor = FailingBackward.apply(torch.tanh(self.linear(value)), self.boom)
        return hidden


class Model(LightningModule):
    def __init__(self, boom: Boom, options: Options) -> None:
        super().__init__()
        self.boom = boom
        self.pause: float = options.get("pause", 0.0)
        self.rows: int = options.get("rows", 64)
        width: int = options.get("width", 32)
        self.layers = nn.Sequential(nn.Linear(8, width), nn.Tanh(), Middle(width, boom), nn.Linear(width, 1))
        if options.get("frozen"):
            self.layers[0].requires_grad_(False)

    def setup(self, stage: str) -> None:
        self.boom("setup")

    def configure_model(self) -> None:
        self.boom("configure_model")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        self.boom("configure_optimizers")
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.boom.current_step = batch_idx + 1
        self.boom("training_step")
        time.sleep(self.pause)
        return self.layers(batch[0]).square().mean()

    def on_save_checkpoint(self, checkpoint: Any) -> None:
        self.boom("on_save_checkpoint")

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.boom("on_before_optimizer_step")

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.boom("validation_step")
        self.log("loss", self.layers(batch[0]).square().mean(), sync_dist=True)

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(TensorDataset(torch.randn(self.rows, 8)), batch_size=2)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(TensorDataset(torch.randn(8, 8)), batch_size=2)


class BatchEnd(Callback):
    def __init__(self, boom: Boom) -> None:
        self.boom = boom

    def on_train_batch_end(self, *_: Any) -> None:
        self.boom.batch_ended()
        self.boom("on_train_batch_end")

    def on_train_end(self, *_: Any) -> None:
        self.boom("on_train_end")


class Trials(Callback):
    """Says how many trials rank 0 has made, and where the next one stands."""

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        (tuner,) = (callback for callback in trainer.callbacks if isinstance(callback, CreditTuner))  # type: ignore[attr-defined]
        say(f"STEP {trainer.global_step} TRIALS {len(tuner.entries)} SETTLED {tuner.is_settled}")


def say(text: str) -> None:
    os.write(1, f"{text}\n".encode())


def report(name: str) -> None:
    """What must be gone once the Trainer is done."""
    gc.collect()
    gated = sum(type(thing) is GatedParameter for thing in gc.get_objects())
    threads = sorted(t.name for t in threading.enumerate() if t.name.startswith("bytescheduler"))
    groups = len(dist.distributed_c10d._world.pg_map) if dist.is_initialized() else 0
    say(f"{name} {time.time()} threads={threads} gated={gated} groups={groups}")


def kill_in_mid_sum(boom: Boom) -> None:
    """Let ``boom`` happen on the thread that adds up a node's parts, when one of them is about to be pushed."""
    push = NodePushPull.push

    def broken_off(*arguments: Any) -> Any:
        boom("adding up")
        return push(*arguments)

    NodePushPull.push = broken_off  # type: ignore[method-assign, assignment]


def kill_in_mid_communication(boom: Boom) -> None:
    """Let ``boom`` happen on the dispatcher thread, when part of a step's gradients has been sent."""
    sent = 0

    def counting(send: Any) -> Any:
        def counted(route: Any, part: Any, sub_task: Any, *how: Any) -> None:
            nonlocal sent
            send(route, part, sub_task, *how)
            sent += sub_task.parent.key.step >= boom.step
            if sent > 2:
                boom("sending")

        return counted

    for route in (AllReduce, Served):
        route.send = counting(route.send)  # type: ignore[method-assign]


def fail_in_mid_step(boom: Boom) -> None:
    """Let ``boom`` happen in an optimizer step of one bucket, when it has changed some of the weights."""
    step = steps.step_partially

    def broken_off(*arguments: Any) -> None:
        step(*arguments)
        boom("stepping")

    steps.step_partially = broken_off  # type: ignore[assignment]


def slow_down_checkpoints(seconds: float) -> None:
    save = TorchCheckpointIO.save_checkpoint

    def slowly(*arguments: Any, **keywords: Any) -> None:
        time.sleep(seconds)
        save(*arguments, **keywords)
        say("CHECKPOINT_WRITTEN")

    TorchCheckpointIO.save_checkpoint = slowly  # type: ignore[method-assign]


def make_trainer(options: Options, boom: Boom, callbacks: list[Callback]) -> Trainer:
    strategy: Any = options.get("strategy")
    if strategy is None:
        strategy = ByteSchedulerStrategy(
            partition_size=options.get("partition_size", 200),
            credit=400,
            bucket_cap_mb=options.get("bucket_cap_mb", 0.001),
            cross_barrier=options.get("cross_barrier", True),
            mode=options.get("mode", "auto" if "tuner" in options else "overlapped"),
            tuning="both" if "tuner" in options else False,
            **({"timeout": timedelta(seconds=options["timeout"])} if "timeout" in options else {}),
            **options.get("served", {}),
        )
    return Trainer(
        accelerator="cpu",
        num_nodes=options.get("nodes", 1),
        devices=options.get("devices") or int(os.environ["LOCAL_WORLD_SIZE"]),
        strategy=strategy,
        max_steps=options.get("steps", 8),
        val_check_interval=options.get("val_check_interval", 4),
        limit_val_batches=options.get("val_batches", 2),
        gradient_clip_val=options.get("clip"),
        num_sanity_val_steps=0,
        enable_checkpointing=any(isinstance(c, ModelCheckpoint) for c in callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
        callbacks=callbacks,
    )


def main(options: Options) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    set_bounds(**options.get("bounds", {}))
    if options.get("outlived"):
        options["lives"] = live(own_rank())  # as long as this process
    if "nodes" in options:
        each = int(os.environ["WORLD_SIZE"]) // options["nodes"]
        node, local = divmod(own_rank(), each)
        place = {"NODE_RANK": node, "GROUP_RANK": node, "LOCAL_RANK": local, "LOCAL_WORLD_SIZE": each}
        os.environ.update({name: str(value) for name, value in place.items()})
    if options.get("far"):
        wire._FAR_S = 0.0  # as over a link with long round trips
        wire._chooses = lambda options: True
    boom = Boom(options)
    kill_in_mid_communication(boom)
    kill_in_mid_sum(boom)
    fail_in_mid_step(boom)
    callbacks: list[Callback] = [BatchEnd(boom)]
    if "checkpoint" in options:
        folder = options["checkpoint"]
        callbacks += [ModelCheckpoint(folder, filename="saved", save_on_exception=True)]
        callbacks += [OnExceptionCheckpoint(folder)]
    if "regular_checkpoint" in options:
        callbacks += [ModelCheckpoint(options["regular_checkpoint"], filename="regular", every_n_train_steps=3)]
        slow_down_checkpoints(options["slow"])
    if "tuner" in options:
        callbacks += [CreditTuner(**options["tuner"]), Trials()]
    model = Model(boom, options)
    trainer = make_trainer(options, boom, callbacks)
    if options.get("served", {"servers": {}})["servers"].get("spare") and own_rank() == 0:
        command = [sys.executable, "-m", "lightning_bytescheduler", "server"]
        subprocess.Popen(command, env={**os.environ, "COVERAGE_PROCESS_START": ""})  # ends with the training
    try:
        for _ in range(options.get("fits", 1)):
            trainer.fit(model)
            report("AFTER_FIT")
            if "save" in options:
                trainer.save_checkpoint(options["save"])
            trainer.fit_loop.epoch_loop.max_steps += options.get("steps", 8)
        if options.get("validate"):
            trainer.validate(model, verbose=False)
            report("AFTER_VALIDATE")
    except BaseException:
        report("AFTER_FAILURE")
        if "save_after_failure" in options:
            try:
                trainer.save_checkpoint(options["save_after_failure"])
            except SchedulerClosedError as refused:
                say(f"REFUSED {refused}")
        if options.get("again") == "outlives":
            for rank in set(range(WORLD_SIZE)) - {own_rank()}:
                os.close(live(rank))
            return
        if not options.get("again"):
            raise
        sys.excepthook(*sys.exc_info())
        board.NATIVE_S = options.get("native", 60.0)
        again = make_trainer(options, boom, [])
        again.fit(Model(boom, options))
        report("AGAIN")


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
