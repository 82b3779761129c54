"""Makes restarts exact: each worker's own state goes into the checkpoint, and comes back to the same worker.

A worker's own state at a moment between two rounds is all that is not global: its optimizer, schedules and loss scale,
its progress, its place in the epoch and its buffers; with fragments or overlap its own weights too, and what compressed
pseudo-gradients have left to be sent. It has tensors and primitives only, in host memory. As with Lightning's other
strategies, random numbers are not part of it: dropout draws others after a restart.

A checkpoint is of a moment between two rounds: the beginning of a round if it is written during the round, or the end
of a round at which all workers stand still. Each worker keeps its state of the last such moment. Worker 0 writes the
checkpoint, with its own state in Lightning's places, and asks the others for theirs. If it
writes in the middle of a round, Lightning's places are put back to the round's beginning, of which the weights are; see
:func:`put_back`.

States travel to worker 0, the writer, over the job's store. Each worker keeps in memory its state at the last moments
of which a checkpoint can be. The thread that reads its mailbox takes the question, and the thread that posts answers as
soon as the state is there. So the training thread takes no part, wherever it is. There is no circular wait: the writer
waits for its present moment, which each other worker reaches without it. A round begins, or all workers stand still at
its end, once all workers have the writer's pseudo-gradient of the round before. From there each worker reaches the same
moment by itself, and goes beyond it by at most one round, if pseudo-gradients travel beside steps.

A state travels as torch writes it, and is read with ``weights_only=True``, which makes nothing but tensors and
primitives of it, as the checkpoint's reader will.
"""

from __future__ import annotations

import copy
import io
import logging
import pickle
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_bytescheduler.ddp.rank_strategy import OUTER_STATE
from lightning_bytescheduler.diloco.loaders import share_of
from lightning_bytescheduler.diloco.mailbox import Caller, await_key, connection_to
from lightning_bytescheduler.diloco.outer_optimizer import copied
from lightning_bytescheduler.diloco.process_groups import WorkerWorld, worker_name
from lightning_bytescheduler.diloco.session import Session
from lightning_bytescheduler.exceptions import RankFailedError, SchedulerTimeoutError, UnsupportedError
from lightning_bytescheduler.lightning_api import pl, rank_zero_warn

log = logging.getLogger(__name__)

_PROGRESS = "epoch_loop.batch_progress"
_COUNTS = (
    "epoch_loop.automatic_optimization.optim_progress",
    "epoch_loop.manual_optimization.optim_step_progress",
    "epoch_loop.scheduler_progress",
)
_MOVED_BY_AVERAGING = "current_model_state"  # where Lightning's WeightAveraging puts what was in "state_dict"
_LARGE = ("optimizers", "unsent", "weights")


class Moment(msgspec.Struct, frozen=True):
    """A moment of which a checkpoint can be, the same for all workers.

    Attributes:
        rounds: Number of rounds that are over.
        halted: Whether all workers stand still; else the next round has begun.
    """

    rounds: int
    halted: bool


def take(
    trainer: pl.Trainer,
    *,
    full: bool,
    after_batch: bool,
    halted: bool,
) -> dict[str, Any]:
    """Return this worker's present state; on the training thread, with weights that are up to date.

    Args:
        trainer: The Trainer of the fit.
        full: Whether the state of optimizers, which takes memory, is part of it.
        after_batch: Whether Lightning has counted a batch here, and not yet a step.
        halted: See :class:`Moment`.
    """
    module = trainer.lightning_module
    share = share_of(trainer)
    precision = trainer.precision_plugin.state_dict()
    taken: dict[str, Any] = {
        "global_step": trainer.global_step,
        "loops": _progress(trainer, after_batch=after_batch, halted=halted),
        "schedulers": [copy.deepcopy(config.scheduler.state_dict()) for config in trainer.lr_scheduler_configs],
        "buffers": {name: copied(buffer) for name, buffer in _buffers(module).items()},
        "position": None if share is None else share.position,
    }
    if precision:
        taken["precision"] = {type(trainer.precision_plugin).__qualname__: copied(precision)}
    if full:
        taken["optimizers"] = [copied(optimizer.state_dict()) for optimizer in trainer.strategy.optimizers]
    return taken


