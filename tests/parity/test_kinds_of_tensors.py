"""Parameters of every type, shape and layout, and changes to graphs and parameters in mid-fit."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, Trainer
from torch import Tensor, nn
from torch.optim import SGD, AdamW

from tests.parity.checks import DDP, assert_same, assert_same_as_ddp, train_on
from tests.parity.factors import Combination
from tests.parity.matrix import check
from tests.parity.observers import sums
from tests.parity.test_parameter_servers import PS
from tests.support.cases import cases
from tests.support.fit import SIZES, Recipe, Run
from tests.support.models import Tower
from tests.support.rank_pool import RankPool

STEPS = 8


class Complex(Tower):
    """A part of the computation is in complex numbers, as in Fourier layers."""

    def __init__(self, dtype: torch.dtype = torch.complex64, **arguments: Any) -> None:
        super().__init__(depth=1, **arguments)
        self.turns = nn.Parameter(torch.randn(24, 24, dtype=dtype) * 0.1)
        self.phase = nn.Parameter(torch.randn((), dtype=dtype))
        self.tables = nn.ParameterList(nn.Parameter(torch.randn(n, dtype=dtype) * 0.1) for n in (24, 1, 0))

    def predict(self, inputs: Tensor) -> Tensor:
        hidden = self.first(inputs).to(self.turns.dtype) @ self.turns * self.phase + sum(t.sum() for t in self.tables)
        return self.last(self.layers[0](torch.tanh(hidden.abs().float())))


class AllSorts(Tower):
    """Two precisions, no elements, no dimensions, other memory formats, no gradient, a class of its own, a buffer."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(depth=1, **arguments)
        self.wide = nn.Parameter(torch.randn(24, 24, dtype=torch.float64) * 0.1)
        self.narrow = nn.Parameter(torch.randn(24, dtype=torch.bfloat16) * 0.1)
        self.nothing = nn.Parameter(torch.zeros(3, 0))
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.kernel = nn.Parameter((torch.randn(4, 2, 3, 3) * 0.1).to(memory_format=torch.channels_last))
        self.turned = nn.Parameter((torch.randn(24, 12) * 0.1).t())
        self.strided = nn.Parameter((torch.randn(24, 48) * 0.1)[:, ::2])
        self.counts = nn.Parameter(torch.arange(3), requires_grad=False)
        self.own = Labelled(torch.randn(24) * 0.1)
        self.own.label = {"kind": "own"}
        self.offset = getattr(nn, "Buffer", Tensor)(torch.ones(24))

    def predict(self, inputs: Tensor) -> Tensor:
        hidden = self.first(inputs) + inputs @ self.turned + self.own * self.offset + self.nothing.sum()
        hidden = torch.tanh(hidden @ self.strided) * self.scale + (hidden.double() @ self.wide).float()
        convolved = F.conv2d(hidden.view(-1, 2, 3, 4), self.kernel, padding=1).mean((1, 2, 3))
        return self.last(self.layers[0](torch.tanh(hidden * self.narrow))) + convolved[:, None] + len(self.own.label)


class Labelled(nn.Parameter):
    label: dict[str, str]


class OneFlatMemory(Tower):
    """All weights lie one after the other in one memory, which nothing else holds."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        flat = torch.cat([p.detach().reshape(-1) for p in self.parameters()])
        nn.utils.vector_to_parameters(flat, self.parameters())


class Hooked(Tower):
    """Hooks on parameters: before and after their gradients are accumulated."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        for parameter in self.layers.parameters():
            parameter.register_hook(lambda gradient: 0.5 * gradient)
            parameter.register_post_accumulate_grad_hook(lambda p: self.notes.append(tuple(p.shape)))


class Penalised(Tower):
    """A gradient penalty: the gradient is differentiated again."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        inputs = batch[0].clone().requires_grad_()
        outputs = self.predict(inputs)
        (slope,) = torch.autograd.grad(outputs.sum(), inputs, create_graph=True)
        loss = F.mse_loss(outputs, batch[1]) + 0.1 * slope.square().mean()
        self.losses.append(loss.item())
        return loss


class LooksAtItsGradient(Tower):
    """Balances two losses by the norms of their gradients with respect to the last layer."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        outputs = self.predict(batch[0])
        losses = F.mse_loss(outputs, batch[1]), outputs.abs().mean()
        norms = [torch.autograd.grad(one, self.last.weight, retain_graph=True)[0].norm() for one in losses]
        loss = losses[0] + (norms[0] / norms[1]).detach() * losses[1]
        self.losses.append(loss.item())
        return loss


class BackwardTwice(Tower):
    """Keeps the graph of each loss, and looks at it after the backward pass."""

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        loss.backward(retain_graph=True)
        self.kept = loss


