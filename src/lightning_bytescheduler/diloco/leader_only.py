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
from typing import Any

from torch.utils.data import DistributedSampler

from lightning_bytescheduler.ddp.rank_strategy import callbacks_of
from lightning_bytescheduler.exceptions import UnsupportedError
from lightning_bytescheduler.lightning_api import Checkpoint, Logger, pl, rank_zero_info

_CHECKPOINT_HOOKS = (
    "on_train_batch_end",
    "on_train_epoch_end",
    "on_validation_end",
    "on_train_end",
    "on_exception",
)
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
        for callback in callbacks_of(trainer):
            if isinstance(callback, Checkpoint):
                for hook in _CHECKPOINT_HOOKS:
                    stack.enter_context(_gated(callback, hook, lambda *_, **__: leads()))
            elif isinstance(callback, pl.callbacks.EarlyStopping):
                stack.enter_context(_early_stopping(trainer, callback, leads, on_stop))
        for logger in trainer.loggers:
            stack.enter_context(_logging(logger, leads))
        yield


@contextmanager
def _gated(of: object, name: str, opens: Callable[..., bool]) -> Iterator[None]:
    own = getattr(of, name, None)
    if own is None:
        yield
        return
    had = vars(of).get(name)

    def gate(*values: Any, **options: Any) -> Any:
        return own(*values, **options) if opens(*values, **options) else None

    vars(of)[name] = gate
    try:
        yield
    finally:
        if had is None:
            vars(of).pop(name, None)
        else:
            vars(of)[name] = had


@contextmanager
def _early_stopping(
    trainer: pl.Trainer, callback: pl.callbacks.EarlyStopping, leads: Callable[[], bool], on_stop: Callable[[], None]
) -> Iterator[None]:
    def opens(*_: Any, **__: Any) -> bool:
        return leads() or callback.monitor in trainer.callback_metrics

    own = callback._run_early_stopping_check

    def check(*values: Any, **options: Any) -> None:
        stopped = trainer.should_stop
        own(*values, **options)
        if trainer.should_stop and not stopped and leads():
            on_stop()

    vars(callback)["_run_early_stopping_check"] = check
    try:
        with _gated(callback, "_run_early_stopping_check", opens):
            yield
    finally:
        vars(callback).pop("_run_early_stopping_check", None)


@contextmanager
def _logging(logger: Logger, leads: Callable[[], bool]) -> Iterator[None]:
    own = logger.log_hyperparams
    kept: list[tuple[Any, Any]] = []

    def hyperparameters(*values: Any, **options: Any) -> None:
        kept.append((values, options))
        catch_up()

    def catch_up(*_: Any, **__: Any) -> bool:
        if not leads():
            return False
        while kept:
            values, options = kept.pop(0)
            own(*values, **options)
        return True

    with ExitStack() as stack:
        for name in _LOGGING:
            stack.enter_context(_gated(logger, name, catch_up))
        vars(logger)["log_hyperparams"] = hyperparameters
        try:
            yield
        finally:
            vars(logger).pop("log_hyperparams", None)


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
