"""Where Lightning's training loop and the rounds of DiLoCo meet: after each batch, when all of its hooks have run.

There Lightning asks its epoch loop whether to validate. A class for each kind of rounds replaces that decision: it
counts steps from batches, sends what is due, and ends the loops. The ranks of one worker agree after each batch: if one
of them would do something, all do it. Then they make the same decisions, as their agreement and their session's answers
are the same on all of them.

*Launched together* (``RoundBoundaries``), a validation, the end of an epoch or of the training happen at the end of a
round, at the same one on all workers. A worker that would do one of these by itself only asks the others for it.

*In a coordinator's run* (``CoordinatedBoundaries``) no worker stands still for another one: an epoch, a validation and
the end of a fit are each worker's own. The leader's validations take place at the end of a round, when its weights are
the global ones and nothing of it is under way, or at the end of its epoch, with what it has trained sent before. The
others validate nothing: checkpoint callbacks and loggers are passed over on them, and ``EarlyStopping`` is where what
it monitors is not there, as a metric of the validation. A ``ReduceLROnPlateau`` is refused. Where ``EarlyStopping``
stops the leader, all are to stop. Another worker may be appointed at any time, which is looked at with each call; what
the former one has logged, as hyperparameters, is not logged again.
"""

from __future__ import annotations

import hashlib
import os
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch.utils.data import DistributedSampler

from lightning_bytescheduler.ddp.rank_strategy import callbacks_of
from lightning_bytescheduler.diloco.options import batches_left_out
from lightning_bytescheduler.diloco.process_groups import JointCollectives, WorkerGroup
from lightning_bytescheduler.diloco.session import Session
from lightning_bytescheduler.exceptions import UnsupportedError
from lightning_bytescheduler.lightning_api import Checkpoint, pl, rank_zero_info

if TYPE_CHECKING:
    from lightning_bytescheduler.diloco.worker_restart import WorkerStates
    from lightning_bytescheduler.slices.training import TrackedTraining

_LOOK_S = 0.25  # between two checks whether all data are in the weights


class LoopBoundaries(ABC):
    """Takes the place of the epoch loop's decision to validate, from :meth:`attach` to :meth:`detach`.

    Args:
        trainer: Whose loop it is.
        session: This rank's.
        group: The ranks of this worker.

    Attributes:
        trainer: As given.
    """

    def __init__(self, trainer: pl.Trainer, session: Session, *, group: WorkerGroup) -> None:
        self.trainer = trainer
        self._session = session
        self._group = group
        self._loop: Any = trainer.fit_loop.epoch_loop  # its decision is not a public method
        self._own_decision: Callable[..., bool] = self._loop._should_check_val_fx
        self._least: tuple[Any, Any] = (trainer.fit_loop.min_epochs, self._loop.min_steps)
        self._began = time.monotonic()
        self._global_step = trainer.global_step
        self._samples = 0
        self._loss: float | None = None
        self._has_batch = False  # since the last decision
        self._ended = False  # as the ranks of this worker have agreed

    def attach(self, kept: WorkerStates | None = None) -> None:
        """Begin to decide.

        Args:
            kept: Told of the moments at which a checkpoint may be taken.
        """
        self._kept = kept
        self._loop._should_check_val_fx = self._after_batch
        self._began = time.monotonic()
        if self._session.over:
            self._stop()

    def detach(self) -> None:
        """Leave the loop as it was."""
        self._loop.__dict__.pop("_should_check_val_fx", None)
        self.trainer.fit_loop.min_epochs, self._loop.min_steps = self._least

    def report_batch(self, *, samples: int, loss: float | None) -> None:
        """Count a batch, which is a step or, with accumulated gradients, a part of one."""
        self._samples += samples
        self._loss, self._has_batch = loss, True

    def before_epoch(self) -> bool:
        """Return whether all ranks of this worker train on; called by ranks that would."""
        self._ended = self._group.any(self._session.over)
        return not self._ended

    def before_end(self) -> None:
        """End training on this rank, and so on all ranks of its worker."""
        if not self._ended:
            self._ended = self._group.any(True)

    def before_batch(self) -> bool:
        """Return whether training goes on."""
        self._session.check()
        return not self._session.over

    @abstractmethod
    def before_epoch_end(self) -> None:
        """Make the epoch end for all workers that share it."""

    def after_validation(self) -> None:
        """Stop all ranks of this worker if one is to stop, as each rank asks its own callbacks."""
        if self._group.any(self.trainer.should_stop):
            self.trainer.should_stop = True

    @abstractmethod
    def _after_batch(self, data_fetcher: Any) -> bool:
        """Decide after a batch and all its hooks; returns whether to validate."""

    def _agree(self, stepped: bool, data_fetcher: Any, *facts: bool) -> tuple[bool, ...]:
        """Return which of the facts hold on any rank of this worker: validate, stop, and more. Counts a step, too."""
        trainer, loss = self.trainer, self._loss
        stops = trainer.should_stop and trainer.fit_loop._can_stop_early
        facts = (self._own_decision(data_fetcher), stops, *facts)
        own = [self._samples, 0 if loss is None else self._samples, (loss or 0.0) * self._samples]
        numbers = self._group.total([*map(float, facts), *(own if stepped else ())])
        agreed = tuple(number > 0 for number in numbers[: len(facts)])
        if agreed[1]:
            trainer.should_stop = True
        if stepped:
            samples, measured, losses = numbers[len(facts) :]
            self._global_step = trainer.global_step
            self._loss = losses / measured if measured else None
            seconds = time.monotonic() - self._began
            self._session.count(samples=round(samples), seconds=seconds, loss=self._loss)
            self._samples = 0
        return agreed

    def _step_schedules(self) -> None:
        """Step the learning-rate schedules at the end of an epoch without a last batch, as Lightning does not.

        Otherwise learning rates of workers would differ. PyTorch would warn if there was no step at all before.
        """
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", r"Detected call of .lr_scheduler\.step", UserWarning)
            self._loop.update_lr_schedulers("epoch", update_plateau_schedulers=False)

    def _reaches_limit(self, epoch: bool) -> bool:
        fit_loop = self.trainer.fit_loop
        if fit_loop.max_steps != -1 and self.trainer.global_step >= fit_loop.max_steps:
            return True
        last = fit_loop.max_epochs not in (None, -1) and self.trainer.current_epoch + 1 >= int(fit_loop.max_epochs)
        return epoch and last

    def _stop(self) -> None:
        """Leave the loops, even before ``min_epochs`` and ``min_steps``."""
        self.trainer.should_stop = True
        self.trainer.fit_loop.min_epochs = None
        self._loop.min_steps = None


