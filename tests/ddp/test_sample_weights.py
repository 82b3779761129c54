"""What a rank's gradient counts: counting, weighing, refusals, and that the training thread waits for none of it."""

from __future__ import annotations

import threading
from collections import UserDict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from lightning_bytescheduler import ByteSchedulerStrategy, OptionError, PerformanceMonitor
from lightning_bytescheduler.collectives import number_exchange
from lightning_bytescheduler.collectives.number_exchange import NumberExchange, PostedNumbers
from lightning_bytescheduler.ddp.sample_weights import SampleCounter, SampleWeights, StepWeight
from lightning_bytescheduler.exceptions import RankFailedError, RanksDifferError, UnsupportedError
from tests.parity.weighted_fits import Case, fitted
from tests.support.fit import SIZES, Recipe, Run, train
from tests.support.models import Tower
from tests.support.rank_pool import RankPool
from tests.support.waiting import WAIT

# ---------------------------------------------------------------------- options


def test_a_wrong_weighting_is_named() -> None:
    with pytest.raises(OptionError, match=r"weighting='sample' is not allowed: .*'ranks', 'samples'.*Did you mean"):
        ByteSchedulerStrategy(weighting="sample")  # type: ignore[arg-type]


def test_what_counts_samples_is_a_function() -> None:
    with pytest.raises(OptionError, match=r"weighting=3 is not allowed: .*or a function of the batch"):
        ByteSchedulerStrategy(weighting=3)  # type: ignore[arg-type]


def differ(rank: int) -> str:
    options = {**SIZES, "weighting": "samples" if rank else "ranks"}
    try:
        train(rank, Recipe(model=Tower), Run(options=options))
    except RanksDifferError as error:
        return str(error)
    return ""


def test_ranks_that_weigh_differently_are_refused(two_ranks: RankPool) -> None:
    for said in two_ranks.run(differ):
        assert "weighting is 'ranks' on rank 0" in said
        assert "'samples' on rank 1" in said


# ---------------------------------------------------------------------- counting


@dataclass
class Pair:
    x: torch.Tensor
    y: torch.Tensor


@pytest.mark.parametrize(
    ("batch", "number"),
    [
        (torch.zeros(5, 2), 5),
        ([torch.zeros(3, 2), torch.zeros(3)], 3),
        ({"text": "words", "ids": torch.zeros(7, 4)}, 7),
        (torch.zeros(0, 2), 0),
        (torch.tensor(1.0), 1),
        ((torch.zeros(4, 9), {"length": torch.zeros(4), "rate": torch.tensor(0.1)}), 4),
        (UserDict(input_ids=torch.zeros(6, 9), labels=torch.zeros(6, 9), text=["a"] * 6), 6),
        ({"scale": torch.tensor(2.0), "x": torch.zeros(5, 2), "n": 3}, 5),
        (Pair(torch.zeros(3, 2), torch.zeros(3)), 3),
        ([torch.zeros(3, 2), np.zeros((7, 7))], 3),
    ],
)
def test_a_batch_has_as_many_samples_as_its_tensors_are_long(batch: Any, number: int) -> None:
    assert SampleCounter(None, 0).count(batch) == PerformanceMonitor().batch_samples(batch) == number


@pytest.mark.parametrize(
    "batch",
    [
        {"nodes": torch.zeros(120, 3), "edges": torch.zeros(2, 400), "graph_labels": torch.zeros(4)},
        [torch.zeros(36, 3), torch.zeros(12)],
        {"a": torch.zeros(4, 2), "b": torch.zeros(12, 2)},
        ([torch.zeros(3, 8, 8)] * 2, [{"boxes": torch.zeros(5, 4)}, {"boxes": torch.zeros(1, 4)}]),
    ],
    ids=["nodes of graphs", "a list", "several loaders", "images and boxes"],
)
def test_a_batch_of_unlike_lengths_is_an_error_that_names_the_way_out(batch: Any) -> None:
    with pytest.raises(OptionError, match=r"different lengths \(.*Give weighting= a function of the batch"):
        SampleCounter(None, 0).count(batch)
    with pytest.raises(UnsupportedError, match=r"different lengths \(.*whose batch_samples\(batch\) returns"):
        PerformanceMonitor().batch_samples(batch)


@pytest.mark.parametrize(
    ("given", "number"), [(12, 12), (torch.tensor(12), 12), (torch.tensor([3.0]), 3), (4.0, 4), (0, 0)]
)
def test_a_function_may_count(given: Any, number: int) -> None:
    assert SampleCounter(lambda batch: given, 0).count("any") == number


