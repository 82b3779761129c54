"""Residuals of error feedback: one flat fp32 tensor for each parameter, by the parameter's name.

With PowerSGD it also holds the factors with which the next step's power iteration begins. They are the same on all
ranks and start anew in each fit, as the residual holds what the first step's factors leave out.

A checkpoint has the *sum* over all ranks, as large as the model's compressed parameters in fp32. The sum is what
matters to the weights, as a residual is added to the rank's share of the mean. A resumed fit gives each of its ranks an
equal share of the sum, so nothing is lost on any number of ranks. Separate residuals would bring nothing: the first
step of a fit has other buckets than later ones, so blocks differ and no resumed fit has the same bits.

A residual has the layout of its gradient in the bucket, which is the parameter's memory layout. A checkpoint has it in
the parameter's shape, so that a model in another memory format adds it to the right elements.

Residuals of scaled gradients are kept with their loss scale, and are rescaled when it changes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_bytescheduler.compression.powersgd import PowerSGD

__all__ = ["Layout", "Residuals", "add_up_on_first"]

_FORMAT = 2
_FIRST = 1024  # elements of a gradient that are looked at first to see that it is not zero


class Layout(NamedTuple):
    """How a parameter's gradient lies in its bucket."""

    shape: tuple[int, ...]
    order: tuple[int, ...]

    @classmethod
    def of(cls, parameter: nn.Parameter) -> Layout:
        """Return a parameter's layout. DDP keeps the order of a dense parameter, and uses logical order for others."""
        with torch._C.DisableTorchFunctionSubclass():
            order = sorted(range(parameter.dim()), key=parameter.stride, reverse=True)
            dense = parameter.permute(order).is_contiguous()
            return cls(tuple(parameter.shape), tuple(order if dense else range(parameter.dim())))

    def flat(self, tensor: Tensor) -> Tensor:
        """Return the elements of a tensor of the parameter's shape in the bucket's order."""
        return tensor.permute(self.order).reshape(-1)

    def shaped(self, flat: Tensor) -> Tensor:
        """Reverse :meth:`flat`."""
        whole = flat.view([self.shape[dim] for dim in self.order])
        return whole.permute([self.order.index(dim) for dim in range(len(self.order))]).contiguous()


