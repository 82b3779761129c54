"""Loops of Fabric: the weights, the optimizers and what the loop sees are DDP's, and steps overlap."""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.fabric import Fabric
from lightning.fabric.plugins import MixedPrecision
from torch import nn
from torch.optim import SGD, AdamW
from torch.utils.checkpoint import checkpoint

from tests.support.fabric_loops import SIZES, compare, data, tower
from tests.support.rank_pool import RankPool

Optimizers = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
sgd: Optimizers = partial(SGD, lr=0.05, momentum=0.9, weight_decay=1e-3)
adamw: Optimizers = partial(AdamW, lr=0.005)


def scaling() -> MixedPrecision:
    """fp16 with a loss scale, which overflows in the first steps."""
    return MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=2.0**24))


def plain(fabric: Fabric, *, optimizer: Optimizers, zero_first: bool) -> Mapping[str, Any]:
    """The loop of the textbook, with gradients dropped before the forward pass, or after the step."""
    model = tower()
    wrapped, stepped = fabric.setup(model, optimizer(model.parameters()))
    losses = []
    for inputs, targets in data(fabric):
        if zero_first:
            stepped.zero_grad()
        loss = F.mse_loss(wrapped(inputs), targets)
        fabric.backward(loss)
        stepped.step()
        if not zero_first:
            stepped.zero_grad()
        losses.append(loss.detach())
    return {"model": wrapped, "optimizer": stepped, "losses": losses}


PLAIN = {
    "sgd, zero_grad first": partial(plain, optimizer=sgd, zero_first=True),
    "sgd, zero_grad last": partial(plain, optimizer=sgd, zero_first=False),
    "adamw": partial(plain, optimizer=adamw, zero_first=False),
}


def test_every_step_but_the_first_overlaps(two_ranks: RankPool) -> None:
    """No gradient leaves before the next forward pass has begun: a wait for one before that would be in vain."""
    for outcome in two_ranks.run(compare, loops=PLAIN, network="held"):
        for name, seen in outcome.items():
            assert not seen.differences, name
            assert not seen.forced, name
            assert seen.statistics.overlapped_steps == seen.statistics.steps - 1 == 8, name


def accumulating(fabric: Fabric) -> Mapping[str, Any]:
    """Three batches for a step; gradients travel with the third."""
    model = tower()
    wrapped, optimizer = fabric.setup(model, adamw(model.parameters()))
    for index, (inputs, targets) in enumerate(data(fabric)):
        steps = index % 3 == 2
        with fabric.no_backward_sync(wrapped, enabled=not steps):
            fabric.backward(F.mse_loss(wrapped(inputs), targets) / 3)
        if steps:
            optimizer.step()
            optimizer.zero_grad()
    return {"model": wrapped, "optimizer": optimizer}


def clipping(fabric: Fabric, **how: float) -> Mapping[str, Any]:
    """By value, or by norm, which is returned."""
    model = tower()
    wrapped, optimizer = fabric.setup(model, sgd(model.parameters()))
    norms = []
    for inputs, targets in data(fabric):
        fabric.backward(F.mse_loss(wrapped(inputs), targets))
        norms.append(fabric.clip_gradients(wrapped, optimizer, **how))
        optimizer.step()
        optimizer.zero_grad()
    return {"model": wrapped, "optimizer": optimizer, "norms": norms}


def set_up_apart(fabric: Fabric) -> Mapping[str, Any]:
    """Module first, then the optimizer; a rate that changes with each step, and one on the wrapper of the optimizer."""
    model = fabric.setup_module(tower())
    optimizer = fabric.setup_optimizers(adamw(model.parameters()))
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    inner = torch.optim.lr_scheduler.LinearLR(optimizer.optimizer, 0.5, total_iters=5)
    rates = []
    for inputs, targets in data(fabric):
        fabric.backward(F.mse_loss(model(inputs), targets))
        optimizer.step()
        schedule.step()
        inner.step()
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.zero_grad()
    return {"model": model, "optimizer": optimizer, "rates": rates}


