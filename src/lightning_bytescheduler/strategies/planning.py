"""Decides what can overlap, from what a fit is made of."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.utilities import GradClipAlgorithmType
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn
from torch.optim import Optimizer

from lightning_bytescheduler.collectives.operations import shards_over
from lightning_bytescheduler.gradients.eligibility import model_reasons, optimizer_reasons
from lightning_bytescheduler.strategies.plan import OverlapPlan
from lightning_bytescheduler.strategies.step_deferral import scales_losses, steps_plainly

__all__ = ["make_plan", "names_of", "norm_needed_by", "precision_reasons"]


def make_plan(
    module: pl.LightningModule,
    optimizers: Sequence[Optimizer],
    plugin: Precision,
    *,
    cross_barrier: bool,
    bucket_views: bool,
    group: dist.ProcessGroup,
    device: torch.device,
    unseen: Iterable[int] = (),
    held: Iterable[int] = (),
) -> OverlapPlan:
    """Decide for this rank.

    Args:
        module: What is trained.
        optimizers: All of them.
        plugin: Precision plugin.
        cross_barrier: The option.
        bucket_views: DDP's ``gradient_as_bucket_view``.
        group: The scheduler's data group.
        device: Where gradients live.
        unseen: Ids of parameters that may be read without a touch.
        held: Ids of parameters whose memory somebody else can read.
    """
    reasons = []
    if not cross_barrier:
        reasons.append("cross_barrier=False (leave it out to keep the overlap)")
    if not module.automatic_optimization:
        reasons.append("optimization is manual (automatic optimization keeps the overlap)")
    else:
        reasons += optimizer_reasons(optimizers)
    if not bucket_views:
        reasons.append(
            "gradient_as_bucket_view=False makes DDP copy gradients at the end of backward (leave it out to keep the "
            "overlap)"
        )
    reasons += precision_reasons(plugin, optimizers)
    reasons += model_reasons(module)
    needed_by = norm_needed_by(module, plugin)
    if needed_by and not shards_over(group, device):
        reasons.append(
            f"{' and '.join(needed_by)} on {device.type} needs all gradients before a step, and "
            f"{dist.get_backend(group)} cannot reduce in shards there (process_group_backend='nccl' keeps the overlap)"
        )
    if reasons:
        return OverlapPlan(steps="synchronised", reasons=tuple(reasons))
    return OverlapPlan(
        steps="overlapped",
        gradients="reduce-scatter" if needed_by else "all-reduce",
        norm_needed_by=needed_by,
        gated_at_start=names_of(module, unseen),
        held_elsewhere=names_of(module, held),
    )


def names_of(module: nn.Module, parameters: Iterable[int]) -> tuple[str, ...]:
    """Names of the parameters with these ids."""
    ids = set(parameters)
    return tuple(name for name, parameter in module.named_parameters() if id(parameter) in ids)


def precision_reasons(plugin: Precision, optimizers: Sequence[Optimizer]) -> list[str]:
    """Why steps cannot be deferred with this precision plugin; empty if they can. Each reason says how to avoid it."""
    if not steps_plainly(plugin):
        return [
            f"{type(plugin).__name__} has an optimizer step or a loss scaler of its own "
            "(precision='16-mixed' or 'bf16-mixed' keeps the overlap)"
        ]
    if scales_losses(plugin) and any(getattr(o, "_step_supports_amp_scaling", False) for o in optimizers):
        return ["a fused optimizer unscales gradients in its step (fused=False keeps the overlap)"]
    return []


def norm_needed_by(module: pl.LightningModule, plugin: Precision) -> tuple[str, ...]:
    """What needs to know the norm of all gradients before an update, in words. The module has its trainer."""
    trainer = module.trainer
    needed = []
    if is_overridden("configure_gradient_clipping", module):
        needed.append("configure_gradient_clipping")  # which may clip by norm
    elif trainer.gradient_clip_val and trainer.gradient_clip_algorithm != GradClipAlgorithmType.VALUE:
        needed.append("gradient norm clipping")
    if scales_losses(plugin):
        needed.append("fp16 loss scaling")
    return tuple(needed)
