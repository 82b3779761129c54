"""Other threads and processes see what DDP would show them, and none hangs."""

from __future__ import annotations

import gc
import multiprocessing
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.optim import AdamW
from torch.utils.data import DataLoader, Dataset

from lightning_bytescheduler.ddp.fit import Fit
from lightning_bytescheduler.ddp.steps import BucketUpdate, OverlappedStep, UpdateState
from lightning_bytescheduler.scheduler.task import CommTask
from tests.parity.checks import DDP, assert_same, assert_same_as_ddp, train_on
from tests.support.fit import Recipe, Run, train
from tests.support.models import Tower
from tests.support.rank_pool import RankPool

adamw = partial(AdamW, lr=0.005)
STEPS = 12
EACH = {"bucket_cap_mb": 1e-6, "partition_size": 400, "credit": 800}
ONE_BUCKET = {"bucket_cap_mb": 1.0, "partition_size": 400, "credit": 800}


class InThreads(Tower):
    """Runs layers in threads of their own, all of one bucket at once."""

    def predict(self, inputs: Tensor) -> Tensor:
        hidden = inputs[:, :12] @ inputs.new_ones(12, 24)
        with ThreadPoolExecutor(len(self.layers)) as threads:
            outputs = list(threads.map(lambda layer: torch.tanh(layer(hidden)), self.layers))
        return self.last(torch.stack(outputs).sum(0) + self.first(inputs))


@pytest.mark.slow
def test_modules_in_threads_of_one_forward_pass(two_ranks: RankPool) -> None:
    recipe = Recipe(model=partial(InThreads, optimizer=adamw, dropout=0.0), steps=STEPS)
    assert_same_as_ddp(two_ranks, recipe, options=ONE_BUCKET, network="late")


class ReadsInThreads(Tower):
    """Looks at the weights of one bucket from several threads, one after the other, while the first of them waits."""

    def predict(self, inputs: Tensor) -> Tensor:
        def look(index: int) -> list[float]:
            threading.Event().wait(0.02 * index)
            return sums([self.layers[index].weight])

        with ThreadPoolExecutor(len(self.layers)) as threads:
            self.notes.append(list(threads.map(look, range(len(self.layers)))))
        return super().predict(inputs)


@contextmanager
def opens_before_its_step(module: LightningModule) -> Any:
    """Open gates first, then step, and let other threads in between."""
    step_bucket = BucketUpdate.update

    def open_first(update: BucketUpdate) -> None:
        update.open_gate()
        threading.Event().wait(0.1)
        step_bucket(update)

    with patch.object(BucketUpdate, "update", open_first):
        yield


def test_reads_in_threads_of_one_forward_pass(two_ranks: RankPool) -> None:
    recipe = Recipe(model=partial(ReadsInThreads, optimizer=adamw), steps=STEPS)
    assert_same_as_ddp(two_ranks, recipe, options=ONE_BUCKET, network="late", broken=opens_before_its_step)


class Monitor(Callback):
    """Reads weights all the time, from a thread of its own."""

    def __init__(self) -> None:
        self.stop = threading.Event()
        self.thread: threading.Thread | None = None

    def on_train_start(self, trainer: Trainer, module: Any) -> None:
        self.thread = threading.Thread(target=self.read, args=(module,), daemon=True)
        self.thread.start()

    def read(self, module: Any) -> None:
        while not self.stop.wait(0.0005):
            for parameter in module.parameters():
                float(parameter.detach().sum())

    def on_train_end(self, trainer: Trainer, module: Any) -> None:
        self.stop.set()
        if self.thread is not None:
            self.thread.join(10)


def test_a_monitor_thread(two_ranks: RankPool) -> None:
    recipe = Recipe(model=partial(Tower, optimizer=adamw), steps=STEPS, callbacks=(Monitor,))
    assert_same_as_ddp(two_ranks, recipe, overlap=False)


@contextmanager
def loses_steps_taken_while_waiting(module: LightningModule) -> Any:
    def forget(step: OverlappedStep, task: CommTask) -> None:
        if not task.done():
            with step.fit.lock:
                for update in step.updates:
                    if update.state is UpdateState.DUE and update.has_arrived:
                        update.state = UpdateState.STEPPED

    with patch.object(OverlappedStep, "step_while_waiting", forget):
        yield