class Discriminator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(8)
        self.layers = nn.Sequential(nn.Linear(3, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 1))

    def forward(self, samples: Any) -> Any:
        return self.layers(samples)


def adversarial(fabric: Fabric) -> Mapping[str, Any]:
    """Two modules and two optimizers; the generator's loss goes through the discriminator, which is DDP's own."""
    generator, discriminator = tower(), Discriminator()
    g, g_steps = fabric.setup(generator, adamw(generator.parameters()))
    d, d_steps = fabric.setup(discriminator, sgd(discriminator.parameters()))
    losses = []
    for noise, real in data(fabric):
        fake = g(noise)
        d_steps.zero_grad()
        d_loss = F.softplus(-d(real)).mean() + F.softplus(d(fake.detach())).mean()
        fabric.backward(d_loss)
        d_steps.step()
        g_steps.zero_grad()
        g_loss = F.softplus(-d(fake)).mean()
        fabric.backward(g_loss)
        g_steps.step()
        losses += [d_loss.detach(), g_loss.detach()]
    return {"generator": g, "discriminator": d, "g_steps": g_steps, "d_steps": d_steps, "losses": losses}


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator, self.discriminator = tower(), Discriminator()

    def forward(self, noise: Any, real: Any, which: str) -> Any:
        if which == "discriminator":
            fake = self.generator(noise).detach()
            return F.softplus(-self.discriminator(real)).mean() + F.softplus(self.discriminator(fake)).mean()
        return F.softplus(-self.discriminator(self.generator(noise))).mean()


def one_module_two_optimizers(fabric: Fabric) -> Mapping[str, Any]:
    """Both networks in one module, each with its optimizer."""
    pair = Pair()
    model, g_steps, d_steps = fabric.setup(
        pair, adamw(pair.generator.parameters()), sgd(pair.discriminator.parameters())
    )
    for noise, real in data(fabric):
        for steps, which in ((d_steps, "discriminator"), (g_steps, "generator")):
            model.zero_grad()
            fabric.backward(model(noise, real, which))
            steps.step()
    return {"model": model, "g_steps": g_steps, "d_steps": d_steps}


def two_modules_one_optimizer(fabric: Fabric) -> Mapping[str, Any]:
    """An encoder and a head, set up apart and stepped together."""
    encoder, head = fabric.setup_module(tower()), fabric.setup_module(Discriminator())
    optimizer = fabric.setup_optimizers(adamw([*encoder.parameters(), *head.parameters()]))
    for inputs, targets in data(fabric):
        optimizer.zero_grad()
        fabric.backward(F.mse_loss(head(encoder(inputs)), targets[:, :1]))
        optimizer.step()
    return {"encoder": encoder, "head": head, "optimizer": optimizer}


def both_step_at_once(fabric: Fabric) -> Mapping[str, Any]:
    """One backward pass, and two optimizers that each step half of the module."""
    model = tower()
    half = list(model.parameters())
    wrapped, first, second = fabric.setup(model, sgd(half[:6]), adamw(half[6:]))
    for inputs, targets in data(fabric):
        fabric.backward(F.mse_loss(wrapped(inputs), targets))
        first.step()
        second.step()
        first.zero_grad()
        second.zero_grad()
    return {"model": wrapped, "first": first, "second": second}


def validating(fabric: Fabric) -> Mapping[str, Any]:
    """Validation in between, with running statistics and means over ranks; and a norm of the weights now and then."""
    model = tower(norm=True)
    wrapped, optimizer = fabric.setup(model, adamw(model.parameters()))
    seen = []
    for index, (inputs, targets) in enumerate(data(fabric)):
        wrapped.train()
        loss = F.mse_loss(wrapped(inputs), targets)
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        seen.append(fabric.all_reduce(loss.detach(), reduce_op="mean"))
        if index % 4 == 3:
            wrapped.eval()
            with torch.no_grad():
                seen.append(fabric.all_reduce(F.mse_loss(wrapped(inputs), targets)))
            seen.append(sum(p.detach().norm() for p in model.parameters()))
    return {"model": wrapped, "optimizer": optimizer, "seen": seen}


