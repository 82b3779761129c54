"""Decides what is overlapped in a fit, what is not, and why; ``strategy.plan`` shows it.

There is one message to the user on rank 0 for each decision, and one at the end. It has the figures behind the
decision, and avoids this package's own terms. A fit without anything to schedule gets one line that says so.
``reads.py`` has what is told of reads that cost overlap or exactness.
"""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_bytescheduler.checks import some_of
from lightning_bytescheduler.ddp.compiled_calls import compiled_calls_are_seen
from lightning_bytescheduler.ddp.compressed_reduction import GradientCompression
from lightning_bytescheduler.ddp.compression_rules import AUTO
from lightning_bytescheduler.ddp.deferred_optimizer import scales_losses, steps_plainly
from lightning_bytescheduler.ddp.gates import can_be_gated
from lightning_bytescheduler.ddp.partial_step import whole_steps_for
from lightning_bytescheduler.ddp.reads import AliasDetector
from lightning_bytescheduler.ddp.reduction import sparse_layers
from lightning_bytescheduler.ddp.statistics import SchedulerStatistics
from lightning_bytescheduler.ddp.wire import AgreedSizes
from lightning_bytescheduler.lightning_api import (
    GradClipAlgorithmType,
    Precision,
    is_overridden,
    pl,
    rank_zero_info,
    rank_zero_warn,
)
from lightning_bytescheduler.scheduler.options import POLICIES, SchedulerOptions, SchedulingPolicy, policy_of
from lightning_bytescheduler.scheduler.placement import Placement
from lightning_bytescheduler.tuning.sizes import LinkEstimate

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
) -> None:
    """Report how the steps of a fit begin.

    Args:
        plan: The plan, as decided.
        agreed: The sizes on all ranks.
        world_size: Number of ranks.
        nbytes: Bytes of all gradients.
        tuned: Whether sizes are tuned from the start.
        policy: The scheduling policy.
    """
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


def say_compressed(compression: GradientCompression) -> None:
    """Report what a user who asked for compression may not expect."""
    if not compression.compressed:
        rank_zero_warn(
            "bytescheduler: no gradient of this model is compressed: each is smaller than compression_min_size, would "
            "not be smaller compressed, or fits no pattern."
        )
    if left := compression.left_out:
        rank_zero_info(
            f"bytescheduler: the checkpoint has what was left to be sent of {len(left)} parameters that are not "
            f"compressed now, or have another size or name, such as {left[0]!r}. That is left out."
        )


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


def warn_unaveraged(names: Sequence[str]) -> None:
    """Warn that DDP does not average some parameters, as they did not require gradients when it wrapped the model."""
    rank_zero_warn(
        f"bytescheduler: the gradients of {some_of(names, 2)} are not averaged over ranks: they require gradients now, "
        "and did not when DDP wrapped the model. As with strategy='ddp', each rank trains them on its own batches, and "
        "the ranks' weights differ. To have them averaged, freeze them in on_fit_start, not before, and use "
        "find_unused_parameters=True."
    )


ONE_RANK = "1 rank: nothing to schedule"
"""Reason for the steps of a training on one process."""

