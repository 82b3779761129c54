"""Reports a fit's decisions, their reasons and their results: the current plan, and messages to the user on rank 0.

There is one line for each decision, and one at the end. A line has the figures behind the decision, and avoids this
package's own terms. A fit without anything to schedule gets one line that says so. Code that reads weights or gradients
between steps, or unseen, costs overlap or exactness; it is named once.
"""

from __future__ import annotations

import logging
import os
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from types import FrameType
from typing import Any

from torch import nn

from lightning_bytescheduler.checks import some_of
from lightning_bytescheduler.collectives.groups import SchedulerGroups
from lightning_bytescheduler.ddp.agreed_sizes import AgreedSizes
from lightning_bytescheduler.ddp.compressed_reduction import GradientCompression
from lightning_bytescheduler.ddp.engine import EngineOptions
from lightning_bytescheduler.ddp.merged_buckets import merged_bytes
from lightning_bytescheduler.ddp.plan import OverlapPlan, names_of
from lightning_bytescheduler.ddp.point_in_force import StepMode
from lightning_bytescheduler.ddp.runtime import SchedulerRuntime
from lightning_bytescheduler.ddp.statistics import SchedulerStatistics
from lightning_bytescheduler.ddp.steps import StepListener
from lightning_bytescheduler.ddp.tuned_fit import FitTuning
from lightning_bytescheduler.failures.board import FaultBoard
from lightning_bytescheduler.lightning_api import (
    DDPStrategy,
    FabricDDPStrategy,
    Logger,
    pl,
    rank_zero_info,
    rank_zero_warn,
)
from lightning_bytescheduler.scheduler.options import POLICIES, SchedulerOptions, SchedulingPolicy, policy_of
from lightning_bytescheduler.tuning.sizes import LinkEstimate, TuningPoint, is_slow

log = logging.getLogger(__name__)

_FAR = (
    "The link's latency is high, so each rank's share of a part goes straight to it, and its sum straight to all; "
    "urgent parts overtake on separate connections. "
)
_TUNED = " How much travels at once is tuned while training."
_BYTESCHEDULER = policy_of(POLICIES[0])
_TINY = 1024  # parameters
_CODEC_THREADS = 2  # one encodes while the other sums and decodes
_WORTH_A_LINE = 0.1  # of all steps: fewer overlapped ones were trials, which have their own lines


def announce(options: SchedulerOptions, agreed: AgreedSizes) -> None:
    """Report what was ignored or clamped, and switch on the debug log."""
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
    if options.debug:
        logger = logging.getLogger("lightning_bytescheduler")
        logger.setLevel(logging.DEBUG)
        if not logger.handlers:
            logger.addHandler(logging.StreamHandler())


def say_start(
    plan: OverlapPlan,
    agreed: AgreedSizes,
    world_size: int,
    nbytes: int,
    *,
    tuned: bool,
    policy: SchedulingPolicy = _BYTESCHEDULER,
    compression: GradientCompression | None = None,
) -> None:
    """Report how the steps of a fit begin.

    Args:
        plan: The plan, as decided.
        agreed: The sizes on all ranks.
        world_size: Number of ranks.
        nbytes: Bytes of all gradients.
        tuned: Whether sizes are tuned from the start.
        policy: The scheduling policy.
        compression: Compression of gradients, if any.
    """
    if compression is not None and not compression.compressed:
        rank_zero_warn(
            "bytescheduler: no gradient of this model is compressed: each is smaller than compression_min_size, would "
            "not be smaller compressed, or fits no pattern."
        )
    if compression is not None and (left := compression.left_out):
        rank_zero_info(
            f"bytescheduler: the checkpoint has what was left to be sent of {len(left)} parameters that are not "
            f"compressed now, or have another size or name, such as {left[0]!r}. That is left out."
        )
    facts = sizes = ""
    steps, link, used = plan.summary(), agreed.link, agreed.sizes
    if plan.overlapped:
        facts, steps = f"{world_size} ranks. ", steps[0].upper() + steps[1:]
        if link is not None:
            facts = (
                f"{world_size} ranks, all-reduce at {1e-6 / link.beta:.0f} MB/s after {1e3 * link.alpha:.2f} ms: "
                f"{_ms(link.seconds(nbytes))} ms for all gradients ({nbytes / 1e6:.3g} MB). "
            )
        if not plan.as_ddp:
            sizes = f" {policy.in_words.format(partition_size=used.partition_size, credit=used.credit)}"
    if agreed.far:
        facts += _FAR
    rank_zero_info(f"bytescheduler: {facts}{steps}{sizes}{_TUNED if tuned else ''}")


