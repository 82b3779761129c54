"""What users do to an optimizer, its state and its groups between two steps leaves them what they are under DDP."""

from __future__ import annotations

import copy
import pickle
from collections import defaultdict
from collections.abc import Mapping
from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from torch import nn
from torch.optim import LBFGS, SGD, Adam, AdamW
from torch.optim.swa_utils import AveragedModel

from tests.parity.checks import DDP, assert_same, assert_same_as_ddp, train_on
from tests.parity.observers import sums
from tests.parity.sabotage import blind_to_kept_state, no_gate_on_state
from tests.support.cases import cases
from tests.support.fit import Recipe, Run
from tests.support.models import Tower
from tests.support.rank_pool import RankPool

model = partial(Tower, depth=2, optimizer=partial(AdamW, lr=0.005))
STEPS = 10


def shown(optimizer: Any) -> list[Any]:
    """Kind, length, order and contents of the state."""
    state = optimizer.state
    return [
        isinstance(state, dict),
        type(state).__name__,
        len(state),
        [tuple(p.shape) for p in state],
        [sums(v for v in values.values() if isinstance(v, torch.Tensor)) for values in state.values()],
    ]


def new_state(trainer: Trainer, module: Any) -> None:
    trainer.optimizers[0].state = defaultdict(dict)


def cleared_state(trainer: Trainer, module: Any) -> None:
    trainer.optimizers[0].state.clear()


def setstate(trainer: Trainer, module: Any) -> None:
    trainer.optimizers[0].__setstate__({"state": defaultdict(dict)})


def dict_update(trainer: Trainer, module: Any) -> None:
    optimizer = trainer.optimizers[0]
    optimizer.__dict__.update(state=defaultdict(dict), param_groups=copy.copy(optimizer.param_groups))


def one_moment_reset(trainer: Trainer, module: Any) -> None:
    del trainer.optimizers[0].state[module.last.weight]


def reloaded(trainer: Trainer, module: Any) -> None:
    optimizer = trainer.optimizers[0]
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def one_more_group(trainer: Trainer, module: Any) -> None:
    trainer.optimizers[0].add_param_group({"params": [nn.Parameter(torch.zeros(2))], "lr": 1.0})


def groups_edited(trainer: Trainer, module: Any) -> None:
    optimizer = trainer.optimizers[0]
    group = optimizer.param_groups[0]
    half = len(group["params"]) // 2
    optimizer.param_groups = [
        {**group, "params": group["params"][half:], "lr": 0.5 * group["lr"]},
        {**group, "params": group["params"][:half]},
        *optimizer.param_groups[1:],
    ]


def parameters_edited(trainer: Trainer, module: Any) -> None:
    parameters = trainer.optimizers[0].param_groups[0]["params"]
    module.set_aside = [parameters.pop(), *getattr(module, "set_aside", [])]  # steps no more for a while
    if len(module.set_aside) == 2:
        parameters.extend(module.set_aside)


def copied(trainer: Trainer, module: Any) -> Any:
    optimizer = trainer.optimizers[0]
    return [shown(copy.deepcopy(optimizer)), shown(copy.copy(optimizer)), shown(pickle.loads(pickle.dumps(optimizer)))]


def looked_at(trainer: Trainer, module: Any) -> Any:
    return shown(trainer.optimizers[0])


def by_vars(trainer: Trainer, module: Any) -> Any:
    return [sums([v["exp_avg"]]) for v in vars(trainer.optimizers[0])["state"].values()]


def swapped(make: Any, trainer: Trainer, module: Any) -> None:
    trainer.optimizers = [make(module.parameters())]


def swapped_in_strategy(trainer: Trainer, module: Any) -> None:
    trainer.strategy.optimizers = [SGD(module.parameters(), lr=0.02, momentum=0.9)]


def swapped_for_a_copy(trainer: Trainer, module: Any) -> None:
    optimizer = AdamW(module.parameters(), lr=0.004)
    optimizer.load_state_dict(trainer.optimizers[0].state_dict())
    trainer.optimizers = [optimizer]


def other_class(trainer: Trainer, module: Any) -> None:
    trainer.optimizers[0].__class__ = Adam


def stepped_by_hand(trainer: Trainer, module: Any) -> None:
    trainer.optimizers[0].step()


def hooked(trainer: Trainer, module: Any) -> None:
    trainer.optimizers[0].register_step_pre_hook(lambda *_: module.notes.append("before a step"))


def clips_by_hand(trainer: Trainer, module: Any) -> Any:
    return nn.utils.clip_grad_norm_(module.parameters(), 0.1).item()


def averaged(trainer: Trainer, module: Any) -> Any:
    if not hasattr(trainer, "averaged"):
        trainer.averaged = [AveragedModel(module.layers)]  # type: ignore[attr-defined]
    trainer.averaged[0].update_parameters(module.layers)
    return sums(trainer.averaged[0].parameters())


