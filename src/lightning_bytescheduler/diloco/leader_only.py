"""What is for one worker only of those of a coordinator: checkpoints, loggers, and what looks at validations.

The coordinator appoints one worker to validate, log and save for all. On the others, checkpoint callbacks and loggers
are passed over; ``EarlyStopping`` is where what it monitors is not there, as a metric of the validation, so that it
does not fail for want of it. A ``ReduceLROnPlateau`` is refused. Where ``EarlyStopping`` stops the leader, all are to
stop. Another worker may be appointed at any time, which is looked at with each call. What was to be logged of
hyperparameters before is logged then.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, TypeAlias

from torch.utils.data import DistributedSampler

from lightning_bytescheduler.ddp.rank_strategy import callbacks_of
from lightning_bytescheduler.exceptions import UnsupportedError
from lightning_bytescheduler.lightning_api import Checkpoint, pl, rank_zero_info

_CHECKPOINT_HOOKS = (
    "on_train_batch_end",
    "on_train_epoch_end",
    "on_validation_end",
    "on_train_end",
    "on_exception",
)
_Method: TypeAlias = Callable[..., Any]
_LOGGING = ("log_metrics", "log_graph", "save", "after_save_checkpoint")


@contextmanager
def for_leader_only(
    trainer: pl.Trainer, leads: Callable[[], bool], on_stop: Callable[[], None] = lambda: None
) -> Iterator[None]:
    """Pass over meanwhile what is the leader's, unless this worker leads.

    Args:
        trainer: Whose callbacks and loggers they are.
        leads: Whether it does; the same on all ranks of a worker.
        on_stop: Called when an ``EarlyStopping`` stops the worker that leads.
    """
    with ExitStack() as stack:

        def replace(of: object, name: str, make: Callable[[_Method], _Method]) -> None:
            stack.enter_context(_replaced(of, name, make))

        def gated(own: _Method) -> _Method:
            return lambda *values, **options: own(*values, **options) if leads() else None

        for callback in callbacks_of(trainer):
            if isinstance(callback, Checkpoint):
                for hook in _CHECKPOINT_HOOKS:
                    replace(callback, hook, gated)
            elif isinstance(callback, pl.callbacks.EarlyStopping):
                replace(callback, "_run_early_stopping_check", partial(_early_stopping, callback, leads, on_stop))
        for logger in trainer.loggers:
            hyperparameters = _Hyperparameters(leads)
            replace(logger, "log_hyperparams", hyperparameters.keeping)
            for name in _LOGGING:
                replace(logger, name, hyperparameters.before)
        yield


@contextmanager
def _replaced(of: object, name: str, make: Callable[[_Method], _Method]) -> Iterator[None]:
    own, had = getattr(of, name, None), vars(of).get(name)
    if own is not None:
        vars(of)[name] = make(own)
    try:
        yield
    finally:
        vars(of).pop(name, None)
        if had is not None:
            vars(of)[name] = had


def _early_stopping(
    callback: pl.callbacks.EarlyStopping, leads: Callable[[], bool], on_stop: Callable[[], None], own: _Method
) -> _Method:
    def check(trainer: pl.Trainer) -> None:
        if leads() or callback.monitor in trainer.callback_metrics:
            stopped = trainer.should_stop
            own(trainer)
            if trainer.should_stop and not stopped and leads():
                on_stop()

    return check


class _Hyperparameters:
    """What was to be logged of them, by the worker that leads."""

    def __init__(self, leads: Callable[[], bool]) -> None:
        self._leads = leads
        self._kept: list[Callable[[], Any]] = []

    def keeping(self, own: _Method) -> _Method:
        """The logger's method for them, for any worker."""

        def keep(*values: Any, **options: Any) -> None:
            self._kept.append(lambda: own(*values, **options))
            self._catch_up()

        return keep

    def before(self, own: _Method) -> _Method:
        """A method of the logger, for the worker that leads."""
        return lambda *values, **options: own(*values, **options) if self._catch_up() else None

    def _catch_up(self) -> bool:
        while self._leads() and self._kept:
            self._kept.pop(0)()
        return self._leads()


def refuse_plateaus(schedulers: Sequence[Any]) -> None:
    """Refuse schedules that follow a metric.

    Args:
        schedulers: Lightning's configurations of them.

    Raises:
        UnsupportedError: Names the metric, and the way out.
    """
    for config in schedulers:
        if config.reduce_on_plateau:
            raise UnsupportedError(
                f"ReduceLROnPlateau of {config.monitor!r} is not allowed with a coordinator: the leader alone "
                "validates, and learning rates of workers would come to differ. Use a schedule of steps or epochs."
            )


_SEED = "PL_GLOBAL_SEED"  # where Lightning's seed_everything leaves it


def seed_sampler(loader: object, worker: str) -> None:
    """Have a worker go through a plain data loader in an order of its own, unless the user chose a seed."""
    sampler = getattr(loader, "sampler", None)
    if not isinstance(sampler, DistributedSampler):
        return
    if os.environ.get(_SEED):
        rank_zero_info(
            "diloco: each worker goes through all of its own data loader. Workers with the same data and the same "
            "seed_everything(...) train on the same samples: give each another seed, or part of the data."
        )
    elif sampler.shuffle and not sampler.seed:
        sampler.seed = int.from_bytes(hashlib.blake2b(worker.encode(), digest_size=4).digest(), "big")
