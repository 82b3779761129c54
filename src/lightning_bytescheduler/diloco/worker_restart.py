"""Makes restarts exact: each worker's own state goes into the checkpoint, and comes back to the same worker.

A worker's own state at a moment between two rounds is all that is not global: its optimizer, schedules and loss scale,
its progress in the epoch, its buffers, and what compressed pseudo-gradients have left to be sent. It has tensors and
primitives only, in host memory. As with Lightning's other strategies, random numbers are not part of it: dropout draws
others after a restart. Nor are weights: training goes on from the global ones, without what a worker had changed beside
them in fragments that were not averaged yet.

A checkpoint is of a moment between two rounds: the beginning of a round if it is written during the round, or the end
of a round at which all workers stand still. Each worker keeps its state of the last such moment. Worker 0 writes the
checkpoint, with its own state in Lightning's places, and asks the others for theirs. If it writes in the middle of a
round, Lightning's places are put back to the round's beginning, of which the weights are; see :func:`put_back`.

States travel to worker 0, the writer, over the job's store. Each worker keeps in memory its state at the last moments
of which a checkpoint can be. The thread that reads its mailbox answers with it; the writer asks again if the worker is
not there yet. So the training thread takes no part, wherever it is. There is no circular wait: the writer waits for its
present moment, which each other worker reaches without it. A round begins, or all workers stand still at its end, once
all workers have the writer's pseudo-gradient of the round before. From there each worker reaches the same moment by
itself, and goes beyond it by at most one round, if pseudo-gradients travel beside steps.

A state travels as torch writes it, and is read with ``weights_only=True``, which makes nothing but tensors and
primitives of it, as the checkpoint's reader will.
"""

from __future__ import annotations

import copy
import io
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
import torch

from lightning_bytescheduler.ddp.rank_strategy import OUTER_STATE
from lightning_bytescheduler.diloco.loaders import share_of
from lightning_bytescheduler.diloco.mailbox import Caller, await_key, connection_to
from lightning_bytescheduler.diloco.outer_optimizer import copied
from lightning_bytescheduler.diloco.process_groups import WorkerWorld, worker_name
from lightning_bytescheduler.diloco.session import Session
from lightning_bytescheduler.exceptions import RankFailedError, SchedulerTimeoutError, UnsupportedError
from lightning_bytescheduler.lightning_api import pl, rank_zero_info, rank_zero_warn

log = logging.getLogger(__name__)

_PROGRESS = "epoch_loop.batch_progress"
_STEPPED = "epoch_loop.state_dict"
_COUNTS = (
    "state_dict",  # of data loaders
    "epoch_loop.automatic_optimization.optim_progress",
    "epoch_loop.manual_optimization.optim_step_progress",
    "epoch_loop.scheduler_progress",
)


class Moment(msgspec.Struct, frozen=True):
    """A moment of which a checkpoint can be, the same for all workers.

    Attributes:
        rounds: Number of rounds that are over.
        halted: Whether all workers stand still; else the next round has begun.
    """

    rounds: int
    halted: bool


def take(trainer: pl.Trainer, *, full: bool, after_batch: bool) -> dict[str, Any]:
    """Return this worker's present state; on the training thread, with weights that are up to date.

    Args:
        trainer: The Trainer of the fit.
        full: Whether the state of optimizers, which takes memory, is part of it.
        after_batch: Whether Lightning has counted a batch here, and not yet a step.
    """
    module = trainer.lightning_module
    kept, buffers = module.state_dict(), module.named_buffers()
    precision = trainer.precision_plugin.state_dict()
    taken: dict[str, Any] = {
        "global_step": trainer.global_step,
        "loops": _progress(trainer, after_batch=after_batch),
        "schedulers": [copy.deepcopy(config.scheduler.state_dict()) for config in trainer.lr_scheduler_configs],
        "buffers": {name: copied(buffer) for name, buffer in buffers if name in kept},
    }
    if precision:
        taken["precision"] = {type(trainer.precision_plugin).__qualname__: copied(precision)}
    if full:
        taken["optimizers"] = [copied(optimizer.state_dict()) for optimizer in trainer.strategy.optimizers]
    return taken


def put_back(taken: Mapping[str, Any], checkpoint: dict[str, Any], *, is_last_batch: bool) -> None:
    """Put a worker's state into Lightning's places in a checkpoint; other places stay.

    Args:
        taken: The worker's state.
        checkpoint: The checkpoint; is changed.
        is_last_batch: Whether the epoch ended there, as it does for all workers at once.
    """
    loops: dict[str, Any] = checkpoint["loops"]["fit_loop"]
    loops.update(copy.deepcopy(taken["loops"]))
    loops[_PROGRESS]["is_last_batch"] = is_last_batch
    checkpoint["global_step"] = taken["global_step"]
    checkpoint["lr_schedulers"] = taken["schedulers"]
    checkpoint.update(taken.get("precision", {}))
    if "optimizers" in taken:
        checkpoint["optimizer_states"] = taken["optimizers"]


