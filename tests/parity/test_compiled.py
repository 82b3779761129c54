"""Compiled code reads weights unseen by the gates: it finds final ones, and is compiled no oftener than under DDP."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.optim import AdamW

from tests.parity.checks import assert_same_as_ddp
from tests.parity.sabotage import no_entry_points
from tests.support.fit import Recipe
from tests.support.models import Tower
from tests.support.rank_pool import RankPool

# A bucket for every parameter, so that no gate opens another's.
SIZES = {"bucket_cap_mb": 1e-6, "partition_size": 400, "credit": 800}
STEPS = 12


class CompiledBlock(Tower):
    """Two layers in one graph; a graph break would be an error."""

    def __init__(self, *, backend: str, **arguments: Any) -> None:
        super().__init__(**arguments)
        block = nn.Sequential(self.layers[1], nn.Tanh(), self.layers[2])
        self.block: Any = torch.compile(block, backend=backend, fullgraph=True)

    def predict(self, inputs: Tensor) -> Tensor:
        hidden = self.first(inputs)
        return self.last(torch.tanh(self.layers[0](hidden)) + self.block(hidden) + self.layers[3](hidden))


class CompiledInPlace(Tower):
    """Each layer on its own, as is done for a network's repeated blocks."""

    def __init__(self, *, backend: str, **arguments: Any) -> None:
        super().__init__(**arguments)
        for number in (0, 1):
            self.layers[number] = Activated(self.layers[number])
            self.layers[number].compile(backend=backend, fullgraph=True)


