from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_bytescheduler.diloco.accumulation import require_weighting, update_weight, weight_shares
from lightning_bytescheduler.exceptions import OptionError


def test_by_samples_tokens_or_not_at_all() -> None:
    assert update_weight("samples", samples=64, tokens=640) == 64
    assert update_weight("tokens", samples=64, tokens=640) == 640
    assert update_weight("uniform", samples=64) == 1
    assert [update_weight(weighting, samples=0) for weighting in ("samples", "tokens", "uniform")] == [0, 0, 0]


@given(st.dictionaries(st.text(), st.integers(0, 2**40), min_size=1, max_size=50).filter(lambda w: any(w.values())))
def test_shares_sum_to_one(weights: dict[str, int]) -> None:
    shares = weight_shares(weights)
    assert math.fsum(shares.values()) == pytest.approx(1.0, abs=1e-15 * len(shares))
    assert all(share >= 0 for share in shares.values())
    assert shares.keys() == weights.keys()


def test_tokens_that_nobody_counted() -> None:
    with pytest.raises(OptionError, match="do not say how many tokens"):
        update_weight("tokens", samples=5)


@pytest.mark.parametrize("weights", [{}, {"a": 0}, {"a": -1}, {"a": 0.5}])
def test_what_has_no_shares(weights: dict) -> None:
    with pytest.raises(OptionError):
        weight_shares(weights)


def test_what_is_no_weighting() -> None:
    with pytest.raises(OptionError, match=r"weighting='loss' is not allowed.*'samples', 'tokens', 'uniform'"):
        require_weighting("weighting", "loss")
