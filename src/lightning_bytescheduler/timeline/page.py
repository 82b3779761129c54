"""What all pictures share: the file, the heading, the legend, and which steps or rounds are shown.

Needs matplotlib, which is imported when a picture is drawn.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from lightning_bytescheduler.checks import importing, require_suffix
from lightning_bytescheduler.exceptions import OptionError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["INK", "PNG_HELP", "among", "headed", "in_colours", "page", "range_of", "ruled"]

INK = "#26323d"

PNG_HELP = "to this file, a .png, .svg or .pdf (needs the extra 'plots')"
"""What the option ``--png`` of a command does, after what is drawn."""

_DOTS_PER_INCH = 130


@contextmanager
def page(out: str | os.PathLike[str], what: str, width: float, height: float) -> Iterator[Figure]:
    """A figure to draw on; written to ``out`` when that has ended.

    Args:
        out: The file. Its suffix names the format (png, svg, pdf, ...); parent directories are created.
        what: Is drawn, as the subject of a sentence.
        width: In inches.
        height: In inches.

    Raises:
        ImportError: If matplotlib is not installed; the message names the extra to install.
        OptionError: If matplotlib does not know the suffix of ``out``.
        OSError: If ``out`` cannot be written.
    """
    with importing(what, extra="plots"):
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    figure = Figure(figsize=(width, height), layout="constrained")
    target = require_suffix("out", out, FigureCanvasAgg(figure).get_supported_filetypes())
    yield figure
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, dpi=_DOTS_PER_INCH)


def headed(figure: Figure, text: str, size: float = 15) -> None:
    """Say above everything what is found."""
    figure.suptitle(text, x=0.01, ha="left", fontsize=size, weight="bold", color=INK)


def in_colours(figure: Figure, meaning: Mapping[str, str], *others: object) -> None:
    """Say below everything what colours mean.

    Args:
        figure: The picture.
        meaning: Colours, by what they stand for.
        others: Further entries, such as lines.
    """
    from matplotlib.patches import Patch

    handles = [*(Patch(color=colour, label=label) for label, colour in meaning.items()), *others]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)


def ruled(ax: Axes) -> None:
    """Give axes with scales a grid."""
    ax.grid(True, which="major", color="#dde3e8", linewidth=0.8)
    ax.set_axisbelow(True)
    ax.spines[["top", "right"]].set_visible(False)


def range_of(text: str) -> tuple[int, int]:
    """Read ``A:B``, for argparse.

    Raises:
        argparse.ArgumentTypeError: If it is no such range.
    """
    first, _, after = text.partition(":")
    try:
        bounds = int(first), int(after)
    except ValueError:
        bounds = 0, 0
    if not bounds[0] < bounds[1]:
        raise argparse.ArgumentTypeError(f"{text!r} is not a range A:B with A < B, such as 10:13")
    return bounds


def among(known: Sequence[int], asked: tuple[int, int], option: str) -> list[int]:
    """Those of some steps or rounds that a range asks for.

    Raises:
        OptionError: If it asks for none of them; names ``option``.
    """
    chosen = [number for number in known if asked[0] <= number < asked[1]]
    if not chosen:
        raise OptionError(option, asked, f"a range among the {option} {known[0]} to {known[-1]}")
    return chosen
