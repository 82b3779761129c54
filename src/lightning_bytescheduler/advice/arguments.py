"""The arguments of ``lightning-bytescheduler predict``: which of them go together, and what they name.

Imports neither torch nor Lightning: which Lightning there is to be, the user's own module says.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

from lightning_bytescheduler.advice.expectations import STEPS
from lightning_bytescheduler.checks import closest, require_whole
from lightning_bytescheduler.exceptions import OptionError, UnsupportedError
from lightning_bytescheduler.simulation.command import add_link_arguments, add_profile_arguments, link_of
from lightning_bytescheduler.simulation.link import LinkModel

__all__ = ["add_arguments", "check_arguments", "load_target"]

_OF_PROFILES = ("profile", "policy", "compute")
_OF_MODULES = ("data", "device", "precision", "gradient_clip_val", "gradient_clip_algorithm", "steps", "json")
_PRECISIONS = ("32-true", "16-mixed", "bf16-mixed", "16-true", "bf16-true", "64-true", "32", "16", "bf16", "64")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "target",
        nargs="?",
        metavar="MODULE:NAME",
        help="what is measured, where no --profile is given: a function that returns a LightningModule, or one and its "
        "data (a DataLoader or LightningDataModule); or "
        "a LightningModule class that is made without arguments. Such as train.py:make or my_project.train:make",
    )
    parser.add_argument(
        "--data", metavar="MODULE:NAME", help="a function that returns the data, or a LightningDataModule class"
    )
    add_link_arguments(parser)
    add_profile_arguments(parser)
    parser.add_argument(
        "--device", metavar="DEVICE", help="cpu, cuda or such as cuda:1 (default: cuda if there is one)"
    )
    parser.add_argument(
        "--precision",
        choices=_PRECISIONS,
        metavar="P",
        help=f"as for the Trainer: {', '.join(_PRECISIONS)} (default: 32-true)",
    )
    parser.add_argument(
        "--gradient-clip-val", type=float, metavar="V", help="as for the Trainer (default: gradients are not clipped)"
    )
    parser.add_argument(
        "--gradient-clip-algorithm",
        choices=("norm", "value"),
        metavar="A",
        help="as for the Trainer: norm or value (default: norm)",
    )
    parser.add_argument("--steps", type=int, metavar="N", help=f"how many steps to time (default: {STEPS})")
    parser.add_argument("--json", metavar="OUT", help="write all figures to this file, which --profile reads")


def check_arguments(options: argparse.Namespace) -> LinkModel | None:
    """Refuse what makes no sense, before anything is imported or measured.

    Args:
        options: The parsed arguments.

    Returns:
        The network of a module, or ``None`` if it is to be measured, or no module is.

    Raises:
        OptionError: If an argument is not allowed.
    """
    measures = options.target is not None
    for name in _OF_PROFILES if measures else _OF_MODULES:
        if getattr(options, name) is not None:
            without = (
                "where a module is measured" if measures else "where none is: name a MODULE:NAME, or no such option"
            )
            raise OptionError(f"--{name.replace('_', '-')}", getattr(options, name), f"left out {without}")
    if not measures:
        return None
    options.steps = STEPS if options.steps is None else options.steps
    require_whole("--steps", options.steps, 1)
    if options.bandwidth is not None:
        if options.workers is None:
            raise OptionError("--workers", None, "given with --bandwidth")
        return link_of(options)
    described = options.latency or options.overhead or options.messages or options.servers or options.idle
    if described or options.algorithm != "ring" or options.architecture != "allreduce":
        raise OptionError(
            "--bandwidth",
            None,
            "given with --latency, --overhead, --messages, --architecture, --servers, --idle and --algorithm",
        )
    return None


def load_target(option: str, text: str) -> Any:
    """Import what ``text`` names; modules in the current directory are found too.

    Args:
        option: What the text was given for.
        text: ``package.module:name``, or ``folder/file.py:name``.

    Raises:
        OptionError: If the text has another form, or the module has no such name.
        ImportError: If there is no such module, or it imports what is missing.
        UnsupportedError: If importing the module ends the process, as a script does that trains at once.
    """
    module_name, _, name = text.partition(":")
    here, file = os.getcwd(), ""
    if module_name.endswith(".py") and os.path.isfile(module_name):
        file = os.path.abspath(module_name)
        here, module_name = os.path.dirname(file), Path(file).stem
    names = (*module_name.split("."), *name.split("."))
    if not all(part.isidentifier() for part in names) or module_name.endswith(".py"):
        raise OptionError(option, text, f"package.module:name, such as {_meant(module_name, name)}")
    if here not in sys.path:
        sys.path.insert(0, here)  # as `python -m` does, and a console script does not
    try:
        found: Any = _of_file(module_name, file) if file else importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{module_name}.".startswith(f"{error.name}."):
            near = closest(error.name, [file.stem for file in Path(here).glob("*.py")])
            hint = "" if near is None else f"; did you mean {near}:{name}?"
            raise ImportError(
                f"{option}: there is no module {error.name}, neither in {here} nor installed{hint}"
            ) from error
        raise ImportError(f"{option}: {module_name} cannot be imported: {error}", name=error.name) from error
    except SystemExit as error:
        raise UnsupportedError(
            f"{option}: importing {module_name} ended the process (exit code {error.code}). What it does when run "
            'belongs under `if __name__ == "__main__":`, and what it trains into a function.'
        ) from error
    for part in name.split("."):
        if not hasattr(found, part):
            near = closest(part, [n for n in dir(found) if not n.startswith("_")])
            hint = "" if near is None else f" (did you mean {near}?)"
            raise OptionError(option, text, f"a name that {module_name} has{hint}")
        found = getattr(found, part)
    return found


def _of_file(name: str, file: str) -> Any:
    """The module that a file is, also where another one has its name."""
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} is no file of Python", name=name)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _meant(module: str, name: str) -> str:
    """What somebody may have meant who gave a file, or left out the name."""
    module = module.removesuffix(".py").strip("./").replace(os.sep, ".")
    called = name.removesuffix("()")
    if not all(part.isidentifier() for part in module.split(".")):
        return "my_project.train:make"
    return f"{module}:{called if called.isidentifier() else 'make'}"
