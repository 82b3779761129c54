"""Makes gradients behave as with Lightning's ``"ddp"`` without ``gradient_as_bucket_view``: independent tensors.

The buckets are DDP's memory: it copies gradients there, and they are sent from there. User code sees this:

- *After a backward pass* ``.grad`` is a tensor over the bucket's memory, but not DDP's own view. DDP's view refuses
  ``detach_()``, and new memory for it (``.grad.data = ...``, ``vector_to_parameters``) would break DDP's bucket. The
  optimizer steps with whatever ``.grad`` is.
- *A gradient kept from before the pass*, such as a view of one flat buffer, gets the mean at the end of the pass, and
  is ``.grad`` again. A kept gradient that has been replaced as ``.grad`` gets its own memory in the next pass. A view
  of it (``detach()``, ``numpy()``) shares the bucket's memory and is overwritten.
- *In a backward pass* a hook that reads another layer's gradient gets a copy of this rank's gradient, and the mean
  replaces it at the end. The first two passes show whose gradients are read; these are copied from then on before their
  bucket is sent. Hooks that begin later cause a warning.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from threading import get_ident
from typing import cast

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel

from lightning_bytescheduler.ddp.gates import arm, disarm, gate_of, is_armed
from lightning_bytescheduler.ddp.reads import kept_elsewhere
from lightning_bytescheduler.lightning_api import rank_zero_warn

__all__ = ["OwnGradients"]

_LOOK_FIRST = 2  # passes; DDP has other buckets in the first one
_LOOK_EVERY = 16
_LATE = (
    "bytescheduler: a hook of the backward pass looked at gradients of other layers, and did not do so in the first "
    "passes. It may have read means of all ranks, or parts of them, where strategy='ddp' has this rank's gradients. "
    "Now it reads this rank's. To avoid this, read from the first pass on, or set gradient_as_bucket_view=False."
)

Gradients = dict[int, tuple[nn.Parameter, torch.Tensor]]
"""By id of the parameter."""


class OwnGradients:
    """Handles gradients; see the module. Used by a backward pass's thread, and by autograd's threads that run hooks.

    Args:
        await_means: Waits until the mean gradients of the parameters with the given ids have arrived.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], await_means: Callable[[set[int]], None]) -> None:
        self._parameters = list(parameters)
        self._await_means = await_means
        self._beside: Gradients = {}  # over the buckets' memory, like DDP's views
        self._kept: Gradients = {}  # by user code, from before this pass
        self._had: list[tuple[nn.Parameter, torch.Tensor, int]] = []
        self._armed: list[nn.Parameter] = []
        self._copies: Gradients = {}  # for hooks of this pass
        self._looked_at: dict[int, nn.Parameter] = {}  # by hooks of any pass
        self._handed_over: set[int] = set()  # in this pass
        self._passes = 0  # number of passes that communicated
        self._under_way = 0  # id of the thread of the current pass
        self._looked_late = self._needed = self._static = False

    def know(self, model: DistributedDataParallel) -> None:
        """Read the options of the DDP module."""
        self._needed = model.gradient_as_bucket_view
        self._static = model.static_graph  # it reduces after the first pass has ended

    def close(self) -> None:
        """Release all gradients and stop handling them."""
        self._look_at([])
        self._parameters, self._beside, self._looked_at, self._had = [], {}, {}, []

    def begin_forward(self) -> None:
        """Begin a forward pass; DDP may rebuild its buckets and move gradients in it."""
        if self._passes == 1:
            with torch._C.DisableTorchFunctionSubclass():
                self._had = [(p, g, g._version) for p, g in _there(self._parameters)]

    def end_forward(self) -> None:
        """Restore moved gradients, when a forward pass ends or a backward pass begins in it."""
        had, self._had = self._had, []
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            for parameter, gradient, version in had:
                moved = parameter.grad
                if moved is not None and moved is not gradient and moved._is_view():
                    if gradient._version == version:
                        gradient.copy_(moved)
                    parameter.grad = gradient

    @contextmanager
    def backward_pass(self) -> Iterator[None]:
        """Wrap a backward pass that adds to gradients, after pending updates have landed."""
        if not self._needed:
            yield
            return
        own = self._under_way = get_ident()
        try:
            with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
                self._begin()
            yield
            if self._under_way == own:  # otherwise the training's pass has begun in between
                with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
                    self._end()
        finally:
            if self._under_way == own:
                self._look_at([])
                self._kept, self._copies, self._handed_over = {}, {}, set()
                self._under_way = 0
        if self._looked_late:
            self._looked_late = False
            rank_zero_warn(_LATE)

    def hand_over(self, bucket: dist.GradBucket) -> None:
        """Replace DDP's views by tensors over the same memory when a bucket is sent, for hooks and later code."""
        if not self._needed:
            return
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            self._put(cast("list[nn.Parameter]", bucket.parameters()), bucket.buffer())
            # DDP's callback comes after its last bucket and expects its own memory.
            if self._kept or self._copies:
                Variable._execution_engine.queue_callback(self._give_back)

    def _put(self, parameters: list[nn.Parameter], buffer: torch.Tensor) -> None:
        self._handed_over.update(map(id, parameters))
        if not (self._kept or self._copies or self._armed):  # the usual case, as fast as possible
            for parameter in parameters:
                gradient = parameter.grad
                if gradient is not None:
                    parameter.grad = self._put_beside(parameter, gradient)
            return
        own = self._kept | self._copies
        first, end = buffer.data_ptr(), buffer.data_ptr() + buffer.numel() * buffer.element_size()
        for parameter in parameters:
            key, gradient = id(parameter), parameter.grad
            if gradient is None or not gradient.numel():
                continue
            if first <= gradient.data_ptr() < end:
                parameter.grad = self._put_beside(parameter, gradient)
            if self._static and not self._passes:
                continue  # no hook follows
            if key in own:
                parameter.grad = own[key][1]
            elif self._passes < _LOOK_FIRST or key in self._looked_at:
                self._copy(parameter, gradient)

    def _put_beside(self, parameter: nn.Parameter, gradient: torch.Tensor) -> torch.Tensor:
        """Return a tensor over the memory of ``gradient``, which is DDP's view."""
        _, beside = self._beside.get(id(parameter), (None, None))
        if beside is None or beside.data_ptr() != gradient.data_ptr():  # its memory was replaced, by user code or DDP
            beside = torch.empty(0, dtype=gradient.dtype, device=gradient.device)
            beside.set_(gradient.untyped_storage(), gradient.storage_offset(), gradient.size(), gradient.stride())
            self._beside[id(parameter)] = parameter, beside
        return beside

    # ------------------------------------------------------------------ one pass

    def _begin(self) -> None:
        self.end_forward()
        self._part_with_kept()
        beside, there = self._beside, _there(self._parameters)
        ours = {id(p) for p, g in there if id(p) in beside and beside[id(p)][1] is g}
        memory = kept_elsewhere([(p, g) for p, g in there if id(p) not in ours])
        kept = [(p, g) for p, g in there if sys.getrefcount(g) > _IN_GRAD + (id(p) in ours)]
        self._kept = {id(p): (p, g) for p, g in memory + kept}
        everywhere = self._passes < _LOOK_FIRST or self._passes % _LOOK_EVERY == 0
        self._look_at(self._parameters if everywhere else self._looked_at.values())

    def _part_with_kept(self) -> None:
        for key, (parameter, gradient) in list(self._beside.items()):
            if sys.getrefcount(gradient) > _KNOWN and parameter.grad is not gradient:
                gradient.data = gradient.clone()
                del self._beside[key]

    def _give_back(self) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            for key in (*self._kept, *self._copies):
                if key in self._beside and (key in self._copies or key in self._handed_over):
                    parameter, beside = self._beside[key]
                    parameter.grad = beside

    def _end(self) -> None:
        if not self._handed_over:
            return  # values that hooks wrote are added to the present ones
        self._passes += 1
        self._give_back()
        theirs = [(p, g) for p, g in self._kept.values() if id(p) in self._handed_over]
        theirs += [(p, g) for p, g in self._copies.values() if sys.getrefcount(g) > _KNOWN]
        if theirs:
            self._await_means({id(p) for p, _ in theirs})
        for parameter, gradient in theirs:
            if parameter.grad is not gradient and parameter.grad is not None:
                gradient.copy_(parameter.grad)
                parameter.grad = gradient

    def _look_at(self, parameters: Iterable[nn.Parameter]) -> None:
        disarm(p for p in self._armed if gate_of(p) is self)
        self._armed = [p for p in parameters if not is_armed(p)]
        arm(self._armed, self)

    # ------------------------------------------------------------------ hooks

    def touched(self, parameter: nn.Parameter, gradient_only: bool) -> None:
        """See :class:`~lightning_bytescheduler.ddp.gates.Gate`."""
        if gradient_only:
            self.look(parameter)

    def open_all(self, reason: str) -> None:
        """See :class:`~lightning_bytescheduler.ddp.gates.Gate`: the caller is not a hook."""
        self._look_at([])

    def look(self, parameter: nn.Parameter) -> bool:
        """Handle a read of a gradient in a backward pass; returns whether the gradient is not in flight."""
        if not self._under_way:
            return False
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            key, gradient = id(parameter), parameter.grad
            if gradient is None:
                return True
            own = self._kept.get(key) or self._copies.get(key)
            if own is None:
                if not gradient._is_view() and gradient is not self._beside.get(key, (None, None))[1]:
                    return True  # autograd's own, not yet copied to the bucket
                if key in self._handed_over:
                    self._looked_late = True
                    self._looked_at[key] = parameter
                    return False
                self._put_beside(parameter, gradient)
                own = self._copy(parameter, gradient)
            elif gradient is not own[1] and gradient._is_view():
                self._put_beside(parameter, gradient)  # DDP has replaced it with its view
            self._looked_at[key] = parameter
            parameter.grad = own[1]
            return True

    def _copy(self, parameter: nn.Parameter, gradient: torch.Tensor) -> tuple[nn.Parameter, torch.Tensor]:
        own = self._copies[id(parameter)] = parameter, gradient.clone()
        parameter.grad = own[1]
        return own


def _there(parameters: Iterable[nn.Parameter]) -> list[tuple[nn.Parameter, torch.Tensor]]:
    return [(p, g) for p in parameters if (g := p.grad) is not None]


# Versions of Python and PyTorch differ in the references that they hold themselves, so these are measured.
_parameter = nn.Parameter(torch.zeros(1, dtype=torch.float32))
_known = {0: (_parameter, torch.zeros(1, dtype=torch.float32))}
_KNOWN = max(sys.getrefcount(g) for _, g in _known.values())
_parameter.grad = torch.zeros(1, dtype=torch.float32)
_IN_GRAD = max(sys.getrefcount(g) for _, g in _there([_parameter]))
