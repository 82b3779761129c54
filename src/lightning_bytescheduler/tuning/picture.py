"""Draws a search: what each trial took, and where in the plane of credit and partition size it was.

Also the rest of ``lightning-bytescheduler tuning``: its arguments, the rows that it prints, and options to paste. Needs
matplotlib, which is imported when a picture is drawn.
"""

from __future__ import annotations

import argparse
import itertools
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_bytescheduler.exceptions import OptionError
from lightning_bytescheduler.timeline.page import INK, PNG_HELP, headed, page, ruled
from lightning_bytescheduler.tuning.record import RECORD_NAME, TrialEntry, read_record
from lightning_bytescheduler.tuning.search_space import TuningPoint

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.collections import PathCollection

__all__ = ["RECORD_NAME", "add_arguments", "draw_tuning", "fixed_options", "tables"]

_BLUE, _GREY, _RED, _GREEN = "#3f86d1", "#9aa7b2", "#d7263d", "#2e8b57"


def draw_tuning(record: Sequence[TrialEntry], out: str | os.PathLike[str]) -> None:
    """Draw the last search: each trial's step time, the best so far, and the points by credit and partition size.

    Args:
        record: As read by ``read_record``; at least one trial.
        out: The file to write. Its suffix names the format (png, svg, pdf, ...); parent directories are created.

    Raises:
        ImportError: If matplotlib is not installed; the message names the extra to install.
        OptionError: If there are no trials, or matplotlib does not know the suffix of ``out``.
        OSError: If ``out`` cannot be written.
    """
    last = max((entry.search for entry in record if entry.is_trial), default=None)
    if last is None:
        raise OptionError("record", len(record), "one with at least one trial")
    trials = [entry for entry in record if entry.is_trial and entry.search == last]
    chosen = next((entry for entry in record if entry.kind == "chosen" and entry.search == last), None)
    with page(out, "Drawing a search", 12.5, 5.4) as figure:
        sized = [entry for entry in trials if not entry.point.is_plain_ddp]
        if len({entry.point for entry in sized}) > 1:
            times, plane = figure.subplots(1, 2, width_ratios=(1.15, 1.0))
            figure.colorbar(_draw_plane(plane, sized, chosen), ax=plane, label="step time (ms)")
            ruled(plane)
        else:  # a plane with one point says nothing
            times = figure.subplots()
        _draw_times(times, trials, chosen)
        ruled(times)
        headed(figure, _heading(trials, chosen), 13)


def _heading(trials: Sequence[TrialEntry], chosen: TrialEntry | None) -> str:
    """What was found, and by how many trials."""
    count = f"{len(trials):,} trial{'s' if len(trials) > 1 else ''}"
    if chosen is None:
        best = min((entry.step_seconds for entry in trials if entry.outcome == "measured"), default=None)
        so_far = "" if best is None else f"; the best so far takes {best * 1e3:,.1f} ms a step"
        return f"{count}, nothing chosen yet{so_far}"
    ddp = [entry.step_seconds for entry in trials if entry.kind == "ddp"]
    gain = ""
    if ddp and not chosen.point.is_plain_ddp:
        gain = f", {ddp[-1] / chosen.step_seconds:.2f}x as fast as plain DDP"
    return f"{chosen.step_seconds * 1e3:,.1f} ms a step{gain}\nchosen after {count}: {chosen.point}"


def _draw_times(ax: Axes, trials: Sequence[TrialEntry], chosen: TrialEntry | None) -> None:
    kinds = ["plain DDP" if entry.kind == "ddp" else entry.outcome for entry in trials]
    for kind, colour, marker in (("measured", _BLUE, "o"), ("abandoned", _GREY, "x"), ("plain DDP", _RED, "s")):
        shown = [
            (number, entry) for number, (entry, its) in enumerate(zip(trials, kinds, strict=True), 1) if its == kind
        ]
        if shown:
            ax.errorbar(
                [number for number, _ in shown],
                [entry.step_seconds * 1e3 for _, entry in shown],
                yerr=[entry.error_seconds * 1e3 for _, entry in shown],
                color=colour,
                marker=marker,
                linestyle="none",
                capsize=2,
                label=kind,
            )
    measured = [entry.step_seconds * 1e3 if entry.outcome == "measured" else float("inf") for entry in trials]
    best = list(itertools.accumulate(measured, min))
    ax.step(range(1, len(best) + 1), best, where="post", color=INK, linewidth=1.2, label="best so far", zorder=3)
    if chosen is not None:
        place = [len(trials) + 0.35], [chosen.step_seconds * 1e3]
        ax.plot(*place, "*", markersize=13, color=_GREEN, label="chosen, measured again", zorder=4)
    ax.set_title("Step time of each trial", loc="left", color=INK)
    ax.set_xlabel("trial")
    ax.set_ylabel("step time (ms)")
    ax.locator_params(axis="x", integer=True)
    ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=3, frameon=False, columnspacing=1.2, fontsize=9)


