"""Decides how the steps of a fit are taken: what overlaps and why not, how steps begin, and how they change later.

*What overlaps* depends on the model, its optimizers, precision and clipping (:meth:`DecidedFit.begin_steps`). There is
one message to the user on rank 0 for each decision, with the figures behind it and without this package's own terms.
``reads.py`` reports reads that cost overlap or exactness.

*How steps are taken.* Rank 0 decides, and all ranks know before the first step. With ``mode="auto"``, or where sizes
are tuned, its tuner chooses between sizes and plain DDP while the fit runs (:class:`PointInForce`); the search space is
one point beside plain DDP where no size is tuned. On a link that is measured to be slow for the model, steps begin
overlapped; otherwise they begin as DDP's, until overlap is seen to pay.

Only rank 0 times steps: its tuner gets their durations, and how long steps as DDP's waited, which overlap could hide. A
rank that waits alone waits for a late rank, which no order of communication changes. So the least wait of all ranks
counts. ``AgreedValues`` brings it to rank 0, and rank 0's decision to all ranks, to take effect before the same step.
All ranks change credit, partition size and mode at that step, between two backward passes, so all buckets of a step are
cut or merged alike. The credit must change on all ranks, too: a rank with a smaller window than rank 0's would hold
back what rank 0 has launched.
"""

from __future__ import annotations

import itertools
import logging
import math
import os
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from lightning_bytescheduler.collectives.device_streams import travel_by_host
from lightning_bytescheduler.collectives.groups import SchedulerGroups
from lightning_bytescheduler.collectives.number_exchange import AgreedValues
from lightning_bytescheduler.ddp.compiled_calls import compiled_calls_are_seen
from lightning_bytescheduler.ddp.compression_rules import CompressionRules
from lightning_bytescheduler.ddp.deferred_optimizer import deferring, followed_by, wants_whole_steps, whole_steps_for
from lightning_bytescheduler.ddp.fit import Fit, StepMode, TrainingStep
from lightning_bytescheduler.ddp.fit_report import OverlapPlan, milliseconds
from lightning_bytescheduler.ddp.gates import can_be_gated
from lightning_bytescheduler.ddp.reads import SeenReads, aliases_are_seen
from lightning_bytescheduler.ddp.sample_weights import SampleCounter
from lightning_bytescheduler.ddp.steps import MergedStep, OverlappedStep, PlainStep, merged_bytes
from lightning_bytescheduler.ddp.wire import AgreedSizes, ServerOptions, Wire, agree_on_sizes
from lightning_bytescheduler.failures.board import FaultBoard
from lightning_bytescheduler.lightning_api import (
    DDPStrategy,
    FabricDDPStrategy,
    FabricMixedPrecision,
    FabricPrecision,
    GradClipAlgorithmType,
    MixedPrecision,
    Precision,
    is_overridden,
    pl,
    rank_zero_info,
    rank_zero_warn,
)
from lightning_bytescheduler.scheduler.core import ByteCore
from lightning_bytescheduler.scheduler.options import MODES, SchedulerOptions
from lightning_bytescheduler.tuning.credit_tuner import CreditTuner
from lightning_bytescheduler.tuning.record import TuningIdentity
from lightning_bytescheduler.tuning.sizes import PLAIN_DDP, SearchSpace, TuningPoint, is_slow

_FAR = (
    "The link's latency is high, so each rank's share of a part goes straight to it, and its sum straight to all; "
    "urgent parts overtake on separate connections. "
)
_TUNED = " How much travels at once is tuned while training."
_PLAIN_STEPS = [
    kind.optimizer_step for kind in (Precision, MixedPrecision, FabricPrecision, FabricMixedPrecision)
]  # these only run the closure and the optimizer's step
_STAND_IN = "_MockOptimizer"  # Lightning's stand-in if configure_optimizers() returns None

SHORTEST_FIT = 100
"""Steps: a fit known to be shorter would end before a search has found anything."""

SETTLED_INTERVAL = 16  # steps between exchanges while nothing is tried
_SHOWN = 16  # last steps as DDP's whose exposed communication is remembered
_MOST = 2**62  # where there is nothing to observe
_UNKNOWN = _MOST - 1  # nanoseconds, for what cannot be known


