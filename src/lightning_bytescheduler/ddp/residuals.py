"""What error feedback has left to be sent: one flat tensor in fp32 for each parameter, by the parameter's name.

Beside it, where gradients travel as products of two factors, what the next step's power iteration begins with, which is
the same on all ranks, and begins anew in each fit: what the first step's factors leave out is in the residual.

In a checkpoint is the *sum* over all ranks, the size of the model's compressed parameters in fp32, and not one for each
rank: what counts for the weights is the sum, as a residual is added to the rank's share of the mean. A fit that goes on
from it, with any number of ranks, gives each of them an equal share of the sum. So nothing is lost, and nothing has to
be known of the ranks there were. It would gain nothing to keep them apart: the first step of a fit has other buckets
than those that follow, so that blocks are cut in another way and no fit goes on with the same bits.

A residual lies as its gradient does in the bucket, which is as the parameter does in memory. In a checkpoint it has the
parameter's shape, so that a model in another memory format adds it to the right elements.

What is of gradients under a loss scale is kept with that scale, and goes along with it when it changes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_bytescheduler.compression.powersgd import PowerSGD

__all__ = ["Layout", "LeftElsewhere", "Residuals", "add_up_on_first"]

_FORMAT = 2

LeftElsewhere = Callable[[str, int, float], Tensor | None]
"""What is left of a parameter, by its name, its elements, and what losses are multiplied with; ``None`` for nothing."""


class Layout(NamedTuple):
    """How a parameter's gradient lies in its bucket.

    Attributes:
        shape: The parameter's.
        order: Its dimensions, from the outermost in memory to the innermost.
    """

    shape: tuple[int, ...]
    order: tuple[int, ...]

    @classmethod
    def of(cls, parameter: nn.Parameter) -> Layout:
        """DDP keeps the order of a parameter without gaps; of any other it has the elements in logical order."""
        with torch._C.DisableTorchFunctionSubclass():
            order = sorted(range(parameter.dim()), key=parameter.stride, reverse=True)
            dense = parameter.permute(order).is_contiguous()
            return cls(tuple(parameter.shape), tuple(order if dense else range(parameter.dim())))

    def flat(self, tensor: Tensor) -> Tensor:
        """Elements of a tensor of the parameter's shape, as they lie in the bucket."""
        return tensor.permute(self.order).reshape(-1)

    def shaped(self, flat: Tensor) -> Tensor:
        """The contrary of :meth:`flat`."""
        whole = flat.view([self.shape[dim] for dim in self.order])
        return whole.permute([self.order.index(dim) for dim in range(len(self.order))]).contiguous()


