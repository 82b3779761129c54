"""What the strategy tells the user at the start of ``fit``: one line each, on rank 0."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence

from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from lightning_bytescheduler.gradients.mode_trial import ModeFound
from lightning_bytescheduler.gradients.runtime import AgreedSizes
from lightning_bytescheduler.scheduler.options import SchedulerOptions

__all__ = ["announce", "announce_mode", "reason_for", "say_unseen"]

log = logging.getLogger(__name__)

_NAMES_SHOWN = 3


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


def reason_for(found: ModeFound) -> str:
    """Say in a few words why steps are taken as they are.

    Args:
        found: What ranks have agreed on, and from what.
    """
    if not math.isnan(found.overlapped_s):
        return f"overlapped steps took {1e3 * found.overlapped_s:.1f} ms, steps as ddp's {1e3 * found.as_ddp_s:.1f} ms"
    if math.isfinite(found.exposed_s):
        return f"communication exposed {1e3 * found.exposed_s:.1f} of {1e3 * found.as_ddp_s:.1f} ms"
    return "it is not known what could be hidden"


def announce_mode(found: ModeFound) -> None:
    """Say which way steps are taken from here on, and why.

    Args:
        found: What ranks have agreed on, and from what.
    """
    way = "steps as ddp's" if found.as_ddp else "steps overlap"
    rank_zero_info(f"bytescheduler: {way}: {reason_for(found)}.")


def say_unseen(names: Sequence[str], step: int, *, certain: bool, rank: int) -> None:
    """Say loudly that weights were read where no gate sees it: a warning on rank 0, an error in the log elsewhere.

    Args:
        names: Of the parameters.
        step: In which it was found.
        certain: Whether they were the weights of the step before; else they may have been.
        rank: Of this process.
    """
    shown = ", ".join(map(repr, names[:_NAMES_SHOWN]))
    shown += f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    late = "had the weights of the step before" if certain else "may have had the weights of the step before"
    message = (
        f"bytescheduler: in step {step} {shown} {'was' if len(names) == 1 else 'were'} read by code that takes a "
        f"weight's memory past PyTorch's functions, for the first time after the first step: it {late}, and this "
        "training is not DDP's to the last bit. From here on their updates are waited for. To avoid it, hand such code "
        "weight.detach(), use it from the first step on, or train with cross_barrier=False."
    )
    if rank == 0:
        rank_zero_warn(message)
    else:
        log.error("rank %d: %s", rank, message)
