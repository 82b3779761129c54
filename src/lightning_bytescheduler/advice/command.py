"""The body of ``lightning-bytescheduler predict MODULE:NAME``: what its arguments name, and the advice they ask for."""

from __future__ import annotations

import argparse
import contextlib
import inspect
import os
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from lightning_bytescheduler.advice.advice import Advice, predict
from lightning_bytescheduler.advice.arguments import check_arguments, load_target
from lightning_bytescheduler.exceptions import ByteSchedulerError, OptionError, UnsupportedError
from lightning_bytescheduler.lightning_api import pl

__all__ = ["advice_for", "call_target"]

_LAUNCHED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


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
    link = check_arguments(options)
    target = load_target("target", options.target)
    data_target = None if options.data is None else load_target("--data", options.data)
    with _launched(options.device) if link is None else contextlib.nullcontext(), _failing_as_itself():
        module, data = _module_and_data(options.target, target)
        if data_target is not None:
            if data is not None:
                raise OptionError("--data", options.data, f"left out, as {options.target} brings data along")
            data = call_target("--data", options.data, data_target, instances=(pl.LightningDataModule,))
        advice = predict(
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
    except SystemExit as error:
        raise UnsupportedError(f"The training to be measured ended the process (exit code {error.code}).") from error
    except (OSError, ValueError, ImportError) as error:
        raise RuntimeError("The training to be measured failed.") from error
