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
from tests.parity.sabotage import every_read_is_seen, no_gate_on
from tests.support.fit import Recipe
from tests.support.models import Tower
from tests.support.rank_pool import RankPool

# A bucket for every parameter, so that no gate opens another's.
SIZES = {"bucket_cap_mb": 1e-6, "partition_size": 400, "credit": 800}
STEPS = 20


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
    """Hands layers to a compiled function that is nobody's method, so that nothing is known of it beforehand."""

    def __init__(self, *, backend: str, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.through = torch.compile(through, backend=backend)

    def predict(self, inputs: Tensor) -> Tensor:
        return self.last(self.through(self.first, self.layers, inputs))


def whole(*, backend: str, **arguments: Any) -> Any:
    """Lightning takes a compiled module and compiles its steps."""
    return torch.compile(Tower(dropout=0.0, **arguments), backend=backend)


class CountsGraphs(Callback):
    """Notes how many graphs were compiled, and how often one did not fit any more."""

    def on_fit_start(self, trainer: Trainer, module: Any) -> None:
        torch._dynamo.reset()
        counters.clear()

    def on_train_end(self, trainer: Trainer, module: Any) -> None:
        module.graphs = counters["stats"]["unique_graphs"]
        module.notes.append(("graphs", module.graphs, sum(counters["graph_break"].values())))


@pytest.mark.parametrize(
    ("model", "backend", "deferred"),
    [
        pytest.param(CompiledBlock, "eager", 0.6, id="block"),
        pytest.param(CompiledBlock, "aot_eager", 0.6, id="block-with-compiled-backward"),
        pytest.param(CompiledInPlace, "eager", 0.6, id="in-place"),
        pytest.param(CompiledMethod, "eager", 0.0, id="method"),
        pytest.param(whole, "eager", 0.0, id="whole"),
    ],
)
def test_compiled(two_ranks: RankPool, model: Any, backend: str, deferred: float) -> None:
    recipe = Recipe(
        model=partial(model, backend=backend, optimizer=partial(AdamW, lr=0.005)),
        steps=STEPS,
        callbacks=(CountsGraphs,),
        trainer={"val_check_interval": 6, "limit_val_batches": 1.0},
    )
    ddp, ours = assert_same_as_ddp(
        two_ranks, recipe, options=SIZES, network="late", overlap=False, broken=every_read_is_seen
    )
    assert ddp[0].notes[-1][1] > 0
    assert ours[0].statistics is not None
    assert ours[0].statistics.deferred_share >= deferred


def test_compiled_function_that_is_handed_layers(two_ranks: RankPool) -> None:
    """Dynamo gives such a function up at the first gate it meets, and leaves it to run as it is."""
    model = partial(HandedToCompiledFunction, backend="eager", optimizer=partial(AdamW, lr=0.005))
    recipe = Recipe(model=model, steps=STEPS)
    broken = partial(no_gate_on, names=("layers.1.weight",))
    assert_same_as_ddp(two_ranks, recipe, options=SIZES, network="late", overlap=False, broken=broken)
