"""The console command ``lightning-bytescheduler``, also as ``python -m lightning_bytescheduler``.

Each sub-command is an entry of ``_COMMANDS``: its texts, and the module that adds its arguments and does the work. That
module is imported when the command is chosen. It returns tables, which are printed here, or prints by itself (``run``).
Errors that a user can cause are one line on stderr and exit code 2.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple, NoReturn

from lightning_bytescheduler.checks import did_you_mean, records_in, require_new_file, some_of
from lightning_bytescheduler.exceptions import ByteSchedulerError
from lightning_bytescheduler.registration import __version__

_PROGRAM = "lightning-bytescheduler"
_USAGE_ERROR = 2
_INTERRUPTED = 130  # the exit code that a shell reports after Ctrl+C
_BROKEN_PIPE = 141
_WIDEST = 100  # columns that are still easy to read


def main(argv: Sequence[str] | None = None) -> int:
    """Run the console command.

    Args:
        argv: The arguments after the program's name; those of the process by default.

    Returns:
        The exit code: 0, or 2 after an error that stderr explains in one line; ``check`` returns 1 for a difference,
            and ``slices verify`` for a slice with wrong content; 130 after Ctrl+C.
    """
    try:
        try:
            return _run(sys.argv[1:] if argv is None else list(argv))
        finally:
            _flush()
    except BrokenPipeError:
        return _BROKEN_PIPE  # the reader, such as `head`, has enough
    except KeyboardInterrupt:
        print(f"{_PROGRAM}: interrupted", file=sys.stderr)
        return _INTERRUPTED
    except (_UsageError, ByteSchedulerError, OSError, ValueError, ImportError) as error:
        print(f"{_PROGRAM}: error: {' '.join(_words_of(error).split())}", file=sys.stderr)
        return _USAGE_ERROR


def _run(argv: list[str]) -> int:
    chosen = next((argument for argument in argv if not argument.startswith("-")), None)
    parser = _Parser(
        prog=_PROGRAM, description="Tools for trainings with lightning-bytescheduler.", example="COMMAND --help"
    )
    parser.add_argument("--version", action="version", version=f"{_PROGRAM} {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", parser_class=_Parser)
    for name, command in _COMMANDS.items():
        does, example = command.does, f"{name} {command.example}"
        added = commands.add_parser(name, help=does.partition(". ")[0].rstrip("."), description=does, example=example)
        if name == chosen:  # adding the others' arguments would import modules that are not needed
            module = import_module(f"lightning_bytescheduler.{command.module}")
            # A command that has actions of its own lets them set it.
            run = partial(_show, module) if hasattr(module, "tables") else getattr(module, "run", None)
            added.set_defaults(run=run)
            module.add_arguments(added)
    options = parser.parse_args(argv)
    if "run" not in options:
        print(parser.format_help(), end="")  # argparse would ignore a full disk
        return 0
    return int(options.run(options))


def _words_of(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename is not None and error.strerror is not None:
        return f"{error.strerror}: {error.filename}"  # without the number
    return str(error)


def _flush() -> None:
    """Flush stdout now, so that a full disk or a closed pipe does not raise while Python exits."""
    if sys.stdout is None:
        return
    try:
        sys.stdout.flush()
    except OSError:
        with open(os.devnull, "w", encoding="utf-8") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())  # Python flushes once more as it exits
        raise


class _UsageError(Exception):
    """The arguments cannot be used; the message names the one that is wrong."""


class _Parser(argparse.ArgumentParser):
    """Leaves errors to ``main``, as argparse would print the usage and exit. Suggests what was probably meant.

    Args:
        example: Arguments of an example, after the program's name.
        description: What the command does.
        options: As for argparse.
    """

    def __init__(self, *, example: str = "", description: str = "", **options: Any) -> None:
        width = min(shutil.get_terminal_size().columns - 2, _WIDEST)
        super().__init__(
            description=textwrap.fill(description, max(width, 30)),
            # Not wrapped, so that it can be copied.
            epilog=f"example:\n  {_PROGRAM} {example}" if example else None,
            formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(prog, width=max(width, 40)),
            **options,
        )
        self._given: list[str] = []
        self._example = example

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse as argparse does. Refuse unknown arguments here, as this parser knows the similar options."""
        self._given = list(args or ())
        found, rest = super().parse_known_args(args, namespace)
        if rest:
            self.error(self._unknown(rest) or f"{' '.join(rest)} is one argument too many")
        return found, rest

    def error(self, message: str) -> NoReturn:
        """Raise, where argparse would exit."""
        message = re.sub(r"invalid int value: (.*)", r"\1 is not a whole number", message)
        message = re.sub(r"invalid float value: (.*)", r"\1 is not a number", message)
        if choice := re.search(r"invalid choice: '?([^' ]*)'? \(choose from (.*)\)", message):
            meant = did_you_mean(choice[1], re.findall(r"[\w-]+", choice[2]))
            message = f"{message}. {meant}".rstrip(" .")
        if "required" in message:
            message = self._unknown(self._given) or message
        stop = "" if message.endswith("?") else "."
        hint = f"Try '{self.prog} --help'."
        if "required" in message and self._example:
            hint = f"For example: {_PROGRAM} {self._example}"
        raise _UsageError(f"{message}{stop} {hint}")

    def _unknown(self, given: Sequence[str]) -> str:
        """Suggest what the first unknown option could mean; an empty string if there is none."""
        known = self._option_string_actions
        for argument in given:
            if argument == "--" or (self._subparsers is not None and not argument.startswith("-")):
                break  # the rest is for another program
            name = argument.partition("=")[0]
            if re.match(r"--?[a-zA-Z]", name) and not any(option.startswith(name) for option in known):
                meant = did_you_mean(name, known)
                for option, action in known.items():
                    values = str(action.metavar)
                    if f":{name.strip('-').upper()}:" in f":{values}:" and ":" in values:
                        meant = f"Did you mean '{option} {values}'?"  # one option takes several values
                return f"there is no option {name}. {meant}".rstrip(" .")
        return ""


