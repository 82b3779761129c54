"""``lightning-bytescheduler timeline``: where the communication of a timeline went, and a picture of a few steps."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from lightning_bytescheduler.exceptions import OptionError
from lightning_bytescheduler.timeline.picture import draw_timeline
from lightning_bytescheduler.timeline.rounds import (
    RoundsSummary,
    draw_rounds_timeline,
    in_rounds,
    rounds_summary,
)
from lightning_bytescheduler.timeline.trace import Trace, TraceSummary, read_timeline

__all__ = ["add_arguments", "draw", "summarised", "traces_of"]

Table = tuple[str, list[tuple[str, str]]]
"""A title, and labels with their figures."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to its parser."""
    parser.add_argument(
        "file",
        metavar="FILE",
        nargs="+",
        help="a file that BYTESCHEDULER_TIMELINE produced; of 'diloco', one for each worker that is to be looked at",
    )
    parser.add_argument(
        "--png",
        metavar="OUT",
        help="draw a few steps to this file, a .png, .svg or .pdf (needs the extra 'plots')",
    )
    parser.add_argument(
        "--steps",
        metavar="A:B",
        type=_steps,
        help="draw the steps (of 'diloco', the rounds) from A up to, but not including, B (default: three like most)",
    )


def traces_of(options: argparse.Namespace) -> list[Trace]:
    """Read the timelines that were asked for.

    Raises:
        OptionError: If there is no such file.
        OSError: If the file cannot be read.
        ValueError: If one is no timeline, steps were chosen and no picture, or several files are not workers'.
    """
    if options.steps is not None and options.png is None:
        raise ValueError("--steps chooses what to draw and needs --png OUT.")
    for file in options.file:
        if not Path(file).is_file():
            raise OptionError(
                "FILE", file, "a file that a training wrote with BYTESCHEDULER_TIMELINE=FILE or timeline=FILE"
            )
    traces = [read_timeline(file) for file in options.file]
    others = [file for file, trace in zip(options.file, traces, strict=True) if not in_rounds(trace)]
    if len(traces) > 1 and others:
        raise ValueError(
            f"Several files are looked at together of strategy 'diloco' only, and there is no round in "
            f"{', '.join(map(str, others))}: leave {'it' if len(others) == 1 else 'them'} out (as of a worker that was "
            "killed), or name one file."
        )
    return traces


def summarised(traces: Sequence[Trace], options: argparse.Namespace) -> list[Table]:
    """Sum up each trace."""
    return [_summarised(trace, file) for trace, file in zip(traces, options.file, strict=True)]


def _summarised(trace: Trace, file: str) -> Table:
    title = f"{file} (broken off: this is what is there)" if trace.broken_off else file
    return title, _rounds_rows(rounds_summary(trace)) if in_rounds(trace) else _rows(trace.summary())


def draw(traces: Sequence[Trace], options: argparse.Namespace) -> None:
    """Draw the traces, if that was asked for.

    Raises:
        ImportError: See `draw_timeline`.
        OptionError: See `draw_timeline`.
        OSError: If the picture cannot be written.
        ValueError: If there is nothing to draw.
    """
    if options.png is None:
        return
    if in_rounds(traces[0]):
        draw_rounds_timeline(traces, options.png, rounds=options.steps)
    else:
        draw_timeline(traces[0], options.png, steps=options.steps)


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