def _progress(trainer: pl.Trainer, *, after_batch: bool) -> dict[str, Any]:
    """Lightning's progress, as if nothing of the next batch had begun."""
    loops: dict[str, Any] = copy.deepcopy(trainer.fit_loop.state_dict())
    progress = loops[_PROGRESS]
    for counts in (progress["total"], progress["current"]):
        done = counts["processed"]
        counts.update(ready=done, started=done, completed=done)
    if after_batch:
        loops[_STEPPED]["_batches_that_stepped"] += 1
    return {name: loops[name] for name in (_PROGRESS, _STEPPED, *_COUNTS) if name in loops}


WRITER = "checkpoint"
"""The sender of the first worker's questions."""
_OVER = "states/over"
_PARTS = ("outer", "optimizer"), ("rounds", "round")
_WORKERS = "workers"
_LOOK_S = 0.05  # between two questions
_SHARE_OF_TIMEOUT = 0.25  # for the writer's waits: the others wait for the writer for up to the timeout


class WorkerStates:
    """One leader's part in exact restarts, for one fit: keeps its states of the last moments, and gives them.

    For the training thread, but for :meth:`answer`.

    Args:
        trainer: The Trainer of the fit.
        session: This leader's session.
        world: The place of this leader among the workers.
        full: Whether optimizers' states and what was left unsent are kept, too.
        timeout: The strategy's timeout, in seconds.
        count: Number of states that are kept.
        unsent: Returns what compressed pseudo-gradients have left to be sent.
    """

    def __init__(
        self,
        trainer: pl.Trainer,
        session: Session,
        world: WorkerWorld,
        *,
        full: bool,
        timeout: float,
        count: int,
        unsent: Callable[[], dict[str, Any]],
    ) -> None:
        self._trainer = trainer
        self._session = session
        self._unsent = unsent
        self._full = full
        self._timeout = timeout
        self._store = world.store
        self._count = count
        self._states: dict[Moment, dict[str, Any]] = {}  # replaced as a whole, as another thread reads it
        # Of the writer alone.
        self._others = [worker_name(number) for number in range(1, world.workers)]
        self._caller: Caller | None = None
        if not world.worker:
            limit = _SHARE_OF_TIMEOUT * timeout
            self._caller = Caller(world.store, sender=WRITER, timeout=limit, check=session.check)

    def begun(self) -> None:
        """A round has begun; its first batch was drawn, and nothing has been done with it."""
        self._session.at_begin = partial(self._keep_begun, after_batch=True)
        self._keep_begun(after_batch=False)

    def halted(self) -> None:
        """All workers stand still, and this worker has done all that this round's end is for, except a validation."""
        self._keep_halted(after_batch=True)

    def over(self) -> None:
        """The last round is over, and this worker has the global weights, by whichever way it got them."""
        self._keep_halted(after_batch=False)

    def complete(self, checkpoint: dict[str, Any], outer: dict[str, Any]) -> None:
        """On the first worker: make a checkpoint one of a single moment, with all workers' states at it."""
        last = self._last
        if last is None:
            return
        moment, own = last
        if not moment.halted:
            put_back(own, checkpoint, is_last_batch=False)
            if "unsent" in own:
                outer["unsent"] = own["unsent"]
        outer["rounds"] = {**outer["rounds"], "round": moment.rounds}
        outer[_WORKERS] = [{"buffers": own["buffers"]}, *self.collect(moment)]  # Lightning's places have the rest

    def collect(self, moment: Moment) -> list[dict[str, Any] | None]:
        """On the first worker: return the others' states. Warns of those that do not come, which it leaves out.

        Args:
            moment: This worker's present moment.
        """
        found: list[dict[str, Any] | None] = []
        for worker in self._others:
            try:
                found.append(torch.load(io.BytesIO(self._ask(worker, moment)), map_location="cpu", weights_only=True))
            except Exception as error:  # a checkpoint without it is better than none
                found.append(None)
                log.warning(
                    "diloco: a checkpoint lacks the own state of %s: %s. If training goes on from it, this worker gets "
                    "worker 0's optimizer and place in the epoch.",
                    worker,
                    error,
                )
        return found

    def _ask(self, worker: str, moment: Moment) -> bytes:
        """Ask again and again, as the worker may not have come to that moment."""
        text, limit = msgspec.json.encode(moment).decode(), _SHARE_OF_TIMEOUT * self._timeout
        began, content = time.monotonic(), b""
        while self._caller is not None and not (content := self._caller.call(worker, text)):
            if time.monotonic() - began >= limit:
                raise SchedulerTimeoutError(f"It has not come to the end of round {moment.rounds} in {limit:.0f} s")
            time.sleep(_LOOK_S)
        return content

    def answer(self, text: str) -> bytes:
        """Return the state at a moment, as torch writes it; nothing if this worker is not there. For any thread."""
        state = self._states.get(msgspec.json.decode(text, type=Moment))
        file = io.BytesIO()
        if state is not None:
            torch.save(state, file)  # raises if a schedule's state cannot be saved
        return file.getvalue()

    def leave(self, *, failed: bool) -> None:
        """The fit is over: stay until the first worker has written its last checkpoint. Bounded.

        Args:
            failed: Whether it ended with an error: it then waits for no other rank.

        Raises:
            Exception: If the first worker has failed before.
        """
        self._session.at_begin = None
        if self._caller is not None:
            self._caller.tell(_OVER)
        elif not failed:
            try:
                store = connection_to(self._store)
            except RankFailedError:  # the writer has ended with its store, well, as its failure would be known
                return
            await_key(store, _OVER, limit=self._timeout, check=self._session.check)

    def keep(self, moment: Moment, state: dict[str, Any]) -> None:
        """Keep a state, in the place of the oldest one; it must not change later."""
        others = [(known, own) for known, own in self._states.items() if known != moment]
        self._states = dict([*others, (moment, state)][-self._count :])

    @property
    def _last(self) -> tuple[Moment, dict[str, Any]] | None:
        return next(reversed(self._states.items()), None)

    def _keep_begun(self, *, after_batch: bool) -> None:
        self.keep(Moment(self._session.round - 1, halted=False), self._take(after_batch=after_batch))

    def _keep_halted(self, *, after_batch: bool) -> None:
        ended, last = self._session.round_end, self._last
        moment = None if ended is None else Moment(ended.round, halted=True)
        if moment is not None and (after_batch or last is None or last[0] != moment):
            self.keep(moment, self._take(after_batch=after_batch))

    def _take(self, *, after_batch: bool) -> dict[str, Any]:
        taken = take(self._trainer, full=self._full, after_batch=after_batch)
        return {**taken, "unsent": self._unsent()} if self._full else taken