_BEFORE_A_STEP = ("on_after_backward", "on_before_optimizer_step")  # hooks of modules and callbacks
_NONE = "no optimizer"
_STAND_IN = "_MockOptimizer"  # Lightning's stand-in if configure_optimizers() returns None
_BY_SAMPLES = "each rank's gradient counts by its samples of the step"
_HELD = (
    "updated in the step, as other code can read the memory: an alias, NumPy, another process, a mapped file "
    "(p.data = p.data.clone() before the fit, and keeping no alias, keeps the overlap)"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class OverlapPlan:
    """The plan of a fit, made from the model, its optimizers, precision and clipping; the same on every rank.

    The first step of a fit is always synchronised, as DDP rebuilds its buckets after it.

    Attributes:
        steps: ``"overlapped"`` if updates cross the step boundary, ``"synchronised"`` if each step waits for all
            gradients.
        reasons: Why steps are synchronised, each with how to avoid it; empty if they overlap.
        gradients: ``"all-reduce"`` (push and pull with parameter servers), or ``"reduce-scatter"`` if every update
            needs the norm of all gradients: each rank reduces a shard, norms are exchanged, and gradients are gathered
            during the next forward pass.
        norm_needed_by: What needs this norm, in words.
        gated_at_start: Names of parameters that are updated before ``training_step`` begins or in the step itself, as
            their reads cannot be seen.
        as_ddp: Whether steps are taken as DDP's at present: with ``mode="ddp"``, if they cannot overlap, if little
            could be hidden, or if a trial found that faster.
        pace: Why steps are as DDP's or overlap, with what was measured so far, in a few words.
        early_readers: Code that read weights or gradients between two steps so far on this rank, for example
            ``MyCallback.on_train_batch_end``, with the number of steps. The reads were exact; these steps waited. Empty
            in Fabric, whose loops have no such names.
        read_unseen: Names of parameters whose unseen reads began after the first step, on this rank, with the step in
            which that was found. In that step the reader had, or may have had, the previous step's weights; later steps
            wait.
        opened_for: What needed all updates at once so far on this rank, as it reads weights unseen or must not meet
            gates, for example ``torch.jit.trace`` or ``compiled MyModule.attend``, with the number of times.
        whole_steps: Why steps were not deferred although they overlap, with the number of steps so far on this rank.
            The cause came after the start of the fit, such as another optimizer, or code that keeps its state.
        held_elsewhere: Names of parameters whose memory other code can read, now or at the last step: a kept alias, a
            NumPy array, another process. They are updated in the step itself. Memory of their own (``p.data =
            p.data.clone()`` before the fit) keeps the overlap.
        batch_shares: Samples of a batch on each rank at present, if batches are balanced.
        waiting_saved_ms: Milliseconds that these shares save per step against equal ones; ``None`` if unknown.
        weighting: ``"samples"`` if gradients are weighted by samples, ``"ranks"`` if weights are equal.
        compressed: The codec by name of the parameter; empty without compression.
        compression_ratio: How many times fewer bytes travel for all gradients.
        placement: With parameter servers: bytes that this rank has pushed to each so far, and each one's intended
            share.
        deferred_share: Fraction of the updates so far on this rank that crossed the step boundary (0 to 1); ``None``
            before the first.
    """

    steps: Literal["overlapped", "synchronised"]
    reasons: tuple[str, ...] = ()
    gradients: Literal["all-reduce", "reduce-scatter"] = "all-reduce"
    norm_needed_by: tuple[str, ...] = ()
    gated_at_start: tuple[str, ...] = ()
    as_ddp: bool = False
    pace: str = ""
    early_readers: Mapping[str, int] = field(default_factory=dict)
    read_unseen: Mapping[str, int] = field(default_factory=dict)
    opened_for: Mapping[str, int] = field(default_factory=dict)
    whole_steps: Mapping[str, int] = field(default_factory=dict)
    held_elsewhere: tuple[str, ...] = ()
    batch_shares: tuple[int, ...] = ()
    waiting_saved_ms: float | None = None
    weighting: str = "ranks"
    compressed: Mapping[str, str] = field(default_factory=dict)
    compression_ratio: float = 1.0
    placement: Placement | None = None
    deferred_share: float | None = None

    @property
    def overlapped(self) -> bool:
        """Whether updates cross the step boundary."""
        return self.steps == "overlapped"

    def summary(self) -> str:
        """Return one line for the log."""
        if self.reasons == (ONE_RANK,):
            return f"{ONE_RANK}."
        if not self.overlapped:
            how = ", and taken as DDP takes them" if self.as_ddp and not self.compressed else ""
            return f"steps are synchronised{how}, because {'; '.join(self.reasons)}{self._besides()}."
        because = f", because {self.pace}" if self.pace else ""
        if self.as_ddp:
            return f"steps are {'' if self.compressed else 'taken '}{self._as_ddp}{because}{self._besides()}."
        line = f"steps overlap{because}: gradients travel under the backward and the next forward pass"
        if self.norm_needed_by:
            line += f"; reduce-scatter, norm, all-gather for {' and '.join(self.norm_needed_by)}"
        if self.gated_at_start:
            line += f"; {some_of(self.gated_at_start)} updated early, as reads of them cannot be seen"
        if self.held_elsewhere:
            line += f"; {some_of(self.held_elsewhere)} {_HELD}"
        return f"{line}{self._besides()}."

    @property
    def _as_ddp(self) -> str:
        return "synchronised" if self.compressed else "as DDP takes them"

    def _besides(self) -> str:
        return (f"; {_BY_SAMPLES}" if self.weighting == "samples" else "") + self._compressed("; ")

    def _compressed(self, before: str = "") -> str:
        if not self.compressed:
            return ""
        counts = Counter(self.compressed.values())
        what = " and ".join(f"{count} tensors in {codec}" for codec, count in counts.most_common())
        if set(counts) == {AUTO}:
            where = "with error feedback, as many of the first layers' as it takes"
            return f"{before}compressed {where}: up to {len(self.compressed)} tensors"
        return f"{before}compressed with error feedback: {what}, {self.compression_ratio:.3g} times fewer bytes"

    def __repr__(self) -> str:
        if self.reasons == (ONE_RANK,):
            return f"OverlapPlan(\n  {ONE_RANK}\n)"
        if self.overlapped:
            lines = [f"steps: {f'{self._as_ddp}, at present' if self.as_ddp else 'overlapped, except the first'}"]
        else:
            lines = [f"steps: synchronised{', as DDP takes them' if self.as_ddp and not self.compressed else ''}"]
        lines += [f"because {reason}" for reason in self.reasons]
        if self.pace:
            lines.append(f"because {self.pace}")
        if self.overlapped and not self.as_ddp:
            lines.append(
                f"gradients: {'all-reduce' if self.placement is None else 'push and pull'}"
                if self.gradients == "all-reduce"
                else f"gradients: reduce-scatter, norm, all-gather (for {' and '.join(self.norm_needed_by)})"
            )
        if self.weighting == "samples":
            lines.append(_BY_SAMPLES)
        if self.batch_shares:
            saved = "" if self.waiting_saved_ms is None else f", which saves {self.waiting_saved_ms:.3g} ms a step"
            lines.append(f"batches of {sum(self.batch_shares)} samples, by rank {self.batch_shares}{saved}")
        if self.compressed:
            lines.append(self._compressed())
        if self.placement is not None and self.placement.grouping:
            lines.append(self.placement.grouping)
        if self.placement is not None and any(self.placement.bytes_per_server):
            lines += str(self.placement).splitlines()
        if self.gated_at_start:
            lines.append(f"updated early: {some_of(self.gated_at_start)}")
        if self.held_elsewhere:
            lines.append(f"{some_of(self.held_elsewhere)} {_HELD}")
        if self.overlapped and self.deferred_share is not None and (self.deferred_share or not self.as_ddp):
            lines.append(f"so far {self.deferred_share:.0%} of the updates crossed the step boundary")
        lines += [f"{steps} steps were taken whole, because {why}" for why, steps in self.whole_steps.items()]
        lines += [f"waited for by {reader} in {_count(steps)}" for reader, steps in self.early_readers.items()]
        lines += [f"read unseen, and late, in step {step}: {name!r}" for name, step in self.read_unseen.items()]
        lines += [f"all updated at once for {what}, {times} times" for what, times in self.opened_for.items()]
        body = "\n".join(f"  {line}" for line in lines)
        return f"OverlapPlan(\n{body}\n)"


def _count(steps: int) -> str:
    return f"{steps} step" if steps == 1 else f"{steps} steps"


def optimizer_name(optimizer: Optimizer) -> str:
    """Return the name of ``optimizer`` for messages: its class, or that there is none."""
    name = type(optimizer).__name__
    return _NONE if name == _STAND_IN else name


def optimizer_reasons(optimizers: Sequence[Optimizer]) -> list[str]:
    """Return why steps of ``optimizers`` cannot be deferred, each with how to avoid it; empty if they can."""
    if len(optimizers) != 1:
        return [
            f"there are {len(optimizers)} optimizers (one optimizer with several parameter groups keeps the overlap)"
        ]
    optimizer = optimizers[0]
    if optimizer_name(optimizer) == _NONE:
        return ["there is no optimizer (configure_optimizers that returns one keeps the overlap)"]
    return [why + rest for why, rest in whole_steps_for(optimizer)]


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
    shown = {
        "compiled calls": compiled_calls_are_seen(),
        "who holds a tensor's memory": AliasDetector(()).works,
    }
    if hidden := [what for what, is_shown in shown.items() if not is_shown]:
        reasons.append(
            f"PyTorch {torch.__version__} does not show {' or '.join(hidden)} (a version that this package is tested "
            "with keeps the overlap)"
        )
    sparse = sparse_layers(model)
    if sparse:
        reasons.append(f"{sparse[0]!r} has sparse gradients (sparse=False keeps the overlap)")
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
        (parameter.data_ptr(), _end(parameter), name)
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and parameter.numel() and can_be_gated(parameter)
    )
    for (_, end, name), (start, _, other) in itertools.pairwise(ranges):
        if start < end:
            return name, other
    return None