@pytest.mark.parametrize("given", [-1, 2.5, None, True, "3", float("nan"), float("inf"), torch.zeros(2), 1 << 40])
def test_nonsense_is_named_with_rank_batch_and_way_out(given: Any) -> None:
    counter = SampleCounter(lambda batch: 1 if batch == "good" else given, 3)
    counter.count("good")
    with pytest.raises(OptionError) as caught:
        counter.count("bad")
    said = str(caught.value)
    assert "weighting=" in said
    assert "on rank 3, in training batch 2 of this fit" in said
    assert repr(given) in said or "cannot be counted" in said
    assert "a function of the batch that returns how many samples it has" in said


def test_a_function_that_fails_is_named() -> None:
    with pytest.raises(OptionError, match=r"on rank 1, .*its samples cannot be counted: ZeroDivisionError: .*by zero"):
        SampleCounter(lambda batch: 1 // 0, 1).count("any")


@pytest.mark.parametrize("batch", ["text", object(), iter([torch.zeros(2)]), None, ["a", "b"]])
def test_a_batch_without_a_size_is_named(batch: Any) -> None:
    with pytest.raises(OptionError, match=r"weighting='samples': on rank 2, in training batch 1.*Give weighting="):
        SampleCounter(None, 2).count(batch)


def test_a_batch_that_is_an_iterator_is_not_used_up() -> None:
    batch = iter([torch.zeros(2)])
    with pytest.raises(OptionError):
        SampleCounter(None, 0).count(batch)
    assert len(list(batch)) == 1


def cannot_count(batch: Any) -> int:
    return -1


def fail_to_count(rank: int) -> str:
    case = Case(sizes=[(3, 4), (5, 6)], options={"weighting": cannot_count if rank else len_of_first})
    try:
        fitted(rank, case)
    except (OptionError, RankFailedError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def len_of_first(batch: Any) -> int:
    return len(batch[0])


def test_all_ranks_hear_of_a_batch_that_cannot_be_counted(two_ranks: RankPool) -> None:
    other, own = two_ranks.run(fail_to_count)
    words = "weighting='cannot_count': on rank 1, in training batch 1 of this fit, the function returned -1 of type int"
    assert own.startswith(f"OptionError: {words}")
    assert other.startswith("RankFailedError: Rank 1 failed")
    assert words in other


# ---------------------------------------------------------------------- weighing


def posted(*numbers: int) -> PostedNumbers:
    made = PostedNumbers()
    made.arrive([[number] for number in numbers])
    return made


counts = st.integers(0, 1 << 20)


@given(st.lists(st.lists(counts, min_size=3, max_size=3), min_size=1, max_size=5))
def test_factors_of_all_ranks_make_a_mean(batches: list[list[int]]) -> None:
    total = sum(map(sum, batches))
    counted = 0.0
    for rank in range(3):
        own = [batch[rank] for batch in batches]
        weight = StepWeight(1, [(batch[rank], posted(*batch)) for batch in batches])
        first = next((number for number in own if number), 0)
        counted += sum(weight.factor * number / first for number in own) if first else weight.factor
    assert counted == pytest.approx(len(batches) if total else 0.0)


@given(st.integers(1, 1 << 30), st.integers(1, 9), st.integers(2, 64))
def test_where_counts_are_equal_the_factor_is_ddps_to_the_last_bit(number: int, batches: int, ranks: int) -> None:
    weight = StepWeight(1, [(number, posted(*[number] * ranks))] * batches)
    assert weight.factor == 1.0 / ranks


class Exchange:
    """Of one rank that knows what the others post."""

    def __init__(self, others: list[int]) -> None:
        self.others = others
        self.posted: list[list[int]] = []

    def post(self, numbers: list[int]) -> PostedNumbers:
        self.posted.append(numbers)
        return posted(numbers[0], self.others[len(self.posted) - 1])


def weights_of(own: list[int], others: list[int]) -> SampleWeights:
    sizes = iter(own)
    exchange: Any = Exchange(others)
    return SampleWeights(SampleCounter(lambda batch: next(sizes), 0), exchange)


def gradient_of(weights: SampleWeights) -> float:
    """Of a backward pass that does not communicate."""
    weight = torch.ones(1, requires_grad=True)
    loss = weight.sum()
    with weights.backward(loss):
        loss.backward()
    assert weight.grad is not None
    return float(weight.grad)


def step_of(weights: SampleWeights) -> StepWeight:
    """Of a backward pass that communicates."""
    with weights.backward(torch.zeros(())):
        step = weights.begin_step()
    assert step is not None
    return step


def test_batches_of_a_step_count_by_their_samples() -> None:
    weights = weights_of([2, 6, 4, 5], [3, 1, 8, 5])
    gradients = []
    for _ in range(2):
        weights.begin_batch("batch")
        gradients.append(gradient_of(weights))
    assert gradients == [1.0, 3.0]
    weights.begin_batch("batch")
    assert step_of(weights).factor == 2 * 3 / 24
    weights.begin_batch("batch")
    assert step_of(weights).factor == 5 / 10, "the next step counts anew"


def test_a_backward_pass_that_was_not_announced_counts_by_the_last_batch() -> None:
    weights = weights_of([2], [6])
    assert weights.begin_step() is weights.equal
    weights.begin_batch("batch")
    step = weights.begin_step()
    assert step is not None
    assert step.factor == 2 / 8


@pytest.mark.parametrize("empty_first", [False, True])
def test_a_pass_without_a_sample_adds_nothing_even_if_its_loss_is_not_a_number(empty_first: bool) -> None:
    """Zero times the mean over no sample is not zero."""
    sizes, exchange = iter([0, 4] if empty_first else [4, 0]), cast(Any, Exchange([4, 4]))
    weight = nn.Parameter(torch.ones(2))
    weights = SampleWeights(SampleCounter(lambda batch: next(sizes), 0), exchange, parameters=[weight])
    losses = [weight.sum(), (weight * torch.zeros(2)).sum() / torch.zeros(())]
    for loss in reversed(losses) if empty_first else losses:
        weights.begin_batch(None)
        with weights.backward(loss):
            loss.backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [1.0, 1.0]
    assert not weight._backward_hooks


def test_what_an_epoch_leaves_of_a_step_is_none_of_the_next() -> None:
    weights = weights_of([2, 6, 4], [2, 2, 12])
    for _ in range(2):  # the epoch is skipped after them
        weights.begin_batch(None)
        gradient_of(weights)
    weights.begin_epoch()
    weights.begin_batch(None)
    assert step_of(weights).factor == 4 / 16


def test_a_step_without_any_sample_has_no_gradient() -> None:
    assert StepWeight(2, [(0, posted(0, 0))]).factor == 0.0


# ---------------------------------------------------------------------- who waits


_STEPS = 4


class TellsBackward(Tower):
    """Tells when each backward pass has ended on this rank's training thread."""

    ended: Iterator[threading.Event]

    def on_after_backward(self) -> None:
        next(self.ended).set()


def fit_with_late_counts(rank: int) -> tuple[list[bool], int]:
    """Whether numbers were held until the backward pass had ended, and how many steps overlapped.

    From the second step on, what all ranks posted is known here only when the training thread is through with the
    backward pass that its gradients are weighed in. If it waited for that, it would wait in vain.
    """
    ended = [threading.Event() for _ in range(_STEPS)]
    held: list[bool] = []
    wait_in_slices = number_exchange.wait_in_slices

    def wait_late(*arguments: Any, **options: Any) -> bool:
        arrived: bool = wait_in_slices(*arguments, **options)
        first = not held  # which waits for its gradients
        held.append(first or ended[len(held)].wait(WAIT))
        return arrived

    def made() -> TellsBackward:
        model = TellsBackward(dropout=0.0)
        model.ended = iter(ended)
        return model

    recipe = Recipe(model=made, steps=_STEPS)
    with patch.object(number_exchange, "wait_in_slices", wait_late):
        outcome = train(rank, recipe, Run(options={**SIZES, "weighting": "samples"}, network="plain"))
    assert outcome.statistics is not None
    return held, outcome.statistics.overlapped_steps


def test_the_training_thread_does_not_wait_for_counts(two_ranks: RankPool) -> None:
    for held, overlapped in two_ranks.run(fit_with_late_counts):
        assert all(held), "the backward pass has waited for them"
        assert overlapped == _STEPS - 1


def test_an_exchange_that_fails_says_so_and_ends() -> None:
    said: list[BaseException] = []
    told = threading.Event()

    def note(error: BaseException) -> None:
        said.append(error)
        told.set()

    broken = SimpleNamespace(is_completed=lambda: True, wait=lambda *_: (_ for _ in ()).throw(RuntimeError("gone")))
    group: Any = SimpleNamespace(size=lambda: 2, allgather=lambda *_: broken)
    with (
        patch.object(number_exchange, "leave", lambda *_, **__: None),
        patch.object(dist, "new_group", lambda **_: group),
    ):
        exchange = NumberExchange(on_error=note)
        numbers = exchange.post([3])
        assert told.wait(WAIT)
        assert str(said[0]) == "gone"
        assert not numbers.known
        with pytest.raises(RuntimeError, match="gone"):
            numbers.wait(lambda: said[0])
        exchange.close(1.0)
        exchange.close(1.0)
        with pytest.raises(RuntimeError, match="closed"):
            exchange.post([3])
    assert not [thread for thread in threading.enumerate() if thread.name == "bytescheduler-counts"]


def test_a_number_of_a_rank_is_told_once_it_is_here() -> None:
    numbers = PostedNumbers()
    told: list[str] = []
    numbers.when_known(partial(told.append, "early"))
    with pytest.raises(RuntimeError, match="before they had arrived"):
        _ = numbers.rows
    assert told == []
    numbers.arrive([[1], [2]])
    numbers.when_known(partial(told.append, "late"))
    assert told == ["early", "late"]
    numbers.wait(lambda: None)
    assert numbers.rows == [[1], [2]]
