"""Gates open at ``torch.autograd.Function.apply``, which dispatches no ``__torch_function__``.

A custom function is how kernels that take a weight's memory (Triton, CUDA extensions) become part of a model. Its
``apply`` hands the arguments to ``torch._functorch.utils.unwrap_dead_wrappers`` first, looked up at each call; while a
fit defers steps, gates among the arguments open there. ``apply`` itself stays what it is, so this holds for ``apply``
methods that were kept as functions (``attention = Attention.apply``), for subclasses that override it and call what
they inherit, and for Dynamo, which recognises custom functions by their ``apply`` and traces what is inside.

Not seen: weights that the arguments only lead to, such as a module's, and kernels that are called without a custom
function. The first iteration finds those (``first_use.py``), later ones ``unseen_reads.py``. Where PyTorch has no such
function, none is seen, and all are found that way.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch._functorch import utils

from lightning_bytescheduler.gradients.gate import open_gates

__all__ = ["FunctionTouches"]

_NAME = "unwrap_dead_wrappers"
_lock = threading.Lock()
_users = 0
_original: Callable[[tuple[Any, ...]], tuple[Any, ...]] | None = None


def unwrap_and_open(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Open the gates among ``args``, then do what PyTorch does with them."""
    open_gates(args)
    return args if _original is None else _original(args)


# Dynamo, where it gave up on a custom function and runs it as it is, must not look into what is around it.
_replacement: Callable[[tuple[Any, ...]], tuple[Any, ...]] = torch.compiler.disable(unwrap_and_open)


class FunctionTouches:
    """Sees to it that gates open, from :meth:`begin` to :meth:`end`; several may do so at a time, on any thread."""

    def __init__(self) -> None:
        self._begun = False

    def begin(self) -> None:
        """Begin; again: nothing happens."""
        global _users, _original
        if self._begun:
            return
        with _lock:
            self._begun = True
            _users += 1
            if _users == 1:
                found = getattr(utils, _NAME, None)
                if found is not None and found is not _replacement:
                    _original = found
                    setattr(utils, _NAME, _replacement)

    def end(self) -> None:
        """End, and leave PyTorch as it was once nobody needs this any more; again: nothing happens."""
        global _users
        with _lock:
            if not self._begun:
                return
            self._begun = False
            _users -= 1
            if _users == 0 and getattr(utils, _NAME, None) is _replacement:
                setattr(utils, _NAME, _original)
