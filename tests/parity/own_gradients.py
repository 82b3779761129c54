"""What people do with gradients as if they were tensors on their own, which they are with Lightning's ``"ddp"``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.optim import Optimizer

from tests.parity.second_passes import TwoLosses
from tests.support.models import Tower

__all__ = ["OWN", "GivesOtherMemory", "HookReadsLater", "LooksInHooks"]


class GivesOtherMemory(Callback):
    """Gives gradients other memory, in each of the ways there are."""

    def on_after_backward(self, trainer: Trainer, module: Any) -> None:
        gradients = [p.grad for p in module.parameters() if p.grad is not None and not p.grad.is_sparse]
        for position, gradient in enumerate(gradients):
            if position % 3 == 0:
                gradient.data = gradient.data / (1.0 + gradient.data.norm())
            elif position % 3 == 1:
                gradient.set_(gradient.detach().sign() * 0.01)


class DataOfGradients(Tower):
    def on_after_backward(self) -> None:
        for parameter in self.parameters():
            parameter.grad.data = parameter.grad.data.sign() * 0.01


class SetGradients(Tower):
    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        for parameter in self.layers.parameters():
            parameter.grad.set_(parameter.grad / (1.0 + parameter.grad.norm()))


class VectorOfGradients(Tower):
    """As gradient surgery for several tasks does it."""

    def on_after_backward(self) -> None:
        gradients = [parameter.grad for parameter in self.parameters()]
        vector = parameters_to_vector(gradients)
        vector_to_parameters(vector / (1.0 + vector.norm()), gradients)


class FlatGradients(Tower):
    """One buffer has all gradients, and is clipped and set to zero as one, as Apex does it."""

    def on_train_start(self) -> None:
        sizes = [parameter.numel() for parameter in self.parameters()]
        self.flat = torch.zeros(sum(sizes))
        for parameter, part in zip(self.parameters(), self.flat.split(sizes), strict=True):
            parameter.grad = part.view_as(parameter)

    def optimizer_zero_grad(self, *_: Any) -> None:
        self.flat.zero_()

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        self.notes.append(self.flat.norm().item())
        self.flat.mul_(0.1 / (1.0 + self.flat.norm()))


class KeptList(Tower):
    """A list of gradients that is made once; they are set to zero and never dropped."""

    gradients: list[Tensor] | None = None

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Optimizer) -> None:
        optimizer.zero_grad(set_to_none=False)

    def on_after_backward(self) -> None:
        if self.gradients is None:
            self.gradients = [parameter.grad for parameter in self.parameters() if parameter.grad is not None]
        torch._foreach_mul_(self.gradients, 0.5)


class DetachesAndZeroes(Tower):
    def optimizer_zero_grad(self, *_: Any) -> None:
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad.detach_()
                parameter.grad.zero_()


class KeepsLastOnes(Tower):
    """Compares gradients with those of the step before, which it has not cloned."""

    last_ones: tuple[Tensor, ...] = ()

    def on_after_backward(self) -> None:
        ones = tuple(parameter.grad for parameter in self.parameters() if parameter.grad is not None)
        for one, other in zip(ones, self.last_ones, strict=False):
            self.notes.append(torch.cosine_similarity(one.flatten(), other.flatten(), dim=0).item())
        self.last_ones = ones


class HookReads(Tower):
    """A hook of one layer reads the gradient of a later one: that of this rank."""

    def configure_model(self) -> None:
        for layer in (self.first, self.layers[1]):
            layer.register_full_backward_hook(lambda *_: self.notes.append(self.last.weight.grad.norm().item()))


class HookWrites(Tower):
    """A hook of one layer writes the gradient of a later one, of which the mean takes the place."""

    def configure_model(self) -> None:
        self.layers[0].register_full_backward_hook(lambda *_: self.write())

    def write(self) -> None:
        self.last.weight.grad.mul_(3.0)
        self.notes.append(self.last.weight.grad.sum().item())


class HookKeeps(Tower):
    """A hook keeps what it found, and looks at it when the mean has come."""

    found: Tensor | None = None

    def configure_model(self) -> None:
        self.layers[0].register_full_backward_hook(lambda *_: setattr(self, "found", self.last.weight.grad))

    def on_after_backward(self) -> None:
        assert self.found is not None
        self.found.mul_(0.5)
        self.notes.append(self.found.norm().item())


class HookWritesInBoth(HookWrites, TwoLosses):
    """In two passes, of which the second one adds to the means."""


class HookReadsLater(HookReads):
    """Begins to do so many steps after buckets began to travel during backward passes."""

    def configure_model(self) -> None:
        self.begun = False

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.global_step == 5 and not self.begun:
            self.begun = True
            super().configure_model()


class LooksInHooks(Callback):
    """A hook of each layer reads and writes one gradient that is there already."""

    def on_fit_start(self, trainer: Trainer, module: Any) -> None:
        self.last = [p for p in module.parameters() if p.requires_grad][-1]
        for layer in module.children():
            if isinstance(layer, nn.Linear):
                layer.register_full_backward_hook(lambda *_: self.look(module))

    def look(self, module: Any) -> None:
        if self.last.grad is not None:
            module.notes.append(("looked", self.last.grad.sum().item()))
            self.last.grad.mul_(2.0)


OWN: Mapping[str, Callable[..., Tower]] = {
    "data": DataOfGradients,
    "set": SetGradients,
    "vector": VectorOfGradients,
    "flat": FlatGradients,
    "kept-list": KeptList,
    "detach-and-zero": DetachesAndZeroes,
    "keeps-last-ones": KeepsLastOnes,
    "hook-reads": HookReads,
    "hook-writes": HookWrites,
    "hook-keeps": HookKeeps,
    "hook-writes-in-both": HookWritesInBoth,
}
