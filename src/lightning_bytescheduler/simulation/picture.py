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
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["Point", "draw_curves"]

_COLOURS = ("#3f86d1", "#e58f2a", "#2e8b57", "#8456b5", "#d7263d")
_WARNING = "#c2185b"
_LINE_LENGTH = 108  # letters


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
    """Draw the speed-up over DDP, and how fast all workers are against one alone, over bandwidth.

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
    with page(out, "Drawing a prediction", 11.5, 5.4) as figure:
        _draw(figure, curves, workers, here, subject)


def _draw(figure: Figure, curves: Mapping[int, Iterable[Point]], workers: int, here: Point, subject: str) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.ticker import LogLocator, MaxNLocator

    gain, speed = figure.subplots(1, 2)
    unit, bits = ("Gbit/s", 1e9) if here.bandwidth * 8 >= 1e9 else ("Mbit/s", 1e6)
    handles, slowest = [], here.scheduled
    for index, (count, curve) in enumerate(curves.items()):
        points = list(curve)
        slowest = max(slowest, points[0].scheduled)
        # The later, the thinner, so that lines on top of each other are all seen.
        colour, width = _COLOURS[index], 4.4 - 2.8 * index / max(len(curves) - 1, 1)
        rates = [point.bandwidth * 8 / bits for point in points]
        gain.plot(rates, [p.ddp / p.scheduled for p in points], color=colour, linewidth=width)
        gain.plot(rates, [p.ddp / p.bound for p in points], color=INK, linewidth=1, linestyle=":")
        # Per worker, so that lines of any number of workers can be compared.
        speed.plot(rates, [1 / p.scheduled for p in points], color=colour, linewidth=width)
        speed.plot(rates, [1 / p.ddp for p in points], color=colour, linewidth=1.4, linestyle="--")
        handles.append(
            Line2D([], [], color=colour, linewidth=width, label=f"{count:,} worker{'s' if count > 1 else ''}")
        )
    at = here.bandwidth * 8 / bits
    for ax, value, words in (
        (gain, here.ddp / here.scheduled, f"{here.ddp / here.scheduled:.2f}x"),
        (speed, 1 / here.scheduled, f"{1 / here.scheduled:.0%}"),
    ):
        ax.axvline(at, color=INK, linewidth=0.8, alpha=0.4)
        ax.plot([at], [value], marker="o", markersize=10, color=_COLOURS[0], markeredgecolor=INK, zorder=5)
        ax.annotate(
            words,
            (at, value),
            xytext=(-8, 8),  # curves rise to the right
            textcoords="offset points",
            ha="right",
            fontsize=12,
            weight="bold",
            color=INK,
        )
    _mark_one_worker(speed, workers, worth_it_everywhere=workers > slowest)
    gain.set_title("How many times as fast as ddp with its best buckets", loc="left", color=INK)
    speed.set_title("Share of a step that computes, rather than waits", loc="left", color=INK)
    highest = max(gain.get_ylim()[1], 1.1)
    gain.set_ylim(1.0 - 0.03 * (highest - 1.0), highest + 0.08 * (highest - 1.0))
    speed.set_ylim(0, 1.09)
    gain.yaxis.set_major_locator(MaxNLocator(7, steps=[1, 2, 5, 10]))
    gain.yaxis.set_major_formatter("{x:.2f}x")
    speed.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    for ax in (gain, speed):
        ax.set_xscale("log")
        ax.set_xlabel(f"bandwidth of each worker's link ({unit})")
        ax.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        ax.xaxis.set_major_formatter(lambda value, _: f"{value:,g}")
        ax.xaxis.set_minor_formatter("")
        ruled(ax)
    heading = "\n".join([_found(workers, here), *textwrap.wrap(subject, _LINE_LENGTH)])
    headed(figure, heading, 12.5)
    handles += [
        Line2D([], [], color=INK, linestyle="-", label="bytescheduler"),
        Line2D([], [], color=INK, linestyle="--", label="ddp"),
        Line2D([], [], color=INK, linestyle=":", label="no order can do better"),
        Line2D([], [], color=_COLOURS[0], marker="o", markeredgecolor=INK, linestyle="", label="this network"),
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)


def _mark_one_worker(ax: Axes, workers: int, *, worth_it_everywhere: bool) -> None:
    """Where so many workers are as fast as one alone: below, they are not worth it."""
    ax.axhline(1 / workers, color=_WARNING, linewidth=1, linestyle=(0, (6, 4)))
    ax.text(
        0.992 if worth_it_everywhere else 0.008,  # away from the curves, which rise to the right
        1 / workers + 0.008,
        f"1/{workers:,}: {workers:,} workers are as fast as one alone",
        transform=ax.get_yaxis_transform(),
        ha="right" if worth_it_everywhere else "left",
        va="bottom",
        fontsize=9,
        color=_WARNING,
    )


def _found(workers: int, here: Point) -> str:
    gain, speed = here.ddp / here.scheduled, workers / here.scheduled
    times = f"{gain:.2f}x as fast as ddp" if gain >= 1.005 else "as fast as ddp"
    if speed < 1:
        return f"Train on one machine: {workers:,} workers are slower ({speed:.2f}x); bytescheduler is {times}"
    return f"bytescheduler is {times}; {workers:,} workers are {speed:.2f}x as fast as one"
