"""Decides what is overlapped in a fit, what is not, and why; ``strategy.plan`` shows it."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_bytescheduler.checks import some_of
from lightning_bytescheduler.ddp.aliases import AliasDetector
from lightning_bytescheduler.ddp.compiled_calls import compiled_calls_are_seen
from lightning_bytescheduler.ddp.compression_rules import AUTO
from lightning_bytescheduler.ddp.deferred_optimizer import scales_losses, steps_plainly
from lightning_bytescheduler.ddp.gates import can_be_gated
from lightning_bytescheduler.ddp.partial_step import whole_steps_for
from lightning_bytescheduler.ddp.sparse_gradients import sparse_layers
from lightning_bytescheduler.lightning_api import GradClipAlgorithmType, Precision, is_overridden, pl
from lightning_bytescheduler.scheduler.placement import Placement

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
    :class:`~lightning_bytescheduler.ddp.gates.FirstUseObserver` finds those that show only at run time, and
    :class:`~lightning_bytescheduler.ddp.aliases.AliasDetector` finds aliases.
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