@dataclass(frozen=True, kw_only=True)
class Resumed:
    """What a checkpoint has for a rank that goes on from it.

    Attributes:
        outer: What ``Runtime.state_dict`` gave.
        own: The worker's state, if the checkpoint has it.
        alike: Whether there were as many workers as now, of as many ranks.
    """

    outer: Mapping[str, Any]
    own: Mapping[str, Any] | None
    alike: bool

    @classmethod
    def from_checkpoint(cls, checkpoint: dict[str, Any], worker: int, workers: int, size: int = 1) -> Resumed | None:
        """Put this worker's state into Lightning's places; ``None`` for a checkpoint of another strategy.

        Args:
            checkpoint: The loaded checkpoint; is changed, and the other workers' states are removed.
            worker: Number of this rank's worker.
            workers: Number of workers.
            size: Number of ranks of each.

        Raises:
            UnsupportedError: If the checkpoint's outer state is damaged; names what is missing.
        """
        outer = checkpoint.get(OUTER_STATE)
        if outer is None:
            rank_zero_info(
                "diloco: the checkpoint is of another strategy. Weights, inner optimizer and progress go on; rounds "
                "and the outer optimizer begin anew."
            )
            return None
        known = outer if isinstance(outer, Mapping) else {}
        lacks = [f"{part}.{name}" for part, name in _PARTS if name not in (known.get(part) or ())]
        if lacks:
            raise UnsupportedError(
                f"The checkpoint's entry {OUTER_STATE!r} is damaged, or is not this strategy's: it lacks "
                f"{', '.join(lacks)}. Without that entry, weights and the inner optimizer go on, and rounds and the "
                "outer optimizer begin anew."
            )
        alike = (outer.get("unsent", {}).get("workers"), outer.get("inner_size", 1)) == (workers, size)
        of = outer.pop(_WORKERS, [])  # none in a coordinator's run, and after the fit
        own = of[worker] if worker < len(of) else None
        if worker and own is not None:
            put_back(own, checkpoint, is_last_batch=checkpoint["loops"]["fit_loop"][_PROGRESS]["is_last_batch"])
            if "unsent" in own:
                outer["unsent"] = own["unsent"]
        lacking = [number for number in range(1, workers) if number >= len(of) or of[number] is None]
        if lacking:
            rank_zero_warn(
                f"diloco: the checkpoint lacks the own states of workers {lacking}. They go on with worker 0's "
                "optimizer and place in the epoch."
            )
        return cls(outer=outer, own=own, alike=alike)

    def go_on(self, trainer: pl.Trainer) -> None:
        """Put this worker's own state where Lightning has no place for it, before the first batch.

        Args:
            trainer: Has loaded the checkpoint.
        """
        module, own = trainer.lightning_module, self.own or {}
        with torch.no_grad():
            buffers = dict(module.named_buffers())
            for name, value in own.get("buffers", {}).items():
                if name in buffers:
                    buffers[name].copy_(value)
        share, progress = share_of(trainer), trainer.fit_loop.epoch_loop.batch_progress
        if share is not None and not self.alike:
            progress.current.reset()  # the samples are dealt anew, and so the epoch begins anew
        elif share is not None and progress.current.ready != trainer.num_training_batches:  # else its epoch is over
            share.done = progress.current.ready