class RoundBoundaries(LoopBoundaries):
    """Validates, and ends epochs and the training, at the end of a round, on all workers at once.

    Args:
        trainer: Whose loop it is.
        session: This worker's.
        group: The ranks of this worker.
        explained: Turns an error of an exchange into its cause.
        shared_data: The training data, if all workers share it.
        joint: Joins all ranks; is used while all stand still.

    Attributes:
        left_out: See ``RoundsPlan``.
    """

    def __init__(
        self,
        trainer: pl.Trainer,
        session: Session,
        *,
        group: WorkerGroup,
        joint: JointCollectives,
        explained: Callable[[], AbstractContextManager[None]] = nullcontext,
        shared_data: TrackedTraining | None = None,
    ) -> None:
        super().__init__(trainer, session, group=group)
        self.left_out: dict[int, Sequence[int]] = {}
        self._joint = joint
        self._explained = explained
        self._shared_data = shared_data
        self._epoch_to_end = False  # this worker's share is used up, and the others have not been told
        self._epoch_ended = False  # for all; where data is shared
        if self._loop.batch_progress.is_last_batch or not trainer.fit_loop.restarting:
            # A checkpoint, or the last fit, was at the end of an epoch: the first round begins with another one.
            self._loop.batch_progress.current.reset()

    def before_batch(self) -> bool:
        """Go on after all workers stood still; returns whether training goes on."""
        self._session.check()
        if self._session.halted:
            self._pass_on()
            self._began = time.monotonic()
        return super().before_batch()

    def before_epoch_end(self) -> None:
        """Make the epoch end for all.

        With overlap, the round of this worker's last batch may have ended for another reason. If data is shared, so may
        the rounds in which a worker only takes part while others train on the rest. A worker that finds no data left
        has an epoch without a batch.
        """
        session, trainer = self._session, self.trainer
        empty = self._shared_data is not None and not self._epoch_ended
        to_end = self._epoch_to_end or empty
        self._epoch_to_end = self._epoch_ended = False
        while to_end and not session.over:
            if not self._pass_on():
                return
            self._end_epoch_for_all(used_up=True)
            if self._halt(own_epoch_ends=True):
                trainer.validating = True
                self._loop.val_loop.run()
                trainer.training = True
            to_end = session.halted and session.round_end is not None and not session.round_end.epoch
        self._epoch_ended = False

    def _pass_on(self) -> bool:
        goes_on = self._session.pass_on()
        if not goes_on:
            self._stop()
        elif self._kept is not None:
            self._kept.begun()
        return goes_on

    def after_validation(self) -> None:
        """See LoopBoundaries."""
        if self._session.halted:
            super().after_validation()

    def _after_batch(self, data_fetcher: Any) -> bool:
        with self._explained():
            return self._decide(data_fetcher)

    def _decide(self, data_fetcher: Any) -> bool:
        session, loop, trainer = self._session, self._loop, self.trainer
        if loop.restarting and not self._has_batch and self._shared_data is None:
            return self._after_restart()
        stepped = trainer.global_step != self._global_step
        own_epoch = loop._num_ready_batches_reached()
        # Not at a restart, as Lightning then asks before the first batch; nor if a limit ends the epoch.
        used_up = own_epoch and self._has_batch and loop.batch_progress.current.ready < trainer.num_training_batches
        self._has_batch = False
        wants_validation, stops, epoch, used_up = self._agree(stepped, data_fetcher, own_epoch, used_up)
        if stepped and session.overlap_steps and session.is_to_merge():
            session.synchronise()
        stop = stops or self._reaches_limit(epoch and not (used_up and self._awaits_others()))
        if self._shared_data is not None and (epoch or stop or session.is_due()):
            self._shared_data.settle()
        if epoch and not stop:
            self._end_epoch_for_all(used_up=used_up, validate=wants_validation)
            self._epoch_to_end = session.round_end is not None and not session.round_end.epoch
        elif stop:
            session.end_round(epoch=epoch, validate=wants_validation, stop=stop)
            self._epoch_to_end = epoch and session.round_end is not None and not session.round_end.epoch
        else:
            if wants_validation and trainer.is_global_zero:  # worker 0's steps decide when, within an epoch
                session.ask(validate=True)
            if stepped and not session.halted and session.is_due():
                session.synchronise()
        if stepped:
            self._began = time.monotonic()
        return session.halted and self._halt(own_epoch)

    def _after_restart(self) -> bool:
        """Answer Lightning, which asks before the first batch whether only a validation is left of the epoch.

        No round is ended here: it was ended when the checkpoint was written. But if this worker had used up its share,
        and others had not, they still have to be told.
        """
        over = bool(self._loop._num_ready_batches_reached())
        self._epoch_to_end = over and not self._loop.batch_progress.is_last_batch
        return over

    def _awaits_others(self) -> bool:
        if self._shared_data is None or self._session.halted or self._session.over:
            return False
        return self._shared_data.rest() is False

    def _end_epoch_for_all(self, *, used_up: bool, validate: bool = False) -> None:
        """End the epoch, or stand still with all others for another reason.

        If nothing is left for this worker but others still train, it takes part in their rounds with the work it has
        done so far: none, after the first round.
        """
        session = self._session
        session.merge_sent()
        while used_up and self._awaits_others():
            session.end_round(for_all=False)
        if not session.halted and not session.over:
            session.end_round(epoch=True, validate=validate)

    def _halt(self, own_epoch_ends: bool) -> bool:
        """Do the work for which all workers stand still; returns whether to validate."""
        ended = self._session.round_end
        if ended is None:
            return False
        if ended.epoch and self._shared_data is not None:
            self._epoch_ended = True
            if not ended.stop:  # at a stop, worker 0 may have ended already
                self._shared_data.end_epoch()
        elif ended.epoch:
            self._note_left_out(own_epoch_ends, epoch=self.trainer.current_epoch)
        if ended.epoch and not own_epoch_ends:
            # Another worker has gone through its share of the data: the epoch ends here as if this batch were the last.
            self._loop.batch_progress.is_last_batch = True
        if ended.epoch and (not own_epoch_ends or not self._loop._num_ready_batches_reached()):
            self._step_schedules()
        if ended.stop:
            self._stop()
        if self._kept is not None:
            self._kept.halted()
        return ended.validate

    def before_end(self) -> None:
        """See LoopBoundaries; an epoch of others may end with the same round."""
        super().before_end()
        if self._session.end_last_round() and self._shared_data is None:
            ended = self._session.round_end
            if ended is not None and ended.epoch:
                self._note_left_out(own_epoch_ends=False, epoch=max(self.trainer.current_epoch - 1, 0))

    def _note_left_out(self, own_epoch_ends: bool, *, epoch: int) -> None:
        """Say how many batches the end of an epoch leaves out of each worker's share.

        All ranks call this once for each epoch: the same end of a round has told all workers of it, in training or as
        they end. None goes on before all have passed it, and no other collective of all ranks comes before the
        validation that follows.
        """
        batches: float = self.trainer.num_training_batches  # inf, where a loader has no length
        left = 0.0 if own_epoch_ends else batches - self._loop.batch_progress.current.ready
        number = torch.tensor(-1 if left == float("inf") else max(int(left), 0))
        counts = self._joint.gather(number)[:: self._group.size].tolist()  # the leaders'
        if any(counts):
            self.left_out[epoch] = counts
            rank_zero_info(f"diloco: epoch {epoch} leaves out batches: {batches_left_out(counts)}.")


