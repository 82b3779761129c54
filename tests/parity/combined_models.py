"""Modules for every value of the factors ``model`` and ``loop``, and what goes into them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, optim
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, OneCycleLR, ReduceLROnPlateau, StepLR

from tests.parity.factors import Combination
from tests.parity.gate_models import Checkpointed, Conditional, Normalised, PartlyFrozen
from tests.support.models import Tower, Trained

__all__ = ["CLIP", "ChangesBetas", "Unfreezes", "build"]

BATCH_SIZE = 4
BATCHES = 7  # of an epoch: no multiple of 2 or 3, so the last accumulation window is a short one
STEPS_OF_CYCLE = 200
CLIP: Mapping[str, tuple[float, str]] = {
    "value": (0.01, "value"),
    "norm": (0.05, "norm"),
    "norm-unreached": (1e6, "norm"),
}


class Tied(Tower):
    """Two layers are one matrix."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.layers[-1].weight = self.layers[0].weight


class UsedTwice(Tower):
    """One layer runs again at the end."""

    def predict(self, inputs: Tensor) -> Tensor:
        hidden = self.first(inputs)
        for layer in (*self.layers, self.layers[0]):
            hidden = hidden + torch.tanh(layer(hidden))
        return self.last(hidden)


class SeveralOutputs(Tower):
    """Returns a dictionary with tensors in lists."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return {"loss": loss, "first": [self.first(batch[0]).detach()], "more": {"zero": loss.new_zeros(1)}}


class Traced(Tower):
    """A layer is TorchScript: traced, as code of scripted ones is shared and keeps the autocast type it met first."""

    def __init__(self, *, width: int, **arguments: Any) -> None:
        super().__init__(width=width, **arguments)
        self.layers[1] = torch.jit.trace(self.layers[1], torch.zeros(1, width))


class Compiled(Tower):
    """A layer is compiled by Dynamo; its backend does not matter here and takes long."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.layers[1].compile(backend="eager")


MODELS: Mapping[str, Callable[..., Trained]] = {
    "plain": Tower,
    "tied": Tied,
    "dropout": partial(Tower, dropout=0.2),
    "batch-norm": Normalised,
    "checkpoint": partial(Checkpointed, reentrant=False),
    "checkpoint-reentrant": partial(Checkpointed, reentrant=True),
    "conditional": Conditional,
    "frozen": PartlyFrozen,
    "used-twice": UsedTwice,
    "several-outputs": SeveralOutputs,
    "traced": Traced,
    "compiled": Compiled,
}