def optimizer_reasons(optimizers: Sequence[Optimizer]) -> list[str]:
    """Return why steps of ``optimizers`` cannot be deferred, each with how to avoid it; empty if they can."""
    if len(optimizers) != 1:
        return [
            f"there are {len(optimizers)} optimizers (one optimizer with several parameter groups keeps the overlap)"
        ]
    optimizer = optimizers[0]
    if type(optimizer).__name__ == _STAND_IN:
        return ["there is no optimizer (configure_optimizers that returns one keeps the overlap)"]
    return list(whole_steps_for(optimizer))


def option_reasons(*, cross_barrier: bool, bucket_views: bool) -> list[str]:
    """Return why these options keep steps from overlapping; ``bucket_views`` is ``gradient_as_bucket_view``."""
    reasons = [] if cross_barrier else ["cross_barrier=False (leave it out to keep the overlap)"]
    if not bucket_views:
        reasons.append(
            "gradient_as_bucket_view=False makes DDP copy gradients at the end of backward (leave it out to keep the "
            "overlap)"
        )
    return reasons


def model_reasons(model: nn.Module) -> list[str]:
    """Return why updates of ``model`` cannot be deferred, each with how to avoid it; empty if they can."""
    reasons = []
    if not (compiled_calls_are_seen() and aliases_are_seen()):
        reasons.append(
            f"PyTorch {torch.__version__} does not show compiled calls, or who holds a tensor's memory (a version that "
            "this package is tested with keeps the overlap)"
        )
    shared = _sharing_memory(model)
    if shared:
        reasons.append(
            f"parameters {shared[0]!r} and {shared[1]!r} are different tensors over the same memory "
            "(tie them by assigning the same nn.Parameter to keep the overlap)"
        )
    return reasons


def _sharing_memory(model: nn.Module) -> tuple[str, str] | None:
    """Return two parameters that overlap in memory. Neighbours in one storage, as in cuDNN's LSTM, do not."""
    ranges = sorted(
        (p.data_ptr(), p.detach()[(-1,) * p.dim()].data_ptr() + p.element_size(), name)  # to the end of the last one
        for name, p in model.named_parameters()
        if p.requires_grad and p.numel() and can_be_gated(p)
    )
    for (_, end, name), (start, _, other) in itertools.pairwise(ranges):
        if start < end:
            return name, other
    return None


def unseen_parameters(model: nn.Module) -> set[int]:
    """Return the ids of parameters that may be read without a touch; their steps are not deferred.

    These are parameters of scripted modules, whose code holds the memory itself, and parameters of other classes.
    :class:`~lightning_bytescheduler.ddp.reads.Reads` finds those that show only at run time, and
    :class:`~lightning_bytescheduler.ddp.reads.AliasDetector` finds aliases.
    """
    scripted = (m for m in model.modules() if isinstance(m, torch.jit.ScriptModule))
    unseen = {id(p) for script in scripted for p in script.parameters()}
    return unseen | {id(p) for p in model.parameters() if not can_be_gated(p)}


def names_of(module: nn.Module, parameters: Iterable[int]) -> tuple[str, ...]:
    """Return the names of the parameters with these ids."""
    ids = set(parameters)
    return tuple(name for name, parameter in module.named_parameters() if id(parameter) in ids)


def precision_reasons(plugin: Any) -> list[str]:
    """Return why this precision plugin keeps steps from being deferred, with how to avoid it; empty if it does not."""
    if type(plugin).optimizer_step not in _PLAIN_STEPS:
        return [f"{type(plugin).__name__} has an optimizer step of its own (precision='bf16-mixed' keeps the overlap)"]
    scaler = getattr(plugin, "scaler", None)
    if scaler is not None and scaler.is_enabled():
        return ["fp16 loss scaling looks at all gradients before a step (precision='bf16-mixed' keeps the overlap)"]
    return []


