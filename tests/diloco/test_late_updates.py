from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_bytescheduler.diloco.late_updates import (
    Alignment,
    alignment,
    late_weight,
    require_late,
    round_of_late,
    staleness,
)
from lightning_bytescheduler.diloco.weighted_mean import WeightedMean
from lightning_bytescheduler.exceptions import OptionError


def lies(update: list[float], reference: list[float]) -> Alignment:
    return alignment({"w": torch.tensor(update)}, {"w": torch.tensor(reference)})


def test_what_a_late_update_counts() -> None:
    same = lies([1.0, 2.0], [2.0, 4.0])
    assert late_weight("drop", 100, staleness=1, alignment=same) == 0
    assert [late_weight("discount", 100, staleness=rounds) for rounds in (1, 2, 99, 100)] == [50, 33, 1, 0]
    assert late_weight("aligned", 100, staleness=9, alignment=same) == 100
    assert late_weight("aligned", 100, staleness=1, alignment=lies([1.0, 1.0], [1.0, 0.0])) == 70
    assert late_weight("aligned", 100, staleness=1, alignment=lies([0.0, 1.0], [1.0, 0.0])) == 0
    assert late_weight("aligned", 100, staleness=1, alignment=lies([-1.0, 0.0], [1.0, 0.0])) == 0
    assert late_weight("aligned", 100, staleness=1, alignment=lies([0.0, 0.0], [1.0, 0.0])) == 0
    assert late_weight("aligned", 100, staleness=1) == 0  # nothing was merged yet that it could agree with


@given(
    st.sampled_from(["drop", "discount", "aligned"]),
    st.integers(0, 2**28),
    st.integers(1, 50),
    st.lists(st.tuples(st.floats(-1e3, 1e3, width=32), st.floats(-1e3, 1e3, width=32)), min_size=1, max_size=6),
)
def test_it_never_counts_more_than_in_time(rule, weight, rounds, values) -> None:
    ours, theirs = zip(*values, strict=True)
    assert 0 <= late_weight(rule, weight, staleness=rounds, alignment=lies(list(ours), list(theirs))) <= weight


@given(st.lists(st.tuples(st.floats(-1, 1, width=32), st.floats(-1, 1, width=32)), min_size=2, max_size=8))
def test_the_cosine_is_that_of_the_vectors_to_rounding(values) -> None:
    ours, theirs = (torch.tensor(one) for one in zip(*values, strict=True))
    if ours.norm() > 0.1 and theirs.norm() > 0.1:
        expected = torch.nn.functional.cosine_similarity(ours.double(), theirs.double(), dim=0)
        assert alignment({"w": ours}, {"w": theirs}).cosine == pytest.approx(float(expected), abs=1e-3)


def test_the_alignment_is_the_same_in_any_order_and_any_pieces() -> None:
    torch.manual_seed(0)
    ours, theirs = torch.randn(1001), torch.randn(1001)
    whole = alignment({"w": ours}, {"w": theirs})
    mixed = torch.randperm(1001)
    assert alignment({"w": ours[mixed]}, {"w": theirs[mixed]}) == whole
    pieces = alignment(
        {"b": ours[400:], "a": ours[:400].reshape(20, 20)}, {"a": theirs[:400].reshape(20, 20), "b": theirs[400:]}
    )
    assert pieces == whole
    assert alignment({"w": ours.bfloat16()}, {"w": theirs}).cosine == pytest.approx(whole.cosine, abs=1e-2)


def test_the_mean_is_the_same_for_any_order_of_late_and_timely_updates() -> None:
    torch.manual_seed(0)
    reference = {"w": torch.randn(50)}
    updates = [{"w": torch.randn(50) + 0.3 * reference["w"]} for _ in range(4)]
    weights = [40]  # in time
    for rule, update, rounds in zip(("discount", "aligned", "aligned"), updates[1:], (1, 2, 1), strict=True):
        weights.append(late_weight(rule, 33, staleness=rounds, alignment=alignment(update, reference)))
    means = []
    for order in itertools.permutations(range(4)):
        mean = WeightedMean(reference)
        for index in order:
            if weights[index]:
                mean.add(updates[index], weight=weights[index])
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
    with pytest.raises(OptionError, match="late"):
        late_weight("later", 1, staleness=1)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="staleness"):
        late_weight("drop", 1, staleness=0)
    with pytest.raises(OptionError, match="'drop' where weighting='uniform'"):
        require_late("late", "discount", weighting="uniform")
    assert require_late("late", "drop", weighting="uniform") == "drop"
    assert require_late("late", "aligned", weighting="tokens") == "aligned"
    assert math.isclose(Alignment(1, 4).cosine, 0.5)
