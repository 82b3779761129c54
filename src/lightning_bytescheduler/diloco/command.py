"""The body of ``lightning-bytescheduler rounds``: its arguments, and the rows that it prints."""

from __future__ import annotations

import argparse
from pathlib import Path

from lightning_bytescheduler.diloco.round_picture import draw_rounds
from lightning_bytescheduler.diloco.round_record import RECORD_NAME, Activity, read_rounds, waiting_share
from lightning_bytescheduler.exceptions import OptionError

__all__ = ["add_arguments", "rounds_table"]

_ACTIVITIES: dict[Activity, str] = {
    "working": "training",
    "waiting": "waiting",
    "sending": "sending",
    "receiving": "fetching",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("path", metavar="RUN", help="the file of rounds that a training wrote, or its folder")
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