def norm_needed_by(module: pl.LightningModule) -> tuple[str, ...]:
    """Return what needs the norm of all gradients before an update, in words; ``module`` is attached to a trainer."""
    trainer = module.trainer
    if is_overridden("configure_gradient_clipping", module):
        return ("configure_gradient_clipping",)  # it may clip by norm
    if trainer.gradient_clip_val and trainer.gradient_clip_algorithm != GradClipAlgorithmType.VALUE:
        return ("gradient norm clipping",)
    return ()


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
        """Begin ``step``; ``seen`` gets the number and seconds of each earlier step that has just been timed."""
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
    """Sizes and mode in force on one rank; all ranks construct it at the same point.

    Args:
        tuner: Decides; only on rank 0.
    """

    may_wait = True

    def __init__(
        self,
        *,
        core: ByteCore,
        values: AgreedValues,
        point: TuningPoint,
        tuner: CreditTuner | None = None,
        device: torch.device,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        super().__init__()
        self._core = core
        self._values = values
        self._tuner = tuner
        self._times = StepTimer(device, clock)
        self._exposed: deque[float] = deque(maxlen=_SHOWN)
        self._hideable: float | None = None
        self._step = 0
        self._put(point)

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
            wanted, interval = self._tuner.current, SETTLED_INTERVAL if self._tuner.is_settled else 1
        seen = [_UNKNOWN if math.isinf(seconds) else int(1e9 * seconds) for seconds in self._exposed]
        seen += [_MOST] * (_SHOWN - len(seen))
        agreed = self._values.before_step(step, wanted, interval=interval, seen=seen)
        if agreed is None:
            return
        point, known = TuningPoint(*agreed[:2]), [least for least in agreed[2:] if least < _MOST]
        hideable = statistics.median_low(known) if known else None
        self._hideable = math.inf if hideable == _UNKNOWN else hideable and hideable / 1e9
        if point != self._point:
            self._put(point)

    def _step_took(self, step: int, seconds: float) -> None:
        if self._tuner is None or step < 1:
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
            self._core.credit, self._core.partition_size = point


class FitTuning:
    """Makes the mode of a fit's steps; its tuner begins and ends with each fit.

    Args:
        options: This rank's options; those of rank 0 decide.
    """

    def __init__(self, options: SchedulerOptions, *, timeout: timedelta | None) -> None:
        self._options = options
        self._timeout = timeout
        self._own: CreditTuner | None = None  # its knowledge outlives a fit
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

    def begin(self, module: nn.Module, fit: Fit, *, slow: bool) -> tuple[StepMode, str]:
        """Begin a fit whose steps may overlap; every rank calls this before its first step.

        Args:
            module: What is trained.
            fit: The fit.
            slow: Whether the link is known to be slow for the model.

        Returns:
            How steps are taken, and why they begin as they do, in a few words.
        """
        if not self._tunes:
            self.say_untuned("there is no size to find (mode='auto' without credit=, tuning='credit' or 'both')")
        mode, trainer = self._options.mode, getattr(module, "_trainer", None)
        left = -1 if trainer is None or trainer.max_steps < 0 else trainer.max_steps - trainer.global_step
        tunes = self._tunes and self._tuner is not None and not (self._tuner is self._own and 0 <= left < SHORTEST_FIT)
        folder = None if trainer is None or not self._tunes else _record_folder(trainer)
        decides = mode == "auto" or tunes
        first = PLAIN_DDP
        if decides and dist.get_rank() == 0:
            asked = tunes and (self._tuner is not self._own or self._options.tunes_partition)
            self._deciding = self._tuner if tunes and self._tuner is not None else CreditTuner()
            problem = self._problem(module, fit, tunes=tunes)
            as_ddp, folder = mode == "auto" and not slow and not asked, folder if tunes else None
            first = self._deciding.begin(**problem, plain_ddp=mode == "auto", as_ddp=as_ddp, folder=folder)
        message = torch.tensor([MODES.index(mode), decides, slow, *first], dtype=torch.int64, device=fit.device)
        dist.broadcast(message, src=0)
        number, decides, slow, *sizes = message.tolist()
        mode, first = MODES[number], TuningPoint(*sizes)
        if not decides:
            return StepMode(mode == "ddp"), f"mode={mode!r}"
        self._in_force = PointInForce(
            core=fit.wire.core,
            values=AgreedValues(2, timeout=self._timeout, failure=fit.own_failure),
            point=first,
            tuner=self._deciding,
            device=fit.device,
        )
        return self._in_force, first_pace(mode, slow=bool(slow), as_ddp=first.is_plain_ddp)

    @property
    def tunes_now(self) -> bool:
        """Whether sizes are being searched, on rank 0."""
        tuner = self._deciding
        return tuner is not None and tuner.search.tunes_sizes and not tuner.current.is_plain_ddp

    @property
    def standing(self) -> str:
        """Result of this fit's decisions so far, in words; empty if nothing is known or decided."""
        if self._in_force is None:
            return ""
        # torch is not asked for the rank: a script may have destroyed its groups before this ends.
        tuner = self._deciding
        return "rank 0 times steps and says what is fastest" if tuner is None else tuner.search.standing

    def say_untuned(self, reason: str) -> None:
        """Report why the user's tuner has nothing to do."""
        if self._tuner is not None and self._tuner is not self._own:
            rank_zero_info(f"bytescheduler: CreditTuner tunes nothing, as {reason}.")

    def end(self, callbacks: list[pl.Callback]) -> None:
        """Stop the tuner, and remove one that was added; bounded, idempotent."""
        self._deciding = self._tuner = None
        in_force, self._in_force = self._in_force, None
        if in_force is not None:
            in_force.close()
        if self._own in callbacks:
            callbacks.remove(self._own)

    def _problem(self, module: nn.Module, fit: Fit, *, tunes: bool) -> dict[str, Any]:
        """Return what a tuner has to know of the model and the link."""
        options, sizes, link = self._options, fit.wire.agreed.sizes, fit.wire.agreed.link
        trained = [p for p in module.parameters() if p.requires_grad]
        width, count = max(p.element_size() for p in trained), sum(p.numel() for p in trained)
        start = TuningPoint(credit=sizes.credit, partition_size=sizes.partition_size)
        # DDP gives a parameter above its limit a bucket of its own.
        largest_bucket = max(sizes.bucket_bytes // width, *(p.numel() for p in trained), 1)
        space = SearchSpace.for_model(
            count,
            start,
            largest_bucket=largest_bucket,
            architecture="allreduce" if fit.wire.servers is None else "ps",
            tunes_credit=tunes and options.tunes_credit,
            tunes_partitions=tunes and options.tunes_partition,
        )
        return {
            "space": space,
            "start": start,
            "identity": TuningIdentity(
                parameters=count,
                bytes_per_parameter=width,
                workers=dist.get_world_size(),
                backend=dist.get_backend(fit.wire.groups.data),
                link=link,
                in_shards=fit.sharded,
                credit=0 if space.tunes_credit else options.credit,
                partition_size=0 if space.tunes_partitions else options.partition_size,
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


_levels: list[int] = []  # the level of the log before a fit with debug=True


def announce(options: SchedulerOptions, agreed: AgreedSizes) -> None:
    """Report what was ignored or clamped, and switch the debug log on, or off again."""
    sizes = agreed.sizes
    if options.partition_size and options.credit and options.partition_size > options.credit:
        rank_zero_warn(
            f"partition_size={options.partition_size} is above credit={options.credit}; "
            f"partitions of {sizes.partition_size} parameters are used."
        )
    if options.ignored_variables:
        rank_zero_info(
            f"bytescheduler: {', '.join(options.ignored_variables)} ignored: ranks find each other through the "
            "process group."
        )
    logger = logging.getLogger("lightning_bytescheduler")
    if options.debug and not _levels:
        _levels.append(logger.level)
        logger.setLevel(logging.DEBUG)
        if not logger.handlers:
            logger.addHandler(logging.StreamHandler())
    elif _levels and not options.debug:
        logger.setLevel(_levels.pop())


@dataclass(frozen=True, kw_only=True)
class FitOptions:
    """What all fits of a strategy have in common.

    Attributes:
        scheduler: The scheduler's options.
        timeout: Longest wait for one bucket.
        own_buckets: Whether the user has chosen the size of buckets.
        tuning: Decides how steps are taken.
        rules: Which gradients travel compressed, if any.
        counter: Makes the counter of a rank's samples, if gradients are weighted by them.
        servers: The parameter servers, if any average gradients.
    """

    scheduler: SchedulerOptions
    timeout: timedelta | None
    own_buckets: bool
    tuning: FitTuning
    rules: CompressionRules | None = None
    counter: Callable[[int], SampleCounter] | None = None
    servers: ServerOptions = field(default_factory=ServerOptions)


def trained(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the trained parameters by name."""
    return {name: p for name, p in module.named_parameters() if p.requires_grad}


def open_wire(
    module: nn.Module, strategy: Any, options: FitOptions, board: FaultBoard, *, routed: bool, in_shards: bool = False
) -> Wire:
    """Agree on sizes with the other ranks, and open the wire on which the gradients of a fit travel.

    Every rank calls this at the same point, before DDP wraps the module.

    Args:
        module: What is trained.
        strategy: The strategy of the Trainer, or Fabric's.
        options: What all fits of the strategy have in common.
        board: Tells failures to the other ranks.
        routed: Whether other code's collectives are ordered with gradients where the backend needs that.
        in_shards: Whether gradients are expected to be reduced in shards.
    """
    device, timeout, rules = strategy.root_device, options.timeout, options.rules
    served = options.servers.used
    groups = SchedulerGroups.create(
        timeout=timeout,
        routed_on=device if routed else None,
        by_host=travel_by_host(device, compressed=rules is not None, served=served),
    )
    agreed = agree_on_sizes(
        groups,
        options.scheduler,
        module.parameters(),
        device,
        in_shards=in_shards or rules is not None,
        ratio=1.0 if rules is None else rules.ratio(trained(module)),
        architecture="ps" if served else "allreduce",
    )
    if options.own_buckets and (chosen := strategy._ddp_kwargs.get("bucket_cap_mb")) is not None:
        agreed = replace(agreed, sizes=replace(agreed.sizes, bucket_bytes=max(int(chosen * 2**20), 1)))
    announce(options.scheduler, agreed)
    servers = options.servers.join(groups, board, strategy, timeout=timeout)
    return Wire(groups, board, agreed, options.scheduler, device, timeout=timeout, servers=servers)


class DecidedFit(Fit):
    """A fit that decides with the other ranks how its steps are taken; until then they are synchronised.

    Args:
        strategy: The strategy of the Trainer, or Fabric's.
        options: What all fits of the strategy have in common.
        more: For :class:`Fit`.

    Attributes:
        plan: What was decided, without results; ``None`` before.
    """

    def __init__(
        self,
        strategy: DDPStrategy | FabricDDPStrategy,
        options: FitOptions,
        wire: Wire,
        parameters: list[nn.Parameter],
        **more: Any,
    ) -> None:
        by_first_use = options.scheduler.policy.by_first_use
        super().__init__(wire, parameters, strategy.root_device, by_first_use=by_first_use, **more)
        self.plan: OverlapPlan | None = None
        self._strategy: Any = strategy
        self._options = options
        self._merged_bytes = 0
        self._processors = 1

    def module(self) -> nn.Module | None:
        """Return the trained module, while it exists."""
        raise NotImplementedError

    @property
    def bucket_cap_mb(self) -> dict[str, float]:
        """DDP's option of that name; empty if the user has chosen the size of buckets."""
        return {} if self._options.own_buckets else {"bucket_cap_mb": self.wire.agreed.sizes.bucket_bytes / 2**20}

    def make_step(self, number: int, *, as_ddp: bool) -> TrainingStep:
        """See :class:`Fit`."""
        if as_ddp and self.merges:
            return MergedStep(self, number, limit=self._merged_bytes, processors=self._processors)
        if number > 1 and self.overlapped and not as_ddp:
            return OverlappedStep(self, number)
        return PlainStep(self, number)

    def begin_steps(self, module: nn.Module, reasons: Iterable[str], *, norm_needed_by: tuple[str, ...] = ()) -> None:
        """Decide with the other ranks what overlaps, set up the steps, and report it.

        Args:
            module: What is trained.
            reasons: Why steps cannot overlap, besides those of the options and the model; empty if they can.
            norm_needed_by: What needs the norm of all gradients before an update, in words.
        """
        views = self._strategy._ddp_kwargs.get("gradient_as_bucket_view", True)
        reasons = (
            *reasons,
            *option_reasons(cross_barrier=self._options.scheduler.cross_barrier, bucket_views=views),
            *model_reasons(module),
        )
        strategy, codec, link = self._strategy, self.codec, self.wire.agreed.link
        agree = strategy.reduce_boolean_decision
        if not agree(not reasons) and not reasons:  # all ranks must send the same
            reasons = ("another rank cannot let its steps overlap",)
        overlapped, pace = not reasons, ""
        self.sharded = agree(overlapped and bool(norm_needed_by), all=False)
        self.reads.unseen = unseen_parameters(module)
        nbytes = sum(p.numel() * p.element_size() for p in module.parameters() if p.requires_grad)
        if overlapped:
            self.reads.find_held()
            slow = link is not None and is_slow(link, nbytes=nbytes, busy_processor=self.device.type == "cpu")
            self.mode, pace = self._options.tuning.begin(module, self, slow=slow)
            self.reads.seen = SeenReads(module, strategy.global_rank)
        else:
            # Partitions by priority do not speed up a synchronised step, so only a user's options switch them on.
            by_itself = self._options.scheduler.mode == "auto" and self._options.scheduler.cross_barrier
            self.mode = StepMode(agree(self._options.scheduler.mode == "ddp" or by_itself))
            self._options.tuning.say_untuned("steps cannot overlap")
        self.overlapped = overlapped
        self.plan = OverlapPlan(
            steps="overlapped" if overlapped else "synchronised",
            reasons=reasons,
            gradients="reduce-scatter" if self.sharded else "all-reduce",
            norm_needed_by=norm_needed_by if overlapped else (),
            pace=pace,
            weighting="samples" if self.weights.by_samples else "ranks",
            compressed=codec.compressed,
            compression_ratio=codec.ratio,
        )
        self._merged_bytes = 0 if self._options.own_buckets else merged_bytes(self.device, link)
        self._processors = own_processors(strategy.num_processes)
        self.say_start(self.so_far() or self.plan, nbytes)

    def say_start(self, plan: OverlapPlan, nbytes: int) -> None:
        """Report how steps begin, by ``plan``, with ``nbytes`` of all gradients."""
        facts = sizes = ""
        steps, agreed, link = plan.summary(), self.wire.agreed, self.wire.agreed.link
        if plan.overlapped:
            facts, steps = f"{self.wire.groups.world_size} ranks", steps[0].upper() + steps[1:]
            if link is not None:
                facts += (
                    f", all-reduce{link.at_rate} after {1e3 * link.alpha:.2f} ms: "
                    f"{milliseconds(link.seconds(nbytes))} ms for all gradients ({nbytes / 1e6:.3g} MB)"
                )
            facts += ". "
            if not plan.as_ddp:
                used = {"partition_size": agreed.sizes.partition_size, "credit": agreed.sizes.credit}
                sizes = f" {self._options.scheduler.policy.in_words.format(**used)}"
        if agreed.far:
            facts += _FAR
        tuned = _TUNED if self._options.tuning.tunes_now else ""
        rank_zero_info(f"bytescheduler: {facts}{steps}{sizes}{tuned}")

    def step_with(
        self,
        take: Callable[..., Any],
        optimizer: Optimizer,
        closure: Callable[[], Any] | None,
        *,
        deferrable: bool,
        why_whole: str | None = None,
    ) -> Any:
        """Defer the optimizer's step if its gradients are in flight; otherwise take it, with final gradients.

        Args:
            take: The strategy's own step; called with a closure or ``None``.
            optimizer: The optimizer.
            closure: Computes loss and gradients; may be ``None``.
            deferrable: Whether nothing but a closure was given to the step.
            why_whole: Why the step has to be taken whole, if the caller knows of a reason.
        """
        if self.overlapped and deferrable:
            # asked for each step, as the optimizer may have been replaced
            why_whole = why_whole or wants_whole_steps(optimizer)
            if why_whole is None:
                with deferring(optimizer, self, getattr(self._strategy, "precision_plugin", None)):
                    return take(closure)
            self.reads.seen.waited(why_whole)
        if closure is None:
            self.flush()
        output = take(None if closure is None else followed_by(self.flush, closure))
        self.count_whole_step(optimizer)
        return output

    def so_far(self) -> OverlapPlan | None:
        """Return the plan with its results so far; ``None`` before there is one."""
        plan, reads, statistics, module = self.plan, self.reads, self.record.statistics, self.module()
        if plan is None:
            return None
        servers = self.wire.servers
        placement = None if servers is None else servers.push_pull.shares.so_far
        plan = replace(plan, as_ddp=self.mode.ddp_mode, placement=placement)
        if not plan.overlapped:
            return plan
        return replace(
            plan,
            gated_at_start=() if module is None else names_of(module, reads.unseen),
            held_elsewhere=() if module is None else names_of(module, reads.held_elsewhere),
            opened_for=dict(reads.opened_for),
            pace=self._options.tuning.standing or plan.pace,
            waits=dict(reads.seen.waits),
            read_unseen=dict(reads.seen.unseen),
            deferred_share=statistics.deferred_share if statistics.updates else None,
        )

    def close(self, *, failed: bool) -> None:
        """See :class:`Fit`."""
        self._options.tuning.end([])
        super().close(failed=failed)


def own_processors(ranks_on_host: int) -> int:
    """Return a rank's share of the processors that it may run on."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(allowed // max(ranks_on_host, 1), 1)
