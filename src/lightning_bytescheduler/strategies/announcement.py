"""What the strategy tells the user at the start of ``fit``: one line each, on rank 0."""

from __future__ import annotations

import logging

from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from lightning_bytescheduler.gradients.runtime import AgreedSizes
from lightning_bytescheduler.scheduler.options import SchedulerOptions

__all__ = ["announce", "announce_mode"]


def announce(options: SchedulerOptions, agreed: AgreedSizes, world_size: int) -> None:
    """Say which sizes are used and why, what was ignored or clamped, and switch on the debug log.

    Args:
        options: This rank's options.
        agreed: What holds on all ranks.
        world_size: Number of ranks.
    """
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
    link = ""
    if agreed.link is not None:
        link = f"; all-reduce at {1e-6 / agreed.link.beta:.0f} MB/s after {1e3 * agreed.link.alpha:.2f} ms"
    rank_zero_info(
        f"bytescheduler: {world_size} ranks, partitions of {sizes.partition_size:,} parameters, "
        f"credit {sizes.credit:,}, buckets of {sizes.bucket_bytes / 1e6:.2f} MB{link}."
    )
    if options.debug:
        logger = logging.getLogger("lightning_bytescheduler")
        logger.setLevel(logging.DEBUG)
        if not logger.handlers:
            logger.addHandler(logging.StreamHandler())


def announce_mode(as_ddp: bool, overlapped_s: float, as_ddp_s: float) -> None:
    """Say which way of stepping was faster.

    Args:
        as_ddp: Whether steps are taken as DDP does from here on.
        overlapped_s: Typical step with updates that cross the step boundary, in seconds.
        as_ddp_s: Typical step as DDP's, in seconds.
    """
    measured = f"overlapped steps took {1e3 * overlapped_s:.1f} ms, steps as DDP's {1e3 * as_ddp_s:.1f} ms"
    if as_ddp:
        rank_zero_info(
            f"bytescheduler: steps are taken as DDP does from here on, as {measured}: there is nothing to hide. "
            "mode='overlapped' leaves this out."
        )
    else:
        rank_zero_info(f"bytescheduler: steps stay overlapped, as {measured}.")