def give(taken: Mapping[str, Any], checkpoint: dict[str, Any], *, halted: bool) -> None:
    """Put a worker's state into Lightning's places in a checkpoint that another worker wrote; other places stay.

    Args:
        taken: This worker's state.
        checkpoint: The checkpoint; is changed.
        halted: See :class:`Moment`. If so, epochs ended for this worker as for the writer.
    """
    loops: dict[str, Any] = checkpoint["loops"]["fit_loop"]
    if halted:
        own: Mapping[str, Any] = taken["loops"]
        loops[_PROGRESS] = {**own[_PROGRESS], "is_last_batch": loops[_PROGRESS]["is_last_batch"]}
        loops.update({name: own[name] for name in _COUNTS if name in own})
        if "combined_loader" in own.get("state_dict", {}):
            loops["state_dict"] = own["state_dict"]
        _put_states(taken, checkpoint)
    else:
        put_back(taken, checkpoint)


def put_back(taken: Mapping[str, Any], checkpoint: dict[str, Any]) -> None:
    """Set a checkpoint back to the beginning of its round, when ``taken`` was taken."""
    checkpoint["loops"]["fit_loop"] = copy.deepcopy(taken["loops"])
    _put_states(taken, checkpoint)


def _put_states(taken: Mapping[str, Any], checkpoint: dict[str, Any]) -> None:
    checkpoint["global_step"] = taken["global_step"]
    checkpoint["lr_schedulers"] = taken["schedulers"]
    checkpoint.update(taken.get("precision", {}))
    if "optimizers" in taken:
        checkpoint["optimizer_states"] = taken["optimizers"]
    model = checkpoint.get(_MOVED_BY_AVERAGING, checkpoint["state_dict"])
    model.update({name: value for name, value in taken["buffers"].items() if name in model})


def _progress(trainer: pl.Trainer, *, after_batch: bool, halted: bool) -> dict[str, Any]:
    """Lightning's progress, as if nothing of the next batch had begun."""
    loops: dict[str, Any] = copy.deepcopy(trainer.fit_loop.state_dict())
    progress = loops[_PROGRESS]
    for counts in (progress["total"], progress["current"]):
        done = counts["processed"]
        counts.update(ready=done, started=done, completed=done)
    if not halted:
        progress["is_last_batch"] = False
    if after_batch:
        loops["epoch_loop.state_dict"]["_batches_that_stepped"] += 1
    return loops


def _buffers(module: nn.Module) -> dict[str, Tensor]:
    return {
        name if not prefix else f"{prefix}.{name}": buffer
        for prefix, part in module.named_modules()
        for name, buffer in part.named_buffers(recurse=False)
        if name not in part._non_persistent_buffers_set
    }


_OVER = "states/over"


def _packed(state: Mapping[str, Any] | None) -> bytes:
    if state is None:
        raise LookupError("it takes part no more")
    file = io.BytesIO()
    torch.save(state, file)  # raises if a schedule's state cannot be saved
    return file.getvalue()


def await_writer(store: dist.Store, limit: float, check: Callable[[], None]) -> None:
    """Wait until the writer has no more questions; see ``await_key``.

    The writer has ended if its store is gone already: its failure would be known, and it waits for few seconds only.
    """
    try:
        connection = connection_to(store)
    except RankFailedError:
        log.debug("The first worker has ended.", exc_info=True)
        return
    await_key(connection, _OVER, limit=limit, check=check)


_PARTS = {"outer": ("optimizer",), "rounds": ("round",)}
_PARTS_OF_LAUNCHED = {"unsent": ("workers", "rank", "own", "mean"), "workers": ("halted", "inner_size", "of")}


