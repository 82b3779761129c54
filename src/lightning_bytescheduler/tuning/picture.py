"""Draws a search: which point each trial was at, and what steps took there.

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
from lightning_bytescheduler.timeline.picture import INK, PNG_HELP, headed, page, ruled
from lightning_bytescheduler.tuning.record import RECORD_NAME, TrialEntry, read_record, standing_of
from lightning_bytescheduler.tuning.search_space import TuningPoint

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["RECORD_NAME", "add_arguments", "draw_tuning", "fixed_options", "tables"]

_BLUE, _GREY, _RED, _GREEN = "#3f86d1", "#9aa7b2", "#d7263d", "#2e8b57"
_LABELLED = 20  # trials, at most: more labels would meet


def draw_tuning(record: Sequence[TrialEntry], out: str | os.PathLike[str]) -> None:
    """Draw the last search: each trial's sizes and step time, the best so far, and what was chosen.

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
        ax = figure.subplots()
        _draw_trials(ax, trials, chosen)
        ruled(ax)
        figure.legend(loc="outside lower center", ncols=5, frameon=False)
        found = standing_of([entry for entry in record if entry.search == last])
        headed(figure, f"{found[0].upper()}{found[1:]}.", 11)


def _draw_trials(ax: Axes, trials: Sequence[TrialEntry], chosen: TrialEntry | None) -> None:
    kinds = ["plain DDP" if entry.kind == "ddp" else entry.outcome for entry in trials]
    for kind, colour, marker in (("measured", _BLUE, "o"), ("abandoned", _GREY, "x"), ("plain DDP", _RED, "s")):
        shown = [number for number, its in enumerate(kinds) if its == kind]
        if shown:
            ax.errorbar(
                [number + 1 for number in shown],
                [trials[number].step_seconds * 1e3 for number in shown],
                yerr=[trials[number].error_seconds * 1e3 for number in shown],
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
    numbers = range(1, len(trials) + 1, 1 + len(trials) // _LABELLED)
    ax.set_xticks(numbers, labels=[_short(trials[number - 1].point) for number in numbers])
    ax.set_xlabel("trial, by its credit and partition size (parameters)")
    ax.set_ylabel("step time (ms)")


def _short(point: TuningPoint) -> str:
    if point.is_plain_ddp:
        return "plain\nDDP"
    return "\n".join(f"{size / 1e6:.3g} M" if size >= 1e6 else f"{size / 1e3:.3g} k" for size in point.sizes)


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
