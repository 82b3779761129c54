"""Where the training data of a fit stands: of ranks that step together, or of workers that go at their own speeds."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Protocol

import torch

from lightning_bytescheduler.checks import is_whole
from lightning_bytescheduler.exceptions import OptionError, TrackerStateError
from lightning_bytescheduler.lightning_api import pl, rank_zero_info
from lightning_bytescheduler.slices.batches import BatchPlan, ReadReport
from lightning_bytescheduler.slices.catalogue import SliceCatalogue
from lightning_bytescheduler.slices.epoch_plan import EpochPlan
from lightning_bytescheduler.slices.fetch import SliceStatistics
from lightning_bytescheduler.slices.options import LoaderOptions, TrackerOptions
from lightning_bytescheduler.slices.plan_thread import FollowingPlan, LeadingRank, PlanThread, WorkerRanks
from lightning_bytescheduler.slices.store import SliceStore
from lightning_bytescheduler.slices.tracked_batches import TrackerPlan
from lightning_bytescheduler.slices.tracker import SliceTracker
from lightning_bytescheduler.slices.tracker_client import LocalTracker, TrackerClient


class TrainingSlices(Protocol):
    """Training data in mid-epoch."""

    @property
    def plan(self) -> BatchPlan:
        """The batches of this rank or worker."""

    @property
    def epoch(self) -> int:
        """The epoch of the data, from 0, which is not Lightning's where that was stopped and resumed."""

    @property
    def fills(self) -> bool:
        """Whether other samples are repeated in the place of those that cannot be read."""

    @property
    def batches(self) -> int | None:
        """Length of a loader, if it is known."""

    def open(self, trainer: pl.Trainer | None) -> None:
        """A loader is about to be made, after a checkpoint was loaded."""

    def received(self, report: ReadReport) -> None:
        """A reader has answered for the next batch."""

    def trained(self) -> None:
        """The next batch has been trained on."""

    def finish_epoch(self, trainer: pl.Trainer) -> None:
        """Lightning's epoch has had its last batch, of all ranks."""

    def keep_alive(self) -> None:
        """Something takes time in which nothing is trained."""

    def close(self) -> None:
        """The training is over."""

    def state_dict(self) -> dict[str, Any]:
        """The position, for a checkpoint: plain values and tensors."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where a state was saved."""


class CoordinatedDataModule(pl.LightningDataModule):
    """A data module whose training data stands somewhere: what a ``SliceCoordinator`` needs to know of one."""

    @property
    def training(self) -> TrainingSlices:
        """Where the training data stands."""
        raise NotImplementedError

    @property
    def statistics(self) -> SliceStatistics:
        """What reading has cost so far."""
        raise NotImplementedError

    @property
    def waited(self) -> float:
        """Seconds that the training has waited for batches so far."""
        raise NotImplementedError


