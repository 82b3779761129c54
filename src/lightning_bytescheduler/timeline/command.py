"""``lightning-bytescheduler timeline``: where the communication of a timeline went, and a picture of a few steps."""

from __future__ import annotations

import argparse
from pathlib import Path

from lightning_bytescheduler.exceptions import OptionError
from lightning_bytescheduler.timeline.page import PNG_HELP, range_of
from lightning_bytescheduler.timeline.picture import draw_timeline
from lightning_bytescheduler.timeline.timeline import INNER
from lightning_bytescheduler.timeline.trace import TraceSummary, read_timeline

__all__ = ["add_arguments", "tables"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to its parser."""
    parser.add_argument("file", metavar="FILE", help="a file that BYTESCHEDULER_TIMELINE produced")
    parser.add_argument("--png", metavar="OUT", help=f"draw a few steps {PNG_HELP}")
    parser.add_argument(
        "--steps",
        metavar="A:B",
        type=range_of,
        help="draw the steps from A up to, but not including, B (default: three like most)",
    )


def tables(options: argparse.Namespace) -> list[tuple[str, list[tuple[str, str]]]]:
    """Sum up the timeline, and draw it where that was asked for.

    Raises:
        OptionError: If there is no such file, it is not one to draw, or it has none of the steps that were chosen.
        ImportError: If a picture was asked for and matplotlib is not installed.
        OSError: If the file cannot be read, or the picture not be written.
        ValueError: If it is no timeline, steps were chosen and no picture, or there is nothing to draw.
    """
    if options.steps is not None and options.png is None:
        raise ValueError("--steps chooses what to draw and needs --png OUT.")
    if not Path(options.file).is_file():
        allowed = "a file that a training wrote with BYTESCHEDULER_TIMELINE=FILE or timeline=FILE"
        raise OptionError("FILE", options.file, allowed)
    trace = read_timeline(options.file)
    if trace.select(INNER):
        allowed = "a timeline of steps; of 'diloco' the command rounds sums rounds up, and Perfetto shows this file"
        raise OptionError("FILE", options.file, allowed)
    if options.png is not None:
        draw_timeline(trace, options.png, steps=options.steps)
    title = f"{options.file} (broken off: this is what is there)" if trace.broken_off else options.file
    return [(title, _rows(trace.summary()))]


def _rows(summary: TraceSummary) -> list[tuple[str, str]]:
    def share(seconds: float) -> str:
        of = seconds / summary.communication_seconds if summary.communication_seconds else 0.0
        return f"{seconds:.3f} s ({of:.0%})"

    def waits(seconds: float) -> str:
        return f"{seconds:.3f} s ({1e3 * seconds / max(summary.steps, 1):.1f} ms a step)"

    return [
        ("steps", f"{summary.steps}"),
        *((f"  {kind}", f"{count}") for kind, count in summary.kinds.items()),
        ("sub-tasks", f"{summary.sub_tasks}"),
        ("sent", f"{summary.total_bytes / 1e6:.1f} MB"),
        ("communication", f"{summary.communication_seconds:.3f} s"),
        ("  under backward", share(summary.under_backward)),
        ("  under forward", share(summary.under_forward)),
        ("  under the next step's forward", share(summary.under_next_forward)),
        ("  hidden", f"{summary.hidden_share:.0%}"),
        ("training waits", waits(summary.exposed_seconds)),
        ("  at gates", waits(summary.gate_seconds)),
        ("deferred steps", f"{summary.step_seconds:.3f} s"),
    ]