def summary_of(statistics: SchedulerStatistics, finding: str) -> str | None:
    """Return one line for the end of a fit; ``None`` if hardly any step overlapped.

    Args:
        statistics: Counters of the fit.
        finding: What was found to be fastest, if measured.
    """
    steps, overlapped = statistics.steps, statistics.overlapped_steps
    if not overlapped or overlapped < _WORTH_A_LINE * steps:
        return None
    line = f"{steps} steps, {overlapped} of them overlapped; training waited {statistics.exposed_ms:.1f} ms a step for "
    return f"{line}gradients; {finding}." if finding else f"{line}gradients."


def codec_cost(statistics: SchedulerStatistics, link: LinkEstimate | None, ranks: int) -> str:
    """Return a warning if codecs take longer than they save on the link; empty otherwise.

    Args:
        statistics: Counters of the fit so far.
        link: The measured link, if any.
        ranks: Number of ranks.
    """
    if link is None or not statistics.steps:
        return ""
    codecs = statistics.codec_s / _CODEC_THREADS
    sent_per_byte = 2 * (ranks - 1) / ranks  # per byte that is all-reduced, as in the measurement of the link
    saved = link.beta * (statistics.bytes_uncompressed - statistics.bytes_sent) / sent_per_byte
    if codecs <= saved:
        return ""
    return (
        "compression makes steps slower on this link: codecs take "
        f"{_ms(codecs / statistics.steps)} ms of a step, and the bytes that they save would travel in "
        f"{_ms(max(saved, 0.0) / statistics.steps)} ms. Leave compression out here."
    )


def _ms(seconds: float) -> str:
    milliseconds = 1e3 * seconds
    return f"{milliseconds:.0f}" if milliseconds >= 100 else f"{milliseconds:.1f}"


def say_if_tiny(**sizes: int | None) -> None:
    """Warn of tiny sizes, which may have been meant as megabytes."""
    for option, size in sizes.items():
        if size is not None and size < _TINY:
            rank_zero_info(
                f"bytescheduler: {option}={size} is in parameters: {4 * size:,} bytes of fp32 at a time, which is "
                f"slow. {size} MB of fp32 = {size * 250_000:,} parameters."
            )


ENOUGH = 20  # steps of which most were read early, before a line is logged
_OWNERS = (pl.Callback, pl.LightningModule, Logger)


