from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_bytescheduler.coordinator.run import CoordinatorOptions
from lightning_bytescheduler.diloco.coordinator_protocol import RunOptions
from lightning_bytescheduler.diloco.round_end import RoundOptions, late_weight, round_of_late, staleness
from lightning_bytescheduler.exceptions import OptionError
from tests.support.plain_mean import PlainMean


def test_what_a_late_update_counts() -> None:
    assert late_weight("drop", 100, staleness=1) == 0
    assert [late_weight("discount", 100, staleness=rounds) for rounds in (1, 2, 99, 100)] == [50, 33, 1, 0]


@given(st.sampled_from(["drop", "discount"]), st.integers(0, 2**28), st.integers(1, 50))
def test_it_never_counts_more_than_in_time(rule, weight, rounds) -> None:
    assert 0 <= late_weight(rule, weight, staleness=rounds) <= weight


def test_the_mean_is_the_same_for_any_order_of_late_and_timely_updates() -> None:
    torch.manual_seed(0)
    updates = [{"w": torch.randn(50)} for _ in range(4)]
    weights = [40, *(late_weight("discount", 33, staleness=rounds) for rounds in (1, 2, 1))]  # the first is in time
    means = []
    for order in itertools.permutations(range(4)):
        mean = PlainMean(updates[0])
        for index in order:
            mean.add_plain(updates[index], weight=weights[index])
        means.append(mean.mean()["w"])
    assert all(torch.equal(mean, means[0]) for mean in means)


@pytest.mark.parametrize(
    ("round", "current", "fragments", "into", "late"),
    [(3, 4, 1, 4, 1), (3, 7, 1, 7, 4), (3, 4, 4, 7, 1), (3, 7, 4, 7, 1), (3, 8, 4, 11, 2), (1, 2, 2, 3, 1)],
)
def test_a_late_update_joins_the_next_round_of_its_fragment(round, current, fragments, into, late) -> None:
    assert round_of_late(round, current=current, fragments=fragments) == into
    assert staleness(round, into=into, fragments=fragments) == late


def test_what_is_not_allowed() -> None:
    CoordinatorOptions(run=RunOptions(weighting="uniform"))
    CoordinatorOptions(run=RunOptions(weighting="samples"), rounds=RoundOptions(late="discount"))
    with pytest.raises(OptionError, match="'drop' where weighting='uniform'"):
        CoordinatorOptions(run=RunOptions(weighting="uniform"), rounds=RoundOptions(late="discount"))
    with pytest.raises(OptionError, match="one of 'drop', 'discount'"):
        RoundOptions(late="aligned")  # type: ignore[arg-type]
