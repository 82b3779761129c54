"""The body of ``lightning-bytescheduler tuning``: its arguments, and the rows that it prints."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from lightning_bytescheduler.exceptions import OptionError
from lightning_bytescheduler.tuning.fixed_options import fixed_options
from lightning_bytescheduler.tuning.picture import draw_tuning
from lightning_bytescheduler.tuning.record import TrialEntry, read_record

__all__ = ["RECORD_NAME", "add_arguments", "tuning_table"]

RECORD_NAME = "tuning.jsonl"
"""Of the record in a run's directory."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("record", metavar="RUN", help=f"a run's directory with {RECORD_NAME} in it, or such a file")
    parser.add_argument(
        "--png",
        metavar="OUT",
        help="draw the searches to this file, a .png, .svg or .pdf (needs the extra 'plots')",
    )


def tuning_table(options: argparse.Namespace) -> tuple[str, list[tuple[str, str]]]:
    """Do what the command was asked for.

    Args:
        options: The parsed arguments.

    Returns:
        A title, and pairs of a label and a value to print below it.

    Raises:
        OptionError: If the record is none, or has no trials.
        ImportError: If a picture was asked for and matplotlib is not installed.
        OSError: If a file cannot be read or written.
    """
    file = Path(options.record)
    if file.is_dir():
        file = file / RECORD_NAME
    record = read_record(file)
    if not any(entry.is_trial for entry in record):
        raise OptionError("record", os.fspath(file), "one with at least one trial")
    if options.png is not None:
        draw_tuning(record, options.png)
    return f"{os.fspath(file)}: what was tried, and a step's time", list(_rows(record))


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
