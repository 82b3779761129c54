"""Weights in processes that are started while updates are due.

A forked child has its parent's memory and none of its threads: a gate that is closed there would wait forever. So all
gates open before a fork, whichever thread forks: the parent waits for what is due, and the child has plain parameters
and needs nothing of ours. ``subprocess`` replaces the child's memory at once, runs no hooks, and costs nothing.

Processes that get a weight over a pipe (``spawn``, ``forkserver``, queues) have it pickled, which opens its gate; torch
hands parameters over in shared memory, by their exact class.

Locks: whoever forks takes the lock of each :class:`Forkable` and holds it across the fork, so that the child never
finds it taken by a thread that it does not have. Two threads that fork take the locks in one order.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import Any, Protocol

from torch import nn
from torch.multiprocessing.reductions import reduce_tensor

from lightning_bytescheduler.gradients.gate import GatedParameter, open_gates

__all__ = ["Forkable", "before_forks"]


class Forkable(Protocol):
    """What has gates to open before a fork."""

    def before_fork(self) -> None:
        """Take the lock, and make all parameters plain; must not raise."""

    def after_fork(self, *, in_child: bool) -> None:
        """Let go of the lock; in the child, forget what only the parent can end."""


_watched: weakref.WeakSet[Any] = weakref.WeakSet()
_of_this_thread = threading.local()


def before_forks(engine: Forkable) -> None:
    """Tell ``engine`` of every fork of this process from here on, for as long as it lives."""
    _watched.add(engine)


def _before() -> None:
    _of_this_thread.held = held = []
    for engine in sorted(_watched, key=id):
        engine.before_fork()
        held.append(engine)


def _after(*, in_child: bool) -> None:
    held, _of_this_thread.held = getattr(_of_this_thread, "held", []), []
    for engine in reversed(held):
        engine.after_fork(in_child=in_child)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_before,
        after_in_parent=lambda: _after(in_child=False),
        after_in_child=lambda: _after(in_child=True),
    )


def _reduce_opened(parameter: nn.Parameter) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """As torch reduces a parameter, and of that class also where the gate stays closed (gradients on their way)."""
    open_gates((parameter,))
    rebuild, arguments = reduce_tensor(parameter)
    return rebuild, tuple(nn.Parameter if value is GatedParameter else value for value in arguments)


ForkingPickler.register(GatedParameter, _reduce_opened)
