"""The command ``lightning-bytescheduler predict``: its arguments, what they name, and the prediction.

It imports torch and Lightning only after the arguments have been checked: the user's module decides which Lightning
package to use.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import inspect
import operator
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lightning_bytescheduler.checks import did_you_mean, named, parameters_in
from lightning_bytescheduler.exceptions import ByteSchedulerError, OptionError, UnsupportedError
from lightning_bytescheduler.predicting.link import RATES, TIMES, LinkModel, require_duration
from lightning_bytescheduler.predicting.prediction import MeasuredStep, Prediction, predict
from lightning_bytescheduler.predicting.profiles import NETWORKS, ModelProfile, network_profile, profile_of_size

_OF_PROFILES = ("profile", "compute")
_OF_MODULES = ("precision",)
_OF_LINKS = ("workers", "bandwidth", "latency", "servers")
_PRECISIONS = ("32-true", "16-mixed", "bf16-mixed", "16-true", "bf16-true", "64-true", "32", "16", "bf16", "64")
_GPT = ("gpt", "gpt2", "gpt2small")  # other names of `transformer`


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add = parser.add_argument
    add(
        "target",
        nargs="?",
        metavar="MODULE:NAME",
        help="the training to measure, if there is no --profile: a function that returns a LightningModule, or a pair "
        "of one and its data (a DataLoader or LightningDataModule), or a LightningModule class without arguments; "
        "such as train.py:make or my_project.train:make",
    )
    add(
        "--profile",
        "--network",
        metavar="PROFILE",
        help=f"the model: {', '.join(NETWORKS)}; or a size, such as 350M (parameters) or 100MB (fp32 gradients), for "
        "20 equal layers",
    )
    add(
        "--compute",
        metavar="TIME",
        help="how long one worker alone takes for a step, such as 350ms (default: what the profile says; 200ms for "
        "networks and sizes)",
    )
    add("--workers", type=int, metavar="N", help="how many workers train together (required)")
    add("--bandwidth", "--link", metavar="RATE", help=f"rate of each worker's link, each way: {RATES} (required)")
    add("--latency", metavar="TIME", help=f"time of one hop, half of what ping shows, such as {TIMES} (default: 0)")
    add("--servers", type=int, metavar="K", help="say what K parameter servers on spare machines bring (default: none)")
    add(
        "--precision",
        choices=_PRECISIONS,
        metavar="P",
        help=f"as for the Trainer: {', '.join(_PRECISIONS)} (default: 32-true)",
    )
    add(
        "--gradient-clip-val",
        type=float,
        metavar="V",
        help="as for the Trainer, where it clips by the norm (default: gradients are not clipped)",
    )
    add(
        "--png",
        metavar="OUT",
        help="draw how fast each kind of strategy is around this bandwidth, to this file: a .png, .svg or .pdf "
        "(needs the extra 'plots')",
    )


def tables(options: argparse.Namespace) -> list[tuple[str, list[tuple[str, str]]]]:
    """Predict, and write the files that were asked for.

    Args:
        options: The parsed arguments.

    Returns:
        The lines of the prediction, without rows below them.

    Raises:
        OptionError: If an argument is not allowed.
        UnsupportedError: If a training cannot be measured.
        ImportError: If the target cannot be imported, or a picture is wanted and matplotlib is not installed.
        OSError: If a file cannot be read or written.
        RuntimeError: If the user's code fails; its cause is the original error.
    """
    measures = options.target is not None
    for name in _OF_PROFILES if measures else _OF_MODULES:
        if getattr(options, name) is not None:
            where = "a module is measured" if measures else "no module is measured; name a MODULE:NAME for that"
            raise OptionError(f"--{name}", getattr(options, name), f"left out where {where}")
    if not measures and options.profile is None:
        raise _missing("--profile", "or the MODULE:NAME of a module to measure, such as train.py:Model")
    link = _link(options)
    with named(target="target", module="module", data="data", compute_seconds="--compute"):
        prediction = _of_module(options, link) if measures else _of_profile(options, link)
    if options.png is not None:
        prediction.draw(options.png)
    return [(line, []) for line in str(prediction).splitlines()]


def _link(options: argparse.Namespace) -> LinkModel:
    """The network that the arguments describe."""
    given = {name: value for name in _OF_LINKS if (value := getattr(options, name)) is not None}
    for name in ("bandwidth", "workers"):
        if name not in given:
            raise _missing(f"--{name}", "such as --workers 4 --bandwidth 10Gbit/s")
    with named():
        return LinkModel(**given)


def _missing(option: str, such_as: str) -> OptionError:
    return OptionError(option, None, "given", says=f"{option} is missing, {such_as}.")


# ── A network in numbers ────────────────────────────────────────────────────────────────────────────


def _of_profile(options: argparse.Namespace, link: LinkModel) -> Prediction:
    profile = profile_of(options.profile)
    if options.compute is not None:
        profile = profile.scaled_to(require_duration("--compute", options.compute))
    clips = ("gradient norm clipping",) if options.gradient_clip_val else ()
    measured = MeasuredStep(profile=profile, norm_needed_by=clips)
    return predict(measured, link)


def profile_of(text: str) -> ModelProfile:
    """The model that ``--profile`` names: a network or a size.

    Raises:
        OptionError: If it is none of these.
    """
    name = text.lower().replace("-", "").replace("_", "")
    if name in NETWORKS:
        return network_profile(name)
    size = parameters_in(text)
    if size is not None:
        return profile_of_size(text, size)
    hint = "Did you mean 'transformer'?" if name in _GPT else did_you_mean(name, NETWORKS)
    allowed = f"{', '.join(NETWORKS)}, or a size such as 350M or 100MB"
    raise OptionError("--profile", text, allowed, hint)


# ── A module of the user's ──────────────────────────────────────────────────────────────────────────


def _of_module(options: argparse.Namespace, link: LinkModel) -> Prediction:
    target = load_target(options.target)  # decides which Lightning package is used
    from lightning_bytescheduler.lightning_api import pl
    from lightning_bytescheduler.predicting.predict import predict as measure

    with _failing_as_itself():
        module, data = target if isinstance(target, pl.LightningModule) else call_target(options.target, target), None
        if isinstance(module, tuple):
            if len(module) != 2:
                allowed = "a function that returns a LightningModule, or a pair of one and its data"
                raise OptionError("target", options.target, allowed)
            module, data = module
        clips = options.gradient_clip_val
        return measure(module, data, link=link, precision=options.precision, gradient_clip_val=clips)


@contextlib.contextmanager
def _failing_as_itself() -> Iterator[None]:
    """Keep the traceback of an error in the user's own code. Bad arguments are reported in one line instead."""
    try:
        yield
    except ByteSchedulerError:
        raise
    except SystemExit as error:
        raise UnsupportedError(f"The training to be measured ended the process (exit code {error.code}).") from error
    except (OSError, ValueError, ImportError) as error:
        raise RuntimeError(f"The training to be measured failed: {type(error).__name__}: {error}") from error


