"""The body of ``lightning-bytescheduler tuning``: its arguments, the rows that it prints, and options to paste."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from lightning_bytescheduler.exceptions import OptionError
from lightning_bytescheduler.tuning.picture import draw_tuning
from lightning_bytescheduler.tuning.record import RECORD_NAME, TrialEntry, read_record
from lightning_bytescheduler.tuning.search_space import TuningPoint

__all__ = ["add_arguments", "fixed_options", "tuning_table"]


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
