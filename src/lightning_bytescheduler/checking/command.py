"""The body of ``lightning-bytescheduler check``: its arguments, and the report they ask for."""

from __future__ import annotations

import argparse
import os
import sys
from functools import partial
from typing import TYPE_CHECKING

from lightning_bytescheduler.checks import is_whole, require_positive, require_whole
from lightning_bytescheduler.exceptions import OptionError, UnsupportedError

if TYPE_CHECKING:
    from lightning_bytescheduler.checking.report import CheckReport

__all__ = ["STEPS", "TIMEOUT", "add_arguments", "check_numbers", "report_for"]

STEPS = 50
TIMEOUT = 600.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "--steps", type=int, default=STEPS, metavar="N", help=f"optimizer steps of each run (default: {STEPS})"
    )
    parser.add_argument("--devices", type=int, metavar="N", help="train on so many devices, whatever the Trainer says")
    parser.add_argument(
        "--timeout",
        type=float,
        default=TIMEOUT,
        metavar="SECONDS",
        help=f"end a run after so long; it counts as hanging (default: {TIMEOUT:g})",
    )
    parser.add_argument("--seed", type=int, default=20240, metavar="N", help="of all random numbers (default: 20240)")
    parser.add_argument(
        "command",
        nargs=argparse.REMAINDER,
        metavar="-- COMMAND",
        help="what trains, such as: -- python train.py --lr 1",
    )


def check_numbers(steps: object, devices: object, timeout: object, seed: object) -> None:
    """Refuse numbers that make no sense.

    Raises:
        OptionError: Names the option.
    """
    require_whole("steps", steps, 1)
    if devices is not None:
        require_whole("devices", devices, 2)
    require_positive("timeout", timeout, of="seconds")
    if not is_whole(seed) or seed >= 2**31:
        raise OptionError("seed", seed, "a whole number from 0 to 2147483647")


def report_for(options: argparse.Namespace) -> CheckReport:
    """Do what the command was asked for.

    Args:
        options: The parsed arguments.

    Raises:
        OptionError: If an argument is not allowed.
        UnsupportedError: If this process is one of several ranks.
        OSError: If the command cannot be started.
    """
    check_numbers(options.steps, options.devices, options.timeout, options.seed)
    command = options.command[1:] if options.command[:1] == ["--"] else list(options.command)
    if not command:
        raise OptionError("command", "", "the command that trains, such as `-- python train.py`")
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        raise UnsupportedError(
            "The check starts the ranks itself and was started as one of several. Start it once, with the launcher "
            "behind it: lightning-bytescheduler check -- torchrun --nproc-per-node 2 train.py"
        )
    if command[0].endswith(".py"):
        if not os.path.exists(command[0]):
            raise OptionError("command", command[0], "a script that is there, or another command that trains")
        command.insert(0, sys.executable)
    # Comparing takes torch, which takes seconds to import: not for what is refused above, or asks for help.
    from lightning_bytescheduler.checking.procedure import investigate
    from lightning_bytescheduler.checking.report import CheckReport
    from lightning_bytescheduler.checking.runs import Runs, start_command

    with Runs(partial(start_command, command), timeout=options.timeout) as launch:
        findings = investigate(launch, steps=options.steps, seed=options.seed, devices=options.devices)
    return CheckReport(findings=findings, steps=options.steps)
