"""``lightning-bytescheduler timeline``: where the communication of a timeline went, and a picture of a few steps."""

from __future__ import annotations

import argparse
from pathlib import Path

from lightning_bytescheduler.exceptions import OptionError
from lightning_bytescheduler.timeline.page import PNG_HELP, range_of
from lightning_bytescheduler.timeline.picture import draw_timeline
from lightning_bytescheduler.timeline.trace import RoundsSummary, TraceSummary, in_rounds, read_timeline, rounds_summary

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
    title = f"{options.file} (broken off: this is what is there)" if trace.broken_off else options.file
    if not in_rounds(trace):
        if options.png is not None:
            draw_timeline(trace, options.png, steps=options.steps)
        return [(title, _rows(trace.summary()))]
    if options.png is not None:
        allowed = "left out for a timeline of 'diloco': the command rounds draws rounds, Perfetto this file"
        raise OptionError("--png", options.png, allowed)
    return [(title, _rounds_rows(rounds_summary(trace)))]


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


def _rounds_rows(summary: RoundsSummary) -> list[tuple[str, str]]:
    busy = summary.training + summary.waiting + summary.outer + summary.still

    def share(seconds: float, of: float = busy) -> str:
        return f"{seconds:.3f} s ({seconds / of if of else 0.0:.0%})"

    return [
        ("worker", summary.worker),
        ("rounds", f"{summary.rounds}"),
        ("inner steps", f"{summary.steps}"),
        ("  training", share(summary.training)),
        ("  waiting", share(summary.waiting)),
        ("  outer steps", share(summary.outer)),
        ("  validation and the like", share(summary.still)),
        ("on the network", f"{summary.network:.3f} s"),
        ("  under inner steps", share(summary.hidden, summary.network)),
        ("  push", f"{summary.pushed / 1e6:.1f} MB"),
        ("  pull", f"{summary.pulled / 1e6:.1f} MB"),
        ("encoding and decoding", f"{summary.coding:.3f} s"),
    ]