def with_closures(fabric: Fabric) -> Mapping[str, Any]:
    """The closure computes the loss: for an optimizer that steps by parameter, and one that calls it three times."""
    model, other = tower(), Discriminator()
    a, adam_steps = fabric.setup(model, adamw(model.parameters()))
    b, lbfgs_steps = fabric.setup(other, torch.optim.LBFGS(other.parameters(), lr=0.1, max_iter=3))
    losses = []
    for inputs, targets in data(fabric):

        def closure(a: Any = a, inputs: Any = inputs, targets: Any = targets) -> Any:
            adam_steps.zero_grad()
            loss = F.mse_loss(a(inputs), targets)
            fabric.backward(loss)
            return loss

        def again(b: Any = b, targets: Any = targets) -> Any:
            lbfgs_steps.zero_grad()
            loss = b(targets).square().mean()
            fabric.backward(loss)
            return loss

        losses += [adam_steps.step(closure).detach(), lbfgs_steps.step(again).detach()]
    return {"a": a, "b": b, "adam": adam_steps, "losses": losses}


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = tower()

    def forward(self, inputs: Any) -> Any:
        hidden = self.layers[0](inputs)
        hidden = checkpoint(self.layers[1:5], hidden, use_reentrant=False)
        return checkpoint(self.layers[5:], hidden, use_reentrant=False)

    def penalty(self) -> Any:
        """A forward method of its own."""
        return self.layers[0](torch.ones(1, 12)).square().mean() + sum(p.square().sum() for p in self.parameters())


def checkpointed(fabric: Fabric) -> Mapping[str, Any]:
    """Layers are computed again in the backward pass; every third step goes through another method of the module."""
    model = Checkpointed()
    wrapped, optimizer = fabric.setup(model, sgd(model.parameters()))
    wrapped.mark_forward_method("penalty")
    for index, (inputs, targets) in enumerate(data(fabric)):
        loss = wrapped.penalty() * 1e-3 if index % 3 == 2 else F.mse_loss(wrapped(inputs), targets)
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    return {"model": wrapped, "optimizer": optimizer}


def left_and_begun_again(fabric: Fabric) -> Mapping[str, Any]:
    """A loop that is left after a backward pass, one that goes on, and another module with a new optimizer."""
    model = tower()
    wrapped, optimizer = fabric.setup(model, sgd(model.parameters()))
    for index, (inputs, targets) in enumerate(data(fabric)):
        optimizer.zero_grad()
        fabric.backward(F.mse_loss(wrapped(inputs), targets))
        if index == 5:
            break
        optimizer.step()
    between = [p.detach().clone() for p in model.parameters()]
    for inputs, targets in data(fabric):
        optimizer.zero_grad(set_to_none=False)
        fabric.backward(F.mse_loss(wrapped(inputs), targets))
        optimizer.step()
    second = Discriminator()
    anew = fabric.setup_optimizers(adamw(model.parameters()))
    other, steps = fabric.setup(second, sgd(second.parameters()))
    for inputs, targets in data(fabric):
        fabric.backward(F.mse_loss(other(wrapped(inputs)), targets[:, :1]))
        anew.step()
        steps.step()
        anew.zero_grad()
        steps.zero_grad()
    return {"model": wrapped, "optimizer": optimizer, "between": between, "other": other, "anew": anew, "steps": steps}