class SeenReads(StepListener):
    """Counts steps whose updates or gradients were waited for between steps, and other costs.

    Such reads are exact, but each costs the overlap of its step. Nothing has to be declared: a callback that reads
    every hundred steps costs every hundredth step's overlap.

    Args:
        trainer: The Trainer whose callbacks, module and loggers are named, while it trains.

    Attributes:
        steps: Number of steps each reader waited in, by its name, for example ``MyCallback.on_train_batch_end``.
        unseen: The step in which each parameter was found to be read past its gate, by its name.
    """

    def __init__(self, names: Mapping[int, str], rank: int = 0, trainer: pl.Trainer | None = None) -> None:
        self._names = names
        self._rank = rank
        self._trainer = trainer
        self._told: set[str] = set()
        self._first_step: dict[str, int] = {}
        self.steps: Counter[str] = Counter()
        self.whole_steps: Counter[str] = Counter()
        self.unseen: dict[str, int] = {}

    def stepped_whole(self, why: str) -> None:
        """See :class:`StepListener`."""
        self.whole_steps[why] += 1
        if self.whole_steps[why] == ENOUGH:
            rank_zero_info(f"bytescheduler: {ENOUGH} steps were not deferred, because {why}.")

    def waited_early(self) -> None:
        """See :class:`StepListener`. A reader is reported once it has waited in most steps."""
        if self._trainer is None or not self._trainer.training or (reader := _reader(sys._getframe(1))) is None:
            return
        step = self._trainer.global_step
        since = step - self._first_step.setdefault(reader, step) + 1
        self.steps[reader] += 1
        if reader not in self._told and self.steps[reader] >= ENOUGH and 2 * self.steps[reader] > since:
            self._told.add(reader)
            rank_zero_info(
                f"bytescheduler: {reader} looks at weights or gradients between steps, in {self.steps[reader]} steps "
                "so far. They are what DDP would show, but these steps wait for all gradients; looking less often "
                "keeps the overlap."
            )

    def read_unseen(self, parameters: list[nn.Parameter], step: int, certain: bool) -> None:
        """See :class:`StepListener`. Warns on rank 0, logs an error on the others."""
        found = [self._names[id(p)] for p in parameters]
        self.unseen.update(dict.fromkeys(found, step))
        had = "had" if certain else "may have had"
        message = (
            f"bytescheduler: in step {step} {some_of(found)} {'was' if len(found) == 1 else 'were'} read by code that "
            "takes a weight's memory past PyTorch's functions, for the first time after the first step: it "
            f"{had} the weights of the step before, and this training is not DDP's to the last bit. From here on "
            "their updates are waited for. To avoid it, hand such code weight.detach(), use it from the first step "
            "on, or train with cross_barrier=False."
        )
        if self._rank == 0:
            rank_zero_warn(message)
        else:
            log.error("rank %d: %s", self._rank, message)


def _reader(frame: FrameType | None) -> str | None:
    """Return the innermost public method of a callback, module or logger on the stack."""
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, _OWNERS) and not frame.f_code.co_name.startswith("_"):
            return f"{type(owner).__name__}.{frame.f_code.co_name}"
        frame = frame.f_back
    return None