class Residuals:
    """One rank's. For one thread at a time: the training's, while nothing is under way.

    While something is, threads that send ask for a parameter's (:meth:`knows`, :meth:`to_change`), each for parts that
    no other one has; one of them begins new ones.

    Attributes:
        elsewhere: Says what those have left to send who are no ranks, while nothing is under way.
        may_be_dropped: Whether mean gradients may be dropped that nobody has stepped with.
    """

    def __init__(self) -> None:
        self._tensors: dict[str, Tensor] = {}
        self._rights: dict[str, Tensor] = {}
        self._scale = 1.0
        self._before: dict[str, Tensor] = {}  # the step that may be left out
        self._changed: set[str] = set()  # in it
        self._pending: set[str] = set()  # changed before it, by gradients that are neither stepped with nor dropped
        self._may_be_left_out = False
        self._layouts: dict[str, Layout] | None = None  # of what is compressed in this fit, by name
        self._loaded: dict[str, Tensor] = {}
        self._ranks = 1
        self.elsewhere: LeftElsewhere | None = None
        self.may_be_dropped = False
        self._device = torch.device("cpu")

    def live_on(self, device: torch.device) -> None:
        """Have all of them on ``device``, where gradients are encoded; host memory until that is said."""
        self._device = device
        for kept in (self._tensors, self._before, self._rights):
            for name, tensor in kept.items():
                kept[name] = tensor.to(device)

    def of(self, name: str, size: int) -> Tensor:
        """The residual of a parameter, zeros at first; written to in place."""
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
        """Whether there is, or may be, something left of a parameter."""
        return name in self._tensors or name in self._loaded

    def to_change(self, name: str, size: int) -> tuple[Tensor, Tensor | None]:
        """The residual of a parameter, and where what it was before the step goes, if that may have to come back.

        It is kept already while what an earlier step has sent is pending.
        """
        residual = self.of(name, size)
        if not self._may_be_left_out or name in self._pending:
            return residual, None
        before = self._before.get(name)
        if before is None or before.numel() != size:
            before = self._before[name] = residual.clone()
        if name not in self._changed:
            self._changed.add(name)
        return residual, before

    def begin_step(
        self, loss_scale: float | None, dropped: Collection[str] = (), not_applied: Collection[str] = ()
    ) -> None:
        """A step begins, whose losses are multiplied with ``loss_scale``; ``None`` if steps are never left out.

        A scale that is smaller than before says that the last step had overflowed and was left out: what it sent came
        to nothing, and what it found is to be sent is what there was before.

        Args:
            loss_scale: See above.
            dropped: Parameters whose last mean gradient is gone without a step, by name: it came to nothing, too.
            not_applied: Those whose last mean gradient nobody has stepped with. If it was not dropped it is there, and
                this step's is added.
        """
        self._take_back_if_left_out(loss_scale)
        self.take_back(dropped)
        self._pending = self.changed.intersection(not_applied)
        self._changed.clear()
        self._may_be_left_out = loss_scale is not None or self.may_be_dropped
        self.scale_to(1.0 if loss_scale is None else loss_scale)

    @property
    def changed(self) -> set[str]:
        """Names of the parameters of which something was sent in the last step, where that may have to be undone.

        Those of steps before besides that are pending.
        """
        return self._changed | self._pending

    def _take_back_if_left_out(self, loss_scale: float | None) -> None:
        if loss_scale is not None and loss_scale < self._scale:
            self.take_back(self.changed)
            self.scale_to(loss_scale)

    def take_back(self, names: Collection[str]) -> None:
        """What mean gradients came of that are gone: what there was before is to be sent; nothing is under way.

        Args:
            names: Of parameters; others than those that were changed have nothing to take back.
        """
        for name in self.changed.intersection(names):
            self._tensors[name].copy_(self._before[name])
        self._changed.difference_update(names)
        self._pending.difference_update(names)

    def keep_step(self) -> None:
        """What was changed in the last step stays, whatever comes of that."""
        self._changed.clear()
        self._pending.clear()

    @property
    def loss_scale(self) -> float:
        """What losses are multiplied with, of whose gradients these are."""
        return self._scale

    def right_of(self, name: str, columns: int, codec: PowerSGD) -> Tensor:
        """The right factor of a parameter's last mean gradient, ``(columns, rank)``; written to in place."""
        known = self._rights.get(name)
        if known is None or known.shape != (columns, codec.rank):
            known = self._rights[name] = codec.first_right(name, columns).to(self._device)
        return known

    def scale_to(self, loss_scale: float) -> None:
        """Losses are multiplied with ``loss_scale`` from here on."""
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
        not_applied: Collection[str] = (),
    ) -> dict[str, Any] | None:
        """All ranks' residuals, for a checkpoint; on all ranks at once, which have the same tensors and keep theirs.

        Args:
            add_up: Makes a tensor the sum over all ranks, in place, on those that save.
            keep: Whether this rank saves.
            loss_scale: What losses are multiplied with at present; ``None`` if that never changes.
            not_applied: Parameters whose mean gradient was not stepped with: no checkpoint has it, so that of these is
                saved what there was before.

        Returns:
            What :meth:`load` takes, if it does, and there is anything.
        """
        self._take_back_if_left_out(loss_scale)
        saved: dict[str, Tensor] = {}
        layouts = self._layouts or {}
        for name, tensor in list(self._loaded.items()):  # that nothing was sent of since
            self.of(name, tensor.numel())
        given = self.changed.intersection(not_applied)  # none of what was just taken back
        for name in sorted(self._tensors):
            kept = self._before if name in given else self._tensors
            tensor = kept[name].to("cpu", copy=True)
            add_up(tensor)
            if keep:
                left = None if self.elsewhere is None else self.elsewhere(name, tensor.numel(), self._scale)
                tensor = tensor if left is None else tensor.add_(left)
                saved[name] = layouts[name].shaped(tensor) if name in layouts else tensor
        return {"format": _FORMAT, "loss_scale": self._scale, "residuals": saved} if saved else None

    def take_over(self) -> None:
        """Have what others have left, as they end; on one rank, and while nothing is under way."""
        elsewhere, self.elsewhere = self.elsewhere, None
        if elsewhere is not None:
            for name, tensor in self._tensors.items():
                left = elsewhere(name, tensor.numel(), self._scale)
                if left is not None:
                    tensor.add_(left)
                    if name in self.changed:
                        self._before[name].add_(left)

    def load(self, state: Mapping[str, Any] | None, ranks: int) -> None:
        """Go on from what :meth:`total` returned, on one of ``ranks`` ranks; from nothing, if that was ``None``.

        Raises:
            ValueError: If it is of another format.
        """
        state = {"format": _FORMAT, "loss_scale": self._scale, "residuals": {}} if state is None else state
        if state.get("format") != _FORMAT:
            raise ValueError(
                f"The checkpoint's state of gradient compression has format {state.get('format')!r}, and this version "
                f"reads format {_FORMAT}."
            )
        self._tensors.clear()
        self._before.clear()
        self.keep_step()
        self._rights.clear()
        self._scale = float(state["loss_scale"])
        self._loaded = {name: tensor.to("cpu", torch.float32, copy=True) for name, tensor in state["residuals"].items()}
        self._ranks = ranks
        self._leave_out_others()

    def are_of(self, layouts: Mapping[str, Layout]) -> list[str]:
        """In this fit these parameters are compressed: what was loaded of others, or in another shape, is left out.

        Returns:
            Their names.
        """
        self._layouts = dict(layouts)
        return self._leave_out_others()

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


def add_up_on_first(tensor: Tensor, device: torch.device) -> None:
    """Make ``tensor`` the sum of all ranks', in place, on the first one of the default group.

    Args:
        tensor: On a CPU.
        device: Where the group takes tensors from: NCCL's has none for those of a CPU.
    """
    there = tensor.to(device)
    dist.reduce(there, dst=0)
    if there is not tensor:
        tensor.copy_(there)