def require_whole_state(checkpoint: Mapping[str, Any]) -> None:
    """Check the outer state of a checkpoint, if it has one.

    Raises:
        UnsupportedError: Names what is missing.
    """
    state = checkpoint.get(OUTER_STATE)
    known = state if isinstance(state, Mapping) else {}
    parts = _PARTS | {part: names for part, names in _PARTS_OF_LAUNCHED.items() if part in known}
    missing = [
        f"{part}.{name}"
        for part, names in parts.items()
        for name in names
        if not isinstance(known.get(part), Mapping) or name not in known[part]
    ]
    if state is not None and missing:
        raise UnsupportedError(
            f"The checkpoint's entry {OUTER_STATE!r} is damaged, or is not this strategy's: it lacks "
            f"{', '.join(missing)}. Without that entry, weights and the inner optimizer go on, and rounds and the "
            "outer optimizer begin anew."
        )


_WORKERS = "workers"
_OF_FIRST = ("position", "weights", "samples", "begun_with")  # what Lightning's places do not have
_SHARE_OF_TIMEOUT = 0.25  # for the writer's waits: the others wait for the writer for up to the timeout


class WorkerStates:
    """One leader's part in exact restarts, for one fit: keeps its states of the last moments, and gives them.

    For the training thread, but for :meth:`ask`.

    Args:
        trainer: The Trainer of the fit.
        session: This leader's session.
        world: The place of this leader among the workers.
        full: Whether optimizers' states, own weights and what was left unsent are kept, too.
        timeout: The strategy's timeout, in seconds.
        count: Number of states that are kept.
        own_state: Returns what else this worker alone has.
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
        own_state: Callable[[], dict[str, Any]],
    ) -> None:
        self._trainer = trainer
        self._session = session
        self._own_state = own_state
        self._inner_size = world.inner_size
        self._full = full
        self._timeout = timeout
        self._store = world.store
        self._count = count
        self._lock = threading.Lock()
        # What follows changes under the lock.
        self._states: dict[Moment, dict[str, Any]] = {}
        self._asked: list[tuple[Moment, Callable[[Callable[[], bytes]], None]]] = []
        self._closed = False
        # Of the writer alone.
        self._others = [worker_name(number) for number in range(1, world.workers)]
        self._caller: Caller | None = None
        if not world.worker:
            limit = _SHARE_OF_TIMEOUT * timeout
            self._caller = Caller(world.store, sender="checkpoint", timeout=limit, check=session.check)

    def begun(self) -> None:
        """A round has begun; its first batch was drawn, and nothing has been done with it."""
        self._session.at_begin = partial(self._keep_begun, after_batch=True)
        self._keep_begun(after_batch=False)

    def halted(self) -> None:
        """All workers stand still, and this worker has done all that this round's end is for, except a validation."""
        ended = self._session.round_end
        if ended is not None:
            self.keep(Moment(ended.round, halted=True), self._take(after_batch=True, halted=True))

    def over(self) -> None:
        """The last round is over, and this worker has the global weights, by whichever way it got them."""
        last, ended = self._last, self._session.round_end
        if ended is not None and (last is None or last[0] != Moment(ended.round, halted=True)):
            self.keep(Moment(ended.round, halted=True), self._take(after_batch=False, halted=True))

    def complete(self, checkpoint: dict[str, Any]) -> None:
        """On the first worker: make a checkpoint one of a single moment, with all workers' states at it."""
        last, outer = self._last, checkpoint.get(OUTER_STATE)
        if self._caller is None or last is None or outer is None or "optimizer_states" not in checkpoint:
            return
        moment, own = last
        if not moment.halted:
            put_back(own, checkpoint)
            if "unsent" in own:
                outer["unsent"] = own["unsent"]
        outer["rounds"] = {**outer["rounds"], "round": moment.rounds}
        found = self.collect(moment)
        lacking = {worker: state for worker, state in found.items() if isinstance(state, str)}
        if lacking:
            log.warning(
                "diloco: a checkpoint lacks the own state of %s: %s. If training goes on from it, they get worker 0's "
                "optimizer and, in the middle of an epoch, other samples.",
                ", ".join(lacking),
                "; ".join(dict.fromkeys(lacking.values())),
            )
        others = [state if isinstance(state, dict) else None for state in found.values()]
        outer[_WORKERS] = self._workers_in(moment, own, others)

    def complete_alone(self, outer: dict[str, Any]) -> None:
        """On the first worker: make its outer state one that outlasts the fit, without the other workers' states."""
        last = self._last
        if last is not None and last[0].halted:
            outer[_WORKERS] = self._workers_in(*last, [None] * len(self._others))

    def _workers_in(self, moment: Moment, own: Mapping[str, Any], others: Sequence[object]) -> dict[str, Any]:
        first = {name: own[name] for name in _OF_FIRST if name in own}
        return {"halted": moment.halted, "inner_size": self._inner_size, "of": [first, *others]}

    def collect(self, moment: Moment) -> dict[str, dict[str, Any] | str]:
        """On the first worker: return the others' states, or why they are missing. Bounded, raises nothing.

        Args:
            moment: This worker's present moment.
        """
        text, caller = msgspec.json.encode(moment).decode(), self._caller
        found: dict[str, dict[str, Any] | str] = {}
        try:
            calls = {} if caller is None else {worker: caller.ask(worker, text) for worker in self._others}
        except RuntimeError as error:  # the store is gone
            return dict.fromkeys(self._others, str(error))
        for worker, call in calls.items():
            try:
                content = caller.answer(call) if caller is not None else b""
                found[worker] = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
            except (RuntimeError, SchedulerTimeoutError, pickle.UnpicklingError) as error:  # it alone lacks
                found[worker] = str(error)
            except (Exception, KeyboardInterrupt) as error:  # a checkpoint without it is better than none
                found[worker] = f"{type(error).__name__}: {error}"
                return {**dict.fromkeys(self._others, found[worker]), **found}
        return found

    def leave(self, *, failed: bool) -> None:
        """The fit is over: stay until the first worker has written its last checkpoint. Bounded.

        Args:
            failed: Whether it ended with an error: it then waits for no other rank.

        Raises:
            Exception: If the first worker has failed before.
        """
        self._session.at_begin = None
        try:
            if self._caller is not None:
                self._caller.tell(_OVER)
            elif not failed:
                await_writer(self._store, self._timeout, self._session.check)
        finally:
            with self._lock:
                self._closed = True
                self._answer()

    def ask(self, text: str, answer: Callable[[Callable[[], bytes]], None]) -> None:
        """Answer the writer, now or when this worker comes to the moment; for a mailbox, on any thread."""
        with self._lock:
            self._asked.append((msgspec.json.decode(text, type=Moment), answer))
            self._answer()

    def keep(self, moment: Moment, state: dict[str, Any]) -> None:
        """Keep a state, in the place of the oldest one; it must not change later."""
        with self._lock:
            self._states.pop(moment, None)
            self._states[moment] = state
            while len(self._states) > self._count:
                self._states.pop(next(iter(self._states)))
            self._answer()

    def _answer(self) -> None:
        asked, self._asked = self._asked, []
        for moment, answer in asked:
            state = None if self._closed else self._states.get(moment)
            if self._closed or state is not None:
                answer(partial(_packed, state))
            else:
                self._asked.append((moment, answer))

    @property
    def _last(self) -> tuple[Moment, dict[str, Any]] | None:
        return next(reversed(self._states.items()), None)  # this thread alone keeps states

    def _keep_begun(self, *, after_batch: bool) -> None:
        moment = Moment(self._session.round - 1, halted=False)
        self.keep(moment, self._take(after_batch=after_batch, halted=False))

    def _take(self, *, after_batch: bool, halted: bool) -> dict[str, Any]:
        taken = take(self._trainer, full=self._full, after_batch=after_batch, halted=halted)
        return {**taken, **self._own_state()} if self._full else taken


