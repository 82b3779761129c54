"""Draws what ByteScheduler is worth over bandwidth, for several numbers of workers.

Needs matplotlib, which is imported when a picture is drawn.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

from lightning_bytescheduler.checks import require_suffix
from lightning_bytescheduler.exceptions import OptionError
from lightning_bytescheduler.simulation.bounds import lower_bound
from lightning_bytescheduler.simulation.link import LinkModel
from lightning_bytescheduler.simulation.prediction import best_ddp, best_scheduled
from lightning_bytescheduler.simulation.profiles import ModelProfile

__all__ = ["BANDWIDTHS", "WORKERS", "draw_prediction"]

WORKERS = (4, 256, 4096)
BANDWIDTHS = tuple(10 ** (9 + exponent / 12) / 8 for exponent in range(25))
"""Bytes per second: 1 to 100 Gbit/s."""

_COLOURS = ("#3f86d1", "#e58f2a", "#2e8b57", "#8456b5", "#d7263d")
_INK = "#26323d"


def draw_prediction(
    profile: ModelProfile,
    link: LinkModel,
    out: str | os.PathLike[str],
    *,
    workers: Sequence[int] = WORKERS,
    bandwidths: Sequence[float] = BANDWIDTHS,
) -> None:
    """Draw the speed-up over DDP, and the share of a step that computes, over bandwidth.

    Args:
        profile: The model.
        link: The network; its bandwidth and number of workers are replaced, and spare servers kept in proportion.
        out: The file to write. Its suffix names the format (png, svg, pdf, ...); parent directories are
            created.
        workers: A line for each; up to five.
        bandwidths: Bytes per second.

    Raises:
        ImportError: If matplotlib is not installed; the message names the extra to install.
        OptionError: If matplotlib does not know the suffix of ``out``, there are too many ``workers``, or a
            link cannot be.
        OSError: If ``out`` cannot be written.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.lines import Line2D
    except ImportError as error:
        raise ImportError(
            "Drawing a prediction needs matplotlib: pip install 'lightning-bytescheduler[plots]'."
        ) from error
    if not 1 <= len(workers) <= len(_COLOURS):
        raise OptionError("workers", workers, f"1 to {len(_COLOURS)} numbers")
    figure = Figure(figsize=(11.5, 4.8), layout="constrained")
    target = require_suffix("out", out, FigureCanvasAgg(figure).get_supported_filetypes())
    gain, share = figure.subplots(1, 2)
    gigabits = [bandwidth * 8 / 1e9 for bandwidth in bandwidths]
    lines = [
        # The later, the thinner, so that lines on top of each other are all seen.
        (count, colour, 4.4 - 2.8 * index / max(len(workers) - 1, 1))
        for index, (count, colour) in enumerate(zip(workers, _COLOURS, strict=False))
    ]
    for count, colour, width in lines:
        spare = link.spare_servers * count // link.workers
        of_count = replace(link, workers=count, spare_servers=spare)
        points = [_Point.of(profile, replace(of_count, bandwidth=bandwidth)) for bandwidth in bandwidths]
        gain.plot(gigabits, [p.ddp / p.scheduled for p in points], color=colour, linewidth=width)
        gain.plot(gigabits, [p.ddp / p.bound for p in points], color=_INK, linewidth=1, linestyle=":")
        share.plot(gigabits, [p.compute / p.scheduled for p in points], color=colour, linewidth=width)
        share.plot(gigabits, [p.compute / p.ddp for p in points], color=colour, linewidth=1.4, linestyle="--")
    gain.set_title("Speed-up over DDP with its best buckets", loc="left", color=_INK)
    share.set_title("Share of a step that computes", loc="left", color=_INK)
    gain.set_ylim(bottom=1.0 - 0.03 * (gain.get_ylim()[1] - 1.0))
    share.set_ylim(0, 1.03)
    gain.yaxis.set_major_formatter("{x:.2f}x")
    share.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    for ax in (gain, share):
        ax.set_xscale("log")
        ax.set_xlabel("bandwidth of each worker's link (Gbit/s)")
        ax.xaxis.set_major_formatter("{x:g}")
        ax.grid(True, which="major", color="#dde3e8", linewidth=0.8)
        ax.spines[["top", "right"]].set_visible(False)
    figure.suptitle(
        f"{profile.name}: {profile.parameter_bytes / 1e6:,.0f} MB of gradients, "
        f"a step computes {profile.compute_seconds * 1e3:,.4g} ms, {link.algorithm}, {link.latency * 1e6:g} µs a hop",
        x=0.01,
        ha="left",
        fontsize=14,
        weight="bold",
        color=_INK,
    )
    handles = [
        Line2D([], [], color=colour, linewidth=width, label=f"{count:,} workers") for count, colour, width in lines
    ]
    handles += [
        Line2D([], [], color=_INK, linestyle="-", label="bytescheduler"),
        Line2D([], [], color=_INK, linestyle="--", label="ddp"),
        Line2D([], [], color=_INK, linestyle=":", label="no order can do better"),
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, dpi=110)


@dataclass(frozen=True, slots=True)
class _Point:
    compute: float
    ddp: float
    scheduled: float
    bound: float

    @classmethod
    def of(cls, profile: ModelProfile, link: LinkModel) -> _Point:
        return cls(
            profile.compute_seconds,
            best_ddp(profile, link).step_seconds,
            best_scheduled(profile, link).step_seconds,
            lower_bound(profile, link),
        )
