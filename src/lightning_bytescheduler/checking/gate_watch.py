"""What opened each parameter's gate in a step: the line that touched it first, or nobody before backward."""

from __future__ import annotations

import os
import sys
from types import FrameType
from typing import Any

import lightning
import torch
from torch import nn

import lightning_bytescheduler
from lightning_bytescheduler.gradients.bucket_update import UpdateState

__all__ = ["GateWatch"]

_PLUMBING = tuple(
    os.path.dirname(os.path.abspath(package.__file__ or "")) + os.sep
    for package in (torch, lightning, lightning_bytescheduler)
)


class GateWatch:
    """Listens at one engine's gates; it opens none.

    Args:
        engine: The :class:`~lightning_bytescheduler.gradients.engine.GradientEngine`.
        module: Names its parameters.

    Attributes:
        openings: For each step, counted from 1, who touched a parameter first, by its name.
        untouched: For each step, whose update was due and landed without anybody's touch.
    """

    def __init__(self, engine: Any, module: nn.Module) -> None:
        self.openings: dict[int, dict[str, str]] = {}
        self.untouched: dict[int, tuple[str, ...]] = {}
        self._engine = engine
        self._names = {id(parameter): name for name, parameter in module.named_parameters()}
        self._step = 0
        self._due: list[str] = []
        self._in_forward = False
        touched = getattr(engine, "touched", None)
        if hasattr(engine, "on_open"):
            engine.on_open = self._opened
        elif touched is not None:

            def noting(update: Any, *arguments: Any, **options: Any) -> Any:
                if update.state is UpdateState.DUE:
                    self._note(update)
                return touched(update, *arguments, **options)

            engine.touched = noting

    def begin(self, step: int) -> None:
        """Before the forward pass of ``step``: note which updates are due."""
        self._step = step
        self._in_forward = True
        due = [update for update in getattr(self._engine, "_updates", ()) if update.state is UpdateState.DUE]
        self._due = [name for update in due for name in self._named(update)]

    def end(self) -> None:
        """After that pass."""
        opened = self.openings.get(self._step, {})
        self.untouched[self._step] = tuple(name for name in self._due if name not in opened)
        self._due = []
        self._in_forward = False

    def _opened(self, opening: Any) -> None:
        if opening.kind != "forward end":
            how = opening.how if opening.kind == "touch" else f"{opening.kind}: {opening.how}"
            self._put_down(self._named(opening), how)

    def _note(self, update: Any) -> None:
        self._put_down(self._named(update), _reader(sys._getframe(2)))

    def _put_down(self, names: list[str], how: str) -> None:
        # Reads between two steps belong to the pass that follows them.
        step = self._step if self._in_forward else self._step + 1
        for name in names:
            self.openings.setdefault(step, {}).setdefault(name, how)

    def _named(self, gated: Any) -> list[str]:
        return [name for name in (self._names.get(id(p)) for p in gated.parameters) if name is not None]


def _reader(frame: FrameType | None) -> str:
    """The innermost line on the stack that is neither torch's, Lightning's nor this package's."""
    module = ""
    while frame is not None:
        owner = frame.f_locals.get("self")
        if not module and isinstance(owner, nn.Module):
            module = f" in {type(owner).__name__}.{frame.f_code.co_name}"
        path = frame.f_code.co_filename
        if not os.path.abspath(path).startswith(_PLUMBING) and not path.startswith("<"):
            return f"{frame.f_code.co_name} ({os.path.basename(path)}:{frame.f_lineno}){module}"
        frame = frame.f_back
    return f"Lightning or torch{module}"