def _end(parameter: nn.Parameter) -> int:
    reach = sum((size - 1) * stride for size, stride in zip(parameter.shape, parameter.stride(), strict=True))
    return parameter.data_ptr() + (reach + 1) * parameter.element_size()


def unseen_parameters(model: nn.Module) -> set[int]:
    """Return the ids of parameters that may be read without a touch; their steps are not deferred.

    These are parameters of scripted modules, whose code holds the memory itself, and parameters of other classes.
    :class:`~lightning_bytescheduler.ddp.reads.FirstUseObserver` finds those that show only at run time, and
    :class:`~lightning_bytescheduler.ddp.reads.AliasDetector` finds aliases.
    """
    scripted = (m for m in model.modules() if isinstance(m, torch.jit.ScriptModule))
    unseen = {id(p) for script in scripted for p in script.parameters()}
    return unseen | {id(p) for p in model.parameters() if not can_be_gated(p)}


def plan_of(
    module: nn.Module,
    reasons: Sequence[str],
    *,
    unseen: Iterable[int],
    held: Iterable[int],
    norm_needed_by: tuple[str, ...] = (),
) -> OverlapPlan:
    """Make this rank's plan.

    Args:
        module: The module that is trained.
        reasons: Why steps cannot overlap; empty if they can.
        unseen: Ids of parameters that may be read without a touch.
        held: Ids of parameters whose memory other code can read.
        norm_needed_by: What needs the norm of all gradients before an update.
    """
    if reasons:
        return OverlapPlan(steps="synchronised", reasons=tuple(reasons))
    return OverlapPlan(
        steps="overlapped",
        gradients="reduce-scatter" if norm_needed_by else "all-reduce",
        norm_needed_by=norm_needed_by,
        gated_at_start=names_of(module, unseen),
        held_elsewhere=names_of(module, held),
    )


