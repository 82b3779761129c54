"""Modules that read parameters where a gate on a layer's own forward pass would not notice."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from tests.support.models import Tokens, Tower, Trained

__all__ = [
    "Attention",
    "Checkpointed",
    "Conditional",
    "CustomFunction",
    "FunctionalCall",
    "Normalised",
    "OwnParameters",
    "PartlyFrozen",
    "ReadOutside",
    "Recurrent",
    "Reversed",
    "SelectivelyCheckpointed",
    "Tied",
    "UsedTwice",
    "WeightNormed",
    "WithUnused",
]


class Tied(Tokens):
    """One matrix is embedding and output layer."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.embedding = nn.Embedding(16, 12)
        self.body = nn.Linear(12, 12)
        self.vocabulary = nn.Linear(12, 16, bias=False)
        self.vocabulary.weight = self.embedding.weight
        self.last = nn.Linear(16, 3)

    def predict(self, inputs: Tensor) -> Tensor:
        hidden = torch.tanh(self.body(self.embedding(inputs))).mean(1)
        return self.last(self.vocabulary(hidden))


class ReadOutside(Trained):
    """Reads the weights of layers that are never called."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.first = nn.Linear(12, 12)
        self.holder = nn.Linear(12, 12)
        self.table = nn.Embedding(3, 12)

    def predict(self, inputs: Tensor) -> Tensor:
        hidden = torch.tanh(F.linear(self.first(inputs), self.holder.weight, self.holder.bias))
        return F.linear(hidden, self.table.weight)


class OwnParameters(Tower):
    """The LightningModule itself has parameters."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.scale = nn.Parameter(torch.ones(12))
        self.offsets = nn.ParameterList([nn.Parameter(torch.zeros(3))])

    def predict(self, inputs: Tensor) -> Tensor:
        return super().predict(inputs * self.scale) + self.offsets[0]


class UsedTwice(Tower):
    """One layer runs in two places of the forward pass."""

    def predict(self, inputs: Tensor) -> Tensor:
        hidden = self.layers[0](self.first(inputs))
        return self.last(self.layers[0](torch.tanh(self.layers[1](hidden)))) + self.last(
            self.layers[3](self.layers[2](hidden))
        )


class WithUnused(Tower):
    """Has layers that take no part on any rank."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.unused = nn.Linear(24, 24)


class PartlyFrozen(Tower):
    """The first layers do not learn."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.first.requires_grad_(False)
        self.layers[0].requires_grad_(False)


class Conditional(Tower):
    """Takes one branch in two of five batches, and another in the others."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.rare = nn.Linear(12, 12)
        self.common = nn.Linear(12, 12)
        self.batch = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.batch = batch_idx
        return super().training_step(batch, batch_idx)

    def predict(self, inputs: Tensor) -> Tensor:
        return super().predict((self.rare if self.batch % 5 in (1, 2) else self.common)(inputs))


class Recurrent(Tokens):
    """An LSTM hands a list of all its weights to one function."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.embedding = nn.Embedding(16, 8)
        self.lstm = nn.LSTM(8, 12, num_layers=2, batch_first=True, dropout=0.1)
        self.last = nn.Linear(12, 3)

    def predict(self, inputs: Tensor) -> Tensor:
        hidden, _ = self.lstm(self.embedding(inputs))
        return self.last(hidden[:, -1])


class Attention(Tokens):
    """Attention takes weights to a function of its own, and in evaluation mode to a fused one."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.embedding = nn.Embedding(16, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
        self.last = nn.Linear(8, 3)

    def predict(self, inputs: Tensor) -> Tensor:
        hidden = self.embedding(inputs)
        hidden = hidden + self.attention(hidden, hidden, hidden, need_weights=False)[0]
        return self.last(self.block(hidden).mean(1))


class Normalised(Tower):
    """Batch statistics in buffers, which DDP broadcasts in every forward pass."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.norm = nn.BatchNorm1d(12)

    def predict(self, inputs: Tensor) -> Tensor:
        return super().predict(self.norm(inputs))


class Checkpointed(Tower):
    """Forgets activations and computes them again in the backward pass."""

    def __init__(self, *, reentrant: bool, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.reentrant = reentrant

    def predict(self, inputs: Tensor) -> Tensor:
        hidden = self.first(inputs)
        for layer in self.layers:
            hidden = hidden + checkpoint(layer, torch.tanh(hidden), use_reentrant=self.reentrant)
        return self.last(hidden)


class SelectivelyCheckpointed(Tower):
    """Keeps the products of two layers and computes the rest again: it counts the products it sees in between."""

    def predict(self, inputs: Tensor) -> Tensor:
        products = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]
        contexts = partial(create_selective_checkpoint_contexts, products)
        hidden = self.first(inputs)
        return self.last(checkpoint(self.two_layers, hidden, use_reentrant=False, context_fn=contexts))

    def two_layers(self, hidden: Tensor) -> Tensor:
        return self.layers[1](torch.tanh(self.layers[0](torch.tanh(hidden))))


class Reversed(Tower):
    """Uses its layers in the reverse of the order of registration."""

    def predict(self, inputs: Tensor) -> Tensor:
        hidden = self.first(inputs)
        for layer in reversed(self.layers):
            hidden = hidden + torch.tanh(layer(hidden))
        return self.last(hidden)


class WeightNormed(Tower):
    """Weights are computed from parameters that nothing else reads."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        nn.utils.parametrizations.weight_norm(self.layers[1])


class FunctionalCall(Tower):
    """Calls a layer with parameters taken out of it."""

    def predict(self, inputs: Tensor) -> Tensor:
        layer = self.layers[1]
        hidden = torch.func.functional_call(layer, dict(layer.named_parameters()), (self.first(inputs),))
        return self.last(hidden)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(inputs, weight)
        return inputs @ weight.t()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        inputs, weight = ctx.saved_tensors
        return gradients[0] @ weight, gradients[0].t() @ inputs


class CustomFunction(Tower):
    """Hands a weight to an autograd function of its own."""

    def predict(self, inputs: Tensor) -> Tensor:
        return self.last(_Product.apply(self.first(inputs), self.layers[1].weight))