@dataclass(frozen=True, kw_only=True)
class Resumed:
    """All workers' states in a checkpoint, on a rank that goes on from it.

    Attributes:
        own: The state of this rank's worker, if the checkpoint has it.
        positions: Where each worker stood in its epoch, if that is known of all.
        inner_size: How many ranks a worker had.
        alike: Whether there were as many workers as now.
    """

    own: Mapping[str, Any] | None
    positions: Sequence[Mapping[str, Any]]
    inner_size: int
    alike: bool

    @classmethod
    def from_checkpoint(cls, checkpoint: dict[str, Any], worker: int, workers: int) -> Resumed | None:
        """Put this worker's state into Lightning's places.

        Args:
            checkpoint: The loaded checkpoint; is changed, and the other workers' states are removed.
            worker: Number of this rank's worker.
            workers: Number of workers.

        Raises:
            UnsupportedError: If the checkpoint's outer state is damaged; names what is missing.
        """
        require_whole_state(checkpoint)
        outer = checkpoint.get(OUTER_STATE)
        saved = None if outer is None else outer.pop(_WORKERS, None)
        if saved is None:
            return None
        of = saved["of"]
        own = of[worker] if worker < len(of) else None
        needed = ("loops", "global_step", "schedulers", "buffers")
        if worker and own is not None and (missing := [name for name in needed if name not in own]):
            raise UnsupportedError(f"The checkpoint is damaged: the state of worker {worker} lacks {missing}.")
        if worker and own is not None and outer is not None:
            give(own, checkpoint, halted=saved["halted"])
            if "unsent" in own:
                outer["unsent"] = own["unsent"]
        lacking = [number for number, state in enumerate(of) if state is None]
        if lacking:
            rank_zero_warn(
                f"diloco: the checkpoint lacks the own states of workers {lacking}. They go on with worker 0's "
                "optimizer and, in the middle of an epoch, with other samples."
            )
        positions = [state and state.get("position") for state in of]
        return cls(
            own=own,
            positions=positions if all(positions) else (),
            inner_size=saved["inner_size"],
            alike=len(of) == workers,
        )

    def go_on(self, trainer: pl.Trainer) -> Callable[[], None] | None:
        """Put this worker's own state where Lightning has no place for it, before the first batch.

        Args:
            trainer: Has loaded the checkpoint.

        Returns:
            A function to call when the next epoch begins, if the rest of this one has another length.
        """
        module, own = trainer.lightning_module, self.own or {}
        with torch.no_grad():
            buffers = dict(module.named_buffers())
            for name, value in own.get("buffers", {}).items():
                if name in buffers:
                    buffers[name].copy_(value)
            if self.alike:
                parameters = dict(module.named_parameters())
                for name, value in own.get("weights", {}).items():
                    parameters[name].copy_(value)
        share = share_of(trainer)
        loop: Any = trainer.fit_loop.epoch_loop
        if share is None or not self.positions or loop.batch_progress.is_last_batch:
            return None
        if not share.resume(self.positions, self.inner_size):
            rank_zero_warn(
                "diloco: the checkpoint is of the middle of an epoch of other data, or in another order: what is left "
                "of it cannot be told. Its batches are drawn from the beginning."
            )
            return None
        done = loop.batch_progress.current.processed
        return None if done + share.left() == len(share) else _of_length(trainer, share.left())


def _of_length(trainer: pl.Trainer, batches: int) -> Callable[[], None]:
    """Let this epoch have ``batches`` batches from here on; returns a function that undoes it for the next ones."""
    fit_loop: Any = trainer.fit_loop
    whole, checked = fit_loop.max_batches, trainer.val_check_batch
    length = min(batches, whole)
    fit_loop.epoch_loop.batch_progress.current.reset()
    fit_loop.max_batches = fit_loop._data_fetcher.length = length
    if isinstance(trainer.val_check_interval, float):
        trainer.val_check_batch = max(1, int(length * trainer.val_check_interval))

    def as_before() -> None:
        fit_loop.max_batches, trainer.val_check_batch = whole, checked

    return as_before