class CoordinatedBoundaries(LoopBoundaries):
    """Validates at the end of a round, on the leader alone; each worker's epochs and end are its own.

    Args:
        trainer: Whose loop it is.
        session: This worker's.
        group: The ranks of this worker.
        leads: Whether this worker leads, to begin with.
        data: The slices that this worker trains on, if the coordinator hands them out.

    Attributes:
        leads: Whether this worker leads, as its ranks have agreed after the last batch.
        ends_all: Whether its end ends all workers, as its ``EarlyStopping`` has stopped it.
    """

    def __init__(
        self,
        trainer: pl.Trainer,
        session: Session,
        *,
        group: WorkerGroup,
        leads: bool = False,
        data: TrackedTraining | None = None,
    ) -> None:
        super().__init__(trainer, session, group=group)
        self.leads = leads
        self._data = data
        self._epochs: Any = trainer.fit_loop.max_epochs
        self.ends_all = False
        self._wants_validation = False
        self._validates = False
        self._left = False
        self._aside = False

    def detach(self) -> None:
        """Leave the loop as it was."""
        self.trainer.fit_loop.max_epochs = self._epochs
        super().detach()

    def before_epoch_end(self) -> None:
        """Make the last epoch of slices end when all of them are in the weights; other epochs are this worker's own.

        Each epoch is one epoch of the data or a share of it, so workers train together on as many as each is to have.
        Slices that another worker leaves behind, or whose update was not merged, are trained on in one more epoch here.
        """
        trainer, session, loop = self.trainer, self._session, self.trainer.fit_loop
        if self._data is None or self._group.any(trainer.should_stop and loop._can_stop_early):
            return
        if not (session.over or self._reaches_limit(False) or self._loop._num_ready_batches_reached()):
            self._step_schedules()
        if self._group.any(self._group.leads and self._data.is_cut) and loop.max_epochs not in (None, -1):
            loop.max_epochs += 1  # this epoch does not count
        # A limit may end the training or the epoch before its data is used up.
        is_limited = self._loop.batch_progress.current.ready >= trainer.num_training_batches
        if is_limited or self._reaches_limit(False) or not self._reaches_limit(True):
            return
        if self._group.any(self._samples > 0):  # batches after the last step: their samples count with it
            (samples,) = self._group.total([float(self._samples)])
            seconds = time.monotonic() - self._began
            self._session.count(samples=round(samples), seconds=seconds)
            self._samples = 0
        while not session.over:
            session.check()
            if self._group.any(bool(trainer.received_sigterm)):
                self._leave(quickly=True)
                trainer._signal_connector.received_sigterm = True  # Lightning ends the fit of each rank
                return
            found = self._data.rest() if self._group.leads else None
            if self._group.any(found is True):
                self._data.train_on_rest()
                loop.max_epochs = trainer.current_epoch + 2
                break
            if not self._group.any(found is False) or self.wait_aside():
                break
            time.sleep(_LOOK_S)
        self.come_back()

    def after_validation(self) -> None:
        """Go back to the rounds; all ranks of this worker stop if one is to stop."""
        if self._validates:
            self._validates = False
            super().after_validation()
            self._resume()

    def wait_aside(self) -> bool:
        """Wait outside the rounds, without data for now; returns whether training is over. All ranks call it."""
        session = self._session
        session.check()
        if self._aside and session.is_to_resume():
            self.come_back()
        if not self._aside:
            self._aside = True
            session.pause(shows=False)
        if self._group.any(session.last_round is not None):
            self.come_back()
        return session.over

    def come_back(self) -> None:
        """Return to the rounds, as there is data again; on all ranks of the worker."""
        if self._aside:
            self._aside = False
            self._resume()

    def _resume(self) -> None:
        self._session.resume()
        if self._session.over:
            self._stop()
        self._began = time.monotonic()

    def before_end(self) -> None:
        """See LoopBoundaries; and leave, with the global weights."""
        super().before_end()
        self._leave(quickly=False)

    def _after_batch(self, data_fetcher: Any) -> bool:
        session, loop, trainer = self._session, self._loop, self.trainer
        if loop.restarting and not self._has_batch and not loop.val_loop.restarted_mid_evaluation:
            # Lightning asks before the first batch whether only a validation is left of the epoch. It is left out.
            return bool(loop._num_ready_batches_reached())
        self._has_batch = False
        stepped = trainer.global_step != self._global_step
        signal = bool(trainer.received_sigterm)
        wants, stops, epoch, signal, self.leads = self._agree(
            stepped, data_fetcher, loop._num_ready_batches_reached(), signal, session.leads
        )
        if signal:
            self._leave(quickly=True)
            trainer._signal_connector.received_sigterm = True  # on all ranks of the worker: Lightning ends each
            return False
        self._wants_validation = self.leads and (self._wants_validation or wants)
        version = session.version
        while not session.over and session.is_due():
            session.synchronise()
        at_end = epoch or stops or self._reaches_limit(epoch)
        if session.over:
            self._stop()
        validates = self._wants_validation and (session.version > version or at_end or session.over)
        if validates:
            if not self._validates:  # Lightning asks twice where it goes on in the middle of a validation
                session.pause()
            self._wants_validation, self._validates = False, True
        if stepped:
            self._began = time.monotonic()
        return validates

    def _leave(self, *, quickly: bool) -> None:
        if not self._left:
            self._left = True
            if self._data is not None:
                self._data.halt()  # the coordinator takes back the slices of a worker that leaves
            self._session.leave(
                quickly=quickly,
                for_all=self.ends_all and self.leads,
                hurries=lambda: bool(self.trainer.received_sigterm),
            )


