"""Draws what ByteScheduler is worth around a network: over bandwidth, for its workers and for more of them.

Needs matplotlib, which is imported when a picture is drawn.
"""

from __future__ import annotations

import os
import textwrap
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, NamedTuple

from lightning_bytescheduler.exceptions import OptionError
from lightning_bytescheduler.timeline.page import INK, headed, page, ruled

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Point", "draw_curves"]

_COLOURS = ("#3f86d1", "#e58f2a", "#2e8b57", "#8456b5", "#d7263d")
_LINE_LENGTH = 84  # letters


class Point(NamedTuple):
    """What a network makes of a step, in units of the time that it takes to compute.

    Attributes:
        bandwidth: Bytes per second.
        ddp: A step of ``ddp``, with its best buckets.
        scheduled: A step of ``bytescheduler``.
        bound: What no order gets below.
    """

    bandwidth: float
    ddp: float
    scheduled: float
    bound: float


def draw_curves(
    curves: Mapping[int, Iterable[Point]], workers: int, here: Point, subject: str, out: str | os.PathLike[str]
) -> None:
    """Draw the speed-up over DDP over bandwidth.

    Args:
        curves: By number of workers, up to five, from the lowest bandwidth on; computed as they are drawn.
        workers: Of the network that is marked.
        here: That network.
        subject: The model and the network, in words.
        out: The file to write. Its suffix names the format (png, svg, pdf, ...); parent directories are created.

    Raises:
        ImportError: If matplotlib is not installed; the message names the extra to install.
        OptionError: If matplotlib does not know the suffix of ``out``, or there are too many curves.
        OSError: If ``out`` cannot be written.
    """
    if len(curves) > len(_COLOURS):
        raise OptionError("workers", list(curves), f"{len(_COLOURS)} numbers at most")
    with page(out, "Drawing a prediction", 9.5, 5.4) as figure:
        _draw(figure, curves, workers, here, subject)


def _draw(figure: Figure, curves: Mapping[int, Iterable[Point]], workers: int, here: Point, subject: str) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.ticker import LogLocator

    ax = figure.subplots()
    unit, bits = ("Gbit/s", 1e9) if here.bandwidth * 8 >= 1e9 else ("Mbit/s", 1e6)
    for index, (count, curve) in enumerate(curves.items()):
        points = list(curve)
        # The later, the thinner, so that lines on top of each other are all seen.
        width = 4.4 - 2.8 * index / max(len(curves) - 1, 1)
        rates = [point.bandwidth * 8 / bits for point in points]
        label = f"{count:,} worker{'s' if count > 1 else ''}"
        ax.plot(rates, [p.ddp / p.scheduled for p in points], color=_COLOURS[index], linewidth=width, label=label)
        ax.plot(rates, [p.ddp / p.bound for p in points], color=INK, linewidth=1, linestyle=":")
    at, gain = here.bandwidth * 8 / bits, here.ddp / here.scheduled
    ax.axvline(at, color=INK, linewidth=0.8, alpha=0.4)
    ax.plot([at], [gain], "o", markersize=10, color=_COLOURS[0], markeredgecolor=INK, label="this network", zorder=5)
    ax.annotate(
        f"{gain:.2f}x",
        (at, gain),
        xytext=(-8, 8),  # curves rise to the right
        textcoords="offset points",
        ha="right",
        fontsize=12,
        weight="bold",
        color=INK,
    )
    ax.set_title("How many times as fast as ddp with its best buckets", loc="left", color=INK)
    highest = max(ax.get_ylim()[1], 1.1)
    ax.set_ylim(1.0 - 0.03 * (highest - 1.0), highest + 0.08 * (highest - 1.0))
    ax.yaxis.set_major_formatter("{x:.2f}x")
    ax.set_xscale("log")
    ax.set_xlabel(f"bandwidth of each worker's link ({unit})")
    ax.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    ax.xaxis.set_major_formatter(lambda value, _: f"{value:,g}")
    ax.xaxis.set_minor_formatter("")
    ruled(ax)
    headed(figure, "\n".join([_found(workers, here), *textwrap.wrap(subject, _LINE_LENGTH)]), 12.5)
    handles = [
        *ax.get_legend_handles_labels()[0],
        Line2D([], [], color=INK, linestyle=":", label="no order can do better"),
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)


def _found(workers: int, here: Point) -> str:
    gain, speed = here.ddp / here.scheduled, workers / here.scheduled
    times = f"{gain:.2f}x as fast as ddp" if gain >= 1.005 else "as fast as ddp"
    if speed < 1:
        return f"Train on one machine: {workers:,} workers are slower ({speed:.2f}x); bytescheduler is {times}"
    return f"bytescheduler is {times}; {workers:,} workers are {speed:.2f}x as fast as one"
