"""Code that holds a parameter's memory without touching the parameter reads updated weights all the same."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import AdamW

from tests.parity.checks import assert_same_as_ddp
from tests.parity.observers import ReadsStateDict, RunsModule
from tests.parity.sabotage import every_read_is_seen, no_gate_on
from tests.support.fit import Recipe
from tests.support.models import Tower
from tests.support.rank_pool import RankPool

adamw = partial(AdamW, lr=0.005)
STEPS = 12
# A bucket for every parameter, so that no gate opens another's.
SIZES = {"bucket_cap_mb": 1e-6, "partition_size": 400, "credit": 800}


class Scripted(Tower):
    """A layer is compiled to TorchScript, whose interpreter knows nothing of Python objects."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.layers[1] = torch.jit.script(self.layers[1])


class Traced(Tower):
    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.layers[1] = torch.jit.trace(self.layers[1], torch.zeros(1, 24))


class Compiled(Tower):
    """A layer is compiled by Dynamo; its backend does not matter here and takes long."""

    def __init__(self, *, in_place: bool, **arguments: Any) -> None:
        super().__init__(**arguments)
        if in_place:
            self.layers[1].compile(backend="eager")
        else:
            compiled: Any = torch.compile(self.layers[1], backend="eager")
            self.layers[1] = compiled


class KeepsAlias(Tower):
    """Multiplies by a view of a weight that it keeps as a buffer, or as an attribute, next to the parameter."""

    def __init__(self, *, as_buffer: bool, **arguments: Any) -> None:
        super().__init__(**arguments)
        view = self.layers[1].weight.data
        if as_buffer:
            self.register_buffer("view", view)
        else:
            self.view = [view]

    def predict(self, inputs: Tensor) -> Tensor:
        view = self.view if isinstance(self.view, Tensor) else self.view[0]
        # Before any touch of the parameter itself.
        return (self.first(inputs) @ view).mean() + super().predict(inputs)


class FrozenTwin(Tower):
    """Reads the first weights through a frozen parameter over the same memory, so that they get no gradient there."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.twin = nn.Parameter(self.layers[1].weight.data, requires_grad=False)

    def predict(self, inputs: Tensor) -> Tensor:
        return (self.first(inputs) @ self.twin).mean() + super().predict(inputs)


class Labelled(nn.Parameter):
    """A third-party parameter class, as libraries for quantisation have them."""


class OtherParameterClass(Tower):
    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        layer: Any = self.layers[1]
        layer.weight = Labelled(layer.weight.detach().clone())


class ScriptedFunction(Tower):
    """Hands a weight to a function that is compiled to TorchScript."""

    product: Any

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.product = torch.jit.script(product)

    def predict(self, inputs: Tensor) -> Tensor:
        return super().predict(inputs) + self.product(inputs[:, :3], self.last.bias)


def product(inputs: Tensor, weight: Tensor) -> Tensor:
    return inputs * weight


class CompiledFunction(Tower):
    """Hands a weight to a function that Dynamo compiles, and that belongs to no module."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.product = [torch.compile(product, backend="eager")]

    def predict(self, inputs: Tensor) -> Tensor:
        return super().predict(inputs) + self.product[0](inputs[:, :3], self.last.bias)


class Impolite(Tensor):
    """A tensor class that ignores the ``__torch_function__`` of other classes in a call."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


class ImpoliteInputs(Tower):
    def predict(self, inputs: Tensor) -> Tensor:
        return super().predict(inputs.as_subclass(Impolite))


class SilentInside(Tower):
    """Switches off ``__torch_function__``, with the effect of code that takes memory directly."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.offset = nn.Parameter(torch.zeros(12))

    def predict(self, inputs: Tensor) -> Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            hidden = inputs + self.offset
        return super().predict(hidden)


