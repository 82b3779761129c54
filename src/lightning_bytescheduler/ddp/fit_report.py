"""What the user is told of a fit, on rank 0: one line for each decision, and one at the end.

A line has the figures that a decision was made from, and can be read by somebody who does not know this package's
words. Whoever has nothing to schedule gets one line that says so.
"""

from __future__ import annotations

import logging
import math

from lightning_bytescheduler.ddp.agreed_sizes import AgreedSizes
from lightning_bytescheduler.ddp.compressed_reduction import GradientCompression
from lightning_bytescheduler.ddp.ddp_mode import ModeFound
from lightning_bytescheduler.ddp.plan import OverlapPlan
from lightning_bytescheduler.ddp.statistics import SchedulerStatistics
from lightning_bytescheduler.lightning_api import rank_zero_info, rank_zero_warn
from lightning_bytescheduler.scheduler.options import POLICIES, SchedulerOptions, SchedulingPolicy, policy_of
from lightning_bytescheduler.tuning.default_sizes import LinkEstimate

__all__ = ["announce", "codec_cost", "first_pace", "reason_for", "say_found", "say_if_tiny", "say_start", "summary_of"]

_FAR = (
    "Messages are long under way, so each rank's share of a part goes straight to it, and its sum straight to all; "
    "what is urgent overtakes on connections of its own. "
)
_TUNED = " How much travels at once is tuned while training."
_BYTESCHEDULER = policy_of(POLICIES[0])
_TINY = 1024  # parameters
_CODEC_THREADS = 2  # one encodes while another adds up and decodes
_WORTH_A_LINE = 0.1  # of all steps: fewer overlapped ones were trials, of which was told already


def announce(options: SchedulerOptions, agreed: AgreedSizes) -> None:
    """Say what was ignored or clamped, and switch on the debug log.

    Args:
        options: This rank's options.
        agreed: What holds on all ranks.
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
    """Say how the steps of a fit begin.

    Args:
        plan: As decided.
        agreed: What holds on all ranks.
        world_size: Number of ranks that train together.
        nbytes: Of all gradients.
        tuned: Whether sizes are tuned from the start.
        policy: In force.
        compression: Of gradients, if there is any.
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
    facts = f"{world_size} ranks{_link_in_words(agreed, nbytes)}. " if plan.overlapped else ""
    sizes = ""
    if plan.overlapped and not plan.as_ddp:
        used = agreed.sizes
        sizes = f" {policy.in_words.format(partition_size=used.partition_size, credit=used.credit)}"
    steps = plan.summary()
    if facts:
        steps = steps[0].upper() + steps[1:]
    if agreed.far:
        facts += _FAR
    rank_zero_info(f"bytescheduler: {facts}{steps}{sizes}{_TUNED if tuned else ''}")


def say_found(found: ModeFound, *, stays: bool, tuned: bool, compressed: bool = False) -> None:
    """Say which way steps are taken from here on, and why.

    Args:
        found: What ranks have agreed on, and from what.
        compressed: Whether gradients travel compressed, which DDP's do not.
        stays: Whether they are taken like that already.
        tuned: Whether sizes are tuned from here on.
    """
    as_ddp = "synchronised, with compressed gradients" if compressed else "as DDP takes them"
    way = as_ddp if found.ddp_mode else "overlapped"
    when = "stay" if stays else "are from here on"
    rank_zero_info(f"bytescheduler: steps {when} {way}: {reason_for(found)}.{_TUNED if tuned else ''}")


def _link_in_words(agreed: AgreedSizes, nbytes: int) -> str:
    """What the link can do, where that was measured."""
    link = agreed.link
    if link is None:
        return ""
    return (
        f", all-reduce at {1e-6 / link.beta:.0f} MB/s after {1e3 * link.alpha:.2f} ms: "
        f"{_ms(link.seconds(nbytes))} ms for all gradients ({nbytes / 1e6:.3g} MB)"
    )


def first_pace(mode: str, *, slow: bool, tuned: bool) -> str:
    """Why steps begin as they do, in a few words.

    Args:
        mode: The option, as rank 0 has it.
        slow: Whether the link is known to be slow for the model.
        tuned: Whether sizes are tuned from the start.
    """
    if mode != "auto":
        return f"mode={mode!r}"
    if slow:
        return "the link is slow for this model"
    if tuned:
        return "tuning begins with them"
    return "nothing has been measured yet; overlap is tried if training is seen to wait for gradients"


