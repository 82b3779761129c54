"""Callbacks that look at weights, gradients and optimizer state at the moments users do, and note what they see."""

from __future__ import annotations

import copy
import pickle
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

__all__ = [
    "AccumulatesHooks",
    "CopiesModule",
    "HooksAllSteps",
    "HooksSteps",
    "KeepsOptimizerState",
    "KeepsState",
    "PicklesModule",
    "ReadsGradients",
    "ReadsOneGradient",
    "ReadsOptimizerState",
    "ReadsStateDict",
    "ReadsWeightsAfterBatch",
    "ReadsWeightsBeforeBatch",
    "ReadsWeightsInInferenceMode",
    "ReadsWeightsInZeroGrad",
    "ReloadsOptimizer",
    "ReloadsWeights",
    "ReplacesGradients",
    "ReplacesOptimizerState",
    "RunsModule",
    "ScalesGradients",
    "WeightNorm",
    "WritesWeights",
    "ZeroesGradients",
]


def sums(tensors: Iterable[Tensor]) -> list[float]:
    return [tensor.detach().double().sum().item() for tensor in tensors]


class ReadsWeightsAfterBatch(Callback):
    def on_train_batch_end(self, trainer: Trainer, module: Any, *_: Any) -> None:
        module.notes.append(sums(module.parameters()))


class ReadsWeightsBeforeBatch(Callback):
    def on_train_batch_start(self, trainer: Trainer, module: Any, *_: Any) -> None:
        module.notes.append(sums(module.parameters()))


class ReadsWeightsInZeroGrad(Callback):
    """Called between the forward pass and the backward pass."""

    def on_before_zero_grad(self, trainer: Trainer, module: Any, optimizer: Any) -> None:
        module.notes.append(sums(p for group in optimizer.param_groups for p in group["params"]))


