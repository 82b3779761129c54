"""Whether a fit is tuned, and from where: settled by rank 0, and known to all ranks, before the first step."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import replace

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import nn

from lightning_bytescheduler.callbacks.credit_tuner import CreditTuner
from lightning_bytescheduler.collectives.agreed_values import AgreedValues
from lightning_bytescheduler.gradients.runtime import AgreedSizes, SchedulerRuntime
from lightning_bytescheduler.scheduler.options import SchedulerOptions
from lightning_bytescheduler.strategies.point_in_force import PointInForce
from lightning_bytescheduler.tuning.identity import TuningIdentity
from lightning_bytescheduler.tuning.point import TuningPoint
from lightning_bytescheduler.tuning.search_space import SearchSpace

__all__ = ["begin_tuning", "say_untuned", "space_for"]


def begin_tuning(
    trainer: pl.Trainer,
    runtime: SchedulerRuntime,
    *,
    options: SchedulerOptions,
    agreed: AgreedSizes,
    parameters: Iterable[nn.Parameter],
    device: torch.device,
    tuner: CreditTuner | None,
    log_metrics: bool,
    on_change: Callable[[TuningPoint], None],
) -> bool:
    """Have this fit tuned, if rank 0's options say so. Every rank calls this at the same point.

    Args:
        trainer: Whose fit it is.
        runtime: What is tuned.
        options: This rank's; rank 0's count.
        agreed: Sizes without tuning.
        parameters: What is trained.
        device: Where the default group wants its tensors.
        tuner: This rank's; rank 0's decides.
        log_metrics: Whether trials are logged.
        on_change: Told what comes into force.

    Returns:
        Whether it is tuned.
    """
    sizes = agreed.sizes
    start = TuningPoint(credit=sizes.credit, partition_size=sizes.partition_size)
    tunes = options.tunes_credit or options.tunes_partition
    message = torch.tensor([tuner is not None and tunes, 0, 0], dtype=torch.int64)
    if not tunes and isinstance(tuner, CreditTuner) and dist.get_rank() == 0:
        say_untuned("sizes and mode are fixed, or credit_tuning is off")
    message = message.to(device)
    dist.broadcast(message, src=0)
    if not message[0].item():
        return False
    # Asked for on all ranks, as the answer travels on the default group.
    folder = trainer.log_dir if trainer.loggers else None
    if not trainer.loggers and os.path.abspath(trainer.default_root_dir) != os.getcwd():
        folder = trainer.default_root_dir
    on_rank_zero = tuner if dist.get_rank() == 0 else None
    if on_rank_zero is not None:
        trained = [p for p in parameters if p.requires_grad]
        width = max(p.element_size() for p in trained)
        count = sum(p.numel() for p in trained)
        first = on_rank_zero.begin(
            space=space_for(count, start, options, largest_bucket=max(sizes.bucket_bytes // width, 1)),
            start=start,
            identity=TuningIdentity(
                parameters=count,
                bytes_per_parameter=width,
                workers=dist.get_world_size(),
                backend=dist.get_backend(runtime.group),
                link=agreed.link,
            ),
            plain_ddp=options.mode == "auto",
            folder=folder,
            log_metrics=log_metrics,
        )
        message = torch.tensor([1, first.credit or 0, first.partition_size or 0], device=device)
    dist.broadcast(message, src=0)
    _, credit, partition_size = message.tolist()
    in_force = PointInForce(
        core=runtime.core,
        engine=runtime.engine,
        values=AgreedValues(2, device=device),
        point=TuningPoint(credit=credit or None, partition_size=partition_size or None),
        tuner=on_rank_zero,
        on_change=on_change,
    )
    runtime.engine.on_forward = in_force.before_forward
    return True


def space_for(
    parameters: int, start: TuningPoint, options: SchedulerOptions, *, largest_bucket: int
) -> SearchSpace:
    """Where to look, with what is not tuned kept as it is.

    Args:
        parameters: How many are trained.
        start: Sizes without tuning.
        options: What is tuned.
        largest_bucket: In parameters.
    """
    credit, partition_size = start.sizes
    space = SearchSpace.for_model(
        parameters,
        partition_size=None if options.tunes_partition else partition_size,
        largest_bucket=largest_bucket if options.tunes_partition else None,
    ).including(start)
    if options.tunes_credit:
        return space
    low, high = space.partitions
    return replace(space, credits=(credit, credit), partitions=(low, min(high, credit)))


def say_untuned(reason: str) -> None:
    """Say why a tuner that was asked for has nothing to do."""
    rank_zero_info(f"bytescheduler: nothing is tuned, as {reason}.")
