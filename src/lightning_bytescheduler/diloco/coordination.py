"""What a Trainer has of a coordinator's run: the strategy's calls that differ from those of ranks launched together.

What is for one worker only of those of a coordinator: checkpoints, loggers, and what looks at validations.

The coordinator appoints one worker to validate, log and save for all. On the others, checkpoint callbacks and loggers
are passed over; ``EarlyStopping`` and ``ReduceLROnPlateau`` are where what they monitor is not there, as a metric of
the validation, so that they do not fail for want of it. Where ``EarlyStopping`` stops the leader, all are to stop.
Another worker may be appointed at any time, which is looked at with each call. What was to be logged of hyperparameters
before is logged then.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.utils.data import DistributedSampler

from lightning_bytescheduler.ddp.rank_strategy import callbacks_of
from lightning_bytescheduler.diloco.coordinated_runtime import CoordinatedRuntime
from lightning_bytescheduler.diloco.coordinator_address import CoordinatorAddress
from lightning_bytescheduler.diloco.options import OuterOptions
from lightning_bytescheduler.diloco.process_groups import WorkerGroup, WorkerWorld
from lightning_bytescheduler.diloco.session import SessionStatistics
from lightning_bytescheduler.diloco.training_loop import CoordinatedBoundaries
from lightning_bytescheduler.failures.board import FaultBoard
from lightning_bytescheduler.lightning_api import Checkpoint, Logger, pl, rank_zero_info

if TYPE_CHECKING:
    import torch.distributed as dist

    from lightning_bytescheduler.diloco.coordinated_slices import CoordinatedSlices


log = logging.getLogger(__name__)

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
        stack.enter_context(_plateaus(trainer, leads))
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


@contextmanager
def _plateaus(trainer: pl.Trainer, leads: Callable[[], bool]) -> Iterator[None]:
    loop: Any = trainer.fit_loop.epoch_loop
    own = getattr(loop, "_update_learning_rates", None)
    if own is None:
        yield
        return

    said = set[str]()

    def update(*values: Any, **options: Any) -> None:
        strategy: Any = trainer.strategy
        configs = strategy.lr_scheduler_configs
        if not leads():
            here = trainer.callback_metrics
            for monitor in {c.monitor for c in configs if c.reduce_on_plateau} - set(here) - said:
                said.add(monitor)
                log.warning(
                    "ReduceLROnPlateau does nothing on this worker, as %r is of the leader's validation alone: learning"
                    " rates of workers may come to differ. Have it monitor what each worker logs in training_step, or "
                    "use a schedule of steps.",
                    monitor,
                )
            strategy.lr_scheduler_configs = [c for c in configs if not c.reduce_on_plateau or c.monitor in here]
        try:
            own(*values, **options)
        finally:
            strategy.lr_scheduler_configs = configs

    vars(loop)["_update_learning_rates"] = update
    try:
        yield
    finally:
        vars(loop).pop("_update_learning_rates", None)


_SEED = "PL_GLOBAL_SEED"  # where Lightning's seed_everything leaves it


class Coordination:
    """See the module. For the training thread.

    Args:
        address: Of the coordinator.
        given: The user's options of ``RunOptions``, by name; None for those that were left out.
    """

    def __init__(self, address: CoordinatorAddress, given: Mapping[str, Any]) -> None:
        self._address = address
        self._given = {name: value for name, value in given.items() if value is not None}
        self._group = WorkerGroup()
        self._runtime: CoordinatedRuntime | None = None
        self._boundaries: CoordinatedBoundaries | None = None
        self._begin_early: Callable[[], None] = lambda: None

    @property
    def leads(self) -> bool:
        """Whether this worker validates, logs and saves for all; the same on all of its ranks."""
        if self._boundaries is not None:
            return self._boundaries.leads
        return self._runtime is not None and self._runtime.leads

    @property
    def statistics(self) -> SessionStatistics | None:
        """Of the session."""
        return None if self._runtime is None else self._runtime.session.statistics

    def connect(
        self,
        module: nn.Module,
        *,
        inside: dist.ProcessGroup | None,
        board: FaultBoard,
        flush: Callable[[], None],
        outer: OuterOptions,
        begin: Callable[[], None],
    ) -> CoordinatedRuntime:
        """Become one of the run; see ``CoordinatedRuntime``.

        Args:
            module: What is trained.
            inside: The ranks of this worker; ``None`` if it has but one.
            board: See there.
            flush: See there.
            outer: Has the longest wait and the timeline's file.
            begin: Begins the rounds before training does, if there are no data for this worker to begin with.
        """
        self._begin_early = begin
        group = self._group = WorkerGroup(inside, timeout=outer.timeout)
        self._runtime = runtime = CoordinatedRuntime(
            self._address,
            module,
            given=self._given,
            group=group,
            board=board,
            flush=flush,
            timeout=outer.timeout,
            timeline=outer.timeline,
        )
        try:
            runtime.connect()
            runtime.prepare()
        except BaseException:
            runtime.stop(failed=True)
            raise
        rank_zero_info(
            f"diloco: this is {runtime.worker!r} in the run of {self._address.url}"
            f"{', which leads: it validates, logs and saves for all' if runtime.leads else ''}."
        )
        return runtime

    def begin(self, trainer: pl.Trainer, state: Mapping[str, Any] | None) -> CoordinatedBoundaries:
        """Begin the first round, and take the place of the loop's decisions."""
        runtime = self._runtime
        if runtime is None:
            raise RuntimeError("Cannot begin: this worker is not connected.")
        runtime.start(state)
        self._boundaries = CoordinatedBoundaries(trainer, runtime.session, group=self._group, leads=runtime.leads)
        self._boundaries.attach()
        return self._boundaries

    def forget(self) -> None:
        """The fit is over."""
        self._runtime = self._boundaries = None
        self._begin_early = lambda: None

    def for_leader_only(self, trainer: pl.Trainer) -> AbstractContextManager[None]:
        """See :func:`for_leader_only`."""
        return for_leader_only(trainer, lambda: self.leads, self._end_all)

    def _end_all(self) -> None:
        if self._boundaries is not None:
            self._boundaries.ends_all = True

    def share_slices(
        self, trainer: pl.Trainer, world: WorkerWorld, *, timeout: float, check: Callable[[], None]
    ) -> CoordinatedSlices | None:
        """Have the worker take slices from the coordinator; see ``coordinated_slices``."""
        from lightning_bytescheduler.diloco.coordinated_slices import coordinated_slices  # takes time

        def check_all() -> None:
            check()
            if self._runtime is not None:
                self._runtime.session.check()

        return coordinated_slices(
            trainer,
            lambda: None if self._runtime is None else self._runtime.client,
            idle=self,
            world=world,
            group=lambda: self._group,
            timeout=timeout,
            check=check_all,
        )

    def waits(self) -> bool:
        """See ``Idle``: this worker takes no part in rounds while other workers hold all that is left.

        Lightning fetches a first batch before it says that training begins. A worker that waited there without having
        joined the rounds would be waited for, if the first round is to have so many workers, by those who hold what it
        waits for.
        """
        if self._boundaries is None and self._runtime is not None:
            self._begin_early()
        return self._boundaries is not None and self._boundaries.wait_aside()

    def goes_on(self) -> None:
        """See ``Idle``."""
        if self._boundaries is not None:
            self._boundaries.come_back()

    def seed_sampler(self, loader: object) -> None:
        """Have this worker go through a plain data loader in an order of its own, unless the user chose a seed."""
        sampler = getattr(loader, "sampler", None)
        if self._runtime is None or not isinstance(sampler, DistributedSampler):
            return
        if os.environ.get(_SEED):
            rank_zero_info(
                "diloco: each worker goes through all of its own data loader. Workers with the same data and the same "
                "seed_everything(...) train on the same samples: give each another seed, or part of the data."
            )
        elif sampler.shuffle and not sampler.seed:
            digest = hashlib.blake2b(self._runtime.worker.encode(), digest_size=4).digest()
            sampler.seed = int.from_bytes(digest, "big")
