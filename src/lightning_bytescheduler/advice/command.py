"""The body of ``lightning-bytescheduler advise``: its arguments, what they name, and the advice they ask for."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import inspect
import os
import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from lightning_bytescheduler.advice.advice import STEPS, Advice, advise
from lightning_bytescheduler.exceptions import ByteSchedulerError, OptionError
from lightning_bytescheduler.lightning_api import pl
from lightning_bytescheduler.simulation.command import add_link_arguments, link_of

__all__ = ["add_arguments", "advice_for", "call_target", "load_target"]

_LAUNCHED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "target",
        metavar="MODULE:NAME",
        help="a function that returns a LightningModule, or one and its data (a DataLoader or LightningDataModule); or "
        "a LightningModule class that is made without arguments. Such as my_project.train:make",
    )
    parser.add_argument(
        "--data", metavar="MODULE:NAME", help="a function that returns the data, or a LightningDataModule class"
    )
    add_link_arguments(parser, algorithms=("ring", "halving_doubling"), required=False)
    parser.add_argument("--device", metavar="DEVICE", help="cpu or cuda (default: cuda where there is one)")
    parser.add_argument("--precision", metavar="P", help="as for the Trainer, such as bf16-mixed")
    parser.add_argument("--gradient-clip-val", type=float, metavar="V", help="as for the Trainer")
    parser.add_argument(
        "--gradient-clip-algorithm", choices=("norm", "value"), metavar="A", help="as for the Trainer: norm or value"
    )
    parser.add_argument(
        "--steps", type=int, default=STEPS, metavar="N", help=f"how many steps to time (default: {STEPS})"
    )
    parser.add_argument("--json", metavar="OUT", help="write all figures to this file")
    parser.add_argument(
        "--png", metavar="OUT", help="draw them to this file, a .png, .svg or .pdf (needs the extra 'plots')"
    )


def advice_for(options: argparse.Namespace) -> Advice | None:
    """Do what the command was asked for.

    Args:
        options: The parsed arguments.

    Returns:
        What to print; ``None`` in all but one of several processes.

    Raises:
        OptionError: If an argument is not allowed.
        UnsupportedError: If the training cannot be measured, or there is no link to measure.
        ImportError: If the target cannot be imported, or a picture was asked for and matplotlib is not installed.
        OSError: If a file cannot be written.
        RuntimeError: If the user's code fails; its cause is what it failed with.
    """
    link = None
    if options.bandwidth is not None:
        if options.workers is None:
            raise OptionError("--workers", None, "given with --bandwidth")
        link = link_of(options)
    elif options.latency or options.overhead or options.messages or options.algorithm != "ring":
        raise OptionError("--bandwidth", None, "given with --latency, --overhead, --messages and --algorithm")
    target = load_target("target", options.target)
    data_target = None if options.data is None else load_target("--data", options.data)
    with _launched(options.device) if link is None else contextlib.nullcontext(), _failing_as_itself():
        module, data = _module_and_data(options.target, target)
        if data_target is not None:
            if data is not None:
                raise OptionError("--data", options.data, f"left out, as {options.target} brings data along")
            data = call_target("--data", options.data, data_target, instances=(pl.LightningDataModule,))
        advice = advise(
            module,
            data,
            link=link,
            workers=options.workers,
            device=options.device,
            precision=options.precision,
            gradient_clip_val=options.gradient_clip_val,
            gradient_clip_algorithm=options.gradient_clip_algorithm,
            steps=options.steps,
        )
    if os.environ.get("RANK", "0") != "0":
        return None
    if options.json is not None:
        advice.save(options.json)
    if options.png is not None:
        advice.draw(options.png)
    return advice


def _module_and_data(text: str, target: Any) -> tuple[Any, Any]:
    made = call_target("target", text, target, instances=(pl.LightningModule,))
    if not isinstance(made, tuple):
        return made, None
    if len(made) != 2:
        raise OptionError("target", text, "a function that returns a LightningModule, or a pair of one and its data")
    return made


def load_target(option: str, text: str) -> Any:
    """Import what ``text`` names; modules in the current directory are found too.

    Args:
        option: What the text was given for.
        text: ``package.module:name``.

    Raises:
        OptionError: If the text has another form, or the module has no such name.
        ImportError: If there is no such module, or it imports what is missing.
    """
    module_name, _, name = text.partition(":")
    if not all(part.isidentifier() for part in (*module_name.split("."), *name.split("."))):
        raise OptionError(option, text, "package.module:name, such as my_project.train:make")
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)  # as `python -m` does, and a console script does not
    found: Any = importlib.import_module(module_name)
    for part in name.split("."):
        if not hasattr(found, part):
            raise OptionError(option, text, f"a name that {module_name} has")
        found = getattr(found, part)
    return found


def call_target(option: str, text: str, target: Any, *, instances: tuple[type, ...]) -> Any:
    """What a function returns or a class makes; what is one of ``instances`` already is left as it is.

    Args:
        option: What the text was given for.
        text: What named the target.
        target: What was imported.
        instances: Classes whose instances are not called, though they could be.

    Raises:
        OptionError: If it is neither, or needs arguments.
    """
    if isinstance(target, instances):
        return target
    if not callable(target):
        raise OptionError(option, text, "the name of a function or a class")
    try:
        inspect.signature(target).bind()
    except TypeError:
        raise OptionError(
            option, text, "a function or class that needs no arguments; wrap it in a function that gives them"
        ) from None
    return target()


@contextlib.contextmanager
def _launched(device: str | None) -> Iterator[None]:
    """Join the other processes, if torchrun or the like started this one."""
    if dist.is_initialized() or not all(name in os.environ for name in _LAUNCHED) or os.environ["WORLD_SIZE"] == "1":
        yield
        return
    on_cuda = torch.cuda.is_available() and (device is None or device.startswith("cuda"))
    if on_cuda:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group("nccl" if on_cuda else "gloo")
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextlib.contextmanager
def _failing_as_itself() -> Iterator[None]:
    """An error of the user's own code keeps its traceback, where bad arguments are told in one line."""
    try:
        yield
    except ByteSchedulerError:
        raise
    except (OSError, ValueError, ImportError) as error:
        raise RuntimeError("The training to be measured failed.") from error
