"""Callbacks that use functions which take parameters without a touch, or copy them, and note what they get."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from tests.parity.observers import sums

__all__ = ["READERS"]


def _samples(layer: nn.Linear, count: int = 3) -> Tensor:
    return torch.linspace(-1.0, 1.0, count * layer.in_features, dtype=layer.weight.dtype).view(count, -1)


class _Reads(Callback):
    """Reads the last layer's weights while the first layers run, now and then, and between two steps."""

    def setup(self, trainer: Trainer, module: Any, stage: str) -> None:
        self.handle = module.layers[0].register_forward_pre_hook(lambda *_: self.now_and_then(module, 5))

    def teardown(self, trainer: Trainer, module: Any, stage: str) -> None:
        self.handle.remove()

    def on_train_batch_end(self, trainer: Trainer, module: Any, *_: Any) -> None:
        self.now_and_then(module, 3)

    def now_and_then(self, module: Any, every: int) -> None:
        if len(module.losses) % every == 1 and not torch.is_inference_mode_enabled():
            with torch.autocast("cpu", enabled=False):
                module.notes.append(sums(self.read(module.last)))

    def read(self, layer: Any) -> list[Tensor]:
        raise NotImplementedError


class PerSampleGradients(_Reads):
    """The gradient of each sample, with respect to parameters that are handed over."""

    def read(self, layer: Any) -> list[Tensor]:
        def loss(weights: dict[str, Tensor], sample: Tensor) -> Tensor:
            return torch.func.functional_call(layer, weights, (sample,)).pow(2).sum()

        weights = dict(layer.named_parameters())
        return list(torch.vmap(torch.func.grad(loss), in_dims=(None, 0))(weights, _samples(layer)).values())


class Jacobians(_Reads):
    """How outputs change with inputs, by transforms that close over the parameters."""

    def read(self, layer: Any) -> list[Tensor]:
        samples = _samples(layer)
        forward = torch.autograd.functional.jvp(layer, samples, samples)[1]
        backward = torch.vmap(torch.func.jacrev(layer))(samples)
        return [backward, torch.func.jvp(layer, (samples,), (samples,))[1], forward]


class Exports(_Reads):
    """Traces in three ways, and notes how long the graphs are."""

    def read(self, layer: Any) -> list[Tensor]:
        samples = _samples(layer)
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")  # torch.jit is deprecated
            traced = torch.jit.trace(layer, samples, check_trace=False)
            frozen = torch.jit.freeze(torch.jit.script(copy.deepcopy(layer).eval()))
            graph = make_fx(lambda value: layer(value))(samples)
        lengths = torch.tensor([str(traced.graph).count("\n"), len(graph.graph.nodes)])
        return [lengths, traced(samples), frozen(samples), graph(samples)]


class Copies(Callback):
    """Copies while gradients travel and after the step, in one way after the other."""

    def on_after_backward(self, trainer: Trainer, module: Any) -> None:
        self.copy(module)

    def on_train_batch_end(self, trainer: Trainer, module: Any, *_: Any) -> None:
        self.copy(module)

    def copy(self, module: Any) -> None:
        layers = module.layers
        ways: tuple[Callable[[], Any], ...] = (
            lambda: copy.deepcopy(layers).parameters(),
            lambda: [copy.copy(layers[0].weight), copy.deepcopy(layers[1].bias)],
            lambda: pickle.loads(pickle.dumps(layers)).parameters(),
            lambda: copy.deepcopy(layers.state_dict(keep_vars=True)).values(),
            lambda: copy.deepcopy(dict(layers.named_parameters())).values(),
        )
        copies = list(ways[len(module.notes) % len(ways)]())
        module.notes.append([*(type(value).__name__ for value in copies), *sums(copies)])


READERS: Mapping[str, Callable[[], Callback]] = {
    "per-sample": PerSampleGradients,
    "jacobians": Jacobians,
    "exports": Exports,
    "copies": Copies,
}