class ReadsWeightsInInferenceMode(Callback):
    """An optimizer's state must not be made there: training could not change it afterwards."""

    def on_train_batch_end(self, trainer: Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx % 5 == 1:
            with torch.inference_mode():
                module.notes.append(sums(module.parameters()))


class ReadsStateDict(Callback):
    """In mid-epoch, every fourth batch."""

    def on_train_batch_end(self, trainer: Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx % 4 == 2:
            module.notes.append(sums(module.state_dict().values()))


class WeightNorm(Callback):
    """One number for the whole model, every step, by the functions people use for that."""

    def on_train_batch_end(self, trainer: Trainer, module: Any, *_: Any) -> None:
        weights = list(module.parameters())
        with torch.no_grad():
            norms = torch._foreach_norm(weights)
            vector = nn.utils.parameters_to_vector(weights)
        module.notes.append([torch.stack(norms).norm().item(), vector.norm().item()])


class WritesWeights(Callback):
    """Clips weights, as a Wasserstein critic does."""

    def on_train_batch_end(self, trainer: Trainer, module: Any, *_: Any) -> None:
        for parameter in module.parameters():
            parameter.data.clamp_(-0.2, 0.2)


class CopiesModule(Callback):
    def on_train_batch_end(self, trainer: Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx % 3 == 1:
            module.notes.append(sums(copy.deepcopy(module.layers).parameters()))


class PicklesModule(Callback):
    def on_train_batch_end(self, trainer: Trainer, module: Any, *_: Any) -> None:
        module.notes.append(sums(pickle.loads(pickle.dumps(module.layers)).parameters()))


class ReloadsWeights(Callback):
    """Goes back to earlier weights, as a callback that saw the loss explode does."""

    def on_train_batch_end(self, trainer: Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 5:
            self.earlier = copy.deepcopy(module.state_dict())
        if batch_idx == 9:
            module.load_state_dict(self.earlier)


class ReloadsOptimizer(Callback):
    def on_train_batch_end(self, trainer: Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 5:
            self.earlier = copy.deepcopy(trainer.optimizers[0].state_dict())
        if batch_idx == 9:
            trainer.optimizers[0].load_state_dict(self.earlier)


class ZeroesGradients(Callback):
    """Gives the memory back early."""

    def on_train_batch_end(self, trainer: Trainer, module: Any, *_: Any) -> None:
        trainer.optimizers[0].zero_grad()
        module.notes.append(sums(module.parameters()))


class RunsModule(Callback):
    """Runs the module on an input in evaluation mode, as a callback that draws samples does."""

    def on_train_batch_end(self, trainer: Trainer, module: Any, *_: Any) -> None:
        module.eval()
        with torch.no_grad():
            module.notes.append(sums([module(torch.ones(2, 12))]))
        module.train()


class ReadsOptimizerState(Callback):
    """Reads the state by parameter, which PyTorch does not count as a use of the parameter."""

    def on_train_batch_end(self, trainer: Trainer, module: Any, *_: Any) -> None:
        optimizer = trainer.optimizers[0]
        module.notes.append([sums(optimizer.state[p].values()) for p in module.parameters()])


class HooksSteps(Callback):
    """Registers a hook of the optimizer when training has been set up."""

    def on_train_start(self, trainer: Trainer, module: Any) -> None:
        trainer.optimizers[0].register_step_post_hook(lambda *_: module.notes.append("stepped"))


class HooksAllSteps(Callback):
    """Registers a hook of all optimizers there are."""

    def on_train_start(self, trainer: Trainer, module: Any) -> None:
        self.handle = register_optimizer_step_post_hook(lambda *_: module.notes.append("stepped"))

    def on_train_end(self, trainer: Trainer, module: Any) -> None:
        self.handle.remove()


class ReadsGradients(Callback):
    """Notes the norm of each gradient, where Lightning's documentation says to do it."""

    def on_before_optimizer_step(self, trainer: Trainer, module: Any, optimizer: Any) -> None:
        module.notes.append(sums(p.grad for p in module.parameters() if p.grad is not None))


class ReadsOneGradient(Callback):
    def on_before_optimizer_step(self, trainer: Trainer, module: Any, optimizer: Any) -> None:
        module.notes.append(module.layers[0].weight.grad.norm().item())


class ScalesGradients(Callback):
    """By a factor that depends on the gradient: scaling by a constant could as well come before the reduction."""

    def on_after_backward(self, trainer: Trainer, module: LightningModule) -> None:
        for parameter in module.parameters():
            if parameter.grad is not None:
                parameter.grad.div_(1.0 + parameter.grad.norm())


class ReplacesGradients(Callback):
    """Puts tensors of its own in place of the gradients, and takes one away."""

    def on_after_backward(self, trainer: Trainer, module: Any) -> None:
        for parameter in module.layers.parameters():
            parameter.grad = parameter.grad.sign() * 0.01
        module.last.bias.grad = None


class AccumulatesHooks(Callback):
    """Hooks on the parameters themselves: they see gradients of this rank only, as with DDP."""

    def on_fit_start(self, trainer: Trainer, module: Any) -> None:
        for parameter in module.layers.parameters():
            parameter.register_hook(lambda gradient: gradient * 0.5)


class KeepsOptimizerState(Callback):
    """Asks for the optimizer's state once, and looks at what it was given from then on."""

    def __init__(self) -> None:
        self.kept: Any = None

    def on_train_batch_end(self, trainer: Trainer, module: Any, *_: Any) -> None:
        if self.kept is None:
            self.kept = trainer.optimizers[0].state_dict()["state"]
        module.notes.append([values["exp_avg"].sum().item() for values in self.kept.values()])


class KeepsState(Callback):
    """Keeps the state itself from the start, and looks at its tensors without asking the optimizer again."""

    def on_train_start(self, trainer: Trainer, module: Any) -> None:
        self.state = trainer.optimizers[0].state

    def on_train_batch_end(self, trainer: Trainer, module: Any, *_: Any) -> None:
        values = [value for of_one in self.state.values() for value in of_one.values()]
        module.notes.append(sums(value for value in values if isinstance(value, Tensor)))


class ReplacesOptimizerState(Callback):
    """Starts again without moments now and then, without a look at what was there."""

    def __init__(self) -> None:
        self.last = 0

    def on_train_batch_end(self, trainer: Trainer, module: Any, *_: Any) -> None:
        if trainer.global_step % 5 == 3 and trainer.global_step != self.last:
            self.last = trainer.global_step
            trainer.optimizers[0].state = defaultdict(dict)
