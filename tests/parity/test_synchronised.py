"""What couples parameters, or has gradients that cannot be cut, is stepped at the barrier, and says so."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.optim import SGD, AdamW, Optimizer

from tests.parity.checks import assert_same_as_ddp
from tests.parity.sabotage import backward_waits_for_nothing, everything_is_deferred
from tests.support.fit import Recipe
from tests.support.models import Tower
from tests.support.rank_pool import RankPool

adamw = partial(AdamW, lr=0.01)
sgd = partial(SGD, lr=0.1)
STEPS = 12


class NormedByAll(Optimizer):
    """Divides each gradient by the norm of all of them, as optimizers for large batches do."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        stepped = [(p, group["lr"]) for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p, _ in stepped]).norm()
        for parameter, rate in stepped:
            parameter.sub_(rate * parameter.grad / norm)
        return loss


class LooksAhead(SGD):
    """A subclass of a per-parameter optimizer that is none: every third step goes back half of the way."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.05, momentum=0.9)
        self.steps = 0
        self.slow = [p.detach().clone() for group in self.param_groups for p in group["params"]]

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        self.steps += 1
        if self.steps % 3 == 0:
            fast = [p for group in self.param_groups for p in group["params"]]
            for slow, parameter in zip(self.slow, fast, strict=True):
                slow.lerp_(parameter, 0.5)
                parameter.copy_(slow)
        return loss


class SharpnessAware(Optimizer):
    """Steps twice around a second closure, which a step that ran in parts would not survive."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        with torch.enable_grad():
            loss = closure()
        weights = [p for group in self.param_groups for p in group["params"]]
        norm = torch.stack([p.grad.norm() for p in weights]).norm()
        moves = [p.grad * (0.05 / norm) for p in weights]
        torch._foreach_add_(weights, moves)
        with torch.enable_grad():
            closure()
        torch._foreach_sub_(weights, moves)
        for parameter in weights:
            parameter.sub_(0.05 * parameter.grad)
        return loss


class ByHand(Tower):
    """Manual optimization with one optimizer, which steps in every other batch and clips by value."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        loss = F.mse_loss(self(batch[0]), batch[1])
        self.losses.append(loss.item())
        self.manual_backward(loss)
        if batch_idx % 2:
            self.clip_gradients(optimizer, gradient_clip_val=0.01, gradient_clip_algorithm="value")
            optimizer.step()
            optimizer.zero_grad()
        self.notes.append([p.sum().item() for p in self.parameters()])


@pytest.mark.parametrize(
    ("model", "reason", "broken"),
    [
        pytest.param(partial(Tower, optimizer=NormedByAll), "NormedByAll", everything_is_deferred, id="norm-of-all"),
        pytest.param(
            partial(Tower, optimizer=LooksAhead),
            "LooksAhead",
            everything_is_deferred,
            id="own-step",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            partial(Tower, optimizer=SharpnessAware),
            "Sharpness",
            everything_is_deferred,
            id="two-closures",
            marks=pytest.mark.slow,
        ),
        pytest.param(partial(ByHand, optimizer=adamw), "manual", backward_waits_for_nothing, id="manual"),
    ],
)
def test_synchronised(two_ranks: RankPool, model: Any, reason: str, broken: Any) -> None:
    recipe = Recipe(model=model, steps=STEPS)
    _, ours = assert_same_as_ddp(two_ranks, recipe, overlap=False, broken=broken)
    assert any(reason in given for given in ours[0].reasons), ours[0].reasons
    assert ours[0].statistics is not None
    assert ours[0].statistics.deferred_updates == 0
    assert ours[0].statistics.sub_tasks > 0, "its gradients are scheduled all the same"
