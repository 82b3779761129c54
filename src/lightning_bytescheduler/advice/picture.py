"""Draws step times of the strategies against the ceiling. Needs matplotlib, imported when a picture is drawn."""

from __future__ import annotations

import os
from collections.abc import Sequence

from lightning_bytescheduler.advice.expectations import Expectation
from lightning_bytescheduler.checks import require_suffix

__all__ = ["draw_advice"]

_COMPUTES, _WAITS, _INK = "#3f86d1", "#f0b56b", "#26323d"


def draw_advice(
    expectations: Sequence[Expectation],
    out: str | os.PathLike[str],
    *,
    title: str,
    compute_seconds: float,
    ceiling_seconds: float,
    workers: int,
) -> None:
    """Draw a bar for each strategy: what of a step computes, and what waits.

    Args:
        expectations: What is drawn.
        out: The file to write. Its suffix names the format (png, svg, pdf, ...); parent directories are created.
        title: The heading.
        compute_seconds: Of a step on one worker that talks to nobody.
        ceiling_seconds: What no order of these bytes can get a step below.
        workers: How many train together.

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
    figure = Figure(figsize=(10, 4.4), layout="constrained")
    target = require_suffix("out", out, FigureCanvasAgg(figure).get_supported_filetypes())
    ax = figure.subplots()
    computes = compute_seconds * 1e3
    longest = max(expected.step_seconds for expected in expectations) * 1e3
    labels = []
    for position, expected in enumerate(expectations):
        step = expected.step_seconds * 1e3
        ax.barh(position, computes, height=0.62, color=_COMPUTES, label="computes" if not position else None)
        waits = max(step - computes, 0.0)
        label = "waits for the link" if not position else None
        ax.barh(position, waits, left=computes, height=0.62, color=_WAITS, label=label)
        ax.text(
            step + longest * 0.012,
            position,
            f"{step:,.1f} ms, {workers * computes / step:.2f}x one worker",
            va="center",
            color=_INK,
        )
        every = "" if expected.inner_steps is None else f", every {expected.inner_steps} steps"
        labels.append(expected.strategy + every + ("" if expected.same_training else " *"))
    # Strategies that train as ddp does come first; what sends fewer bytes has no such ceiling.
    exact = sum(expected.same_training for expected in expectations)
    bound = ceiling_seconds * 1e3
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
    figure.suptitle(title, x=0.01, ha="left", fontsize=13, weight="bold", color=_INK)
    figure.legend(loc="outside lower center", ncols=3, frameon=False)
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, dpi=110)
