"""Loops of Fabric on unequally many batches, with ``weighting="samples"``: they are one process's on all samples."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

from lightning_bytescheduler import ByteSchedulerFabricStrategy, UnsupportedError
from tests.parity.test_sample_weights import TOLERANCE, relative_errors
from tests.parity.weighted_fits import (
    OPTIMIZERS,
    Case,
    Stream,
    Unequal,
    alone,
    batches_of,
    first_step_without_effect,
)
from tests.support.fabric_loops import SIZES
from tests.support.rank_pool import RankPool

UNEVEN = Case(sizes=[(4, 3, 2, 5, 1), (6, 2)])
FEWER_FIRST = replace(UNEVEN, sizes=UNEVEN.sizes[::-1])
CASES = {
    "the first has more": UNEVEN,
    "the last has more": replace(FEWER_FIRST, optimizer="AdamW"),
    "accumulated, the last has more": replace(FEWER_FIRST, accumulate=2, clip=(0.05, "norm"), optimizer="AdamW"),
    "as DDP": replace(UNEVEN, options={"mode": "ddp"}),
    "no overlap": replace(FEWER_FIRST, options={"cross_barrier": False}),
    "streams, as many": replace(UNEVEN, sizes=[(4, 3), (6, 2)], stream=True),
    "a batch without a sample begins a step": replace(UNEVEN, sizes=[(0, 4, 3, 0), (2, 5)], accumulate=2),
}


class Looped(Unequal):
    """What Fabric wraps; counts in a buffer how often it has run."""

    runs: Tensor

    def __init__(self, case: Case, rank: int) -> None:
        super().__init__(case, rank)
        self.register_buffer("runs", torch.zeros(()))

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            self.runs += 1
        return self.predict(inputs)


def launched(case: Case) -> Any:
    strategy = ByteSchedulerFabricStrategy(**{**SIZES, "weighting": "samples", **case.options})
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy)
    fabric.launch()
    return fabric


def loader_of(fabric: Fabric, case: Case, rank: int) -> Any:
    batches: Any = batches_of(case, rank)
    loader = DataLoader(Stream(batches) if case.stream else batches, batch_size=None)
    return fabric.setup_dataloaders(loader, use_distributed_sampler=False)


def looped(rank: int, case: Case) -> dict[str, Any]:
    """Two epochs' worth of what a loop sees; the weights are those after the first."""
    torch.set_num_threads(1)
    fabric = launched(case)
    loader = loader_of(fabric, case, rank)
    torch.manual_seed(7)
    model = Looped(case, rank)
    module, optimizer = fabric.setup(model, OPTIMIZERS[case.optimizer](model.parameters()))
    schedule = LambdaLR(optimizer, first_step_without_effect)
    own: list[bool] = []
    samples = 0
    for index, (inputs, targets) in enumerate(loader):
        own.append(fabric.strategy.has_batch)
        samples += len(inputs) if own[-1] else 0
        steps = index % case.accumulate == case.accumulate - 1 or (not case.stream and index == len(loader) - 1)
        with fabric.no_backward_sync(module, enabled=not steps):
            fabric.backward(nn.functional.mse_loss(module(inputs), targets) / case.accumulate)
        if steps:
            if case.clip is not None:
                fabric.clip_gradients(module, optimizer, max_norm=case.clip[0])
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
    module.eval()
    with torch.no_grad():
        seen = sum(len(module(inputs)) for inputs, _ in loader)  # as a validation
    weights = {name: value.detach().clone() for name, value in module.state_dict().items()}
    plan = fabric.strategy.plan
    fabric.strategy.end()
    return {"weights": weights, "own": own, "samples": samples, "seen": seen, "plan": plan}


def loop_all(rank: int, cases: Sequence[Case]) -> list[dict[str, Any]]:
    return [looped(rank, case) for case in cases]


