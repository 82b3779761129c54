"""Whether a worker fits a run: the first thing that differs, in words for the person who started it."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_bytescheduler.__about__ import __version__
from lightning_bytescheduler.diloco.coordinator_protocol import PROTOCOL, Hello, ModelParameter, RunOptions
from lightning_bytescheduler.diloco.fragments import split_fragments
from lightning_bytescheduler.exceptions import OptionError

__all__ = ["difference"]

_UNSET = object()


def difference(hello: Hello, options: RunOptions, model: Sequence[ModelParameter]) -> str | None:
    """What keeps a worker from taking part, or ``None``.

    Args:
        hello: What it says of itself.
        options: The run's.
        model: The run's; empty before the first worker.
    """
    if hello.protocol != PROTOCOL or hello.package != __version__:
        return (
            f"This worker has lightning-bytescheduler {hello.package} (protocol {hello.protocol}), and the coordinator "
            f"{__version__} (protocol {PROTOCOL}). Install the same version everywhere."
        )
    for name, value in hello.options.items():
        ours = getattr(options, name, _UNSET)
        if ours is _UNSET:
            return f"The coordinator knows no option {name!r}."
        if value != ours or isinstance(value, bool) != isinstance(ours, bool):
            return (
                f"{name}={value!r} is not what the coordinator was started with, {name}={ours!r}. Leave it out, and "
                "the coordinator's holds."
            )
    if not hello.model:
        return "This worker has no parameter to train."
    if model:
        return _model_difference(hello.model, model)
    return _model_fault(hello.model, options)


def _model_difference(theirs: Sequence[ModelParameter], ours: Sequence[ModelParameter]) -> str | None:
    for index, (their, our) in enumerate(zip(theirs, ours, strict=False)):
        for aspect in ("name", "shape", "dtype"):
            if getattr(their, aspect) != getattr(our, aspect):
                return (
                    f"This worker trains another model than the run: the {aspect} of parameter {index} is "
                    f"{_shown(their, aspect)} here and {_shown(our, aspect)} in the run."
                )
    if len(theirs) != len(ours):
        longer, where = (theirs, "here") if len(theirs) > len(ours) else (ours, "in the run")
        return (
            f"This worker trains another model than the run: it has {len(theirs)} parameters and the run has "
            f"{len(ours)}; the first that is only {where} is {longer[min(len(theirs), len(ours))].name!r}."
        )
    return None


def _shown(parameter: ModelParameter, aspect: str) -> str:
    of = "" if aspect == "name" else f" ({parameter.name!r})"
    return f"{getattr(parameter, aspect)!r}{of}"


def _model_fault(model: Sequence[ModelParameter], options: RunOptions) -> str | None:
    names = [parameter.name for parameter in model]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        return f"This worker says that it has two parameters of the name {twice!r}."
    sizes = {parameter.name: _size(parameter) for parameter in model}
    if not sum(sizes.values()):
        return "This worker has no parameter to train: all are empty."
    try:
        split_fragments(sizes, options.fragments)
    except OptionError as error:
        return str(error)
    return None


def _size(parameter: ModelParameter) -> int:
    size = 1
    for length in parameter.shape:
        size *= length
    return size
