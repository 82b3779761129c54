"""The picture of a run's rounds (what each worker did when, a row for each), and the command that makes it.

Needs matplotlib, which is imported when a picture is drawn. Limits: a handful of rounds make a readable picture, a
hundred do not.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_bytescheduler.checks import importing
from lightning_bytescheduler.diloco.round_record import RECORD_NAME, Activity, RoundRecord, read_rounds, waiting_share
from lightning_bytescheduler.exceptions import OptionError

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["add_arguments", "draw_rounds", "rounds_table"]

_COLOURS: dict[Activity, str] = {
    "receiving": "#8456b5",
    "working": "#3f86d1",
    "sending": "#e58f2a",
    "waiting": "#d7263d",
}
_MEANING: dict[Activity, str] = {
    "receiving": "fetching weights",
    "working": "training",
    "sending": "sending its pseudo-gradient",
    "waiting": "waiting for the others",
}
_ACTIVITIES: dict[Activity, str] = {
    "working": "training",
    "waiting": "waiting",
    "sending": "sending",
    "receiving": "fetching",
}
_INK = "#26323d"
_ROUNDS_SHOWN = 6
_ROUNDS_MARKED = 20  # of more, lines would hide what is drawn
_PAGE = 11.0  # inches for all workers
_LEAST_LABELLED = 0.25  # inches of a row that has room for text
_NAME_LENGTH, _HEAD, _TAIL = 30, 17, 12  # letters
_UNITS = (("h", 3600.0), ("min", 60.0), ("s", 1.0))
_ENOUGH = 3.0  # of a unit, to take it
_LETTER = 0.0068  # width of a letter, and some air, as a share of the width of the axes


def draw_rounds(
    record: Sequence[RoundRecord],
    out: str | os.PathLike[str],
    *,
    rounds: tuple[int, int] | None = None,
    title: str | None = None,
) -> None:
    """Draw what each worker did in some rounds.

    Args:
        record: The rounds; see ``read_rounds``.
        out: The file to write. Its suffix names the format (png, svg, pdf, ...); parent directories are created.
        rounds: First round to draw, and the one after the last, as in ``range``. By default the last six.
        title: The heading; by default it names the rounds.

    Raises:
        ImportError: If matplotlib is not installed; the message names the extra to install.
        OptionError: If the record has none of ``rounds``, or matplotlib does not know the suffix of ``out``.
        OSError: If ``out`` cannot be written.
    """
    with importing("Drawing rounds", extra="plots"):
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    shown = _choose(record, rounds)
    workers = sorted({worker.worker for one in shown for worker in one.workers}, key=_natural)
    target = Path(out)
    figure = Figure(figsize=(12.5, 2.4 + _row_height(len(workers)) * max(len(workers), 2)), layout="constrained")
    formats = FigureCanvasAgg(figure).get_supported_filetypes()
    if target.suffix[1:].lower() not in formats:
        raise OptionError("out", os.fspath(out), f"a file name with one of the suffixes {', '.join(formats)}")
    numbers = f"{shown[0].round}" if len(shown) == 1 else f"{shown[0].round} to {shown[-1].round}"
    found = f"workers waited {waiting_share(shown):.1%} of their time"
    heading = f"Round{'s' if len(shown) > 1 else ''} {numbers}: {found}" if title is None else title
    _draw(figure, shown, workers, heading)
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, dpi=140)


def _row_height(workers: int) -> float:
    """In inches: of a few workers as is comfortable, of many as much as a page has."""
    return min(0.45, max(_PAGE / max(workers, 1), 0.12))


def _choose(record: Sequence[RoundRecord], rounds: tuple[int, int] | None) -> list[RoundRecord]:
    if not record:
        raise OptionError("record", [], "of one round or more")
    if rounds is None:
        return list(record[-_ROUNDS_SHOWN:])
    chosen = [one for one in record if rounds[0] <= one.round < rounds[1]]
    if not chosen:
        raise OptionError("rounds", rounds, f"a range among the rounds {record[0].round} to {record[-1].round}")
    return chosen


def _natural(name: str) -> tuple[int, str]:
    """Sorts ``worker 2`` before ``worker 10``, where names differ in a number at the end."""
    return len(name), name


def _draw(figure: Figure, shown: Sequence[RoundRecord], workers: Sequence[str], heading: str) -> None:
    from matplotlib.patches import Patch

    origin, whole = shown[0].start, shown[-1].end - shown[0].start
    unit, seconds = next(((u, s) for u, s in _UNITS if whole >= _ENOUGH * s), _UNITS[-1])

    def at(moment: float) -> float:
        return (moment - origin) / seconds

    axes: Axes = figure.subplots()
    end = whole / seconds or 1.0
    few = len(shown) <= _ROUNDS_MARKED
    height = _row_height(len(workers))
    axes.set_xlim(0, end)
    axes.set_ylim(max(len(workers), 1) - 0.4, -0.55 - 0.4 * 0.45 / height)
    axes.set_yticks(range(len(workers)), _short(workers), fontsize=min(10.0, 52 * height))
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    axes.set_xlabel(f"time ({unit})")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,g}")
    labelled_until = -1.0
    for one in shown:
        start = at(one.start)
        axes.axvline(start, color=_INK, linewidth=1.2 if few else 0.5)
        label = f" round {one.round}"
        width = 1.5 * (len(label) + 1) * _LETTER * end
        if labelled_until <= start <= end - width:  # where rounds are short, some of them have their number
            axes.text(start, -0.62, label, va="bottom", weight="bold", color=_INK, clip_on=True)
            labelled_until = start + width
        if one.decided is not None and few:
            axes.axvline(at(one.decided), color=_INK, linewidth=0.8, linestyle=":")
        for worker in one.workers:
            row = workers.index(worker.worker)
            for activity, colour in _COLOURS.items():
                bars = [(at(begin), (stop - begin) / seconds) for kind, begin, stop in worker.spans if kind == activity]
                drawn = axes.broken_barh(bars, (row - 0.34, 0.68), facecolors=colour)
                if not worker.merged:
                    drawn.set(hatch="////", edgecolor="white", linewidth=0)
            if height >= _LEAST_LABELLED:
                spans = [(at(begin), at(stop)) for kind, begin, stop in worker.spans if kind == "working"]
                _label(axes, spans, row, f"{worker.steps:,} steps", f"{worker.samples:,} samples")
    handles: list[Artist] = [Patch(color=colour, label=_MEANING[activity]) for activity, colour in _COLOURS.items()]
    if few:
        handles.append(axes.plot([], [], color=_INK, linewidth=0.8, linestyle=":", label="end decided")[0])
    if not all(worker.merged for one in shown for worker in one.workers):
        handles.append(Patch(facecolor="#aab4be", hatch="////", edgecolor="white", linewidth=0, label="not merged"))
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)
    figure.suptitle(heading, x=0.01, ha="left", fontsize=15, weight="bold", color=_INK)
    samples = sum(one.samples for one in shown)
    axes.set_title(f"{samples:,} samples became part of the weights", loc="left", fontsize=11, color=_INK)


def _short(names: Sequence[str]) -> list[str]:
    """Names that leave room for the picture, as long as they can still be told apart."""
    short = [name if len(name) <= _NAME_LENGTH else f"{name[:_HEAD]}…{name[-_TAIL:]}" for name in names]
    return short if len(set(short)) == len(names) else list(names)


def _label(axes: Axes, spans: Sequence[tuple[float, float]], row: int, *lines: str) -> None:
    """Write into the bar of a worker's training what fits."""
    for start, end in spans:
        for text in (", ".join(lines), lines[0]):
            if end - start > len(text) * _LETTER * axes.get_xlim()[1]:
                axes.text(
                    (start + end) / 2,
                    row,
                    text,
                    ha="center",
                    va="center",
                    color="white",
                    fontsize=9,
                    clip_on=True,
                    # Also over hatches and the line at which the end was decided.
                    bbox={"facecolor": _COLOURS["working"], "edgecolor": "none", "pad": 1.0},
                )
                break


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``lightning-bytescheduler rounds``."""
    parser.add_argument(
        "path",
        metavar="RUN",
        help=f"a run's folder, such as lightning_logs or lightning_logs/version_0, or its {RECORD_NAME}",
    )
    parser.add_argument(
        "--png", metavar="OUT", help="draw rounds to this file, a .png, .svg or .pdf (needs the extra 'plots')"
    )
    parser.add_argument(
        "--rounds",
        metavar="A:B",
        type=_range,
        help="only the rounds from A up to, but not including, B (default: all, and the last six in the picture)",
    )


def rounds_table(options: argparse.Namespace) -> tuple[str, list[tuple[str, str]]]:
    """Do what the command was asked for.

    Args:
        options: The parsed arguments.

    Returns:
        A title, and pairs of a label and a value to print below it.

    Raises:
        OptionError: If the file is not one of rounds, or an argument is not allowed.
        ImportError: If a picture was asked for and matplotlib is not installed.
        OSError: If a file cannot be read or written.
    """
    file = Path(options.path)
    if file.is_dir():
        file = file / RECORD_NAME
    record = read_rounds(file)
    if not record:
        raise OptionError("record", str(file), "a file with one round or more")
    if options.png is not None:
        draw_rounds(record, options.png, rounds=options.rounds)
    first, after = options.rounds or (record[0].round, record[-1].round + 1)
    shown = [one for one in record if first <= one.round < after]
    if not shown:
        raise OptionError("rounds", (first, after), f"a range among {record[0].round} to {record[-1].round}")
    seconds = shown[-1].end - shown[0].start
    samples = sum(one.samples for one in shown)
    rows = [
        ("rounds", f"{len(shown):,}"),
        ("  without an outer step", f"{sum(not one.merged for one in shown):,}"),
        ("time", f"{seconds:,.1f} s"),
        ("samples", f"{samples:,}"),
        ("samples per second", f"{samples / seconds if seconds else 0.0:,.1f}"),
        ("waiting", f"{waiting_share(shown):.1%} of the workers' time"),
    ]
    for name in sorted({worker.worker for one in shown for worker in one.workers}, key=lambda name: (len(name), name)):
        parts = [worker for one in shown for worker in one.workers if worker.worker == name]
        spent = {label: sum(part.seconds(kind) for part in parts) for kind, label in _ACTIVITIES.items()}
        total = sum(spent.values()) or 1.0
        shares = ", ".join(f"{label} {share / total:.1%}" for label, share in spent.items())
        rows.append((name, f"{sum(part.steps for part in parts):,} steps: {shares}"))
    return str(file), rows


def _range(text: str) -> tuple[int, int]:
    first, _, after = text.partition(":")
    try:
        bounds = int(first), int(after)
    except ValueError:
        bounds = 0, 0
    if not bounds[0] < bounds[1]:
        raise argparse.ArgumentTypeError(f"{text!r} is not a range A:B with A < B, such as 10:13")
    return bounds