def _draw_plane(ax: Axes, sized: Sequence[TrialEntry], chosen: TrialEntry | None) -> PathCollection:
    from matplotlib.ticker import LogLocator

    ax.set_title("Where it looked", loc="left", color=INK)
    ax.set_xlabel("credit (parameters)")
    ax.set_ylabel("partition size (parameters)")
    ax.set_xscale("log", base=2)
    ax.set_yscale("log", base=2)
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_locator(LogLocator(base=2, numticks=7))
        axis.set_major_formatter(lambda value, _: f"{value / 1e6:.3g} M" if value >= 1e6 else f"{value / 1e3:.3g} k")
    best = min(entry.step_seconds for entry in sized)
    drawn = ax.scatter(
        [entry.point.sizes[0] for entry in sized],
        [entry.point.sizes[1] for entry in sized],
        c=[entry.step_seconds * 1e3 for entry in sized],
        s=140,
        cmap="viridis_r",
        vmin=best * 1e3,
        vmax=best * 1.3e3,  # what is far off is just far off
        edgecolors="white",
    )
    if chosen is not None and not chosen.point.is_plain_ddp:
        place = ([size] for size in chosen.point.sizes)
        ax.plot(*place, "o", markersize=19, fillstyle="none", markeredgewidth=2, color=_GREEN, label="chosen")
        ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.12), frameon=False, fontsize=9, markerscale=0.6)
    # The whole range of whichever size varies less, too, so that a search of credits alone is not a line on the frame.
    ax.margins(0.12)
    return drawn


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "record",
        metavar="RUN",
        help=f"a run's folder, such as lightning_logs or lightning_logs/version_0, or its {RECORD_NAME}",
    )
    parser.add_argument(
        "--png",
        metavar="OUT",
        help=f"draw the searches {PNG_HELP}",
    )


def tables(options: argparse.Namespace) -> list[tuple[str, list[tuple[str, str]]]]:
    """Say what was tried and chosen, and draw it where that was asked for.

    Args:
        options: The parsed arguments; ``record`` is the file.

    Returns:
        A title, and pairs of a label and a value to print below it.

    Raises:
        OptionError: If the record is none, or has no trials.
        ImportError: If a picture was asked for and matplotlib is not installed.
        OSError: If a file cannot be read or written.
    """
    record = read_record(Path(options.record))
    if not any(entry.is_trial for entry in record):
        raise OptionError("record", options.record, "one with at least one trial")
    if options.png is not None:
        draw_tuning(record, options.png)
    return [(f"{options.record}: what was tried, and a step's time", list(_rows(record)))]


def _rows(record: Sequence[TrialEntry]) -> Iterator[tuple[str, str]]:
    chosen = None
    for entry in record:
        if entry.kind == "chosen":
            chosen = entry
        time = f"{entry.step_seconds * 1e3:,.1f} ± {entry.error_seconds * 1e3:,.1f} ms"
        abandoned = f"  {entry.outcome}" if entry.outcome == "abandoned" else ""
        yield f"step {entry.step:,}  {entry.kind}", f"{entry.point}  {time}{abandoned}"
        if entry.note:
            yield "", entry.note
    if chosen is None:
        yield "chosen", "nothing yet"
        return
    for where, text in fixed_options(chosen.point).items():
        yield f"to keep it ({where})", text


def fixed_options(point: TuningPoint) -> dict[str, str]:
    """Say the result of a search in each of the ways in which options can be given, for trainings that do not search.

    Args:
        point: What a search chose.

    Returns:
        Text to paste by where it goes: ``"argument"`` for Python, ``"environment"`` for a shell where there is one.
        There is no variable for the mode, so with those alone steps as DDP's are still tried.
    """
    if point.is_plain_ddp:
        return {"argument": 'ByteSchedulerStrategy(mode="ddp")'}
    credit, partition = point.sizes
    variables = {"PARTITION": partition, "CREDIT": credit, "CREDIT_TUNING": 0, "PARTITION_TUNING": 0}
    return {
        "argument": f'ByteSchedulerStrategy(partition_size={partition}, credit={credit}, mode="overlapped")',
        "environment": " ".join(f"BYTESCHEDULER_{name}={value}" for name, value in variables.items()),
    }
