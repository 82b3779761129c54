"""Steps with compressed gradients: where compression pays, and how little of it ``"auto"`` takes."""

from __future__ import annotations

import pytest

from lightning_bytescheduler.simulation.link import (
    CODECS,
    CodecPace,
    LinkModel,
    break_even_bandwidth,
    compressed_link,
)
from lightning_bytescheduler.simulation.prediction import auto_step

INT4 = CODECS[-1]
COMPUTE = 1.0
LINK = LinkModel(workers=4, bandwidth=50e6)


def step_on(ratio: float, link: LinkModel) -> float:
    """All communication hides up to the computation's time; ``ratio`` on ``LINK``."""
    return max(COMPUTE, ratio * COMPUTE * link.seconds_per_byte / LINK.seconds_per_byte)


def test_what_hides_is_left_alone() -> None:
    assert auto_step(lambda link: step_on(0.5, link), COMPUTE, LINK, INT4)[1] == 0
    assert auto_step(lambda link: step_on(1.04, link), COMPUTE, LINK, INT4)[1] == 0


def test_as_little_as_hides_the_rest() -> None:
    seconds, share = auto_step(lambda link: step_on(2.0, link), COMPUTE, LINK, INT4)
    assert seconds <= 1.01 * COMPUTE
    assert share == pytest.approx((1 - 1.01 / 2) / (1 - 1 / INT4.ratio), abs=0.05)


def test_all_of_it_where_that_is_not_enough() -> None:
    seconds, share = auto_step(lambda link: step_on(40.0, link), COMPUTE, LINK, INT4)
    assert share == 1.0
    assert seconds == pytest.approx(40.0 / INT4.ratio)


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
def test_it_pays_below_the_break_even_link_and_not_above(codec: CodecPace) -> None:
    even = break_even_bandwidth(LINK, codec)
    assert even == pytest.approx(1.5 / (1 / codec.compress + 2 / codec.read))
    for factor in (0.5, 0.95, 1.05, 4.0):
        link = LinkModel(workers=4, bandwidth=factor * even)
        assert (compressed_link(link, codec).seconds_per_byte < link.seconds_per_byte) == (factor < 1)
        assert (auto_step(lambda other: step_on(9e3, other), COMPUTE, link, codec)[1] > 0) == (factor < 1)


def test_one_worker_has_nothing_to_compress() -> None:
    alone = LinkModel(workers=1, bandwidth=1e6)
    assert compressed_link(alone, INT4) == alone