def saved_and_loaded(fabric: Fabric) -> Mapping[str, Any]:
    """Saved right after a step, trained on, and put back."""
    model = tower()
    wrapped, optimizer = fabric.setup(model, adamw(model.parameters()))
    with tempfile.TemporaryDirectory() as own:
        path = Path(fabric.broadcast(own), "state.ckpt")
        for index, (inputs, targets) in enumerate(data(fabric)):
            fabric.backward(F.mse_loss(wrapped(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()
            if index == 5:
                fabric.save(path, {"model": wrapped, "optimizer": optimizer, "index": index})
        after = [p.detach().clone() for p in model.parameters()]
        left = fabric.load(path, {"model": wrapped, "optimizer": optimizer})
        fabric.barrier()
    for inputs, targets in data(fabric):
        fabric.backward(F.mse_loss(wrapped(inputs), targets))
        optimizer.step()
        optimizer.zero_grad()
    return {"model": wrapped, "optimizer": optimizer, "after": after, "left": left["index"]}


def folds(fabric: Fabric) -> Mapping[str, Any]:
    """One module after the other: a module that is gone leaves no scheduler behind."""
    weights = []
    for _ in range(3):
        outcome = plain(fabric, optimizer=sgd, zero_first=True)
        weights.append([p.detach().clone() for p in outcome["model"].parameters()])
        del outcome
        gc.collect()
    return {"weights": weights}


def one_rank_looks(fabric: Fabric) -> Mapping[str, Any]:
    """One rank alone runs the module between steps, with gradients enabled, while the other one waits for it.

    As DDP allows once it has settled its buckets.
    """
    model = tower()
    wrapped, optimizer = fabric.setup(model, sgd(model.parameters()))
    for index, (inputs, targets) in enumerate(data(fabric)):
        if index > 2 and fabric.is_global_zero:
            wrapped(inputs).sum()
        fabric.barrier()
        fabric.backward(F.mse_loss(wrapped(inputs), targets))
        optimizer.step()
        optimizer.zero_grad()
    return {"model": wrapped, "optimizer": optimizer}


LOOPS = {
    "accumulation": accumulating,
    "clipping by value": partial(clipping, clip_val=0.01),
    "clipping by norm": partial(clipping, max_norm=0.1),
    "module and optimizer apart": set_up_apart,
    "two modules, two optimizers": adversarial,
    "two modules, one optimizer": two_modules_one_optimizer,
    "two optimizers step at once": both_step_at_once,
    "validation": validating,
    "closures": with_closures,
    "activation checkpointing": checkpointed,
    "left and begun again": left_and_begun_again,
    "saved and loaded": saved_and_loaded,
    "folds": folds,
}


QUICK = ("accumulation", "clipping by norm", "two modules, one optimizer", "validation", "closures", "saved and loaded")


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(QUICK, id="usual"),
        pytest.param([name for name in LOOPS if name not in QUICK], id="rarer", marks=pytest.mark.slow),
    ],
)
def test_loops_are_ddps(names: list[str], two_ranks: RankPool) -> None:
    for outcome in two_ranks.run(compare, loops={name: LOOPS[name] for name in names}):
        for name, seen in outcome.items():
            assert not seen.differences, name
            assert seen.statistics.overlapped_steps or name in ("clipping by norm", "two modules, one optimizer"), name
            whole = {"the optimizer has parameters of something else, too": 8}  # all but the first of 9
            assert seen.plan is not None
            waits = {why: steps for why, steps in seen.plan.waits.items() if "between steps" not in why}
            assert waits == (whole if name == "two modules, one optimizer" else {}), name


def test_one_module_with_two_optimizers(two_ranks: RankPool) -> None:
    loops, options = {"pair": one_module_two_optimizers}, {**SIZES, "find_unused_parameters": True}
    for outcome in two_ranks.run(compare, loops=loops, options=options):
        assert not outcome["pair"].differences
        assert outcome["pair"].statistics.overlapped_steps == 17


@pytest.mark.parametrize("arguments", [{"precision": "bf16-mixed"}, {"precision": "64-true"}, {"plugins": scaling}])
def test_precision(arguments: dict[str, Any], two_ranks: RankPool) -> None:
    loops = {"loop": partial(plain, optimizer=sgd, zero_first=False)}
    for outcome in two_ranks.run(compare, loops=loops, fabric=arguments):
        assert not outcome["loop"].differences


@pytest.mark.slow
@pytest.mark.parametrize("options", [{**SIZES, "mode": "ddp"}, {"mode": "auto"}, {**SIZES, "cross_barrier": False}])
def test_options(options: dict[str, Any], two_ranks: RankPool) -> None:
    loops = {"adamw": PLAIN["adamw"], "one rank looks": one_rank_looks}
    for outcome in two_ranks.run(compare, loops=loops, options=options, network="plain"):
        assert not [name for name, seen in outcome.items() if seen.differences]