class WaitsLong(Tower):
    """Its first layer's gradients are more than all others', and are computed last: these wait for them."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.wide = nn.Linear(12, 2048)

    def predict(self, inputs: Tensor) -> Tensor:
        return super().predict(inputs + self.wide(inputs)[:, :12])


@pytest.mark.slow
def test_steps_taken_while_another_bucket_is_waited_for(two_ranks: RankPool) -> None:
    recipe = Recipe(model=partial(WaitsLong, optimizer=adamw), steps=STEPS)
    assert_same_as_ddp(
        two_ranks, recipe, options=EACH, network="plain", overlap=False, broken=loses_steps_taken_while_waiting
    )


def sums(parameters: Any) -> list[float]:
    return [p.detach().double().sum().item() for p in parameters]


_PATIENCE_S = 60.0


def in_a_fork(work: Callable[[], bytes]) -> bytes:
    """What ``work`` returns in a forked child, or nothing if it has to be killed."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(writing, work())
        finally:
            os._exit(0)
    os.close(writing)
    hurry = threading.Timer(_PATIENCE_S, os.kill, (child, 9))
    hurry.start()
    with os.fdopen(reading, "rb") as pipe:
        found = pipe.read()
    hurry.cancel()  # before its number may be another process's
    hurry.join()
    os.waitpid(child, 0)
    return found


class Forks(Callback):
    """Forks between two steps, or while gradients are on their way, and has the child read."""

    def __init__(self, when: str, thread: bool = False) -> None:
        self.when = when
        self.thread = thread

    def note(self, module: Any) -> None:
        def work() -> bytes:
            plain = all(type(p) is nn.Parameter for p in module.parameters())
            return repr((plain, sums(module.parameters()))).encode()

        if not self.thread:
            module.notes.append(in_a_fork(work))
            return
        with ThreadPoolExecutor(1) as elsewhere:
            module.notes.append(elsewhere.submit(in_a_fork, work).result())

    def on_train_batch_end(self, trainer: Trainer, module: Any, *_: Any) -> None:
        if self.when == "between" and trainer.global_step % 5 == 4:
            self.note(module)

    def on_after_backward(self, trainer: Trainer, module: Any) -> None:
        if self.when == "reducing" and trainer.global_step % 5 == 4:
            self.note(module)


@contextmanager
def nothing_before_forks(module: LightningModule) -> Any:
    with (
        patch.object(Fit, "before_fork", lambda _: None),
        patch.object(Fit, "after_fork", lambda _, in_child: None),
        patch(f"{__name__}._PATIENCE_S", 2.0),
    ):
        yield


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize(
    "forks",
    [
        pytest.param(partial(Forks, "between"), id="between-steps", marks=pytest.mark.slow),
        pytest.param(partial(Forks, "between", thread=True), id="from-a-thread"),
        pytest.param(partial(Forks, "reducing"), id="gradients-on-their-way"),
    ],
)
def test_a_forked_child_has_the_weights_of_its_moment(two_ranks: RankPool, forks: Any) -> None:
    recipe = Recipe(model=partial(Tower, optimizer=adamw), steps=10, callbacks=(forks,))
    ddp, _ = assert_same_as_ddp(two_ranks, recipe, overlap=False)
    assert len(ddp[0].notes) == 2
    assert all(note.startswith(b"(True, [") for note in ddp[0].notes)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_without_the_hook_a_forked_child_waits_for_good(two_ranks: RankPool) -> None:
    """Proof that the tests above can fail."""
    forks = partial(Forks, "between")
    recipe = Recipe(model=partial(Tower, optimizer=adamw), steps=5, callbacks=(forks,))
    assert_same_as_ddp(two_ranks, recipe, overlap=False, broken=nothing_before_forks)


class ReadsAWeight(Dataset[Any]):
    def __init__(self, module: Any) -> None:
        self.module = module

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> float:
        return (
            self.module.last.weight.detach().sum().item()
        )  # no tensor: those need a thread and a socket of the worker