class DecidedSteps:
    """Holds the plan of a fit, and decides with the other ranks which steps are as DDP's, before the first step.

    A Trainer's fit and a Fabric module share this class; only a Trainer's fit also tunes sizes.
    """

    runtime: SchedulerRuntime | None = None
    statistics: SchedulerStatistics | None = None

    def __init__(
        self,
        strategy: DDPStrategy | FabricDDPStrategy,
        options: SchedulerOptions,
        *,
        own_buckets: bool,
        tuning: FitTuning,
    ) -> None:
        self._strategy: Any = strategy
        self._options = options
        self._own_buckets = own_buckets
        self._tuning = tuning
        self._compression: GradientCompression | None = None
        self._plan: OverlapPlan | None = None
        self._reads: SeenReads | None = None  # if steps overlap

    def _open(
        self,
        groups: SchedulerGroups,
        board: FaultBoard,
        agreed: AgreedSizes,
        parameters: list[nn.Parameter],
        *,
        timeout: timedelta | None,
        **more: Any,
    ) -> None:
        """Make the runtime; ``more`` is for :class:`SchedulerRuntime`."""
        device = self._strategy.root_device
        self.runtime = SchedulerRuntime(
            groups=groups,
            board=board,
            agreed=agreed,
            options=self._options,
            parameters=parameters,
            device=device,
            timeout=timeout,
            **more,
        )
        self.statistics = self.runtime.statistics
        announce(self._options, agreed)

    def flush(self) -> None:
        """Wait for all gradients and apply every pending update; the weights are final afterwards."""
        if self.runtime is not None:
            self.runtime.engine.flush()

    def _close(self, plan: OverlapPlan | None, *, failed: bool) -> SchedulerRuntime | None:
        """Keep ``plan``, stop every thread, and return the runtime that was; bounded, idempotent."""
        self._plan = plan
        self._tuning.end([])
        runtime, self.runtime = self.runtime, None
        if runtime is not None:
            runtime.close(failed=failed)
        return runtime

    def _so_far(self, module: nn.Module | None, **facts: Any) -> OverlapPlan | None:
        """Return the plan of the current or last fit with its results so far; ``None`` before the first fit."""
        plan, reads, statistics = self._plan, self._reads, self.statistics
        if plan is not None and reads is not None:
            if self.runtime is not None and module is not None:
                # The context also knows what was found later: unseen reads of the first step, and later aliases.
                context = self.runtime.engine.context
                facts["gated_at_start"] = names_of(module, context.unseen)
                facts["held_elsewhere"] = names_of(module, context.held_elsewhere)
                facts["opened_for"] = dict(context.opened_for)
            facts["pace"] = self._tuning.standing or plan.pace
            facts["early_readers"], facts["whole_steps"] = dict(reads.steps), dict(reads.whole_steps)
            facts["read_unseen"] = dict(reads.unseen)
            updated = statistics is not None and statistics.updates
            facts["deferred_share"] = statistics.deferred_share if statistics is not None and updated else None
        return plan if plan is None or not facts else replace(plan, **facts)

    def _begin_steps(self, module: nn.Module, plan: OverlapPlan, runtime: SchedulerRuntime, unseen: set[int]) -> None:
        """Decide with the other ranks what overlaps, set up the steps, and report it."""
        strategy, compression = self._strategy, self._compression
        agree = strategy.reduce_boolean_decision
        if not agree(plan.overlapped) and plan.overlapped:  # all ranks must send the same
            plan = OverlapPlan(steps="synchronised", reasons=("another rank cannot let its steps overlap",))
        sharded = agree(plan.gradients == "reduce-scatter", all=False)
        if runtime.weights is not None:
            plan = replace(plan, weighting="samples")
        if compression is not None:
            plan = replace(plan, compressed=compression.compressed, compression_ratio=compression.ratio)
        self._plan = plan
        nbytes = sum(p.numel() * p.element_size() for p in module.parameters() if p.requires_grad)
        link, device = runtime.agreed.link, strategy.root_device
        if plan.overlapped:
            slow = link is not None and is_slow(link, nbytes=nbytes, busy_processor=device.type == "cpu")
            mode, pace = self._tuning.begin(module, runtime, device, self._point_changed, slow=slow, in_shards=sharded)
        else:
            # Partitions by priority bring nothing to a synchronised step; they are used only if the user asked for it.
            by_itself = self._options.mode == "auto" and self._options.cross_barrier
            mode, pace = StepMode(agree(self._options.mode == "ddp" or by_itself)), ""
            self._tuning.say_untuned("steps cannot overlap")
        self._plan = replace(plan, as_ddp=mode.ddp_mode, pace=pace)
        names = {id(p): name for name, p in module.named_parameters()}
        trainer = getattr(module, "_trainer", None)
        self._reads = SeenReads(names, strategy.global_rank, trainer) if plan.overlapped else None
        runtime.engine.begin_fit(
            EngineOptions(
                overlapped=plan.overlapped,
                mode=mode,
                sharded=sharded,
                unseen=frozenset(unseen),
                merged_bytes=0 if self._own_buckets else merged_bytes(device, link),
                processors=own_processors(strategy.num_processes),
            ),
            self._reads,
        )
        ranks, tuned, policy = runtime.group.size(), self._tuning.tunes_now, self._options.policy
        say_start(self._plan, runtime.agreed, ranks, nbytes, tuned=tuned, policy=policy, compression=compression)

    def _point_changed(self, point: TuningPoint) -> None:
        if self._plan is not None:
            self._plan = replace(self._plan, as_ddp=point.is_plain_ddp)


def own_processors(ranks_on_host: int) -> int:
    """Return a rank's share of the processors that it may run on."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(allowed // max(ranks_on_host, 1), 1)