class SignDescent(Optimizer):
    """An optimizer that this package does not know."""

    def __init__(self, parameters: Iterable[Any], lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        with torch.enable_grad():
            loss = None if closure is None else closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.add_(parameter.grad.sign(), alpha=-group["lr"])
        return loss


class SignedMomentum(optim.SGD):
    """Keeps torch's step, and changes a function that it calls: only signs and the largest gradient count."""

    def _init_group(self, group: Any, params: Any, grads: Any, momentum_buffer_list: Any) -> Any:
        result: Any = super()._init_group(group, params, grads, momentum_buffer_list)  # type: ignore[misc]
        largest = max((float(gradient.abs().max()) for gradient in grads), default=0.0)
        grads[:] = [gradient.sign() * min(largest, 1.0) for gradient in grads]
        return result


def with_tensor_betas(parameters: Iterable[Any], lr: float) -> Optimizer:
    """Betas that can be changed in place; :class:`ChangesBetas` does."""
    return optim.AdamW(parameters, lr=lr, betas=(torch.tensor(0.9), torch.tensor(0.99)))


OPTIMIZERS: Mapping[str, Callable[..., Optimizer]] = {
    "SGD-momentum": partial(optim.SGD, lr=0.05, momentum=0.9),
    "SGD-nesterov-decay": partial(optim.SGD, lr=0.05, momentum=0.8, nesterov=True, weight_decay=0.01),
    "Adam": partial(optim.Adam, lr=0.005),
    "AdamW": partial(optim.AdamW, lr=0.005, weight_decay=0.1),
    "AdamW-foreach": partial(optim.AdamW, lr=0.005, foreach=True),
    "AdamW-amsgrad": partial(optim.AdamW, lr=0.005, amsgrad=True),
    "AdamW-tensor-betas": partial(with_tensor_betas, lr=0.005),
    "ASGD": partial(optim.ASGD, lr=0.05, t0=5),
    "Adafactor": partial(optim.Adafactor, lr=0.01),
    "Adagrad": partial(optim.Adagrad, lr=0.02, lr_decay=0.01),
    "RMSprop": partial(optim.RMSprop, lr=0.002, momentum=0.5, centered=True),
    "Adadelta": partial(optim.Adadelta, lr=0.5),
    "NAdam": partial(optim.NAdam, lr=0.005),
    "RAdam": partial(optim.RAdam, lr=0.01),
    "Adamax": partial(optim.Adamax, lr=0.01),
    "Rprop": partial(optim.Rprop, lr=0.01),
    # Without a tolerance, as that looks at the loss of one rank: the ranks would call the closure unequally often.
    "LBFGS": partial(optim.LBFGS, lr=0.05, max_iter=3, tolerance_change=0.0),
    "own-step": partial(SignDescent, lr=0.002),
    "own-part": partial(SignedMomentum, lr=0.002, momentum=0.9),
}
_OTHERWISE = {"betas": (0.8, 0.95), "momentum": 0.6, "rho": 0.8, "etas": (0.6, 1.1), "lr_decay": 0.02}


class Combined(Trained):
    """Mixed in before a module: its schedules and, where it is manual, its training step."""

    combination: Combination

    def configure_optimizers(self) -> Any:
        parameters = list(self.parameters())
        halves = [parameters]
        if self.combination.loop == "two-optimizers":
            halves = [parameters[::2], parameters[1::2]]
        optimizers = [self._optimizer(half) for half in halves]
        schedules = [schedule for optimizer in optimizers for schedule in self._schedule(optimizer)]
        if self.combination.loop == "step-hooks":
            optimizers[0].register_step_post_hook(lambda *_: self.notes.append("stepped"))
        return optimizers, schedules

    def _optimizer(self, parameters: list[Any]) -> Optimizer:
        make = OPTIMIZERS[self.combination.optimizer]
        if self.combination.groups == "one-group":
            return make(parameters)
        rate = make.keywords["lr"]  # type: ignore[attr-defined]
        accepted = inspect.signature(make.func).parameters  # type: ignore[attr-defined]
        otherwise = {name: value for name, value in _OTHERWISE.items() if name in accepted}
        return make(
            [
                {"params": parameters[0::3]},
                {"params": parameters[1::3], "lr": rate / 2},
                {"params": parameters[2::3], "lr": rate / 4, **otherwise},
            ]
        )

    def _schedule(self, optimizer: Optimizer) -> list[dict[str, Any]]:
        name, rate = self.combination.schedule, optimizer.param_groups[0]["lr"]
        if name == "one-cycle":
            cycles = any(key in optimizer.defaults for key in ("betas", "momentum"))
            cycle = OneCycleLR(optimizer, max_lr=2 * rate, total_steps=STEPS_OF_CYCLE, cycle_momentum=cycles)
            return [{"scheduler": cycle, "interval": "step"}]
        if name == "cosine":
            return [{"scheduler": CosineAnnealingLR(optimizer, T_max=15), "interval": "step"}]
        if name == "step-lr":
            return [{"scheduler": StepLR(optimizer, step_size=1, gamma=0.7)}]
        if name == "plateau":
            plateau = ReduceLROnPlateau(optimizer, patience=0, threshold=0.5)
            return [{"scheduler": plateau, "monitor": "validation_loss"}]
        return []


class Manual(Combined):
    """Mixed in before a module: steps by hand, with all that Lightning would have done between two steps."""

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        window = int(self.combination.accumulation)
        steps = batch_idx % window == window - 1 or self.trainer.is_last_batch
        optimizers = self.optimizers(use_pl_optimizer=True)
        for optimizer in optimizers if isinstance(optimizers, list) else [optimizers]:
            closure = partial(self._closure, optimizer, batch, batch_idx, begins=batch_idx % window == 0, steps=steps)
            if steps:
                optimizer.step(closure=closure)
            else:
                closure()
        if steps and self.combination.schedule in ("one-cycle", "cosine"):
            for schedule in self._schedules():
                schedule.step()

    def on_train_epoch_end(self) -> None:
        for schedule in self._schedules():
            if self.combination.schedule == "step-lr":
                schedule.step()
            elif "validation_loss" in self.trainer.callback_metrics:  # not where training ends in mid-epoch
                schedule.step(self.trainer.callback_metrics["validation_loss"])

    def _closure(self, optimizer: Any, batch: Any, batch_idx: int, *, begins: bool, steps: bool) -> Tensor:
        if begins:
            optimizer.zero_grad()
        output: Any = super().training_step(batch, batch_idx)
        loss: Tensor = output["loss"] if isinstance(output, dict) else output
        self.manual_backward(loss)
        if steps and self.combination.clipping in CLIP:
            limit, algorithm = CLIP[self.combination.clipping]
            self.clip_gradients(optimizer, gradient_clip_val=limit, gradient_clip_algorithm=algorithm)
        return loss

    def _schedules(self) -> list[Any]:
        schedules = self.lr_schedulers()
        if schedules is None:
            return []
        return schedules if isinstance(schedules, list) else [schedules]


class ChangesBetas(Callback):
    """Changes them in place after each batch, when the step may still be due."""

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        for group in trainer.optimizers[0].param_groups:
            group["betas"][0].fill_(0.5 + 0.1 * (batch_idx % 4))


class Unfreezes(Callback):
    """Lets the last layer learn from the seventh step on."""

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == 6:
            module.last.requires_grad_(True)


def build(combination: Combination, *, depth: int, width: int) -> Trained:
    """The module that a combination trains."""
    make = MODELS[combination.model]
    keywords = {"dropout": 0.0, **(make.keywords if isinstance(make, partial) else {})}
    base: Any = make.func if isinstance(make, partial) else make
    manual = combination.loop in ("manual", "two-optimizers")
    mixed: Any = type(base.__name__, (Manual if manual else Combined, base), {"combination": combination})
    samples = 2 * (BATCHES * BATCH_SIZE - (2 if combination.loop == "uneven" else 0))
    module: Any = mixed(depth=depth, width=width, samples=samples, batch_size=BATCH_SIZE, **keywords)
    module.automatic_optimization = not manual
    if combination.loop == "unfreezing":
        module.last.requires_grad_(False)
    return module