class Residuals:
    """One rank's residuals. The training thread uses them while no gradient is in flight.

    Otherwise threads that send use :meth:`knows` and :meth:`to_change`, each for its own parts; only one of them
    creates residuals.
    """

    def __init__(self) -> None:
        self._tensors: dict[str, Tensor] = {}
        self._rights: dict[str, Tensor] = {}
        self._scale = 1.0
        self._before: dict[str, Tensor] = {}  # residuals before a step that may be skipped
        self._changed: set[str] = set()  # in that step
        self._pending: set[str] = set()  # changed earlier, by gradients that are neither applied nor dropped
        self._may_be_left_out = False
        self._layouts: dict[str, Layout] | None = None  # by name of each parameter compressed in this fit
        self._parameters: Mapping[str, nn.Parameter] = {}  # during a fit
        self._may_drop = False
        self._stepped: set[int] = set()  # ids of parameters stepped since the last reduced backward pass
        self._versions: dict[str, int] = {}  # of parameters, when that pass began
        self._dropped: set[str] = set()  # gradients dropped since then
        self._loaded: dict[str, Tensor] = {}
        self._ranks = 1
        self._device = torch.device("cpu")

    def live_on(self, device: torch.device) -> None:
        """Move all tensors to ``device``, where gradients are encoded; the default is host memory."""
        self._device = device
        for kept in (self._tensors, self._before, self._rights):
            for name, tensor in kept.items():
                kept[name] = tensor.to(device)

    def of(self, name: str, size: int) -> Tensor:
        """Return the residual of a parameter, zeros at first; the caller changes it in place."""
        known = self._tensors.get(name)
        if known is None or known.numel() != size:
            known = self._tensors[name] = torch.zeros(size, dtype=torch.float32, device=self._device)
            loaded = self._loaded.pop(name, None)
            if loaded is not None and loaded.numel() == size:
                layout = None if self._layouts is None else self._layouts.get(name)
                flat = loaded.reshape(-1) if layout is None else layout.flat(loaded)
                known.copy_(flat).mul_(1.0 / self._ranks)
        return known

    def knows(self, name: str) -> bool:
        """Whether a parameter has, or may have, a residual."""
        return name in self._tensors or name in self._loaded

    def to_change(self, name: str, size: int) -> Tensor:
        """Return a parameter's residual; at its first call in a step, keep the value if that may be restored.

        While an earlier step's gradient is pending, the older value is kept.
        """
        residual = self.of(name, size)
        if self._may_be_left_out and name not in self._pending and name not in self._changed:
            before = self._before.get(name)
            if before is None or before.numel() != size:
                self._before[name] = residual.clone()
            else:
                before.copy_(residual)
            self._changed.add(name)
        return residual

    # ------------------------------------------------------------------ one fit

    def begin_fit(self, parameters: Mapping[str, nn.Parameter], *, may_drop: bool) -> list[str]:
        """Begin a fit that compresses these parameters; loaded residuals of others, or of other shapes, are dropped.

        Args:
            parameters: The parameters by name.
            may_drop: Whether mean gradients may be dropped without an optimizer step, as with two losses and
                optimizers. The residuals are then restored.

        Returns:
            Names of the dropped ones.
        """
        self._parameters, self._may_drop = parameters, may_drop
        self._layouts = {name: Layout.of(parameter) for name, parameter in parameters.items()}
        return self._leave_out_others()

    def end_fit(self) -> None:
        """End a fit: move to host memory, and restore residuals of gradients that were never applied."""
        self.take_back(self.not_applied())
        self._parameters = {}
        self.live_on(torch.device("cpu"))

    def stepped(self, optimizer: Optimizer) -> None:
        """Record that an optimizer has stepped with the present mean gradients."""
        if self._may_drop:
            with torch._C.DisableTorchFunctionSubclass():
                parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
                self._stepped.update(id(parameter) for parameter in parameters if parameter.grad is not None)

    def not_applied(self) -> set[str]:
        """Return the parameters whose last mean gradient may still be dropped unused.

        A step that bypasses the strategy, such as that of a separate optimizer, shows as a write to the parameter.
        """
        if not self._may_drop:
            return set()
        with torch._C.DisableTorchFunctionSubclass():
            return {
                name
                for name in self.changed & self._parameters.keys()
                if id(self._parameters[name]) not in self._stepped
                and self._parameters[name]._version == self._versions.get(name)
            }

    def before_backward(self) -> None:
        """Record which mean gradients were dropped."""
        with torch._C.DisableTorchFunctionSubclass():
            self._dropped.update(name for name in self.not_applied() if _is_dropped(self._parameters[name].grad))

    def begin_step(self, loss_scale: float | None) -> None:
        """Begin a step with ``loss_scale``; ``None`` if steps are never skipped.

        A smaller scale than before means that the last step overflowed and was skipped. Then the earlier residuals are
        restored, as are those of mean gradients that were dropped without a step. One that was not applied and not
        dropped is still there, and this step's is added.
        """
        self._take_back_if_left_out(loss_scale)
        self.take_back(self._dropped)
        self._pending = self.not_applied()
        self._changed.clear()
        self._stepped.clear()
        self._dropped.clear()
        self._may_be_left_out = loss_scale is not None or self._may_drop
        self.scale_to(1.0 if loss_scale is None else loss_scale)
        if self._may_drop:
            with torch._C.DisableTorchFunctionSubclass():
                self._versions = {name: parameter._version for name, parameter in self._parameters.items()}

    @property
    def changed(self) -> set[str]:
        """Names of the parameters whose residuals changed in the last step, if that may be undone.

        Includes pending ones of earlier steps.
        """
        return self._changed | self._pending

    def _take_back_if_left_out(self, loss_scale: float | None) -> None:
        if loss_scale is not None and loss_scale < self._scale:
            self.take_back(self.changed)
            self.scale_to(loss_scale)

    def take_back(self, names: Collection[str]) -> None:
        """Restore residuals whose mean gradients were dropped; nothing may be in flight."""
        for name in self.changed.intersection(names):
            self._tensors[name].copy_(self._before[name])
        self._changed.difference_update(names)
        self._pending.difference_update(names)

    def right_of(self, name: str, columns: int, codec: PowerSGD) -> Tensor:
        """Return the right factor of a parameter's last mean gradient, ``(columns, rank)``; changed in place."""
        known = self._rights.get(name)
        if known is None or known.shape != (columns, codec.rank):
            known = self._rights[name] = codec.first_right(name, columns).to(self._device)
        return known

    def scale_to(self, loss_scale: float) -> None:
        """Rescale to ``loss_scale``."""
        if loss_scale != self._scale and loss_scale > 0:
            for tensor in self._tensors.values():
                tensor.mul_(loss_scale / self._scale)
            for tensor in self._loaded.values():
                tensor.mul_(loss_scale / self._scale)
            for name in self.changed:
                self._before[name].mul_(loss_scale / self._scale)
            self._scale = loss_scale

    def total(
        self,
        add_up: Callable[[Tensor], object],
        *,
        keep: bool,
        loss_scale: float | None = None,
    ) -> dict[str, Any] | None:
        """Return the sum of all ranks' residuals for a checkpoint; all ranks call it together and keep theirs.

        Args:
            add_up: Replaces a tensor by the sum over all ranks, in place, on ranks that save.
            keep: Whether this rank saves.
            loss_scale: The present loss scale; ``None`` if it never changes.

        Returns:
            The state for :meth:`load`; ``None`` if this rank does not save or there is none.
        """
        self._take_back_if_left_out(loss_scale)
        saved: dict[str, Tensor] = {}
        layouts = self._layouts or {}
        for name, tensor in list(self._loaded.items()):  # parameters that were not sent since loading
            self.of(name, tensor.numel())
        given = self.not_applied()  # no checkpoint has these gradients, so earlier residuals are saved
        for name in sorted(self._tensors):
            kept = self._before if name in given else self._tensors
            tensor = kept[name].to("cpu", copy=True)
            add_up(tensor)
            if keep:
                saved[name] = layouts[name].shaped(tensor) if name in layouts else tensor
        return {"format": _FORMAT, "loss_scale": self._scale, "residuals": saved} if saved else None

    def load(self, state: Mapping[str, Any] | None, ranks: int) -> None:
        """Restore what :meth:`total` returned, on one of ``ranks`` ranks; ``None`` clears everything.

        Raises:
            ValueError: If it has another format.
        """
        state = {"format": _FORMAT, "loss_scale": self._scale, "residuals": {}} if state is None else state
        if state.get("format") != _FORMAT:
            raise ValueError(
                f"The checkpoint's state of gradient compression has format {state.get('format')!r}, and this version "
                f"reads format {_FORMAT}."
            )
        self._tensors.clear()
        self._before.clear()
        self._changed.clear()
        self._pending.clear()
        self._rights.clear()
        self._scale = float(state["loss_scale"])
        self._loaded = {name: tensor.to("cpu", torch.float32, copy=True) for name, tensor in state["residuals"].items()}
        self._ranks = ranks
        self._leave_out_others()

    def _leave_out_others(self) -> list[str]:
        layouts = self._layouts
        if layouts is None:
            return []
        fits = {name for name, left in self._loaded.items() if name in layouts and left.shape == layouts[name].shape}
        others = sorted(self._loaded.keys() - fits)
        for name in others:
            del self._loaded[name]
        return others

    def __len__(self) -> int:
        return len(self._tensors)


def _is_dropped(gradient: Tensor | None) -> bool:
    """Whether ``zero_grad`` was called, with or without ``set_to_none``."""
    if gradient is None:
        return True
    flat = gradient.detach().reshape(-1)
    return not flat[:_FIRST].any() and not flat.any()


def add_up_on_first(tensor: Tensor, device: torch.device) -> None:
    """Replace ``tensor`` by the sum over all ranks, in place, on the first rank of the default group.

    Args:
        tensor: A CPU tensor.
        device: Where the group takes tensors: NCCL takes none from a CPU.
    """
    there = tensor.to(device)
    dist.reduce(there, dst=0)
    if there is not tensor:
        tensor.copy_(there)