class Workers(Callback):
    def __init__(self, context: str) -> None:
        self.context = context

    def on_train_batch_end(self, trainer: Trainer, module: Any, *_: Any) -> None:
        if trainer.global_step == 6:
            # These ranks are processes of a kind that may have no children otherwise.
            with patch.dict(multiprocessing.current_process()._config, daemon=False):  # type: ignore[attr-defined]
                loader = DataLoader(
                    ReadsAWeight(module), None, num_workers=1, multiprocessing_context=self.context, timeout=60
                )
                module.notes.append(list(loader))


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_forked_loader_workers_read_a_weight(two_ranks: RankPool) -> None:
    recipe = Recipe(model=partial(Tower, optimizer=adamw), steps=10, callbacks=(partial(Workers, "fork"),))
    assert_same_as_ddp(two_ranks, recipe, overlap=False)


def collect() -> bytes:
    return b"collected" if gc.collect() >= 0 else b""


def collects_in_a_fork(rank: int, recipe: Recipe, run: Run, freezes: bool) -> bytes:
    """What a child finds that is forked after a training and collects garbage, if it comes to an end."""
    gc.collect()
    gc.disable()
    try:
        train(rank, recipe, run)
        if freezes:
            return in_a_fork(collect)
        with patch.object(gc, "freeze"), patch(f"{__name__}._PATIENCE_S", 2.0):
            return in_a_fork(collect)
    finally:
        gc.enable()
        gc.collect()


@pytest.mark.slow
@pytest.mark.parametrize(("freezes", "found"), [(True, b"collected"), (False, b"")])
def test_a_child_leaves_the_groups_of_a_former_training_alone(two_ranks: RankPool, freezes: bool, found: bytes) -> None:
    recipe = Recipe(model=partial(Tower, optimizer=adamw), steps=2)
    assert two_ranks.run(collects_in_a_fork, recipe=recipe, run=Run(), freezes=freezes) == [found, found]


class Product(torch.autograd.Function):
    """A kernel that takes a weight's memory."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(value)
        with torch._C.DisableTorchFunctionSubclass():
            return value * weight

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return None, (gradients[0] * ctx.saved_tensors[0]).sum(0)


class RawKernel(Tower):
    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.scale = nn.Parameter(torch.ones(12))

    def predict(self, inputs: Tensor) -> Tensor:
        return super().predict(Product.apply(inputs, self.scale))


def test_a_custom_function_keeps_the_overlap(two_ranks: RankPool) -> None:
    """Every update is deferred, those of a weight that only a custom function gets too."""
    assert_same_as_ddp(two_ranks, Recipe(model=partial(RawKernel, optimizer=adamw), steps=STEPS), options=EACH)


class SwitchesKernel(Tower):
    """Reads a bias past PyTorch's functions from the sixth step on."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.offset = nn.Parameter(torch.zeros(12))

    def predict(self, inputs: Tensor) -> Tensor:
        if self.trainer.global_step < 6 or not self.training:
            return super().predict(inputs + self.offset)
        with torch._C.DisableTorchFunctionSubclass():
            hidden = inputs + self.offset
        return super().predict(hidden)


def test_an_unseen_read_that_begins_later_is_said_and_ends(two_ranks: RankPool) -> None:
    recipe = Recipe(model=partial(SwitchesKernel, optimizer=adamw), steps=10)
    (ours,) = train_on(two_ranks, recipe, Run(options=EACH))
    assert ours[0].plan is not None
    assert dict(ours[0].plan.read_unseen) == {"offset": 7}
    assert any("'offset'" in warning and "cross_barrier=False" in warning for warning in ours[0].warnings)


def test_before_it_begins_nothing_is_said(two_ranks: RankPool) -> None:
    recipe = Recipe(model=partial(SwitchesKernel, optimizer=adamw), steps=6)
    ddp, ours = train_on(two_ranks, recipe, DDP, Run(options=EACH))
    assert_same(ddp, ours)
    assert ours[0].plan is not None
    assert not ours[0].plan.read_unseen
