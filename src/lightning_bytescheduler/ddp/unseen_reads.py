"""Finding reads that no gate sees and that began after the first iteration, such as a kernel that is switched on later.

A parameter that nobody touched in a forward pass, though its update was due, and that gets a gradient in the backward
pass all the same, was read unseen, and before its update. A gate opens for a whole bucket, so a parameter is told
apart from its neighbours only now and then: in such a pass, parameters whose bucket another one's touch has opened keep
a gate that only notes their own.

What this costs: nothing for parameters that are touched, and one more touch of each in one pass out of sixteen.

Not found: reads without a gradient, and a parameter that is read unseen and then touched in the same forward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from lightning_bytescheduler.ddp.gates import arm, disarm, gate_of

__all__ = ["UnseenReads"]

_EVERY = 16


class UnseenReads:
    """Watches one engine's forward and backward passes, under its lock or on the training thread."""

    def __init__(self) -> None:
        self._on_touch: Callable[[nn.Parameter], None] | None = None
        self._apart = False
        self._watched: dict[int, nn.Parameter] = {}
        self._stale: dict[int, nn.Parameter] = {}  # not touched, and not stepped when the forward pass ended
        self._doubtful: dict[int, nn.Parameter] = {}  # not touched, but their bucket was open at some time
        self._with_gradient: set[int] = set()
        self._handles: list[Any] = []

    def begin(self, step: int, on_touch: Callable[[nn.Parameter], None] | None = None) -> None:
        """A forward pass begins.

        Args:
            step: Number of the backward pass that follows.
            on_touch: Told of each parameter that is touched after its bucket was opened: then each is told apart from
                its neighbours, in this pass too.
        """
        self._apart = on_touch is not None or step % _EVERY == 0
        self._on_touch = on_touch

    def opened(self, parameters: Iterable[nn.Parameter], touched: nn.Parameter | None) -> None:
        """In place of making ``parameters`` plain, in a forward pass: a touch of one of them has opened their gate."""
        if not self._apart:
            return
        others = [p for p in parameters if p is not touched]
        self._watched.update((id(p), p) for p in others)
        arm(others, self)

    def touched(self, parameter: nn.Parameter, gradient_only: bool) -> None:
        """See :class:`~lightning_bytescheduler.ddp.gates.Gate`."""
        if gradient_only:
            return
        if self._watched.pop(id(parameter), None) is not None and self._on_touch is not None:
            self._on_touch(parameter)
        if gate_of(parameter) is self:
            disarm((parameter,))

    def open_all(self, reason: str) -> None:
        """See :class:`~lightning_bytescheduler.ddp.gates.Gate`: what begins reads unseen, and that is known."""
        watched, self._watched = self._watched, {}
        disarm(p for p in watched.values() if gate_of(p) is self)

    def end(self, late: Iterable[nn.Parameter] = (), untouched: Iterable[nn.Parameter] = ()) -> None:
        """A forward pass has ended; nobody touched ``late``, which are stepped only now, and ``untouched``."""
        watched, self._watched = self._watched, {}
        disarm(p for p in watched.values() if gate_of(p) is self)
        self._doubtful = watched | {id(p): p for p in untouched}
        self._stale = {id(p): p for p in late}

    def before_backward(self) -> None:
        """See who gets a gradient: in this process, as DDP fills in those of other ranks."""
        self._forget_hooks()
        for parameter in (*self._stale.values(), *self._doubtful.values()):
            if parameter.requires_grad:
                self._handles.append(parameter.register_hook(self._noting(id(parameter))))

    def after_backward(self) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        """Who was read unseen: surely before the update, and perhaps."""
        found = self._with_gradient
        stale = [p for key, p in self._stale.items() if key in found]
        doubtful = [p for key, p in self._doubtful.items() if key in found]
        self.close()
        return stale, doubtful

    def close(self) -> None:
        """Leave nothing behind."""
        self.end()
        self._doubtful = {}
        self._forget_hooks()

    def _forget_hooks(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._with_gradient = set()

    def _noting(self, key: int) -> Callable[[Any], None]:
        return lambda _: self._with_gradient.add(key)
