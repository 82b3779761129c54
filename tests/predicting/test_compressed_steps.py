"""Links on which gradients travel compressed."""

from __future__ import annotations

import pytest

from lightning_bytescheduler.predicting.link import CODECS, LinkModel, compressed_link


@pytest.mark.parametrize("name", CODECS)
def test_it_pays_below_the_link_that_is_as_fast_as_the_codec_and_not_above(name: str) -> None:
    even = 1.5 / CODECS[name].seconds_per_byte
    for factor in (0.5, 0.95, 1.05, 4.0):
        link = LinkModel(workers=4, bandwidth=factor * even)
        assert (compressed_link(link, CODECS[name]).seconds_per_byte < link.seconds_per_byte) == (factor < 1)