class SilentInSecondPass(SilentInside):
    """Has two backward passes, over different parameters; the gradient of the unseen read comes late."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        inputs, targets = batch
        with torch._C.DisableTorchFunctionSubclass():
            hidden = inputs + self.offset
        self.parts = F.mse_loss(Tower.predict(self, inputs), targets), hidden.square().mean()
        self.losses.extend(part.item() for part in self.parts)
        return self.parts[0] + self.parts[1]

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        for part in self.parts:
            part.backward()


class VectorisedOverWeights(Tower):
    """Maps over the rows of a weight, which torch.vmap takes without a touch."""

    def predict(self, inputs: Tensor) -> Tensor:
        hidden = self.first(inputs)
        mapped = torch.vmap(lambda row: hidden @ row)(self.layers[1].weight)
        return self.last(torch.tanh(mapped.t()))


KNOWN_BEFOREHAND = [
    pytest.param(Scripted, id="scripted", marks=pytest.mark.slow),
    pytest.param(Traced, id="traced", marks=pytest.mark.slow),
    pytest.param(partial(Compiled, in_place=False), id="compiled", marks=pytest.mark.slow),
    pytest.param(partial(Compiled, in_place=True), id="compiled-in-place"),
    pytest.param(partial(KeepsAlias, as_buffer=True), id="alias-in-a-buffer"),
    pytest.param(partial(KeepsAlias, as_buffer=False), id="alias-in-a-list", marks=pytest.mark.slow),
    pytest.param(FrozenTwin, id="frozen-twin", marks=pytest.mark.slow),
    pytest.param(OtherParameterClass, id="parameter-class"),
]
FOUND_IN_THE_FIRST_STEP = [
    pytest.param(ScriptedFunction, id="scripted-function", marks=pytest.mark.slow),
    pytest.param(CompiledFunction, id="compiled-function", marks=pytest.mark.slow),
    pytest.param(ImpoliteInputs, id="tensor-class"),
    pytest.param(SilentInside, id="silent-code"),
]


@pytest.mark.parametrize("model", KNOWN_BEFOREHAND + FOUND_IN_THE_FIRST_STEP)
def test_in_the_forward_pass(two_ranks: RankPool, model: Any) -> None:
    recipe = Recipe(model=partial(model, optimizer=adamw), steps=STEPS)
    _, ours = assert_same_as_ddp(two_ranks, recipe, options=SIZES, overlap=False)
    assert ours[0].statistics is not None
    assert ours[0].statistics.deferred_share > 0.6, "what is seen keeps its overlap"


def test_with_gradients_of_a_second_pass(two_ranks: RankPool) -> None:
    recipe = Recipe(model=partial(SilentInSecondPass, optimizer=adamw), steps=STEPS)
    assert_same_as_ddp(two_ranks, recipe, options=SIZES, overlap=False)


@pytest.mark.slow
@pytest.mark.parametrize("model", KNOWN_BEFOREHAND[1::3])
def test_in_validation(two_ranks: RankPool, model: Any) -> None:
    trainer = {"val_check_interval": 3, "limit_val_batches": 1.0}
    recipe = Recipe(model=partial(model, optimizer=adamw), steps=STEPS, trainer=trainer)
    assert_same_as_ddp(two_ranks, recipe, options=SIZES, overlap=False)


@pytest.mark.parametrize(
    ("model", "callback"),
    [
        pytest.param(Scripted, RunsModule, id="scripted", marks=pytest.mark.slow),
        pytest.param(FrozenTwin, RunsModule, id="frozen-twin", marks=pytest.mark.slow),
        pytest.param(partial(KeepsAlias, as_buffer=True), ReadsStateDict, id="alias-in-a-buffer"),
        pytest.param(OtherParameterClass, ReadsStateDict, id="parameter-class", marks=pytest.mark.slow),
    ],
)
def test_in_callbacks(two_ranks: RankPool, model: Any, callback: Any) -> None:
    recipe = Recipe(model=partial(model, optimizer=adamw), steps=STEPS, callbacks=(callback,))
    assert_same_as_ddp(two_ranks, recipe, options=SIZES, overlap=False)


@pytest.mark.parametrize(
    "model",
    [
        pytest.param(Scripted, id="scripted"),
        pytest.param(partial(KeepsAlias, as_buffer=True), id="alias-in-a-buffer"),
        pytest.param(OtherParameterClass, id="parameter-class"),
        pytest.param(ImpoliteInputs, id="tensor-class"),
    ],
)
def test_they_would_be_stale(two_ranks: RankPool, model: Any) -> None:
    """Proof that the tests above can fail."""
    recipe = Recipe(model=partial(model, optimizer=adamw), steps=STEPS)
    assert_same_as_ddp(two_ranks, recipe, options=SIZES, overlap=False, broken=every_read_is_seen)


@pytest.mark.slow
def test_vmap_over_a_weight_touches_it(two_ranks: RankPool) -> None:
    unused = {"find_unused_parameters": True}
    recipe = Recipe(model=partial(VectorisedOverWeights, optimizer=adamw), steps=STEPS, ddp=unused)
    assert_same_as_ddp(two_ranks, recipe, options=SIZES, broken=partial(no_gate_on, names=("layers.1.weight",)))
