"""Draws what ByteScheduler is worth around a network: over bandwidth, for its workers and for more of them.

Needs matplotlib, which is imported when a picture is drawn.
"""

from __future__ import annotations

import os
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from lightning_bytescheduler.checks import importing, require_suffix
from lightning_bytescheduler.exceptions import OptionError
from lightning_bytescheduler.simulation.bounds import lower_bound
from lightning_bytescheduler.simulation.link import LinkModel, network_in_words
from lightning_bytescheduler.simulation.prediction import best_ddp, best_scheduled
from lightning_bytescheduler.simulation.profiles import ModelProfile

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["bandwidths_around", "draw_prediction", "workers_around"]

_POINTS = 10  # on either side of the given bandwidth
_COLOURS = ("#3f86d1", "#e58f2a", "#2e8b57", "#8456b5", "#d7263d")
_INK, _WARNING = "#26323d", "#c2185b"
_NAME_LENGTH, _LINE_LENGTH = 40, 108  # letters


def workers_around(workers: int) -> tuple[int, ...]:
    """The given number of workers, and 4 and 16 times as many."""
    return workers, 4 * workers, 16 * workers


def bandwidths_around(bandwidth: float) -> tuple[float, ...]:
    """From a tenth of a bandwidth to ten times as much; it is the one in the middle."""
    return tuple(bandwidth * 10 ** (exponent / _POINTS) for exponent in range(-_POINTS, _POINTS + 1))


def draw_prediction(
    profile: ModelProfile,
    link: LinkModel,
    out: str | os.PathLike[str],
    *,
    workers: Sequence[int] = (),
    bandwidths: Sequence[float] = (),
) -> None:
    """Draw the speed-up over DDP, and how fast all workers are against one alone, over bandwidth. The link is marked.

    Args:
        profile: The model.
        link: The network; where the number of workers is replaced, spare servers are kept in proportion.
        out: The file to write. Its suffix names the format (png, svg, pdf, ...); parent directories are
            created.
        workers: A line for each, up to five; by default the link's, 4 and 16 times as many.
        bandwidths: Bytes per second; by default from a tenth to ten times the link's.

    Raises:
        ImportError: If matplotlib is not installed; the message names the extra to install.
        OptionError: If matplotlib does not know the suffix of ``out``, there are too many ``workers``, or a
            link cannot be.
        OSError: If ``out`` cannot be written.
    """
    with importing("Drawing a prediction", extra="plots"):
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.lines import Line2D
        from matplotlib.ticker import LogLocator, MaxNLocator
    counts, rates = (
        tuple(workers) or workers_around(link.workers),
        tuple(bandwidths) or bandwidths_around(link.bandwidth),
    )
    if len(counts) > len(_COLOURS):
        raise OptionError("workers", workers, f"{len(_COLOURS)} numbers at most")
    figure = Figure(figsize=(11.5, 5.4), layout="constrained")
    target = require_suffix("out", out, FigureCanvasAgg(figure).get_supported_filetypes())
    gain, speed = figure.subplots(1, 2)
    unit, bits = ("Gbit/s", 1e9) if link.bandwidth * 8 >= 1e9 else ("Mbit/s", 1e6)
    scaled = [rate * 8 / bits for rate in rates]
    lines = [
        # The later, the thinner, so that lines on top of each other are all seen.
        (count, colour, 4.4 - 2.8 * index / max(len(counts) - 1, 1))
        for index, (count, colour) in enumerate(zip(counts, _COLOURS, strict=False))
    ]
    for count, colour, width in lines:
        of_count = replace(link, workers=count, servers=link.servers * count // link.workers)
        points = [_Point.of(profile, replace(of_count, bandwidth=rate)) for rate in rates]
        gain.plot(scaled, [p.ddp / p.scheduled for p in points], color=colour, linewidth=width)
        gain.plot(scaled, [p.ddp / p.bound for p in points], color=_INK, linewidth=1, linestyle=":")
        # Per worker, so that lines of any number of workers can be compared.
        speed.plot(scaled, [p.compute / p.scheduled for p in points], color=colour, linewidth=width)
        speed.plot(scaled, [p.compute / p.ddp for p in points], color=colour, linewidth=1.4, linestyle="--")
    here = _Point.of(profile, link)
    at = link.bandwidth * 8 / bits
    for ax, value, words in (
        (gain, here.ddp / here.scheduled, f"{here.ddp / here.scheduled:.2f}x"),
        (speed, here.compute / here.scheduled, f"{here.compute / here.scheduled:.0%}"),
    ):
        ax.axvline(at, color=_INK, linewidth=0.8, alpha=0.4)
        ax.plot([at], [value], marker="o", markersize=10, color=lines[0][1], markeredgecolor=_INK, zorder=5)
        ax.annotate(
            words,
            (at, value),
            xytext=(-8, 8),  # curves rise to the right
            textcoords="offset points",
            ha="right",
            fontsize=12,
            weight="bold",
            color=_INK,
        )
    if link.workers > 1:
        slowest = _Point.of(profile, replace(link, bandwidth=min(rates)))
        worth_it = link.workers * slowest.compute > slowest.scheduled
        _mark_one_worker(speed, link.workers, worth_it_everywhere=worth_it)
    gain.set_title("How many times as fast as ddp with its best buckets", loc="left", color=_INK)
    speed.set_title("Share of a step that computes, rather than waits", loc="left", color=_INK)
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
        ax.grid(True, which="major", color="#dde3e8", linewidth=0.8)
        ax.spines[["top", "right"]].set_visible(False)
    figure.suptitle(_heading(profile, link, here), x=0.01, ha="left", fontsize=12.5, weight="bold", color=_INK)
    handles = [
        Line2D([], [], color=colour, linewidth=width, label=f"{count:,} worker{'s' if count > 1 else ''}")
        for count, colour, width in lines
    ]
    handles += [
        Line2D([], [], color=_INK, linestyle="-", label="bytescheduler"),
        Line2D([], [], color=_INK, linestyle="--", label="ddp"),
        Line2D([], [], color=_INK, linestyle=":", label="no order can do better"),
        Line2D([], [], color=lines[0][1], marker="o", markeredgecolor=_INK, linestyle="", label="this network"),
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, dpi=110)


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


def _heading(profile: ModelProfile, link: LinkModel, here: _Point) -> str:
    """What the picture shows at the link; and of what."""
    name = profile.name if len(profile.name) <= _NAME_LENGTH else f"{profile.name[: _NAME_LENGTH - 1]}…"
    gain = here.ddp / here.scheduled
    if link.workers == 1:
        found = "One worker has nobody to talk to: nothing to gain"
    else:
        times = f"{gain:.2f}x as fast as ddp" if gain >= 1.005 else "as fast as ddp"
        speed = link.workers * here.compute / here.scheduled
        if speed < 1:
            found = (
                f"Train on one machine: {link.workers:,} workers are slower ({speed:.2f}x); bytescheduler is {times}"
            )
        else:
            found = f"bytescheduler is {times}; {link.workers:,} workers are {speed:.2f}x as fast as one"
    details = (
        f"{name} ({profile.parameter_bytes / 1e6:,.4g} MB of gradients, a step computes "
        f"{profile.compute_seconds * 1e3:,.4g} ms); {network_in_words(link)}, {_reduced_by(link)}"
    )
    return "\n".join([found, *textwrap.wrap(details, _LINE_LENGTH)])


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


def _reduced_by(link: LinkModel) -> str:
    return "parameter servers" if link.architecture == "ps" else link.algorithm.replace("_", " ")
