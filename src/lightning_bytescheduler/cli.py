"""The console command ``lightning-bytescheduler``.

Each sub-command is one function that adds its parser, listed in ``_COMMANDS``; the parser's ``run`` default does the
work and returns the exit code. What a command computes is in its room's ``command.py``; here it is printed. Errors that
a user can cause are one line on stderr and exit code 2.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NoReturn

from lightning_bytescheduler.__about__ import __version__
from lightning_bytescheduler.advice import command as advise_command
from lightning_bytescheduler.checking import command as check_command
from lightning_bytescheduler.diloco import picture as rounds_command
from lightning_bytescheduler.exceptions import ByteSchedulerError
from lightning_bytescheduler.simulation import command as predict_command
from lightning_bytescheduler.slices import command as slices_command
from lightning_bytescheduler.timeline import command as timeline_command
from lightning_bytescheduler.tuning import picture as tuning_command

if TYPE_CHECKING:
    _SubParsers = argparse._SubParsersAction["_Parser"]

__all__ = ["main"]

_PROGRAM = "lightning-bytescheduler"
_USAGE_ERROR = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run the console command.

    Args:
        argv: The arguments after the program's name; those of the process by default.

    Returns:
        The exit code: 0, or 2 after an error that stderr explains in one line; ``check`` returns 1 for a difference.
    """
    parser = _Parser(prog=_PROGRAM, description="Tools for trainings with lightning-bytescheduler.")
    parser.add_argument("--version", action="version", version=f"{_PROGRAM} {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for add in _COMMANDS:
        add(commands)
    try:
        options = parser.parse_args(argv)
        code: int = options.run(options)
    except (_UsageError, ByteSchedulerError, OSError, ValueError, ImportError) as error:
        print(f"{_PROGRAM}: error: {' '.join(str(error).split())}", file=sys.stderr)
        return _USAGE_ERROR
    return code


class _UsageError(Exception):
    """The arguments make no sense; the message names the one that does not."""


class _Parser(argparse.ArgumentParser):
    """Leaves errors to ``main``, where argparse would print the usage as well and exit."""

    def error(self, message: str) -> NoReturn:
        raise _UsageError(f"{message}. Try '{self.prog} --help'.")


def _add_timeline(commands: _SubParsers) -> None:
    parser = commands.add_parser(
        "timeline",
        help="summarise a timeline, and draw it",
        description="Say how much of the communication in a timeline was hidden, and draw a few steps of it.",
    )
    timeline_command.add_arguments(parser)
    parser.set_defaults(run=_timeline)


def _timeline(options: argparse.Namespace) -> int:
    trace = timeline_command.trace_of(options)
    _print_table(*timeline_command.summarised(trace, options))
    timeline_command.draw(trace, options)
    return 0


def _add_predict(commands: _SubParsers) -> None:
    parser = commands.add_parser(
        "predict",
        help="predict the time of a step on a network",
        description="Say how long a training step would take on a network, with ddp and with bytescheduler.",
    )
    predict_command.add_arguments(parser)
    parser.set_defaults(run=_predict)


def _predict(options: argparse.Namespace) -> int:
    _print_table(*predict_command.predicted_table(options))
    return 0


def _add_rounds(commands: _SubParsers) -> None:
    parser = commands.add_parser(
        "rounds",
        help="summarise the rounds of a DiLoCo training, and draw them",
        description="Say how the workers of a DiLoCo training spent their time, and draw a few of its rounds.",
    )
    rounds_command.add_arguments(parser)
    parser.set_defaults(run=_rounds)


def _rounds(options: argparse.Namespace) -> int:
    _print_table(*rounds_command.rounds_table(options))
    return 0


def _add_slices(commands: _SubParsers) -> None:
    parser = commands.add_parser(
        "slices",
        help="make, verify and serve slices of data",
        description="Make slices of data, verify them, and serve them to trainings on other machines.",
    )
    slices_command.add_arguments(parser)


def _add_advise(commands: _SubParsers) -> None:
    parser = commands.add_parser(
        "advise",
        help="measure your model, and say what each strategy makes of it on a network",
        description="Take a few steps of a training, on a copy and on one device, and say in plain words what to "
        "expect of each strategy on a network. Without --bandwidth the network is measured: start one process on each "
        "machine, with torchrun.",
    )
    advise_command.add_arguments(parser)
    parser.set_defaults(run=_advise)


def _advise(options: argparse.Namespace) -> int:
    advice = advise_command.advice_for(options)
    if advice is not None:
        heading, *rows = advice.table()
        _print_table(advice.measured.profile.name, rows, heading)
        for paragraph in advice.text().splitlines():
            print(f"\n{paragraph}")
    return 0


def _add_check(commands: _SubParsers) -> None:
    parser = commands.add_parser(
        "check",
        help="train your script with ddp and with bytescheduler, and compare",
        description="Run a training script for some steps with ddp and with bytescheduler, from the same seeds and "
        "whatever its strategy is, and say whether weights, optimizer state and metrics are the same, and which is "
        "faster; or where they part. Exit codes: 0 the same, 1 different, 2 could not be checked.",
    )
    check_command.add_arguments(parser)
    parser.set_defaults(run=_check)


def _check(options: argparse.Namespace) -> int:
    report = check_command.report_for(options)
    print(report.text())
    return report.exit_code


def _add_tuning(commands: _SubParsers) -> None:
    parser = commands.add_parser(
        "tuning",
        help="show how credit and partition size were tuned, and draw it",
        description="Say what was tried while a run was tuned and what was chosen, also as options to keep it.",
    )
    tuning_command.add_arguments(parser)
    parser.set_defaults(run=_tuning)


def _tuning(options: argparse.Namespace) -> int:
    _print_table(*tuning_command.tuning_table(options))
    return 0


def _print_table(title: str, rows: Sequence[Sequence[str]], heading: Sequence[str] = ()) -> None:
    try:
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except ImportError:
        lines = [heading, *rows] if heading else rows
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        print(title)
        for label, *values in lines:
            # What has no heading is text rather than a column of figures.
            cells = [value.rjust(width) if heading else value for value, width in zip(values, widths[1:], strict=True)]
            print("  ".join([f"  {label:<{widths[0]}}", *cells]))
        return
    table = Table(title=Text(title), title_justify="left", show_header=bool(heading))
    for index in range(len(rows[0])):
        name = Text(heading[index]) if heading else ""
        # What is too wide for the terminal goes on in the next line: neither labels nor values are cut.
        table.add_column(name, no_wrap=not index, overflow="fold", justify="right" if index else "left")
    for row in rows:
        table.add_row(*map(Text, row))  # as Text: a file name may hold what rich takes for markup
    Console().print(table)


_COMMANDS: tuple[Callable[[_SubParsers], None], ...] = (
    _add_timeline,
    _add_predict,
    _add_advise,
    _add_check,
    _add_tuning,
    _add_rounds,
    _add_slices,
)
