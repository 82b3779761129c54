"""Links on which gradients travel compressed."""

from __future__ import annotations

import pytest

from lightning_bytescheduler.simulation.link import CODECS, LinkModel, compressed_link
from lightning_bytescheduler.simulation.prediction import AUTO, predict
from lightning_bytescheduler.simulation.profiles import network_profile

UNIFORM = network_profile("uniform")  # 100 MB, 200 ms


def auto(bandwidth: float) -> tuple[float, float | None]:
    """Seconds of a step, and the share of the bytes that is compressed."""
    found = predict(UNIFORM, LinkModel(workers=4, bandwidth=bandwidth)).of(AUTO)
    return found.step_seconds, found.compressed_share


def test_what_hides_is_left_alone() -> None:
    assert auto(1.5e9)[1] == 0


def test_as_little_as_hides_the_rest() -> None:
    seconds, share = auto(0.375e9)  # exact gradients take twice as long as the computation
    assert seconds <= 1.05 * 0.2
    assert share is not None
    assert (1 - 1 / 2) < share < 0.8


def test_all_of_it_where_that_is_not_enough() -> None:
    seconds, share = auto(0.01e9)
    assert share == 1.0
    assert seconds == pytest.approx(100e6 * 1.5 / 0.01e9 / CODECS["int4"].ratio, rel=0.02)


@pytest.mark.parametrize("name", CODECS)
def test_it_pays_below_the_link_that_is_as_fast_as_the_codec_and_not_above(name: str) -> None:
    even = 1.5 / CODECS[name].seconds_per_byte
    for factor in (0.5, 0.95, 1.05, 4.0):
        link = LinkModel(workers=4, bandwidth=factor * even)
        assert (compressed_link(link, CODECS[name]).seconds_per_byte < link.seconds_per_byte) == (factor < 1)


def test_one_worker_has_nothing_to_compress() -> None:
    alone = LinkModel(workers=1, bandwidth=1e6)
    assert compressed_link(alone, CODECS["int4"]) == alone
