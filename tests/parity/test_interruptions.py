"""Code that Python may run at any point of a thread: finalizers of garbage, and handlers of signals."""

from __future__ import annotations

import gc
import os
import pkgutil
import signal
import weakref
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
from lightning.pytorch import Callback, Trainer
from torch.optim import AdamW

from lightning_bytescheduler.collectives.completion import CompletionThread
from lightning_bytescheduler.scheduler.core import ByteCore
from tests.parity.checks import assert_same_as_ddp
from tests.support.fit import Recipe
from tests.support.models import Tower
from tests.support.rank_pool import RankPool


class Holder:
    """Garbage that only a collection finds."""

    def __init__(self) -> None:
        self.itself = self


def read_all(trainer: Trainer, module: Any) -> None:
    for parameter in module.parameters():
        parameter.sum().item()
        assert parameter.grad is None or parameter.grad.sum().isfinite()
    len(trainer.optimizers[0].state)


class Garbage(Callback):
    """Leaves garbage behind whose finalizers read weights, gradients and state, and has it collected at one place.

    Args:
        owner: Owner of the function that collects.
        name: Name of that function.
    """

    def __init__(self, owner: type, name: str) -> None:
        original = getattr(owner, name)

        def collects(*args: Any, **kwargs: Any) -> Any:
            gc.collect(0)
            return original(*args, **kwargs)

        self.collecting = patch.object(owner, name, collects)

    def on_train_start(self, trainer: Trainer, module: Any) -> None:
        gc.disable()
        self.collecting.start()

    def on_train_batch_end(self, trainer: Trainer, module: Any, *_: Any) -> None:
        self.leave_garbage(trainer, module)

    def on_after_backward(self, trainer: Trainer, module: Any) -> None:
        self.leave_garbage(trainer, module)

    def leave_garbage(self, trainer: Trainer, module: Any) -> None:
        weakref.finalize(Holder(), read_all, trainer, module).atexit = False

    def on_train_end(self, trainer: Trainer, module: Any) -> None:
        self.collecting.stop()
        gc.enable()


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        pytest.param(CompletionThread, "_await", id="where-collectives-end"),
        pytest.param(ByteCore, "_select", id="where-they-are-launched"),
    ],
)
def test_a_finalizer_waits_for_nothing(two_ranks: RankPool, owner: type, name: str) -> None:
    recipe = Recipe(
        model=partial(Tower, optimizer=partial(AdamW, lr=0.005)), callbacks=(partial(Garbage, owner, name),)
    )
    assert_same_as_ddp(two_ranks, recipe, network="plain", overlap=False)


class Signals(Callback):
    """Has a handler read everything, and save, right after a function of the package.

    Args:
        owner: Owner of the function, in the room ``ddp``.
        name: Name of the function.
    """

    def __init__(self, owner: str, name: str) -> None:
        within = pkgutil.resolve_name(f"lightning_bytescheduler.ddp.{owner}")
        original = getattr(within, name)

        def signals(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            os.kill(os.getpid(), signal.SIGUSR2)
            return result

        self.signalling = patch.object(within, name, signals)

    def on_train_start(self, trainer: Trainer, module: Any) -> None:
        def handle(*_: Any) -> None:
            read_all(trainer, module)
            getattr(trainer.strategy, "flush", list)()
            trainer.strategy.lightning_module_state_dict()

        self.before = signal.signal(signal.SIGUSR2, handle)
        self.signalling.start()

    def on_train_end(self, trainer: Trainer, module: Any) -> None:
        self.signalling.stop()
        signal.signal(signal.SIGUSR2, self.before)


@pytest.mark.parametrize(
    ("owner", "name", "clips"),
    [
        pytest.param("fit:Fit", "hook", False, id="in-a-backward-pass", marks=pytest.mark.slow),
        pytest.param("steps", "_why_whole", False, id="as-a-step-is-deferred"),
        pytest.param("gradient_transforms:StepTransforms", "apply", True, id="as-a-bucket-is-stepped"),
    ],
)
def test_a_handler_changes_nothing(two_ranks: RankPool, owner: str, name: str, clips: bool) -> None:
    recipe = Recipe(
        model=partial(Tower, optimizer=partial(AdamW, lr=0.005)),
        trainer={"gradient_clip_val": 1e6} if clips else {},
        callbacks=(partial(Signals, owner, name),),
    )
    assert_same_as_ddp(two_ranks, recipe, network="plain", overlap=False)
