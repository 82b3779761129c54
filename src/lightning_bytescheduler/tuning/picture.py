"""Draws a search: what each trial took, and where in the plane of credit and partition size it was.

Needs matplotlib, which is imported when a picture is drawn.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from lightning_bytescheduler.checks import require_suffix
from lightning_bytescheduler.exceptions import OptionError
from lightning_bytescheduler.tuning.record import TrialEntry

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.collections import PathCollection

__all__ = ["draw_tuning"]

_INK = "#26323d"
_BLUE, _GREY, _RED, _GREEN = "#3f86d1", "#9aa7b2", "#d7263d", "#2e8b57"


def draw_tuning(record: Sequence[TrialEntry], out: str | os.PathLike[str]) -> None:
    """Draw each trial's step time with the best so far, and the last search's points by credit and partition size.

    Args:
        record: As read by ``read_record``; at least one trial.
        out: The file to write. Its suffix names the format (png, svg, pdf, ...); parent directories are created.

    Raises:
        ImportError: If matplotlib is not installed; the message names the extra to install.
        OptionError: If there are no trials, or matplotlib does not know the suffix of ``out``.
        OSError: If ``out`` cannot be written.
    """
    trials = [entry for entry in record if entry.is_trial]
    if not trials:
        raise OptionError("record", len(record), "one with at least one trial")
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("Drawing a search needs matplotlib: pip install 'lightning-bytescheduler[plots]'.") from error
    figure = Figure(figsize=(12.5, 5.0), layout="constrained")
    target = require_suffix("out", out, FigureCanvasAgg(figure).get_supported_filetypes())
    times, plane = figure.subplots(1, 2, width_ratios=(1.15, 1.0))
    _draw_times(times, record, trials)
    colours = _draw_plane(plane, record, trials)
    if colours is not None:
        figure.colorbar(colours, ax=plane, label="step time (ms)")
    for ax in (times, plane):
        ax.grid(True, which="major", color="#dde3e8", linewidth=0.8)
        ax.set_axisbelow(True)
        ax.spines[["top", "right"]].set_visible(False)
    chosen = next((entry for entry in reversed(record) if entry.kind == "chosen"), None)
    outcome = f"chosen: {chosen.point}" if chosen is not None else "nothing chosen yet"
    figure.suptitle(f"{len(trials)} trials, {outcome}", x=0.01, ha="left", fontsize=14, weight="bold", color=_INK)
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, dpi=110)


def _draw_times(ax: Axes, record: Sequence[TrialEntry], trials: Sequence[TrialEntry]) -> None:
    numbered = list(enumerate(trials, start=1))
    styles = (
        ("measured", _BLUE, "o", [(n, e) for n, e in numbered if e.outcome == "measured" and e.kind != "ddp"]),
        ("abandoned", _GREY, "x", [(n, e) for n, e in numbered if e.outcome == "abandoned" and e.kind != "ddp"]),
        ("plain DDP", _RED, "s", [(n, e) for n, e in numbered if e.kind == "ddp"]),
    )
    for label, colour, marker, shown in styles:
        if shown:
            ax.errorbar(
                [number for number, _ in shown],
                [entry.step_seconds * 1e3 for _, entry in shown],
                yerr=[entry.error_seconds * 1e3 for _, entry in shown],
                color=colour,
                marker=marker,
                linestyle="none",
                capsize=2,
                label=label,
            )
    for number, (_, group) in enumerate(itertools.groupby(numbered, key=lambda entry: entry[1].search)):
        search = list(group)
        measured = [entry.step_seconds * 1e3 if entry.outcome == "measured" else float("inf") for _, entry in search]
        best = list(itertools.accumulate(measured, min))
        ax.step(
            [trial for trial, _ in search],
            best,
            where="post",
            color=_INK,
            linewidth=1.2,
            label=None if number else "best so far",
        )
        if search[0][0] > 1:
            ax.axvline(search[0][0] - 0.5, color=_RED, linewidth=1, linestyle=":")
    for index, entry in enumerate(entry for entry in record if entry.kind == "chosen"):
        last = max((number for number, trial in numbered if trial.search == entry.search), default=0)
        ax.plot(
            [last + 0.35],
            [entry.step_seconds * 1e3],
            marker="*",
            markersize=13,
            color=_GREEN,
            linestyle="none",
            label=None if index else "chosen, measured again",
        )
    ax.set_title("Step time of each trial", loc="left", color=_INK)
    ax.set_xlabel("trial")
    ax.set_ylabel("step time (ms)")
    ax.locator_params(axis="x", integer=True)
    ax.legend(frameon=False)


def _draw_plane(ax: Axes, record: Sequence[TrialEntry], trials: Sequence[TrialEntry]) -> PathCollection | None:
    last = trials[-1].search
    sized = [(n, e) for n, e in enumerate(trials, start=1) if e.search == last and not e.point.is_plain_ddp]
    ax.set_title("Where the last search looked", loc="left", color=_INK)
    ax.set_xlabel("credit (parameters)")
    ax.set_ylabel("partition size (parameters)")
    if not sized:
        return None
    ax.set_xscale("log", base=2)
    ax.set_yscale("log", base=2)
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_formatter(lambda value, _: f"{value / 1e6:.3g} M" if value >= 1e6 else f"{value / 1e3:.3g} k")
    best = min(entry.step_seconds for _, entry in sized)
    drawn = ax.scatter(
        [entry.point.sizes[0] for _, entry in sized],
        [entry.point.sizes[1] for _, entry in sized],
        c=[entry.step_seconds * 1e3 for _, entry in sized],
        s=140,
        cmap="viridis_r",
        vmin=best * 1e3,
        vmax=best * 1.3e3,  # what is far off is just far off
        edgecolors="white",
    )
    for number, entry in sized:
        ax.annotate(str(number), entry.point.sizes, xytext=(7, 5), textcoords="offset points", color=_INK, fontsize=9)
    chosen = next((entry for entry in reversed(record) if entry.kind == "chosen" and entry.search == last), None)
    if chosen is not None and not chosen.point.is_plain_ddp:
        ax.plot(
            *([size] for size in chosen.point.sizes),
            marker="o",
            markersize=19,
            fillstyle="none",
            markeredgewidth=2,
            color=_GREEN,
            linestyle="none",
            label="chosen",
        )
        ax.legend(frameon=False)
    # The whole range of whichever size varies less, too, so that a search of credits alone is not a line on the frame.
    ax.margins(0.12)
    return drawn