def call_target(text: str, target: Any) -> Any:
    """Call a function, or make an object of a class.

    Args:
        text: The text that named the target.
        target: The imported object.

    Raises:
        OptionError: If it is neither a function nor a class, or needs arguments.
    """
    try:
        inspect.signature(target).bind()
    except TypeError:  # also of what cannot be called
        allowed = "the name of a function or a class that needs no arguments; wrap it in a function that gives them"
        raise OptionError("target", text, allowed) from None
    return target()


def load_target(text: str) -> Any:
    """Import what ``text`` names; modules in the current directory are found, too.

    Args:
        text: ``package.module:name``, or ``folder/file.py:name``.

    Raises:
        OptionError: If the text has another form, or the module has no such name.
        ImportError: If there is no such module, or an import in it fails.
        UnsupportedError: If importing the module ends the process, as in a script that trains at once.
    """
    module_name, _, name = text.partition(":")
    here, file = os.getcwd(), ""
    if module_name.endswith(".py"):
        if not os.path.isfile(module_name):
            raise OptionError("target", text, "in a file that is there")
        file = os.path.abspath(module_name)
        here, module_name = os.path.dirname(file), Path(file).stem
    if not all(part.isidentifier() for part in (*module_name.split("."), *name.split("."))):
        raise OptionError("target", text, "package.module:name or file.py:name, such as train.py:make")
    if here not in sys.path:
        sys.path.insert(0, here)  # as `python -m` does, and a console script does not
    try:
        found: Any = _of_file(module_name, file) if file else importlib.import_module(module_name)
    except ImportError as error:
        near = [path.stem for path in Path(here).glob("*.py")] if error.name == module_name else []
        hint = did_you_mean(module_name, near)
        raise ImportError(f"{module_name} cannot be imported: {error}. {hint}".rstrip(), name=error.name) from error
    except SystemExit as error:
        raise UnsupportedError(
            f"Importing {module_name} ended the process (exit code {error.code}). What it does when run "
            'belongs under `if __name__ == "__main__":`, and what it trains into a function.'
        ) from error
    try:
        return operator.attrgetter(name)(found)
    except AttributeError as error:
        raise OptionError("target", text, f"a name that {module_name} has", did_you_mean(name, dir(found))) from error


def _of_file(name: str, file: str) -> Any:
    """The module in a file, even if another module has its name."""
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} is no file of Python", name=name)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
