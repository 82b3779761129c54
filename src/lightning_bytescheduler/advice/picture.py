"""Draws step times of the strategies against the ceiling. Needs matplotlib, imported when a picture is drawn."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_bytescheduler.advice.words import network
from lightning_bytescheduler.exceptions import OptionError

if TYPE_CHECKING:
    from lightning_bytescheduler.advice.advice import Advice

__all__ = ["draw_advice"]

_COMPUTES, _WAITS, _INK = "#3f86d1", "#f0b56b", "#26323d"


def draw_advice(advice: Advice, out: str | os.PathLike[str]) -> None:
    """Draw a bar for each strategy: what of a step computes, and what waits.

    Args:
        advice: What is drawn.
        out: The file to write. Its suffix names the format (png, svg, pdf, ...); parent directories are created.

    Raises:
        ImportError: If matplotlib is not installed; the message names the extra to install.
        OptionError: If matplotlib does not know the suffix of ``out``.
        OSError: If ``out`` cannot be written.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("Drawing advice needs matplotlib: pip install 'lightning-bytescheduler[plots]'.") from error
    target = Path(out)
    figure = Figure(figsize=(10, 4.4), layout="constrained")
    formats = FigureCanvasAgg(figure).get_supported_filetypes()
    if target.suffix[1:].lower() not in formats:
        raise OptionError("out", os.fspath(out), f"a file name with one of the suffixes {', '.join(formats)}")
    ax = figure.subplots()
    computes = advice.compute_seconds * 1e3
    longest = max(expected.step_seconds for expected in advice.expectations) * 1e3
    labels = []
    for position, expected in enumerate(advice.expectations):
        step = expected.step_seconds * 1e3
        ax.barh(position, computes, height=0.62, color=_COMPUTES, label="computes" if not position else None)
        waits = max(step - computes, 0.0)
        label = "waits for the link" if not position else None
        ax.barh(position, waits, left=computes, height=0.62, color=_WAITS, label=label)
        ax.text(
            step + longest * 0.012,
            position,
            f"{step:,.1f} ms, {advice.speedup(expected.step_seconds):.2f}x one worker",
            va="center",
            color=_INK,
        )
        every = "" if expected.inner_steps is None else f", every {expected.inner_steps} steps"
        labels.append(expected.strategy + every + ("" if expected.same_training else " *"))
    # Strategies that train as ddp does come first; what sends fewer bytes has no such ceiling.
    exact = sum(expected.same_training for expected in advice.expectations)
    bound = advice.ceiling_seconds * 1e3
    ax.plot(
        [bound, bound], [-0.5, exact - 0.5], color=_INK, linewidth=1.6, linestyle=":", label="ceiling of these bytes"
    )
    ax.set_yticks(range(len(labels)), labels)
    ax.invert_yaxis()
    ax.set_xlim(0, longest * 1.32)
    ax.set_xlabel("milliseconds of a step    (* other weights than ddp's)")
    ax.grid(True, axis="x", color="#dde3e8", linewidth=0.8)
    ax.set_axisbelow(True)
    ax.spines[["top", "right"]].set_visible(False)
    figure.suptitle(
        f"{advice.measured.profile.name}: {network(advice)}", x=0.01, ha="left", fontsize=13, weight="bold", color=_INK
    )
    figure.legend(loc="outside lower center", ncols=3, frameon=False)
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, dpi=110)
