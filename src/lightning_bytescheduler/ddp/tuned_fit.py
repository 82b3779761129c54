"""How the steps of a fit are taken: with which mode they begin, who decides from there on, and when that ends.

Rank 0 decides, and all ranks know before the first step. With ``mode="auto"``, or where sizes are tuned, its tuner
chooses between sizes and plain DDP while the fit runs (:class:`PointInForce`); the search space is one point beside
plain DDP where no size is tuned. On a link that is measured to be slow for the model, steps begin overlapped;
otherwise they begin as DDP's, until overlap is seen to pay.

Only rank 0 times steps: its tuner gets their durations, and what could be hidden in steps as DDP's. A wait on one rank
alone is for a late rank, which no order of communication changes, so the least counts that any rank saw.
``AgreedValues`` brings it to rank 0, and rank 0's decision to all ranks, with the step before which it takes effect.
All ranks change credit, partition size and mode at that step, between two backward passes, so all buckets of a step are
cut or merged alike. The credit must change on all ranks, too: a rank with a smaller window than rank 0's would hold
back what rank 0 has launched.

Where partitions are tuned, the first guess is the partition size with the least cost of start-ups and waiting on the
measured link. A wrong guess costs one trial.
"""

from __future__ import annotations

import math
import os
import statistics
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lightning_bytescheduler.collectives.number_exchange import MOST, AgreedValues
from lightning_bytescheduler.ddp.fit import Fit, StepMode, TrainingStep
from lightning_bytescheduler.ddp.overlapped_step import OverlappedStep
from lightning_bytescheduler.ddp.plain_step import MergedBuckets, PlainStep, ScheduledBuckets, merged_bytes
from lightning_bytescheduler.ddp.plan import OverlapPlan, names_of, say_start
from lightning_bytescheduler.ddp.reads import SeenReads
from lightning_bytescheduler.ddp.wire import Wire
from lightning_bytescheduler.lightning_api import DDPStrategy, FabricDDPStrategy, pl, rank_zero_info
from lightning_bytescheduler.scheduler.core import ByteCore
from lightning_bytescheduler.scheduler.options import MODES, SchedulerOptions
from lightning_bytescheduler.tuning.credit_tuner import CreditTuner
from lightning_bytescheduler.tuning.record import TuningIdentity
from lightning_bytescheduler.tuning.sizes import (
    ALIGNMENT,
    PLAIN_DDP,
    LinkEstimate,
    SearchSpace,
    TuningPoint,
    distance,
    is_slow,
)

SHORTEST_FIT = 100
"""Steps: a fit known to be shorter would end before a search has found anything."""

SETTLED_INTERVAL = 16  # steps between exchanges while nothing is tried
_SHOWN = 16  # last steps as DDP's whose exposed communication is remembered
_UNKNOWN = MOST - 1  # nanoseconds, for what cannot be known
_NEAR = 0.5  # octaves


def first_guess(space: SearchSpace, parameters: int, link: LinkEstimate, start: TuningPoint) -> tuple[TuningPoint, ...]:
    """Return the partition size with the least cost of start-ups and waiting, two in flight, unless ``start`` is near.

    Parts of ``p`` parameters cost ``alpha * parameters / p`` to start, and the most urgent part waits ``beta * 4 * p``
    for the one on the link. The sum is least where both are equal.
    """
    best = math.sqrt(link.alpha * max(parameters, 1) / (link.beta * 4))
    low, high = space.partitions
    partition = min(max(round(best / ALIGNMENT) * ALIGNMENT, low), high)
    credit = min(max(2 * partition, space.credits[0]), space.credits[1])
    guess = TuningPoint(credit=credit, partition_size=min(partition, credit))
    return (guess,) if distance(guess, start) >= _NEAR else ()


