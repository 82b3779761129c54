"""Draws the strategies on the network that was asked about, and what other networks would bring.

Needs matplotlib, which is imported when a picture is drawn.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING

from lightning_bytescheduler.advice.expectations import ALONE, DDP, AdviceFigures, exact_steps
from lightning_bytescheduler.checks import importing, require_suffix
from lightning_bytescheduler.simulation.link import network_in_words
from lightning_bytescheduler.simulation.picture import bandwidths_around, workers_around

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["draw_advice"]

_COMPUTES, _WAITS, _INK, _WARNING = "#3f86d1", "#f0b56b", "#26323d", "#c2185b"
_COLOURS = ("#3f86d1", "#e58f2a", "#2e8b57")
_NAME_LENGTH = 40


def draw_advice(advice: AdviceFigures, out: str | os.PathLike[str]) -> None:
    """Draw a bar for each strategy, what of a step computes and what waits; and the speed of all over bandwidth.

    Args:
        advice: What is drawn.
        out: The file to write. Its suffix names the format (png, svg, pdf, ...); parent directories are created.

    Raises:
        ImportError: If matplotlib is not installed; the message names the extra to install.
        OptionError: If matplotlib does not know the suffix of ``out``.
        OSError: If ``out`` cannot be written.
    """
    with importing("Drawing advice", extra="plots"):
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    figure = Figure(figsize=(13, 5.2), layout="constrained")
    target = require_suffix("out", out, FigureCanvasAgg(figure).get_supported_filetypes())
    steps, speeds = figure.subplots(1, 2, width_ratios=(1.25, 1.0))
    _draw_steps(steps, advice)
    _draw_speeds(speeds, advice)
    for ax in (steps, speeds):
        ax.set_axisbelow(True)
        ax.spines[["top", "right"]].set_visible(False)
        ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.13), ncols=3, frameon=False, fontsize=9)
    figure.suptitle(_heading(advice), x=0.01, ha="left", fontsize=13, weight="bold", color=_INK)
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, dpi=110)


def _heading(advice: AdviceFigures) -> str:
    """What was found; and of what, on the second line."""
    workers, chosen = advice.link.workers, advice.recommended
    speed = advice.speedup(chosen.step_seconds)
    if advice.alone_is_faster:
        found = f"Train on one machine: {workers:,} workers are slower than one ({speed:.2f}x)"
    elif chosen.strategy == DDP:
        found = f"ddp will do: {workers:,} workers are {speed:.2f}x as fast as one"
    else:
        gain = advice.of(DDP).step_seconds / chosen.step_seconds
        found = f"{chosen.strategy}: {gain:.2f}x as fast as ddp; {workers:,} workers are {speed:.2f}x as fast as one"
    name = advice.measured.profile.name
    name = name if len(name) <= _NAME_LENGTH else f"{name[: _NAME_LENGTH - 1]}…"
    return f"{found}\n{name}: {network_in_words(advice.link)}"


def _draw_steps(ax: Axes, advice: AdviceFigures) -> None:
    computes, workers = advice.compute_seconds * 1e3, advice.link.workers
    longest = max(expected.step_seconds for expected in advice.expectations) * 1e3
    bars = [(ALONE, computes, 1)]
    for expected in advice.expectations:
        inner = expected.inner_steps
        every = "" if inner is None else f", every {inner:,} steps" if inner > 1 else ", every step"
        other = "" if expected.same_training else " *"
        bars.append((expected.strategy + every + other, expected.step_seconds * 1e3, workers))
    for position, (_, step, count) in enumerate(bars):
        ax.barh(position, computes, height=0.62, color=_COMPUTES, label="computes" if not position else None)
        waits = max(step - computes, 0.0)
        label = "waits for the network" if position == 1 else None
        ax.barh(position, waits, left=computes, height=0.62, color=_WAITS, label=label)
        speed = f", {count * computes / step:.2f}x one worker" if position else ""
        ax.text(step + longest * 0.012, position, f"{step:,.1f} ms{speed}", va="center", color=_INK, fontsize=9)
    # Strategies that train as ddp does come first; what sends fewer bytes has no such ceiling.
    exact = sum(expected.same_training for expected in advice.expectations)
    bound = advice.ceiling_seconds * 1e3
    label = "no order of these bytes is faster"
    ax.plot([bound, bound], [0.5, exact + 0.5], color=_INK, linewidth=1.6, linestyle=":", label=label)
    ax.set_yticks(range(len(bars)), [name for name, *_ in bars])
    ax.invert_yaxis()
    ax.set_xlim(0, longest * 1.58)
    ax.locator_params(axis="x", nbins=6)
    ax.xaxis.set_major_formatter(lambda value, _: f"{value:,g}")
    ax.set_title(f"A step of {workers:,} workers", loc="left", color=_INK)
    ax.set_xlabel("time of a step (ms)    * other weights than ddp's")
    ax.grid(True, axis="x", color="#dde3e8", linewidth=0.8)


def _draw_speeds(ax: Axes, advice: AdviceFigures) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter

    link, measured = advice.link, advice.measured
    unit, bits = ("Gbit/s", 1e9) if link.bandwidth * 8 >= 1e9 else ("Mbit/s", 1e6)
    rates = bandwidths_around(link.bandwidth)
    scaled = [rate * 8 / bits for rate in rates]
    for count, colour, width in zip(workers_around(link.workers), _COLOURS, (4.0, 2.6, 1.6), strict=True):
        points = [exact_steps(measured, replace(link, workers=count, bandwidth=rate)) for rate in rates]
        alone = count * advice.compute_seconds
        ax.plot(scaled, [alone / own for _, own in points], color=colour, linewidth=width, label=f"{count:,} workers")
        ax.plot(scaled, [alone / ddp for ddp, _ in points], color=colour, linewidth=1.2, linestyle="--")
    ax.plot([], [], color=_INK, label="bytescheduler")
    ax.plot([], [], color=_INK, linewidth=1.2, linestyle="--", label="ddp")
    here, speed = link.bandwidth * 8 / bits, link.workers * advice.compute_seconds / exact_steps(measured, link)[1]
    ax.axvline(here, color=_INK, linewidth=0.8, alpha=0.4)
    ax.plot(
        [here], [speed], "o", markersize=10, color=_COLOURS[0], markeredgecolor=_INK, zorder=5, label="this network"
    )
    ax.annotate(
        f"{speed:.2f}x",
        (here, speed),
        xytext=(8, -16),
        textcoords="offset points",
        weight="bold",
        color=_INK,
        fontsize=11,
    )
    ax.axhline(1, color=_WARNING, linewidth=1, linestyle=(0, (6, 4)))
    ax.text(
        0.008, 1.04, "one worker alone", transform=ax.get_yaxis_transform(), va="bottom", fontsize=9, color=_WARNING
    )
    ax.set_xscale("log")
    ax.set_yscale("log")
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_major_formatter(lambda value, _: f"{value:,g}")
        axis.set_minor_formatter(NullFormatter())
    ax.yaxis.set_major_formatter(lambda value, _: f"{value:,g}x")
    ax.set_title("Speed of all workers, against one alone", loc="left", color=_INK)
    ax.set_xlabel(f"bandwidth of each worker's link ({unit})")
    ax.grid(True, which="major", color="#dde3e8", linewidth=0.8)