def _show(module: Any, options: argparse.Namespace) -> int:
    """Print a command's result. For the folder of a run, use the newest record in it."""
    if options.png is not None:  # before anything is computed
        from lightning_bytescheduler.timeline.picture import require_picture

        options.png = require_new_file("--png", options.png)
        require_picture("--png", options.png)
    if hasattr(module, "RECORD_NAME"):
        newest, *others = records_in(options.record, module.RECORD_NAME)
        options.record = str(newest)
        if others:
            rest = some_of(list(map(str, others)))
            print(f"{_PROGRAM}: the newest of {len(others) + 1} is {newest}; also there: {rest}", file=sys.stderr)
    for text, rows in module.tables(options):
        print(text)
        width = max((len(label) for label, _ in rows), default=0)
        for label, value in rows:
            print(f"  {label:<{width}}  {value}")
    if options.png is not None:
        print(f"Wrote {options.png}")
    return 0


class _Command(NamedTuple):
    """A sub-command.

    Attributes:
        does: What it does, for its help; the first sentence is in the list of commands, too.
        example: Arguments of an example.
        module: Adds its arguments, as ``add_arguments``, and does the work, as ``run`` or ``tables``.
    """

    does: str
    example: str
    module: str


_COMMANDS = {
    "timeline": _Command(
        "Say how much of the communication in a timeline was hidden, and draw a few steps of it.",
        "trace.json --png trace.png --steps 10:13",
        "timeline.picture",
    ),
    "predict": _Command(
        "Say how long a training step takes on a link, with ddp, bytescheduler and others. It is that of a known "
        "network (--profile), or of your own module, of which a few steps are taken on a copy and on one device.",
        "train.py:Model --workers 4 --bandwidth 10Gbit/s --latency 50us --png plan.png",
        "predicting.command",
    ),
    "check": _Command(
        "Train your script with ddp and with bytescheduler, and compare. Both take some steps from the same seeds, in "
        "place of its own strategy. The report says whether weights, optimizer state and metrics are the same, or "
        "where they differ. Exit codes: 0 the same, 1 different, 2 could not be checked.",
        "--steps 50 --devices 2 -- python train.py --lr 1e-3",
        "checking.check",
    ),
    "tuning": _Command(
        "Say which sizes were tried while a run was tuned, which were chosen, and which options fix them.",
        "lightning_logs/version_0 --png search.png",
        "tuning.record",
    ),
    "rounds": _Command(
        "Say how the workers of a DiLoCo training spent their time, and draw a few of its rounds.",
        "lightning_logs/version_0 --png rounds.png --rounds 10:13",
        "diloco.round_record",
    ),
    "slices": _Command(
        "Make slices of data, verify them, and serve them to trainings on other machines.",
        "make data/*.jsonl data/slices",
        "slices.command",
    ),
    "coordinator": _Command(
        "Coordinate a DiLoCo training whose workers join and leave. They join by DiLoCoStrategy(coordinator=...). The "
        "coordinator ends rounds, merges updates, hands out slices of data, and keeps the run in a folder or bucket.",
        "--state runs/first --train data/slices --inner-steps 100 --wire-dtype int8",
        "coordinator.command",
    ),
    "server": _Command(
        "Add up gradients for a training with parameter servers. It runs until a training with "
        "ByteSchedulerStrategy(servers=...) is over, and finds it by its MASTER_ADDR and MASTER_PORT.",
        "--master-addr node0 --master-port 29500",
        "collectives.server_meeting",
    ),
}
_COMMANDS["advise"] = _COMMANDS["predict"]._replace(does="The older name of predict, for this release.")

if __name__ == "__main__":
    raise SystemExit(main())
