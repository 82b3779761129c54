"""``lightning-bytescheduler timeline``: where the communication of a timeline went, and a picture of a few steps."""

from __future__ import annotations

import argparse
from pathlib import Path

from lightning_bytescheduler.exceptions import OptionError
from lightning_bytescheduler.timeline.picture import draw_timeline
from lightning_bytescheduler.timeline.trace import Trace, TraceSummary, read_timeline

__all__ = ["add_arguments", "draw", "summarised", "trace_of"]

Table = tuple[str, list[tuple[str, str]]]
"""A title, and labels with their figures."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to its parser."""
    parser.add_argument("file", metavar="FILE", help="a file that BYTESCHEDULER_TIMELINE produced")
    parser.add_argument(
        "--png",
        metavar="OUT",
        help="draw a few steps to this file, a .png, .svg or .pdf (needs the extra 'plots')",
    )
    parser.add_argument(
        "--steps",
        metavar="A:B",
        type=_steps,
        help="draw the steps from A up to, but not including, B (default: three like most)",
    )


def trace_of(options: argparse.Namespace) -> Trace:
    """Read the timeline that was asked for.

    Raises:
        OptionError: If there is no such file.
        OSError: If the file cannot be read.
        ValueError: If it is no timeline, or steps were chosen and no picture.
    """
    if options.steps is not None and options.png is None:
        raise ValueError("--steps chooses what to draw and needs --png OUT.")
    if not Path(options.file).is_file():
        raise OptionError(
            "FILE", options.file, "a file that a training wrote with BYTESCHEDULER_TIMELINE=FILE or timeline=FILE"
        )
    return read_timeline(options.file)


def summarised(trace: Trace, options: argparse.Namespace) -> Table:
    """Sum up the trace."""
    title = f"{options.file} (broken off: this is what is there)" if trace.broken_off else str(options.file)
    return title, _rows(trace.summary())


def draw(trace: Trace, options: argparse.Namespace) -> None:
    """Draw the trace, if that was asked for.

    Raises:
        ImportError: See `draw_timeline`.
        OptionError: See `draw_timeline`.
        OSError: If the picture cannot be written.
        ValueError: If there is nothing to draw.
    """
    if options.png is not None:
        draw_timeline(trace, options.png, steps=options.steps)


def _steps(text: str) -> tuple[int, int]:
    first, _, after = text.partition(":")
    try:
        steps = int(first), int(after)
    except ValueError:
        steps = 0, 0
    if not steps[0] < steps[1]:
        raise argparse.ArgumentTypeError(f"{text!r} is not a range A:B with A < B, such as 10:13")
    return steps


def _rows(summary: TraceSummary) -> list[tuple[str, str]]:
    def share(seconds: float) -> str:
        of = seconds / summary.communication_seconds if summary.communication_seconds else 0.0
        return f"{seconds:.3f} s ({of:.0%})"

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
        ("  exposed", share(summary.exposed_seconds)),
        ("    waited for", share(summary.waited_seconds)),
        ("waiting after backward", f"{summary.wait_seconds:.3f} s"),
        ("waiting at gates", f"{summary.gate_seconds:.3f} s"),
        ("deferred steps", f"{summary.step_seconds:.3f} s"),
    ]
