"""Trainings with functions that take parameters without a touch: transforms, copies, exports, fast paths, scripts."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor, nn
from torch.optim import AdamW

from tests.parity import silent_readers
from tests.parity.checks import assert_same_as_ddp
from tests.parity.sabotage import no_entry_points
from tests.support.cases import cases
from tests.support.fit import Recipe
from tests.support.models import Tokens, Tower
from tests.support.rank_pool import RankPool

adamw = partial(AdamW, lr=0.005)
STEPS = 12
# A bucket for every parameter, so that no gate opens another's.
SIZES = {"bucket_cap_mb": 1e-6, "partition_size": 400, "credit": 800}
UNUSED = {"find_unused_parameters": True}


class InnerStep(Tower):
    """Takes a gradient step inside the forward pass, as meta-learning does."""

    def predict(self, inputs: Tensor) -> Tensor:
        layer, hidden = self.layers[1], self.first(inputs)

        def inner_loss(weights: dict[str, Tensor]) -> Tensor:
            return torch.func.functional_call(layer, weights, (hidden,)).pow(2).mean()

        weights = dict(layer.named_parameters())
        gradients = torch.func.grad(inner_loss)(weights)
        stepped = {name: weight - 0.1 * gradients[name] for name, weight in weights.items()}
        return self.last(torch.func.functional_call(layer, stepped, (hidden,)))


class TransformsClosures(Tower):
    """Penalises how its output changes with its input; the transforms close over the weights."""

    def predict(self, inputs: Tensor) -> Tensor:
        def through(sample: Tensor) -> Tensor:
            return self.last(torch.tanh(self.layers[2](torch.tanh(self.first(sample)))))

        outputs = torch.vmap(through)(inputs)
        change = torch.vmap(torch.func.jacrev(through))(inputs[:2])
        tangent = torch.func.jvp(self.layers[0], (self.first(inputs),), (self.first(inputs),))[1]
        return outputs + 0.01 * change.pow(2).mean() + 0.01 * tangent.mean()


class ForwardMode(Tower):
    """Follows a direction through its layers with dual numbers."""

    def predict(self, inputs: Tensor) -> Tensor:
        with forward_ad.dual_level():
            hidden = forward_ad.make_dual(inputs, torch.ones_like(inputs))
            for layer in (self.first, self.layers[0], self.layers[1]):
                hidden = torch.tanh(layer(hidden))
            value, tangent = forward_ad.unpack_dual(hidden)
        return self.last(value + 0.1 * tangent)


@pytest.mark.parametrize("model", [InnerStep, TransformsClosures, pytest.param(ForwardMode, marks=pytest.mark.slow)])
def test_transforms_in_the_forward_pass(two_ranks: RankPool, model: Any) -> None:
    """They wait for what they read, as layers do."""
    recipe = Recipe(model=partial(model, optimizer=adamw), steps=STEPS, ddp=UNUSED)
    broken = no_entry_points if model is InnerStep else None
    _, ours = assert_same_as_ddp(two_ranks, recipe, options=SIZES, broken=broken)
    assert ours[0].plan is not None
    assert not ours[0].plan.opened_for


@pytest.mark.parametrize("callback", cases(silent_readers.READERS, quick={"per-sample", "exports"}))
def test_callbacks(two_ranks: RankPool, callback: Any) -> None:
    """In the forward pass, after the backward pass and between steps."""
    recipe = Recipe(model=partial(Tower, optimizer=adamw), steps=STEPS, callbacks=(callback,))
    assert_same_as_ddp(two_ranks, recipe, options=SIZES, overlap=False)


class ScriptedInMidRun(Tower):
    """Compiles a layer to TorchScript after a few steps, and goes on training with that."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.hidden_from_modules: list[Any] = []

    def predict(self, inputs: Tensor) -> Tensor:
        hidden = self.first(inputs)
        if len(self.losses) == 4 and not self.hidden_from_modules:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self.hidden_from_modules = [torch.jit.script(self.layers[1]), torch.jit.trace(self.layers[2], hidden)]
        for layer in self.hidden_from_modules or self.layers[1:3]:
            hidden = torch.tanh(layer(hidden))
        return self.last(hidden)


def test_scripted_in_mid_run(two_ranks: RankPool) -> None:
    """Nothing shows the reads of such a layer; that it holds the parameters does."""
    recipe = Recipe(model=partial(ScriptedInMidRun, optimizer=adamw), steps=STEPS, ddp=UNUSED)
    _, ours = assert_same_as_ddp(two_ranks, recipe, options=SIZES, overlap=False)
    assert ours[0].statistics is not None
    assert 0.5 < ours[0].statistics.deferred_share < 0.95


class Encoder(Tokens):
    """Also runs a part of itself in evaluation mode, with padding."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.embedding = nn.Embedding(16, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.last = nn.Linear(8, 3)

    def predict(self, inputs: Tensor) -> Tensor:
        embedded = self.embedding(inputs)
        padding = torch.zeros(inputs.shape, dtype=torch.bool)
        padding[:, 6:] = True
        self.encoder.eval()
        with torch.no_grad():
            target = self.encoder(embedded, src_key_padding_mask=padding)
        self.encoder.train()
        return self.last((self.encoder(embedded) - 0.1 * target.sum(1, keepdim=True)).mean(1))


@pytest.mark.slow
def test_fast_paths_in_the_forward_pass(two_ranks: RankPool) -> None:
    recipe = Recipe(model=partial(Encoder, optimizer=adamw), steps=STEPS)
    assert_same_as_ddp(two_ranks, recipe, options=SIZES, broken=no_entry_points)