class LockStepTraining:
    """``TrainingSlices`` that every rank works out for itself: all get the same number of steps, without a message.

    Args:
        plan: The batches of this rank.

    Attributes:
        plan: As given.
    """

    fills = True

    def __init__(self, plan: EpochPlan) -> None:
        self.plan = plan
        self._corrupt: dict[str, str] = {}
        self._only_ends = False

    @property
    def epoch(self) -> int:
        """See ``TrainingSlices``."""
        return self.plan.epoch

    @property
    def batches(self) -> int:
        """Steps of the loader that was opened, those included that Lightning counts as done."""
        return self.plan.counted if self._only_ends else len(self.plan)

    def open(self, trainer: pl.Trainer | None) -> None:
        """Say what is padded or dropped.

        Raises:
            OptionError: If there is not a single step.
        """
        plan = self.plan
        if plan.over and plan.begun:  # these ranks have no step for what was left to others
            plan.end_epoch()
        self._only_ends = trainer is not None and not plan.begun and ends_restored_epoch(trainer)
        plan.open(0 if trainer is None else counted_batches(trainer))
        shares = plan.shares
        if not shares.steps:
            raise OptionError(
                "train", f"{shares.left} samples", "a sample for each rank: check what is quarantined, or use 'pad'"
            )
        if shares.padded or shares.dropped:
            what = f"{shares.padded} will be repeated" if shares.padded else f"{shares.dropped} will be left out"
            rank_zero_info(
                f"slices: the samples of epoch {plan.epoch} do not go round, so {what}, for every rank to take "
                f"{shares.steps} steps."
            )

    def received(self, report: ReadReport) -> None:
        """Remember slices that are corrupt."""
        self._corrupt.update(report.corrupt)

    def trained(self) -> None:
        """Count a step."""
        self.plan.trained()

    def finish_epoch(self, trainer: pl.Trainer) -> None:
        """Go to the next epoch, or to this one again to overfit, without the slices that any rank found corrupt."""
        self.plan.quarantine(self._agreed(trainer))
        self._corrupt = {}
        if trainer.overfit_batches:  # type: ignore[attr-defined]  # the same batches in each epoch
            self.plan.start_epoch(self.plan.epoch)
        else:
            self.plan.end_epoch()

    def keep_alive(self) -> None:
        """Nobody waits for this."""

    def close(self) -> None:
        """The position stays."""

    def state_dict(self) -> dict[str, Any]:
        """The plan's, the same at every rank."""
        return {"together": self.plan.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where a state was saved.

        Raises:
            TrackerStateError: If it was saved by workers that do not step together, or does not fit.
        """
        if "together" not in state:
            raise TrackerStateError(
                "The state of the slices was saved by workers that did not step together. Resume with the strategy "
                "that it was saved with, or load only the weights."
            )
        self.plan.load_state_dict(state["together"])

    def _agreed(self, trainer: pl.Trainer) -> dict[str, str]:
        """The slices that any rank has found to be corrupt: every rank has to leave out the same."""
        found = self._corrupt
        if trainer.world_size == 1 or not trainer.strategy.reduce_boolean_decision(bool(found), all=False):
            return found
        catalogue = self.plan.catalogue
        marks = torch.zeros(len(catalogue), dtype=torch.int32, device=trainer.strategy.root_device)
        for key in found:
            index = catalogue.find(key)
            if index is not None:
                marks[index] = 1
        marked = trainer.strategy.reduce(marks, reduce_op="sum").cpu()
        keys = [catalogue.key(int(index)) for index in marked.nonzero().flatten()]
        return {key: found.get(key, "Another rank found it to be corrupt.") for key in keys}


def require_same_slices(trainer: pl.Trainer, catalogue: SliceCatalogue) -> None:
    """Compare the slices of all ranks; called by all of them.

    Raises:
        OptionError: At every rank, if one sees others than rank 0.
    """
    if trainer.world_size == 1:
        return
    here = asdict(catalogue.fingerprint)
    there = trainer.strategy.broadcast(here)
    if not trainer.strategy.reduce_boolean_decision(here == there, all=True):
        raise OptionError(
            "train",
            f"{here['slices']} slices, {here['samples']} samples",
            f"the same slices on every rank: rank 0 has {there['slices']} with {there['samples']} samples, and some "
            "rank has others, or the same under other names",
        )


def require_same_reading(trainer: pl.Trainer, loading: LoaderOptions) -> None:
    """Require that ranks read equally far ahead, as they get the parts of one batch; called by all of them.

    Raises:
        OptionError: At every rank, if one reads otherwise than rank 0.
    """
    here = loading.num_workers
    there = trainer.strategy.broadcast(here)
    if not trainer.strategy.reduce_boolean_decision(here == there, all=True):
        raise OptionError(
            "num_workers",
            loading.num_workers,
            f"the same on all ranks of a worker: rank 0 has {there}, and some rank another number",
        )


def require_tracker_host(host: object) -> None:
    """Require a way to a tracker.

    Raises:
        OptionError: If it is none.
    """
    worker, workers = getattr(host, "worker", None), getattr(host, "workers", None)
    is_host = callable(getattr(host, "connect", None)) and isinstance(getattr(host, "waits", None), bool)
    if not is_host or not is_whole(workers, 1) or not is_whole(worker) or worker >= workers:
        allowed = "a TrackerHost: an object with worker (from 0), workers, waits (a bool) and connect(make)"
        raise OptionError("host", host, f"{allowed}; strategy='diloco' makes one by itself")


def counted_batches(trainer: pl.Trainer) -> int:
    """Batches of the epoch that Lightning counts as done when it goes on in the middle of one."""
    loop = trainer.fit_loop
    current: Any = loop.epoch_loop.batch_progress.current  # typed as less than it is
    return int(current.processed) if loop.restarting else 0


def ends_restored_epoch(trainer: pl.Trainer) -> bool:
    """Whether Lightning still has to end an epoch that has no batches left, as after a validation at its end.

    An epoch that was saved after its last batch, before all else, is ended here; like Lightning, without a validation.
    """
    loop = trainer.fit_loop
    batches: Any = loop.epoch_loop.batch_progress
    epochs: Any = loop.epoch_progress
    if not loop.restarting or not batches.is_last_batch:
        return False
    if epochs.current.processed < epochs.current.started:
        if batches.current.completed == batches.current.processed:
            return True
        batches.increment_completed()
        epochs.increment_processed()
        epochs.increment_completed()
        loop.epoch_loop._batches_that_stepped += 1
    # By itself, a loop with max_steps never takes an epoch to be complete.
    loop._restarting = loop.epoch_loop.restarting = False
    return False


class TrackerHost(Protocol):
    """One worker's way to the run's slice tracker; see :meth:`~lightning_bytescheduler.SliceDataModule.bind_tracker`.

    Attributes:
        worker: Number of this worker, from 0; the same after a restart.
        workers: How many there are at the start. Others may join later.
        waits: Whether a worker that finds nothing for now when its epoch begins waits in its loader, and goes on to the
            next epoch of the data by itself. If not, its epoch of Lightning may be empty, and the strategy ends epochs
            of the data for all workers, with ``training.awaits_others()`` and ``training.end_epoch()``.
        ranks: May be left out, or ``None``: the ranks of this worker, where several train together and share its
            batches. Then ``connect`` is called on the first of them alone.
    """

    worker: int
    workers: int
    waits: bool

    def connect(self, make: Callable[[], LocalTracker]) -> TrackerClient:
        """Reach the tracker.

        Called once in a fit, when the first batch is wanted, which is after a checkpoint was loaded. At worker 0 it
        calls ``make``, offers the result to the others and returns it, or something that leads there. Elsewhere it does
        not call ``make``, and waits, for a bounded time, until worker 0 offers its tracker.

        Raises:
            Exception: If the tracker cannot be reached.
        """


class TrackedTraining:
    """``TrainingSlices`` of one worker. The tracker is at worker 0, which saves it too.

    Args:
        host: The way to the tracker.
        store: Of the training data.
        options: Of the tracker.
        batch_sizes: Samples of a batch, of each rank of this worker.
        ahead: Slices to hold ahead; None follows the speeds.
    """

    def __init__(
        self,
        host: TrackerHost,
        store: SliceStore,
        *,
        options: TrackerOptions,
        batch_sizes: Sequence[int],
        ahead: int | None,
    ) -> None:
        self._host = host
        self._store = store
        self._options = options
        self._ranks: WorkerRanks | None = getattr(host, "ranks", None)
        self._batch_sizes = tuple(batch_sizes)
        self._ahead = ahead
        self._tracker: LocalTracker | None = None
        self._pending: Mapping[str, Any] | None = None
        self._plan: PlanThread | FollowingPlan | None = None

    @property
    def fills(self) -> bool:
        """A rank that left out a batch would leave the others of its worker alone in a step."""
        return self._ranks is not None

    @property
    def plan(self) -> PlanThread | FollowingPlan:
        """The batches of this worker.

        Raises:
            OptionError: Before there was a loader.
        """
        if self._plan is None:
            raise OptionError("plan", None, "asked for after train_dataloader()")
        return self._plan

    @property
    def epoch(self) -> int:
        """See ``TrainingSlices``."""
        return 0 if self._plan is None else self._plan.epoch

    @property
    def batches(self) -> None:
        """Nobody knows."""
        return None

    @property
    def tracker(self) -> LocalTracker | None:
        """The tracker, where it is."""
        return self._tracker

    def open(self, trainer: pl.Trainer | None) -> None:
        """Reach the tracker, once."""
        if self._plan is not None:
            return
        idle, ranks = getattr(self._host, "idle", None), self._ranks
        if ranks is not None and ranks.rank > 0:
            self._plan = FollowingPlan(ranks, batch_size=self._batch_sizes[ranks.rank], idle=idle)
            return
        leading = None if ranks is None else LeadingRank(ranks, self._batch_sizes)
        self._plan = plan = PlanThread(
            TrackerPlan(
                self._host.connect(self._make_tracker),
                worker=_name(self._host.worker),
                incarnation=uuid.uuid4().hex,
                batch_size=sum(self._batch_sizes),
                ahead=self._ahead,
                slices=self._store.source.slices,
                cached=self._store.cached,
                waits=self._host.waits,
            ),
            idle=idle,
            others=leading,
        )
        if leading is not None:
            leading.listen(plan.quarantine)

    def received(self, report: ReadReport) -> None:
        """Tell the tracker what is corrupt."""
        self.plan.received(report)

    def trained(self) -> None:
        """Tell the tracker where this worker is."""
        self.plan.trained()

    def finish_epoch(self, trainer: pl.Trainer) -> None:
        """The tracker says when an epoch of the data is over."""

    def keep_alive(self) -> None:
        """Renew the lease in time."""
        if self._plan is not None:
            self._plan.keep_alive()

    def awaits_others(self) -> bool:
        """Whether other workers hold all that is left of the epoch."""
        plan = self.plan
        return isinstance(plan, PlanThread) and plan.awaits_others()

    def end_epoch(self) -> None:
        """Go on to the next epoch of the data, if nothing is left of this one: for all workers at the same moment."""
        if isinstance(self.plan, PlanThread):
            self.plan.end_epoch()

    def leave(self) -> None:
        """Give back what this worker holds, while the tracker can be reached."""
        if self._plan is not None:
            self._plan.leave()

    def halt(self, timeout: float) -> bool:
        """End the plan's thread, as after a failure, when nothing can be given back; returns whether it ended in time.

        Args:
            timeout: In seconds.
        """
        return not isinstance(self._plan, PlanThread) or self._plan.stop(timeout)

    def close(self) -> None:
        """Give back what this worker holds."""
        plan, self._plan = self._plan, None
        if plan is not None:
            try:
                plan.leave()
            finally:
                plan.stop()

    def settle(self) -> None:
        """Wait until the tracker knows all that this worker has trained on."""
        if self._plan is not None:
            self._plan.settle()

    def state_dict(self) -> dict[str, Any]:
        """The tracker's at worker 0, with all that was trained on here; elsewhere nothing."""
        self.settle()
        if self._tracker is not None:
            return {"tracker": self._tracker.state_dict()}
        return {} if self._pending is None else dict(self._pending)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where a state was saved; heeded where the tracker is.

        Raises:
            TrackerStateError: If it was saved by ranks that step together, or does not fit.
        """
        if state and "tracker" not in state:
            raise TrackerStateError(
                "The state of the slices was saved by ranks that step together. Resume with the strategy that it was "
                "saved with, or load only the weights."
            )
        self._pending = dict(state) or None
        if self._tracker is not None:
            self._load(self._tracker)

    def _make_tracker(self) -> LocalTracker:
        if self._tracker is None:
            catalogue = SliceCatalogue(self._store.source.slices)
            tracker = LocalTracker(SliceTracker(catalogue, self._options, clock=time.monotonic))
            self._load(tracker)
            self._tracker = tracker
        return self._tracker

    def _load(self, tracker: LocalTracker) -> None:
        if self._pending is not None:
            workers = [_name(number) for number in range(self._host.workers)]
            tracker.load_state_dict(self._pending["tracker"], workers=workers)
            self._pending = None
            report = tracker.report()
            if report.over and not self._host.waits:  # nobody goes on to the next one by itself
                tracker.start_epoch(report.epoch + 1)


def _name(worker: int) -> str:
    return f"worker-{worker}"