# ---------------------------------------------------------------------- what is for the leader only

_CHECKPOINT_HOOKS = ("on_train_batch_end", "on_train_epoch_end", "on_validation_end", "on_train_end", "on_exception")
_Method: TypeAlias = Callable[..., Any]
_LOGGING = ("log_hyperparams", "log_metrics", "log_graph", "save", "after_save_checkpoint")


@contextmanager
def for_leader_only(
    trainer: pl.Trainer, leads: Callable[[], bool], on_stop: Callable[[], None] = lambda: None
) -> Iterator[None]:
    """Pass over what is the leader's within this, unless this worker leads.

    Args:
        trainer: Whose callbacks and loggers they are.
        leads: Returns whether it leads; the same on all ranks of a worker.
        on_stop: Called when an ``EarlyStopping`` stops the worker that leads.
    """
    with ExitStack() as stack:

        def replace(of: object, name: str, make: Callable[[_Method], _Method]) -> None:
            if (own := getattr(of, name, None)) is not None:
                stack.callback(vars(of).update, {name: own} if name in vars(of) else {})
                stack.callback(vars(of).pop, name, None)
                vars(of)[name] = make(own)

        def gated(own: _Method) -> _Method:
            return lambda *values, **options: own(*values, **options) if leads() else None

        for callback in callbacks_of(trainer):
            if isinstance(callback, Checkpoint):
                for hook in _CHECKPOINT_HOOKS:
                    replace(callback, hook, gated)
            elif isinstance(callback, pl.callbacks.EarlyStopping):
                replace(callback, "_run_early_stopping_check", partial(_early_stopping, callback, leads, on_stop))
        for logger in trainer.loggers:
            for name in _LOGGING:
                replace(logger, name, gated)
        yield


def _early_stopping(
    callback: pl.callbacks.EarlyStopping, leads: Callable[[], bool], on_stop: Callable[[], None], own: _Method
) -> _Method:
    def check(trainer: pl.Trainer) -> None:
        has_batch = trainer.fit_loop.epoch_loop.batch_progress.current.ready > 0
        if has_batch and (leads() or callback.monitor in trainer.callback_metrics):
            stopped = trainer.should_stop
            own(trainer)
            if trainer.should_stop and not stopped and leads():
                on_stop()

    return check


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
                "validates, so workers' learning rates would differ. Use a schedule by steps or epochs."
            )


_SEED = "PL_GLOBAL_SEED"  # where Lightning's seed_everything leaves it


def seed_sampler(loader: object, worker: str) -> None:
    """Give a worker's plain data loader an order of its own, unless the user chose a seed."""
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