def names_of(module: nn.Module, parameters: Iterable[int]) -> tuple[str, ...]:
    """Return the names of the parameters with these ids."""
    ids = set(parameters)
    return tuple(name for name, parameter in module.named_parameters() if id(parameter) in ids)


def precision_reasons(plugin: Precision, optimizers: Sequence[Optimizer]) -> list[str]:
    """Return why this plugin keeps steps from being deferred, each with how to avoid it; empty if it does not."""
    if not steps_plainly(plugin):
        return [
            f"{type(plugin).__name__} has an optimizer step or a loss scaler of its own "
            "(precision='16-mixed' or 'bf16-mixed' keeps the overlap)"
        ]
    if scales_losses(plugin) and any(getattr(o, "_step_supports_amp_scaling", False) for o in optimizers):
        return ["a fused optimizer unscales gradients in its step (fused=False keeps the overlap)"]
    return []


def norm_needed_by(module: pl.LightningModule, plugin: Precision) -> tuple[str, ...]:
    """Return what needs the norm of all gradients before an update, in words. The module has its trainer."""
    trainer = module.trainer
    needed = []
    if is_overridden("configure_gradient_clipping", module):
        needed.append("configure_gradient_clipping")  # it may clip by norm
    elif trainer.gradient_clip_val and trainer.gradient_clip_algorithm != GradClipAlgorithmType.VALUE:
        needed.append("gradient norm clipping")
    if scales_losses(plugin):
        needed.append("fp16 loss scaling")
    return tuple(needed)


def may_drop_gradients(module: pl.LightningModule) -> bool:
    """Whether user code may drop mean gradients before a step, by hand or in a hook. The module has its trainer."""
    own = ("backward", *_BEFORE_A_STEP, "configure_gradient_clipping", "optimizer_step")
    if not module.automatic_optimization or any(is_overridden(hook, module) for hook in own):
        return True
    callbacks: list[pl.Callback] = module.trainer.callbacks  # type: ignore[attr-defined]  # set by a connector
    return any(is_overridden(hook, each, pl.Callback) for hook in _BEFORE_A_STEP for each in callbacks)
