from __future__ import annotations

import io

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from lightning_bytescheduler.diloco.fragments import TrainedWeights
from lightning_bytescheduler.diloco.outer_optimizer import OuterOptimizer, OuterState, pseudo_gradient
from lightning_bytescheduler.exceptions import OptionError, UnsupportedError
from tests.support.plain_mean import PlainMean


def model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 3))


def weights_of(module: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in module.named_parameters()}


def set_weights(module: nn.Module, weights: dict[str, Tensor]) -> None:
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(weights[name])


def batch(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(8, 6, generator=generator), torch.randn(8, 3, generator=generator)


def inner_step(module: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    data, wanted = batch(seed)
    optimizer.zero_grad()
    nn.functional.mse_loss(module(data), wanted).backward()
    optimizer.step()


def merge(updates: list[tuple[dict[str, Tensor], int]]) -> dict[str, Tensor]:
    accumulator = PlainMean(updates[0][0])
    for update, weight in updates:
        accumulator.add_plain(update, weight=weight)
    return accumulator.mean()


def ulps(found: Tensor, old: Tensor, new: Tensor) -> float:
    """How far ``found`` is from ``new``, in units in the last place of the larger of old and new.

    The unit is 2^-56 at least: the merge has no smaller one, and a weight whose own unit is smaller is below 2^-33.
    """
    largest = torch.maximum(old.abs(), new.abs())
    ulp = (torch.nextafter(largest, torch.full_like(largest, torch.inf)) - largest).clamp_(min=2.0**-56)
    return float(((found.double() - new.double()).abs() / ulp.double()).max())


@pytest.mark.parametrize("inner", [torch.optim.SGD, torch.optim.AdamW])
def test_one_worker_of_one_step_is_the_inner_optimizer(inner) -> None:
    """H = 1, an outer SGD with learning rate 1 and no momentum: within one unit in the last place."""
    module = model()
    optimizer = inner(module.parameters(), lr=0.05)
    outer = OuterOptimizer(weights_of(module), lr=1.0, momentum=0.0)
    for seed in range(50):
        old = {name: tensor.clone() for name, tensor in outer.weights.items()}
        inner_step(module, optimizer, seed)
        new = weights_of(module)
        outer.step(merge([(pseudo_gradient(old, new), 8)]))
        assert all(ulps(outer.weights[name], old[name], new[name]) <= 1.0 for name in new)
        set_weights(module, dict(outer.weights))


@given(st.lists(st.tuples(st.floats(-1e3, 1e3, width=32), st.floats(-1e3, 1e3, width=32)), min_size=1, max_size=20))
def test_any_inner_step_is_taken_over_to_one_unit_in_the_last_place(pairs) -> None:
    old, new = (torch.tensor(column) for column in zip(*pairs, strict=True))
    outer = OuterOptimizer({"x": old}, lr=1.0, momentum=0.0)
    outer.step(merge([(pseudo_gradient({"x": old}, {"x": new}), 3)]))
    assert ulps(outer.weights["x"], old, new) <= 1.0


def test_equal_workers_of_one_step_are_ddp() -> None:
    """H = 1 and inner SGD: a step along the mean of the workers' gradients."""
    workers, lr, steps = 3, 0.1, 20
    modules = [model() for _ in range(workers)]
    outer = OuterOptimizer(weights_of(modules[0]), lr=1.0, momentum=0.0)
    reference = model()
    optimizer = torch.optim.SGD(reference.parameters(), lr=lr)
    for step in range(steps):
        old = dict(outer.weights)
        updates = []
        for rank, module in enumerate(modules):
            set_weights(module, old)
            inner_step(module, torch.optim.SGD(module.parameters(), lr=lr), workers * step + rank)
            updates.append((pseudo_gradient(old, weights_of(module)), 8))
        outer.step(merge(updates))
        optimizer.zero_grad()
        for rank in range(workers):
            data, wanted = batch(workers * step + rank)
            (nn.functional.mse_loss(reference(data), wanted) / workers).backward()
        optimizer.step()
    for name, expected in weights_of(reference).items():
        torch.testing.assert_close(outer.weights[name], expected, rtol=1e-5, atol=1e-6)


def test_two_workers_are_torchs_nesterov_of_their_mean() -> None:
    start = weights_of(model())
    outer = OuterOptimizer(start)
    reference = [tensor.clone().requires_grad_() for tensor in start.values()]
    optimizer = torch.optim.SGD(reference, lr=0.7, momentum=0.9, nesterov=True)
    generator = torch.Generator().manual_seed(0)
    for _ in range(10):
        one, two = (
            {name: torch.randn(tensor.shape, generator=generator) for name, tensor in start.items()} for _ in range(2)
        )
        outer.step(merge([(one, 24), (two, 8)]))
        for tensor, name in zip(reference, start, strict=True):
            tensor.grad = ((one[name].double() * 24 + two[name].double() * 8) / 32).float()
        optimizer.step()
    for tensor, name in zip(reference, start, strict=True):
        assert torch.equal(outer.weights[name], tensor)


def test_a_fragment_steps_without_the_others() -> None:
    outer = OuterOptimizer({"x": torch.zeros(2), "y": torch.zeros(2)})
    outer.step({"x": torch.ones(2)})
    outer.step({"y": torch.ones(2)})
    assert outer.weights["x"].tolist() == outer.weights["y"].tolist()  # x's momentum did not carry it on
    assert all(tensor.grad is None for tensor in outer.weights.values())


def test_weights_are_copies_in_fp32() -> None:
    given = torch.ones(2, dtype=torch.bfloat16)
    outer = OuterOptimizer({"x": given})
    outer.step({"x": torch.ones(2)})
    assert given.tolist() == [1.0, 1.0]
    assert outer.weights["x"].dtype == torch.float32


def test_it_carries_on_from_a_checkpoint() -> None:
    outer = OuterOptimizer({"x": torch.ones(3)})
    outer.step({"x": torch.tensor([1.0, 2.0, 3.0])})
    file = io.BytesIO()
    torch.save(outer.state_dict(), file)
    file.seek(0)
    again = OuterOptimizer({"x": torch.zeros(3)})
    again.load_state_dict(torch.load(file, weights_only=True))
    for either in (outer, again):
        either.step({"x": torch.tensor([0.5, 0.0, -1.0])})
    assert torch.equal(outer.weights["x"], again.weights["x"])


def test_a_state_is_not_changed_by_later_steps() -> None:
    outer = OuterOptimizer({"x": torch.ones(3)})
    outer.step({"x": torch.ones(3)})
    state = outer.state_dict()
    before = state["weights"]["x"].clone(), state["optimizer"]["state"][0]["momentum_buffer"].clone()
    outer.step({"x": torch.ones(3)})
    OuterOptimizer({"x": torch.ones(3)}).load_state_dict(state)
    assert torch.equal(state["weights"]["x"], before[0])
    assert torch.equal(state["optimizer"]["state"][0]["momentum_buffer"], before[1])


@pytest.mark.parametrize("options", [{"lr": 0.0}, {"lr": float("nan")}, {"momentum": 1.5}, {"momentum": -0.1}])
def test_what_is_not_allowed(options: dict) -> None:
    with pytest.raises(OptionError, match=next(iter(options))):
        OuterOptimizer({"x": torch.ones(1)}, **options)


@pytest.mark.parametrize("merged", [{"y": torch.ones(1)}, {"x": torch.ones(2)}])
def test_what_does_not_fit_is_not_stepped(merged) -> None:
    outer = OuterOptimizer({"x": torch.ones(1)})
    with pytest.raises(ValueError, match="was not taken"):
        outer.step(merged)
    with pytest.raises(ValueError, match="does not fit"):
        outer.load_state_dict({"weights": merged, "optimizer": {}})
    assert outer.weights["x"].item() == 1.0


def test_a_worker_that_has_diverged_is_not_averaged() -> None:
    module = model()
    state = OuterState(TrainedWeights(module))
    state.count(4)
    for value, says in ((torch.nan, "is infinite or NaN"), (1e15, r"has changed by 1\.0e\+15 in one round")):
        with torch.no_grad():
            module.get_parameter("2.bias")[1] = value
        with pytest.raises(UnsupportedError, match=rf"'2\.bias' of this worker {says}.*gradient_clip_val"):
            state.pseudo_gradient(0)
        state.count(4)


def test_what_is_given_beats_what_was_saved() -> None:
    weights = weights_of(model())
    saved = OuterOptimizer(weights, lr=0.1, momentum=0.5).state_dict()
    groups = []
    for options in ({}, {"lr": 0.3}, {"lr": 0.3, "momentum": 0.0}):
        optimizer = OuterOptimizer(weights, **options)
        optimizer.load_state_dict(saved)
        groups.append(optimizer.state_dict()["optimizer"]["param_groups"][0])
    assert [(group["lr"], group["momentum"], group["nesterov"]) for group in groups] == [
        (0.1, 0.5, True),
        (0.3, 0.5, True),
        (0.3, 0.0, False),
    ]
