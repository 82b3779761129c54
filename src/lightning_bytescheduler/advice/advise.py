"""The body of ``lightning-bytescheduler advise``: its arguments, and the advice they ask for.

``advise()``: measures a user's model and says what to expect of it on a network.

What ``package.module:name`` on a command line stands for.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import inspect
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist

from lightning_bytescheduler.advice.advice import Advice, check_link, give_advice
from lightning_bytescheduler.advice.profiled_fit import measure_step
from lightning_bytescheduler.collectives.link_probe import probe_link
from lightning_bytescheduler.exceptions import ByteSchedulerError, OptionError, UnsupportedError
from lightning_bytescheduler.simulation.command import add_link_arguments, link_of
from lightning_bytescheduler.simulation.link import LinkModel

__all__ = ["add_arguments", "advice_for", "advise", "call_target", "load_target"]

_STEPS = 10


def advise(
    module: pl.LightningModule,
    data: Any = None,
    *,
    link: LinkModel | None = None,
    workers: int | None = None,
    device: str | torch.device | None = None,
    precision: Any = None,
    gradient_clip_val: float | None = None,
    gradient_clip_algorithm: str | None = None,
    steps: int = _STEPS,
) -> Advice:
    """Measure a few steps of a training, and say what to expect of it with each strategy on a network.

    Training happens on a copy: the module, the state of random numbers and of data loaders are left as they are. What
    was compiled in place, with ``Module.compile()``, runs uncompiled there. Print the answer, or take its figures.

    Args:
        module: What is trained.
        data: What its training data comes from: a DataLoader, a LightningDataModule, whatever ``Trainer.fit`` takes;
            left out where the module has a ``train_dataloader``.
        link: The network. Left out, it is measured by a handful of all-reduces over the default process group of
            torch.distributed, so that every process of the group has to call this function.
        workers: How many train together; by default those of the link.
        device: ``cpu`` or a CUDA device; by default CUDA where there is one.
        precision: As for the Trainer.
        gradient_clip_val: As for the Trainer.
        gradient_clip_algorithm: As for the Trainer.
        steps: How many steps to time; as many are watched layer by layer, after a warm-up.

    Raises:
        OptionError: If an option's value is not allowed.
        UnsupportedError: If the training cannot be measured, or there is no link to measure.
    """
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise OptionError("steps", steps, "a whole number, 1 or more")
    where = _device(device)
    probed = link is None
    if link is None:
        link = _probed(where)
    elif not isinstance(link, LinkModel):
        raise OptionError("link", link, "a LinkModel, or left out to measure the link")
    if workers is not None:
        link = replace(link, workers=workers)
    check_link(link)
    options = {
        "precision": precision,
        "gradient_clip_val": gradient_clip_val,
        "gradient_clip_algorithm": gradient_clip_algorithm,
    }
    measured = measure_step(module, data, device=where, steps=steps, trainer_options=options)
    if not probed:
        return give_advice(measured, link)
    seconds = _of_all_workers(measured.profile.compute_seconds, where)
    # Workers that take their steps together take the slowest one's time.
    slowest = replace(measured, profile=measured.profile.scaled_to(max(seconds)))
    return give_advice(slowest, link, worker_seconds=seconds)


def _device(device: str | torch.device | None) -> torch.device:
    if device is None:
        return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError):
        found = None
    if found is None or found.type not in ("cpu", "cuda"):
        raise OptionError("device", device, "'cpu', 'cuda' or one CUDA device such as 'cuda:0'")
    if found.type == "cuda" and not torch.cuda.is_available():
        raise OptionError("device", device, "'cpu', as torch finds no CUDA device here")
    if found.type == "cuda" and found.index is None:
        return torch.device("cuda", torch.cuda.current_device())  # what sets the device wants to know which
    return found


def _probed(device: torch.device) -> LinkModel:
    """The link of the default process group."""
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() < 2:
        raise UnsupportedError(
            "There is no link to measure, as this process is alone: say what the link is like (on the command line "
            "with --bandwidth and --workers, in Python with link=LinkModel(...)), or start one process on each machine "
            "with torchrun."
        )
    world = dist.group.WORLD
    if world is None:
        raise UnsupportedError("torch.distributed has no default process group: call init_process_group first.")
    estimate = probe_link(world, device)
    return LinkModel.measured(workers=dist.get_world_size(), alpha=estimate.alpha, beta=estimate.beta)


def _of_all_workers(seconds: float, device: torch.device) -> list[float]:
    mine = torch.tensor([seconds], dtype=torch.float64, device=device)
    everybody = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everybody, mine)
    return [float(one.item()) for one in everybody]


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
    parser.add_argument("--steps", type=int, default=10, metavar="N", help="how many steps to time (default: 10)")
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