KINDS = {
    "complex": Complex,
    "complex128": partial(Complex, torch.complex128),
    "all sorts": AllSorts,
    "one memory": OneFlatMemory,
    "hooks": Hooked,
    "penalty": Penalised,
    "autograd.grad": LooksAtItsGradient,
    "retained": BackwardTwice,
}


@pytest.mark.parametrize("model", cases(KINDS, quick={"complex", "all sorts", "one memory", "hooks"}))
def test_kinds(two_ranks: RankPool, model: Any) -> None:
    recipe = Recipe(model=partial(model, optimizer=partial(SGD, lr=0.02, momentum=0.9)), steps=STEPS)
    _, ours = assert_same_as_ddp(two_ranks, recipe, overlap=False)
    assert ours[0].statistics is not None
    assert ours[0].statistics.overlapped_steps == STEPS - 1


@pytest.mark.slow
@pytest.mark.parametrize("options", [SIZES, PS], ids=["allreduce", "ps"])
@pytest.mark.parametrize("bucket_views", [True, False])
def test_the_first_pass_of_a_static_graph_with_several_buckets(
    two_ranks: RankPool, bucket_views: bool, options: dict[str, Any]
) -> None:
    """DDP hands all of them over at the end of this pass, each with index 0, and calls none of them the last."""
    ddp = {"static_graph": True, "gradient_as_bucket_view": bucket_views}
    recipe = Recipe(model=partial(AllSorts, optimizer=partial(SGD, lr=0.02, momentum=0.9)), steps=STEPS, ddp=ddp)
    expected, actual = train_on(two_ranks, recipe, DDP, Run(options=options, network="late"))
    assert_same(expected, actual)
    assert actual[0].statistics is not None
    assert actual[0].statistics.overlapped_steps == (STEPS - 1 if bucket_views else 0)


def test_two_passes_in_the_first_forward_of_a_static_graph(two_ranks: RankPool, tmp_path: Path) -> None:
    two = Combination(
        optimizer="SGD-momentum",
        groups="one-group",
        schedule="constant",
        accumulation="1",
        clipping="unclipped",
        precision="32-true",
        model="plain",
        ddp="static-graph",
        weighting="ranks",
        architecture="allreduce",
        loop="two-optimizers",
    )
    check(two_ranks, two, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    "model",
    cases(
        {"complex64": Complex, "complex128": partial(Complex, torch.complex128), "all sorts": AllSorts},
        quick={"all sorts"},
    ),
)
def test_kinds_clipped_by_their_norm(two_ranks: RankPool, model: Any) -> None:
    """Norms are added up in another order than DDP's, so the weights are those of DDP within rounding."""
    recipe = Recipe(
        model=partial(model, optimizer=partial(SGD, lr=0.02, momentum=0.9)),
        steps=STEPS,
        trainer={"gradient_clip_val": 0.3},
    )
    expected, actual = train_on(two_ranks, recipe, DDP, Run())
    for one, other in zip(expected, actual, strict=True):
        assert other.statistics is not None
        assert other.statistics.overlapped_steps == STEPS - 1
        for name, weight in one.weights.items():
            torch.testing.assert_close(other.weights[name].to(weight.dtype), weight, rtol=2e-3, atol=2e-5, msg=name)


class ChangesTheModel(Callback):
    """Freezes and unfreezes layers, and adds and removes one, between steps."""

    def on_train_batch_end(self, trainer: Trainer, module: Any, *_: Any) -> None:
        step = trainer.global_step
        if step == 3:
            module.layers[0].requires_grad_(False)
            module.added = nn.Linear(2, 2)
        if step == 6:
            module.layers[0].requires_grad_(True)
            del module.added
        module.notes.append(sums(module.parameters()) if step == 5 else step)


class ClipsGradients(Callback):
    """By torch's own functions, where users do."""

    def on_before_optimizer_step(self, trainer: Trainer, module: Any, optimizer: Any) -> None:
        if trainer.global_step % 2:
            module.notes.append(nn.utils.clip_grad_norm_(module.layers.parameters(), 0.1).item())
        else:
            nn.utils.clip_grad_value_(module.parameters(), 0.01)


@pytest.mark.parametrize("callback", [ChangesTheModel, ClipsGradients])
def test_changes_in_mid_fit(two_ranks: RankPool, callback: Any) -> None:
    find = {"find_unused_parameters": True} if callback is ChangesTheModel else {}
    recipe = Recipe(
        model=partial(Tower, optimizer=partial(AdamW, lr=0.005)), steps=STEPS + 2, callbacks=(callback,), ddp=find
    )
    assert_same_as_ddp(two_ranks, recipe, overlap=False)