def test_weights_are_those_of_one_process(two_ranks: RankPool) -> None:
    by_rank = two_ranks.run(loop_all, cases=list(CASES.values()))
    for index, (name, case) in enumerate(CASES.items()):
        for rank, found in enumerate(ranks[index] for ranks in by_rank):
            runs = found["weights"].pop("runs")
            errors = relative_errors(found["weights"], alone(case))
            assert max(errors.values()) <= TOLERANCE, f"{name}, rank {rank}: {errors}"
            sizes = case.sizes[rank]
            assert found["own"] == [number < len(sizes) for number in range(max(map(len, case.sizes)))], name
            assert found["samples"] == found["seen"] == sum(sizes), f"{name}: a validation was given batches again"
            assert runs <= max(map(len, case.sizes)), name
            if name.startswith(("the last has more", "accumulated, the last")):
                assert runs == len(case.sizes[0]), "as with DDP all ranks have rank 0's buffers"
            assert found["plan"].weighting == "samples"
        assert by_rank[0][index]["weights"]["first.weight"].equal(by_rank[1][index]["weights"]["first.weight"]), name


# ---------------------------------------------------------------------- what cannot be weighed


def draws_ahead(fabric: Any, module: Any, loader: Any) -> None:
    batches = iter(loader)
    first, _ = next(batches)
    next(batches)
    module(first)


def draws_elsewhere(fabric: Any, module: Any, loader: Any) -> None:
    fabric.backward(module(torch.ones(2, 12)).sum())


def sets_up_another(fabric: Any, module: Any, loader: Any) -> None:
    fabric.setup(nn.Linear(2, 2))


REFUSED: dict[str, tuple[Callable[..., None], str]] = {
    "drawn ahead": (draws_ahead, "2 batches were drawn before one forward pass.*torch.no_grad"),
    "not drawn": (draws_elsewhere, "before a loader has handed out a batch.*fabric.setup_dataloaders"),
    "another module": (sets_up_another, "Linear would be another. Set up one module with both inside"),
}


def refused(rank: int, kind: str) -> None:
    fabric = launched(UNEVEN)
    loader = loader_of(fabric, UNEVEN, rank)
    module = fabric.setup(Looped(UNEVEN, rank))
    try:
        with pytest.raises(UnsupportedError, match=REFUSED[kind][1]):
            REFUSED[kind][0](fabric, module, loader)
    finally:
        fabric.strategy.end()


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_weighed_is_refused_with_the_way_out(two_ranks: RankPool, kind: str) -> None:
    two_ranks.run(refused, kind=kind)


def has_none(rank: int) -> None:
    fabric = launched(UNEVEN)
    loader = loader_of(fabric, Case(sizes=[(4, 3), ()]), rank)
    with torch.no_grad():
        assert len(list(loader)) == (0 if rank else 2)
    if rank:
        with pytest.raises(UnsupportedError, match="this rank's loader has no batch, and another rank's has 2"):
            list(loader)
    fabric.strategy.end()


def test_a_rank_without_any_batch_has_nothing_to_compute_on(two_ranks: RankPool) -> None:
    two_ranks.run(has_none)


def all_but_three(batch: Any) -> int:
    return 0 if len(batch[0]) == 3 else len(batch[0])


def test_a_batch_that_counts_nothing_adds_nothing(two_ranks: RankPool) -> None:
    case = Case(sizes=[(4, 2, 3, 4), (2, 5, 1, 6)], accumulate=2, options={"weighting": all_but_three})
    expected = alone(replace(case, sizes=[(4, 2, 0, 4), (2, 5, 1, 6)]))
    for found in two_ranks.run(looped, case=case):
        del found["weights"]["runs"]
        assert max(relative_errors(found["weights"], expected).values()) <= TOLERANCE


def one_after_the_other(rank: int) -> list[dict[str, Tensor]]:
    torch.set_num_threads(1)
    fabric = launched(UNEVEN)
    loader = loader_of(fabric, UNEVEN, rank)
    weights = []
    for _ in range(2):
        torch.manual_seed(7)
        model = Looped(UNEVEN, rank)
        module, optimizer = fabric.setup(model, OPTIMIZERS[UNEVEN.optimizer](model.parameters()))
        for inputs, targets in loader:
            fabric.backward(nn.functional.mse_loss(module(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()
        weights.append({name: value.detach().clone() for name, value in module.state_dict().items()})
        del model, module, optimizer
        gc.collect()
    fabric.strategy.end()
    return weights


def test_the_next_module_is_weighed_when_the_first_is_gone(two_ranks: RankPool) -> None:
    for first, second in two_ranks.run(one_after_the_other):
        assert all(value.equal(second[name]) for name, value in first.items())