def reason_for(found: ModeFound) -> str:
    """Say in a few words why steps are taken as they are.

    Args:
        found: What ranks have agreed on, and from what.
    """
    if found.compared:
        overlapped, as_ddp = f"{_ms(found.overlapped_s)} ms", f"{_ms(found.ddp_mode_s)} ms"
        if not found.ddp_mode:
            return f"overlapped steps are fastest so far ({overlapped} against {as_ddp} synchronised)"
        if found.overlapped_s < found.ddp_mode_s:
            return f"overlapped steps are hardly faster ({overlapped} against {as_ddp} synchronised)"
        return f"synchronised steps are fastest so far ({as_ddp} against {overlapped} overlapped)"
    if math.isfinite(found.exposed_s):
        so = "overlap is tried soon" if found.to_be_tried else "too little"
        return f"{_ms(found.exposed_s)} ms of a step's {_ms(found.ddp_mode_s)} ms could be hidden: {so}"
    return "it is not known what could be hidden"


def summary_of(statistics: SchedulerStatistics, finding: str) -> str | None:
    """One line for the end of a fit; ``None`` where hardly a step overlapped.

    Args:
        statistics: Counters of the fit.
        finding: What was found to be fastest, if that was measured.
    """
    steps, overlapped = statistics.steps, statistics.overlapped_steps
    compressed = _compression_in_words(statistics)
    if not overlapped or overlapped < _WORTH_A_LINE * steps:
        return f"{steps} steps; {compressed}." if compressed else None
    line = f"{steps} steps, {overlapped} of them overlapped; training waited {statistics.exposed_ms:.1f} ms a step for "
    line += "gradients"
    if compressed:
        line += f"; {compressed}"
    return f"{line}; {finding}." if finding else f"{line}."


def _compression_in_words(statistics: SchedulerStatistics) -> str:
    """What compression has saved, and what it took; empty where nothing was compressed."""
    if not statistics.codec_s or not statistics.steps:
        return ""
    return (
        f"{statistics.bytes_sent / 1e6:.3g} MB of gradients sent instead of {statistics.bytes_uncompressed / 1e6:.3g}, "
        f"{statistics.compression_ratio:.3g} times fewer, as "
        f"{statistics.compressed_share:.0%} travelled compressed; codecs took "
        f"{_ms(statistics.codec_s / statistics.steps)} ms of a step, beside the training"
    )


def codec_cost(statistics: SchedulerStatistics, link: LinkEstimate | None, ranks: int) -> str:
    """What to say where codecs take longer than the link would for the bytes that they save; empty elsewhere.

    Args:
        statistics: Counters of the fit so far.
        link: As it was measured, if it was.
        ranks: How many there are.
    """
    if link is None or not statistics.steps:
        return ""
    codecs = statistics.codec_s / _CODEC_THREADS
    sent_per_byte = 2 * (ranks - 1) / ranks  # of what is all-reduced, as the link was measured
    saved = link.beta * (statistics.bytes_uncompressed - statistics.bytes_sent) / sent_per_byte
    if codecs <= saved:
        return ""
    return (
        "compression makes steps slower on this link: codecs take "
        f"{_ms(codecs / statistics.steps)} ms of a step, and the bytes that they save would travel in "
        f"{_ms(max(saved, 0.0) / statistics.steps)} ms. Leave compression out here."
    )


def _ms(seconds: float) -> str:
    """Milliseconds, with the digits that matter."""
    milliseconds = 1e3 * seconds
    return f"{milliseconds:.0f}" if milliseconds >= 100 else f"{milliseconds:.1f}"


def say_if_tiny(**sizes: int | None) -> None:
    """Somebody may have meant megabytes."""
    for option, size in sizes.items():
        if size is not None and size < _TINY:
            rank_zero_info(
                f"bytescheduler: {option}={size} is in parameters: {4 * size:,} bytes of fp32 at a time, which is "
                f"slow. {size} MB of fp32 = {size * 250_000:,} parameters."
            )