class LooksAhead:
    """A wrapper that is no optimizer: takes its inner one's step, and goes only half of the way every other time."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.count = inner, 0
        self.slow = [p.detach().clone() for group in inner.param_groups for p in group["params"]]

    def __call__(self, closure: Any = None) -> Any:
        output = type(self.inner).step(self.inner, closure)
        self.count += 1
        if self.count % 2 == 0:
            with torch.no_grad():
                for slow, p in zip(self.slow, self.inner.param_groups[0]["params"], strict=True):
                    p.copy_(slow.lerp_(p, 0.5))
        return output


def wrapped(trainer: Trainer, module: Any) -> None:
    trainer.optimizers[0].step = LooksAhead(trainer.optimizers[0])  # type: ignore[method-assign]


class TwiceTheClosure(SGD):
    """As SAM: its step calls the closure again, at other weights."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        parameters = [p for group in self.param_groups for p in group["params"]]
        with torch.enable_grad():
            closure()
        moves = [0.01 * p.grad for p in parameters]
        torch._foreach_add_(parameters, moves)
        with torch.enable_grad():
            closure()
        torch._foreach_sub_(parameters, moves)
        return super().step()


SURGERY: Mapping[str, Any] = {
    f.__name__: f
    for f in (
        new_state,
        cleared_state,
        setstate,
        dict_update,
        one_moment_reset,
        reloaded,
        one_more_group,
        groups_edited,
        parameters_edited,
        copied,
        looked_at,
        by_vars,
        swapped_in_strategy,
        swapped_for_a_copy,
        other_class,
        stepped_by_hand,
        hooked,
        clips_by_hand,
        averaged,
        wrapped,
    )
} | {
    "swapped for SGD": partial(swapped, partial(SGD, lr=0.02, momentum=0.9)),
    "swapped for LBFGS": partial(swapped, partial(LBFGS, lr=0.01, max_iter=2)),
    "swapped for SAM": partial(swapped, partial(TwiceTheClosure, lr=0.02)),
}


class Operates(Callback):
    """Does something to the optimizer after two steps, and looks at the last weights and the state at the end."""

    def __init__(self, operation: Any) -> None:
        self.operation = operation

    def on_train_batch_end(self, trainer: Trainer, module: Any, *_: Any) -> None:
        if trainer.global_step in (4, 6):
            module.notes.append(self.operation(trainer, module))

    def on_train_end(self, trainer: Trainer, module: Any) -> None:
        if not isinstance(trainer.optimizers[0], LBFGS):
            module.notes.append(shown(trainer.optimizers[0]))


QUICK = {"new_state", "one_more_group", "by_vars", "other_class", "stepped_by_hand", "clips_by_hand", "swapped for SAM"}


@pytest.mark.parametrize("operation", cases(SURGERY, quick=QUICK))
def test_surgery(two_ranks: RankPool, operation: Any) -> None:
    recipe = Recipe(model=model, steps=STEPS, callbacks=(partial(Operates, operation),))
    assert_same_as_ddp(two_ranks, recipe, overlap=False)


def test_without_the_gate_on_the_optimizer_it_shows(two_ranks: RankPool) -> None:
    recipe = Recipe(model=model, steps=STEPS, callbacks=(partial(Operates, by_vars),))
    assert_same_as_ddp(two_ranks, recipe, overlap=False, broken=no_gate_on_state)


class KeepsPartOfTheState(Callback):
    """Takes hold of a tensor of the state, or of its memory, and looks at that alone."""

    def __init__(self, take: Any) -> None:
        self.take = take
        self.kept: Any = None

    def on_train_batch_end(self, trainer: Trainer, module: Any, *_: Any) -> None:
        if trainer.global_step == 3:
            self.kept = self.take(trainer.optimizers[0].state[module.layers[0].weight]["exp_avg"])
        if self.kept is not None:
            module.notes.append(float(self.kept.sum()))
        if trainer.global_step == 8:
            self.kept = None


@pytest.mark.slow
@pytest.mark.parametrize("take", [torch.Tensor.positive, torch.Tensor.detach, torch.Tensor.numpy])
def test_a_tensor_of_the_state_that_is_kept(two_ranks: RankPool, take: Any) -> None:
    recipe = Recipe(model=model, steps=14, callbacks=(partial(KeepsPartOfTheState, take),))
    _, ours = assert_same_as_ddp(two_ranks, recipe, overlap=False, broken=blind_to_kept_state)
    plan, statistics = ours[0].plan, ours[0].statistics
    assert plan is not None
    assert statistics is not None
    (why,) = [why for why in plan.waits if "keeps the optimizer's state" in why]
    assert plan.waits[why] == 5
    assert statistics.overlapped_steps == 8, "of 14, but for the first and those in which it was held"
    assert plan.deferred_share == statistics.deferred_share


def test_a_new_state_is_filled_in_the_order_of_ddp(two_ranks: RankPool) -> None:
    """Though buckets are stepped in another order."""
    recipe = Recipe(model=model, steps=STEPS, callbacks=(partial(Operates, new_state),))
    ddp, ours = train_on(two_ranks, recipe, DDP, Run())
    assert_same(ddp, ours)
    assert ours[0].statistics is not None
    assert ours[0].statistics.overlapped_steps == STEPS - 1