class Activated(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.relu(self.layer(inputs))


class CompiledMethod(Tower):
    """A method of the module, whose graph reads the parameters of its layers."""

    def __init__(self, *, backend: str, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.compiled = torch.compile(self.hidden, backend=backend)

    def hidden(self, inputs: Tensor) -> Tensor:
        hidden = self.first(inputs)
        for layer in self.layers:
            hidden = hidden + torch.tanh(layer(hidden))
        return hidden

    def predict(self, inputs: Tensor) -> Tensor:
        return self.last(self.compiled(inputs))


def through(first: Any, layers: Any, inputs: Tensor) -> Tensor:
    hidden = first(inputs)
    for layer in layers:
        hidden = hidden + torch.tanh(layer(hidden))
    return hidden


class HandedToCompiledFunction(Tower):
    """Hands layers to a compiled function that is no method of a module, so nothing is known of it beforehand."""

    def __init__(self, *, backend: str, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.through = torch.compile(through, backend=backend)

    def predict(self, inputs: Tensor) -> Tensor:
        return self.last(self.through(self.first, self.layers, inputs))


def whole(*, backend: str, **arguments: Any) -> Any:
    """Lightning takes a compiled module and compiles its steps."""
    return torch.compile(Tower(dropout=0.0, **arguments), backend=backend)


class HelperWithoutWeights(Tower):
    """A compiled function that reads no weights, in the middle of a model, costs no overlap."""

    def __init__(self, *, backend: str, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.activation = torch.compile(softened, backend=backend, fullgraph=True)

    def predict(self, inputs: Tensor) -> Tensor:
        hidden = self.first(inputs)
        for layer in self.layers:
            hidden = hidden + self.activation(layer(hidden))
        return self.last(hidden)


def softened(inputs: Tensor) -> Tensor:
    return torch.tanh(inputs) * 0.5


def linear(inputs: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return torch.tanh(inputs @ weight.t() + bias)


class WeightsAsArguments(Tower):
    """One compiled function for all layers, which hand it their weights: compiled once."""

    def __init__(self, *, backend: str, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.linear = torch.compile(linear, backend=backend, fullgraph=True)

    def predict(self, inputs: Tensor) -> Tensor:
        hidden = self.first(inputs)
        for layer in self.layers:
            hidden = hidden + self.linear(hidden, weight=layer.weight, bias=layer.bias)
        return self.last(hidden)


class Closure(Tower):
    """A compiled function that reads weights it is not handed, compiled in a later step only."""

    def __init__(self, *, backend: str, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.backend = backend
        self.compiled: Any = None

    def predict(self, inputs: Tensor) -> Tensor:
        hidden = self.first(inputs)
        if len(self.losses) == 3 and self.compiled is None:
            layers = self.layers  # a graph of its own for the last two, and a call in between that is not compiled

            def outside(value: Tensor) -> Tensor:
                return torch.tanh(layers[2](uncompiled(torch.tanh(layers[1](value)))))

            self.compiled = [torch.compile(outside, backend=self.backend)]
        if self.compiled is not None:
            return self.last(hidden + self.compiled[0](hidden))
        return self.last(hidden)


@torch.compiler.disable
def uncompiled(value: Tensor) -> Tensor:
    return value + 0.1


class CompiledLater(Tower):
    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        for number in (0, 2):
            self.layers[number] = Activated(self.layers[number])


class CompilesInMidFit(Callback):
    """Compiles two layers in place between two steps, and runs them at once."""

    def on_train_batch_end(self, trainer: Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == 4:
            module.layers[0].compile(backend="aot_eager", fullgraph=True)
            module.layers[2].compile(backend="aot_eager", fullgraph=True)
        if trainer.global_step in (4, 9):
            with torch.no_grad():
                module.notes.append(module.layers[0](torch.ones(2, 24)).sum().item())


class CountsGraphs(Callback):
    """Notes how many graphs were compiled, and how often one had to be compiled again."""

    def on_fit_start(self, trainer: Trainer, module: Any) -> None:
        torch._dynamo.reset()
        counters.clear()

    def on_train_end(self, trainer: Trainer, module: Any) -> None:
        module.graphs = counters["stats"]["unique_graphs"]
        module.notes.append(("graphs", module.graphs, sum(counters["graph_break"].values())))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "backend", "opened"),
    [
        pytest.param(CompiledBlock, "eager", 0, id="block"),
        pytest.param(CompiledBlock, "aot_eager", 0, id="block-with-compiled-backward"),
        pytest.param(CompiledInPlace, "eager", 0, id="in-place"),
        pytest.param(CompiledMethod, "eager", 0, id="method"),
        pytest.param(whole, "eager", 0, id="whole"),
        pytest.param(WeightsAsArguments, "aot_eager", 0, id="weights-as-arguments"),
        pytest.param(HandedToCompiledFunction, "eager", 0, id="layers-as-arguments"),
        pytest.param(Closure, "aot_eager", STEPS - 6, id="closure-in-mid-fit"),
    ],
)
def test_compiled(two_ranks: RankPool, model: Any, backend: str, opened: int) -> None:
    """Updates cross the step boundary, and what is compiled waits for what it reads; some waits for everything."""
    recipe = Recipe(
        model=partial(model, backend=backend, optimizer=partial(AdamW, lr=0.005)),
        steps=STEPS,
        callbacks=(CountsGraphs,),
        trainer={"val_check_interval": 6, "limit_val_batches": 1.0},
        ddp={"find_unused_parameters": True} if model is Closure else {},
    )
    ddp, ours = assert_same_as_ddp(two_ranks, recipe, options=SIZES, network="late", broken=no_entry_points)
    assert ddp[0].notes[-1][1] > 0
    assert ours[0].plan is not None
    assert ours[0].plan.gated_at_start == ()
    assert opened <= sum(ours[0].plan.opened_for.values()) <= opened + 4, ours[0].plan


def test_compiled_code_without_weights_costs_no_overlap(two_ranks: RankPool) -> None:
    model = partial(HelperWithoutWeights, backend="eager", optimizer=partial(AdamW, lr=0.005))
    recipe = Recipe(model=model, steps=STEPS, callbacks=(CountsGraphs,))
    ddp, ours = assert_same_as_ddp(two_ranks, recipe, options=SIZES)
    assert ddp[0].notes[-1][1] > 0
    assert ours[0].plan is not None
    assert not ours[0].plan.opened_for


@pytest.mark.slow
def test_modules_compiled_in_mid_fit(two_ranks: RankPool) -> None:
    model = partial(CompiledLater, optimizer=partial(AdamW, lr=0.005))
    recipe = Recipe(model=model, steps=STEPS, callbacks=(CountsGraphs, CompilesInMidFit))
    ddp, _ = assert_same_as_ddp(two_ranks, recipe, options=SIZES, network="late", broken=no_entry_points)
    assert ddp[0].notes[-1][1] > 0