class StepTimer:
    """Times one fit's steps, from one forward pass to the next.

    On a GPU it records events on the training's stream, as the host may be whole steps ahead, and reads them once the
    GPU has passed them.
    """

    def __init__(self, device: torch.device, clock: Callable[[], float], *, cuda: Any = torch.cuda) -> None:
        self._device = device
        self._clock = clock
        self._cuda = cuda
        self._began: Any = clock() if device.type != "cuda" else None
        self._unread: deque[tuple[int, Any, Any]] = deque()

    def begin(self, step: int, seen: Callable[[int, float], None]) -> None:
        """Begin ``step``; ``seen`` gets numbers and seconds of earlier steps that are known."""
        if self._device.type != "cuda":
            now = self._clock()
            seen(step - 1, now - self._began)
            self._began = now
            return
        now = self._cuda.Event(enable_timing=True)
        now.record(self._cuda.current_stream(self._device))
        if self._began is not None:
            self._unread.append((step - 1, self._began, now))
        self._began = now
        while self._unread and self._unread[0][2].query():
            ended, start, end = self._unread.popleft()
            seen(ended, start.elapsed_time(end) / 1e3)


class PointInForce(StepMode):
    """Sizes and mode in force on one rank; all ranks make it at the same point.

    Args:
        tuner: Decides; only on rank 0.
        others_try: Returns whether something else is being tried, so that times of steps do not belong to the point.
    """

    may_wait = True

    def __init__(
        self,
        *,
        core: ByteCore,
        values: AgreedValues,
        point: TuningPoint,
        tuner: CreditTuner | None = None,
        on_change: Callable[[TuningPoint], None],
        device: torch.device,
        others_try: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        super().__init__()
        self._others_try = others_try
        self._core = core
        self._values = values
        self._tuner = tuner
        self._on_change = on_change
        self._times = StepTimer(device, clock)
        self._exposed: deque[float] = deque(maxlen=_SHOWN)
        self._hideable: float | None = None
        self._step = 0
        self._put(point)

    @property
    def tries(self) -> bool:
        """See :class:`StepMode`."""
        return self._tuner is not None and not self._tuner.is_settled

    def before_forward(self, step: int) -> None:
        """See :class:`StepMode`.

        Args:
            step: Number of the step that this pass belongs to, from 1; several passes may belong to one.
        """
        if step <= self._step:
            return
        self._step = step
        if self._tuner is not None:
            self._times.begin(step, self._step_took)
        wanted, interval = None, 1
        if self._tuner is not None:
            wanted, interval = self._tuner.current.numbers, SETTLED_INTERVAL if self._tuner.is_settled else 1
        seen = [_UNKNOWN if math.isinf(seconds) else int(1e9 * seconds) for seconds in self._exposed]
        seen += [MOST] * (_SHOWN - len(seen))
        agreed = self._values.before_step(step, wanted, interval=interval, seen=seen)
        if agreed is None:
            return
        point, known = TuningPoint.of(agreed[:2]), [least for least in agreed[2:] if least < MOST]
        hideable = statistics.median_low(known) if known else None
        self._hideable = math.inf if hideable == _UNKNOWN else hideable and hideable / 1e9
        if point != self._point:
            self._put(point)

    def _step_took(self, step: int, seconds: float) -> None:
        # Something else is tried in overlapped steps only.
        if self._tuner is None or step < 1 or (self._others_try() and not self.ddp_mode):
            return
        # Until all ranks know a decision, steps are still at the old point.
        as_decided = step >= self._since and self._tuner.current == self._point
        self._tuner.step_took(step, seconds, as_decided=as_decided, hideable=self._hideable)

    def add_exposed(self, seconds: float) -> None:
        """See :class:`StepMode`."""
        self._exposed.append(seconds)

    def close(self) -> None:
        """Leave the exchange with the other ranks; bounded, idempotent."""
        self._values.close()

    def _put(self, point: TuningPoint) -> None:
        self._point, self._since = point, self._step
        self.ddp_mode = point.is_plain_ddp
        self._exposed.clear()
        self._hideable = None
        if not point.is_plain_ddp:
            self._core.credit, self._core.partition_size = point.sizes
        self._on_change(point)


class FitTuning:
    """Makes the mode of a fit's steps; its tuner begins and ends with each fit.

    Args:
        options: This rank's options; rank 0's count.
    """

    def __init__(self, options: SchedulerOptions, *, timeout: timedelta | None) -> None:
        self._options = options
        self._timeout = timeout
        self._own: CreditTuner | None = None  # its knowledge outlives a fit
        self._pacing: CreditTuner | None = None  # where no size is searched: knows nothing that is to be kept
        self._stood = ""  # what was decided in the last fit
        self._tuner: CreditTuner | None = None  # the user's or this one, among the callbacks during a fit
        self._deciding: CreditTuner | None = None  # on rank 0, during a fit
        self._in_force: PointInForce | None = None

    @property
    def _tunes(self) -> bool:
        return self._options.tunes_credit or self._options.tunes_partition

    def bring_tuner(self, callbacks: list[pl.Callback]) -> None:
        """Find the user's tuner among the callbacks, or add one if something is tuned."""
        self._tuner = next((callback for callback in callbacks if isinstance(callback, CreditTuner)), None)
        if self._tuner is None and self._tunes:
            self._tuner = self._own = self._own or CreditTuner()
            callbacks.insert(1, self._own)  # after the strategy's hooks

    def begin(
        self,
        module: nn.Module,
        fit: Fit,
        device: torch.device,
        on_change: Callable[[TuningPoint], None],
        *,
        slow: bool,
        in_shards: bool,
    ) -> tuple[StepMode, str]:
        """Begin a fit whose steps may overlap; every rank calls this before its first step.

        Args:
            module: What is trained.
            fit: The fit.
            device: Where the default group needs its tensors.
            on_change: Called with the point in force, at first and when it changes, if one is decided on.
            slow: Whether the link is known to be slow for the model.
            in_shards: Whether gradients are reduced in shards.

        Returns:
            How steps are taken, and why they begin as they do, in a few words.
        """
        self._stood = ""
        if not self._tunes:
            self.say_untuned("there is no size to find (mode='auto' without credit=, tuning='credit' or 'both')")
        mode, trainer = self._options.mode, getattr(module, "_trainer", None)
        folder = None if trainer is None or not self._tunes else _record_folder(trainer)
        left = -1 if trainer is None or trainer.max_steps < 0 else trainer.max_steps - trainer.global_step
        tunes = self._tunes and self._tuner is not None and not (self._tuner is self._own and 0 <= left < SHORTEST_FIT)
        decides = mode == "auto" or tunes
        first = PLAIN_DDP
        if decides and dist.get_rank() == 0:
            asked = tunes and (self._tuner is not self._own or self._options.tunes_partition)
            self._deciding = self._tuner if tunes else None
            if self._deciding is None:
                self._deciding = self._pacing = self._pacing or CreditTuner()
                folder = None
            problem = self._problem(module, fit, tunes=tunes, in_shards=in_shards)
            as_ddp = mode == "auto" and not slow and not asked
            first = self._deciding.begin(**problem, plain_ddp=mode == "auto", as_ddp=as_ddp, folder=folder)
        message = torch.tensor([MODES.index(mode), decides, slow, *first.numbers], dtype=torch.int64, device=device)
        dist.broadcast(message, src=0)
        number, decides, slow, *sizes = message.tolist()
        mode, first = MODES[number], TuningPoint.of(sizes)
        if not decides:
            return StepMode(mode == "ddp"), f"mode={mode!r}"
        self._in_force = PointInForce(
            core=fit.wire.core,
            values=AgreedValues(2, timeout=self._timeout, failure=fit.own_failure),
            point=first,
            tuner=self._deciding,
            on_change=on_change,
            device=device,
            others_try=lambda: fit.codec.layers is not None and not fit.codec.layers.is_settled,
        )
        return self._in_force, first_pace(mode, slow=bool(slow), as_ddp=first.is_plain_ddp)

    @property
    def tunes_now(self) -> bool:
        """Whether sizes are being searched, on rank 0."""
        tuner = self._deciding
        return tuner is not None and tuner.tunes_sizes and not tuner.current.is_plain_ddp

    @property
    def standing(self) -> str:
        """Result of this fit's decisions so far, in words; empty if nothing is known or decided."""
        if self._in_force is None:
            return self._stood
        # torch is not asked for the rank: a script may have destroyed its groups before this ends.
        return "rank 0 times steps and says what is fastest" if self._deciding is None else self._deciding.standing

    def say_untuned(self, reason: str) -> None:
        """Report why the user's tuner has nothing to do."""
        if self._tuner is not None and self._tuner is not self._own:
            rank_zero_info(f"bytescheduler: CreditTuner tunes nothing, as {reason}.")

    def end(self, callbacks: list[pl.Callback]) -> None:
        """Stop the tuner, and remove one that was added; bounded, idempotent."""
        self._stood = self.standing
        tuner, self._deciding, self._tuner = self._deciding, None, None
        if tuner is not None:
            tuner.stop()
        in_force, self._in_force = self._in_force, None
        if in_force is not None:
            in_force.close()
        if self._own in callbacks:
            callbacks.remove(self._own)

    def _problem(self, module: nn.Module, fit: Fit, *, tunes: bool, in_shards: bool) -> dict[str, Any]:
        """Return what a tuner has to know of the model and the link."""
        options, sizes, link = self._options, fit.wire.agreed.sizes, fit.wire.agreed.link
        trained = [p for p in module.parameters() if p.requires_grad]
        width, count = max(p.element_size() for p in trained), sum(p.numel() for p in trained)
        start = TuningPoint(credit=sizes.credit, partition_size=sizes.partition_size)
        space = SearchSpace(credits=(sizes.credit,) * 2, partitions=(sizes.partition_size,) * 2)
        if tunes:
            # DDP gives a parameter above its limit a bucket of its own.
            largest_bucket = max(sizes.bucket_bytes // width, *(p.numel() for p in trained), 1)
            space = space_for(count, start, options, largest_bucket=largest_bucket, architecture=fit.wire.architecture)
        by_hand = {"credits": options.credit, "partitions": options.partition_size}
        return {
            "space": space,
            "start": start,
            "guesses": () if link is None or not space.tunes_partitions else first_guess(space, count, link, start),
            "given": [name for name, size in by_hand.items() if size is not None],
            "identity": TuningIdentity(
                parameters=count,
                bytes_per_parameter=width,
                workers=dist.get_world_size(),
                backend=dist.get_backend(fit.wire.groups.data),
                link=link,
                in_shards=in_shards,
            ),
        }


def first_pace(mode: str, *, slow: bool, as_ddp: bool) -> str:
    """Return in a few words why steps begin as they do, if rank 0 decides later on; ``mode`` is its option."""
    if mode != "auto":
        return f"mode={mode!r}"
    if as_ddp:
        return "nothing has been measured yet; overlap is tried if training is seen to wait for gradients"
    return "the link is slow for this model" if slow else "tuning begins with them"


def _record_folder(trainer: pl.Trainer) -> str | None:
    """Return where a run's files go; every rank has to call it, as the answer is broadcast on the default group."""
    if trainer.loggers:
        return trainer.log_dir
    given = os.path.abspath(trainer.default_root_dir) != os.getcwd()
    return trainer.default_root_dir if given else None


def space_for(
    parameters: int,
    start: TuningPoint,
    options: SchedulerOptions,
    *,
    largest_bucket: int,
    architecture: str = "allreduce",
) -> SearchSpace:
    """Return the search space, in which a size that is not tuned keeps its value."""
    credit, partition_size = start.sizes
    space = SearchSpace.for_model(parameters, architecture=architecture, largest_bucket=largest_bucket)
    if not (options.tunes_partition and space.tunes_partitions):  # a small model has only one partition size
        space = SearchSpace.for_model(parameters, architecture=architecture, partition_size=partition_size)
    space = space.including(start)
    if options.tunes_credit:
        return space
    low, high = space.partitions
    return replace(space, credits=(credit, credit), partitions=(low, min(high, credit)))


class DecidedFit(Fit):
    """A fit that decides with the other ranks how its steps are taken; until then they are synchronised.

    Args:
        strategy: The strategy of the Trainer, or Fabric's.
        options: The scheduler's options.
        own_buckets: Whether the user has chosen the size of buckets; they are not merged then.
        tuning: Decides which steps are as DDP's.
        more: For :class:`Fit`.

    Attributes:
        plan: What was decided; ``None`` before.
    """

    def __init__(
        self,
        strategy: DDPStrategy | FabricDDPStrategy,
        options: SchedulerOptions,
        wire: Wire,
        parameters: list[nn.Parameter],
        *,
        own_buckets: bool,
        tuning: FitTuning,
        **more: Any,
    ) -> None:
        super().__init__(wire, parameters, strategy.root_device, by_first_use=options.policy.by_first_use, **more)
        self.plan: OverlapPlan | None = None
        self._strategy: Any = strategy
        self._options = options
        self._own_buckets = own_buckets
        self._merged_bytes = 0
        self._processors = 1
        self._tuning = tuning

    def make_step(self, number: int, *, as_ddp: bool) -> TrainingStep:
        """See :class:`Fit`."""
        if as_ddp and self.merges:
            merged = MergedBuckets.of(self, number, limit=self._merged_bytes, processors=self._processors)
            return PlainStep(self, number, merged, self.mode.add_exposed)
        if number > 1 and self.overlapped and not as_ddp:
            return OverlappedStep(self, number)
        exposed, each = self.mode.add_exposed if as_ddp else None, self.static_graph and number == 1
        return PlainStep(self, number, ScheduledBuckets(self, number), exposed, each=each)

    def begin_steps(self, module: nn.Module, plan: OverlapPlan, unseen: set[int]) -> None:
        """Decide with the other ranks what overlaps, set up the steps, and report it.

        Args:
            module: What is trained.
            plan: This rank's plan.
            unseen: Ids of parameters that may be read without a touch.
        """
        strategy, codec, agreed = self._strategy, self.codec, self.wire.agreed
        agree = strategy.reduce_boolean_decision
        if not agree(plan.overlapped) and plan.overlapped:  # all ranks must send the same
            plan = OverlapPlan(steps="synchronised", reasons=("another rank cannot let its steps overlap",))
        self.sharded = agree(plan.gradients == "reduce-scatter", all=False)
        weighting = "samples" if self.weights.by_samples else "ranks"
        plan = replace(plan, weighting=weighting, compressed=codec.compressed, compression_ratio=codec.ratio)
        self.plan = plan
        nbytes = sum(p.numel() * p.element_size() for p in module.parameters() if p.requires_grad)
        link, pace = agreed.link, ""
        if plan.overlapped:
            slow = link is not None and is_slow(link, nbytes=nbytes, busy_processor=self.device.type == "cpu")
            self.mode, pace = self._tuning.begin(
                module, self, self.device, self._point_changed, slow=slow, in_shards=self.sharded
            )
            names = {id(p): name for name, p in module.named_parameters()}
            self.reads.seen = SeenReads(names, strategy.global_rank, getattr(module, "_trainer", None))
        else:
            # Partitions by priority bring nothing to a synchronised step; they are used only if the user asked for it.
            by_itself = self._options.mode == "auto" and self._options.cross_barrier
            self.mode = StepMode(agree(self._options.mode == "ddp" or by_itself))
            self._tuning.say_untuned("steps cannot overlap")
        self.plan = replace(plan, as_ddp=self.mode.ddp_mode, pace=pace)
        self.overlapped = plan.overlapped
        self.reads.unseen = set(unseen)
        self._merged_bytes = 0 if self._own_buckets else merged_bytes(self.device, link)
        self._processors = own_processors(strategy.num_processes)
        ranks, policy = self.wire.groups.world_size, self._options.policy
        say_start(self.plan, agreed, ranks, nbytes, tuned=self._tuning.tunes_now, policy=policy)

    def _point_changed(self, point: TuningPoint) -> None:
        if self.plan is not None:
            self.plan = replace(self.plan, as_ddp=point.is_plain_ddp)

    def so_far(self, module: nn.Module | None) -> OverlapPlan | None:
        """Return the plan with its results so far; ``None`` before there is one."""
        plan, reads, statistics = self.plan, self.reads, self.record.statistics
        if plan is None:
            return None
        if self.wire.servers is not None:
            plan = replace(plan, placement=self.wire.servers.push_pull.shares.so_far)
        if not plan.overlapped:
            return plan
        if module is not None:  # what is read unseen, or held, may be found later than the plan was made
            unseen, held = names_of(module, reads.unseen), names_of(module, reads.held_elsewhere)
            plan = replace(plan, gated_at_start=unseen, held_elsewhere=held)
        return replace(
            plan,
            opened_for=dict(reads.opened_for),
            pace=self._tuning.standing or plan.pace,
            early_readers=dict(reads.seen.steps),
            whole_steps=dict(reads.seen.whole_steps),
            read_unseen=dict(reads.seen.unseen),
            deferred_share=statistics.deferred_share if statistics.updates else None,
        )

    def close(self, *, failed: bool) -> None:
        """See :class:`Fit`."""
        self._tuning.end([])
        super().close(failed=failed)


def own_processors(ranks_on_host: int) -> int:
    """Return a rank's share of the processors that it may run on."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(allowed // max(ranks_on_host, 1), 1)
