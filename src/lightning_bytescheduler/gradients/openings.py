"""What opened a gate, for whoever asks: see ``GradientEngine.on_open``.

Nothing here runs unless somebody asks: it walks the stack at each opening.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import torch
from torch import nn

__all__ = ["Opening", "OpeningKind", "caller"]

OpeningKind = Literal["touch", "gradient", "step", "forward end", "flush"]

_OWN_FILES = str(Path(__file__).parent)
_TORCH_FILES = str(Path(torch.__file__).parent)
_LIBRARIES = (_OWN_FILES, _TORCH_FILES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """One gate that opened, or one parameter whose gate another one's touch had opened and that was touched now.

    Attributes:
        step: Number of the backward pass whose update (or gradient) was waited for, from 1; the same on all ranks.
        parameters: Whose gates opened: all of a bucket's; one, when its bucket was open already.
        touched: The one that was touched, if any was.
        kind: ``"touch"`` of a weight, in or between forward passes; ``"gradient"`` when a gradient was asked for;
            ``"step"`` when the update is taken in the step itself, as reads cannot be seen; ``"forward end"`` when the
            forward pass ended and had not touched the bucket; ``"flush"`` when all weights had to be final.
        how: By what, in words, such as ``linear, in Linear.forward (linear.py:134), from Net.training_step
            (train.py:40)``.
    """

    step: int
    parameters: tuple[nn.Parameter, ...]
    touched: nn.Parameter | None
    kind: OpeningKind
    how: str

    @classmethod
    def of(
        cls, parameters: Sequence[nn.Parameter], touched: nn.Parameter | None, kind: OpeningKind, step: int
    ) -> Opening:
        """What opens now, on this thread."""
        by_touch = kind in ("touch", "gradient")
        return cls(
            step=step,
            parameters=tuple(parameters),
            touched=touched if by_touch else None,
            kind=kind,
            how=caller(),
        )


def caller() -> str:
    """Who is further up this thread's stack: the PyTorch function, the module it ran in, and the code that called."""
    frame: FrameType | None = sys._getframe(1)
    function = ""
    module: str | None = None
    while frame is not None:
        code, file = frame.f_code, frame.f_code.co_filename
        if not function and code.co_name == "__torch_function__" and file.startswith(_OWN_FILES):
            function = _name_of(frame.f_locals.get("func"))
        elif not function and code.co_name == "unwrap_and_open" and file.startswith(_OWN_FILES):
            function = "autograd.Function.apply"
        elif module is None and code.co_name == "forward" and isinstance(frame.f_locals.get("self"), nn.Module):
            module = _place(frame)
        if not file.startswith(_LIBRARIES) and not _is_of_the_package(file):
            place = _place(frame)
            parts = [function, f"in {module}" if module not in (None, place) else "", f"from {place}"]
            return ", ".join(part for part in parts if part)
        frame = frame.f_back
    return function or "unknown code"


def _is_of_the_package(file: str) -> bool:
    parts = Path(file).parts
    return "lightning_bytescheduler" in parts or "contextlib.py" in parts[-1:]


def _place(frame: FrameType) -> str:
    owner = frame.f_locals.get("self")
    name = frame.f_code.co_name if owner is None else f"{type(owner).__name__}.{frame.f_code.co_name}"
    return f"{name} ({Path(frame.f_code.co_filename).name}:{frame.f_lineno})"


def _name_of(function: Any) -> str:
    name = getattr(function, "__name__", None) or repr(function)
    owner = getattr(getattr(function, "__self__", None), "__name__", None)
    return f"{owner}.{name}" if name in ("__get__", "__set__", "__delete__") and owner else str(name)
