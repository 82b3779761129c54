"""Sizes of what travels between workers: from the link, the same on all ranks, unless they are given."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from lightning_bytescheduler import DiLoCoStrategy
from lightning_bytescheduler.compression.wire_format import WireFormat
from lightning_bytescheduler.diloco.process_groups import WorkerWorld
from lightning_bytescheduler.diloco.pseudo_gradient_exchange import PseudoGradientExchange, outer_sizes
from lightning_bytescheduler.exceptions import OptionError
from lightning_bytescheduler.tuning.default_sizes import LinkEstimate
from tests.support.rank_pool import RankPool

MANY = 10_000_000
VARIABLES = ("BYTESCHEDULER_PARTITION", "BYTESCHEDULER_CREDIT", "BYTESCHEDULER_TIMELINE")


def link_of(mbit: float, alpha: float) -> LinkEstimate:
    return LinkEstimate(alpha=alpha, beta=1.5 * 8e-6 / mbit)


def test_a_slow_link_gets_smaller_parts_than_a_fast_one() -> None:
    slow, _ = outer_sizes(MANY, link_of(50, 0.007))
    fast, _ = outer_sizes(MANY, link_of(500, 0.007))
    assert 400_000 < slow < 700_000
    assert 1_200_000 < fast <= 2_000_000


def test_a_long_way_gets_a_window_that_fills_it() -> None:
    link = link_of(500, 0.4)
    partition_size, credit = outer_sizes(100 * MANY, link)
    assert credit >= 2 * partition_size
    partition_size, credit = outer_sizes(100 * MANY, link, partition_size=100_000)
    assert partition_size == 100_000
    assert (credit - partition_size) * 4 * link.beta >= link.alpha


def test_a_small_model_is_not_cut() -> None:
    assert outer_sizes(5_000, link_of(5, 0.001)) == (5_000, 10_000)


@given(
    parameters=st.integers(1, 2_000_000_000),
    alpha=st.floats(0.0, 10.0),
    beta=st.floats(1e-12, 1e-3),
    partition_size=st.none() | st.integers(1, 10**9),
    credit=st.none() | st.integers(1, 10**9),
)
def test_sizes_are_possible_on_any_link(
    parameters: int, alpha: float, beta: float, partition_size: int | None, credit: int | None
) -> None:
    link = LinkEstimate(alpha=alpha, beta=beta)
    found = outer_sizes(parameters, link, partition_size=partition_size, credit=credit)
    assert 0 < found[0] <= (8_000_000 if partition_size is None else partition_size)
    assert found[1] >= (found[0] if credit is None else 1)
    assert partition_size in (None, found[0])
    assert credit in (None, found[1])
    assert partition_size is not None or found[0] <= parameters


def followed(rank: int, sizes: dict[str, int], wire_dtype: str) -> tuple[Any, Any, dict[str, Any]]:
    world = WorkerWorld.join(rank=rank, size=3, backend="gloo", timeout=None)
    ends = PseudoGradientExchange(
        world.leaders, wire=WireFormat(dtype=wire_dtype), on_error=lambda error: error, **sizes
    )
    link = ends.follow_link(70_000, timeout=20.0)
    values = torch.randn(70_000, generator=torch.Generator().manual_seed(rank))
    mean, _ = ends.start("a", values, weight=1, on_end=lambda error: None).wait(20.0)
    found = (ends.sizes, link), mean, ends.state_dict()
    idle = ends.stop(5.0)
    dist.barrier()
    world.leave(idle=idle)
    return found


@pytest.mark.parametrize("sizes", [{}, {"partition_size": 70_000}], ids=["none", "partition"])
def test_all_workers_find_the_same_sizes_and_nothing_is_left_of_the_search(
    sizes: dict[str, int], three_plain_ranks: RankPool
) -> None:
    found = three_plain_ranks.run(followed, sizes=sizes, wire_dtype="int8")
    (taken, link), mean, _ = found[0]
    assert link is not None
    assert taken == outer_sizes(70_000, link, **sizes)
    for other, its_mean, state in found:
        assert other == (taken, link)
        assert torch.equal(its_mean, mean)
        assert list(state["own"]) == ["a"]
    if sizes:  # the same numbers, and so the same rounding, as without a search
        fixed = three_plain_ranks.run(followed, sizes={**sizes, "credit": 140_000}, wire_dtype="int8")
        assert fixed[0][0] == ((70_000, 140_000), None)
        assert torch.equal(fixed[0][1], mean)


def options_of(**given: Any) -> tuple[Any, ...]:
    options = DiLoCoStrategy(**given)._options
    return options.partition_size, options.credit, options.timeline


def test_an_argument_beats_a_variable_which_beats_the_link(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    assert options_of() == (None, None, None)
    for variable, value in zip(VARIABLES, ("3e5", "6e5", "its.json"), strict=True):
        monkeypatch.setenv(variable, value)
    assert options_of() == (300_000, 600_000, "its.json")
    assert options_of(timeline="mine.json") == (300_000, 600_000, "mine.json")
    inside = {"inner": {"strategy": "bytescheduler", "size": 2}}
    assert options_of(**inside) == (300_000, 600_000, "its.outer.json")
    with pytest.raises(OptionError, match=r"^timeline='its\.json' is not allowed"):
        options_of(**inside, timeline="its.json")
    monkeypatch.setenv("BYTESCHEDULER_PARTITION", "4MB")
    with pytest.raises(OptionError, match="BYTESCHEDULER_PARTITION"):
        options_of()
