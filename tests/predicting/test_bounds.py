from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.configuration import ddp_bound
from lightning_bytescheduler.predicting.link import LinkModel
from lightning_bytescheduler.predicting.profiles import ModelProfile
from lightning_bytescheduler.predicting.simulator import lower_bound
from tests.predicting.profiles import links, model, models, plain_link, unhurried

BOUNDS = [lower_bound, ddp_bound]
CLOSE = 1 + 1e-9


@pytest.mark.parametrize(
    ("layers", "bound", "ddp"),
    [
        # Little to send, where the first layer's counts: B + c_1 + F.
        ([(4, 1, 2), (1, 1, 2), (1, 1, 2)], 6 + 4 + 3, 3 + 6 + 4),
        # Much to send: C + b_L + f_L, and F + b_L + C.
        ([(20, 1, 2), (20, 1, 2), (20, 1, 2)], 60 + 2 + 1, 3 + 2 + 60),
        # A large layer in the middle: C_2 + b_2 + b_3 + f_2 + f_3; 17 rather than the 15 and 16 of the other two.
        ([(3, 2, 2), (6, 2, 2), (3, 2, 2)], 17, 6 + 14),
        # Nothing to send.
        ([(0, 1, 2), (0, 1, 2)], 6, 6),
        # A layer without parameters computes and sends nothing.
        ([(4, 1, 2), (0, 10, 20)], 33 + 4, 33 + 4),
    ],
)
def test_by_hand(layers: list[tuple[int, float, float]], bound: float, ddp: float) -> None:
    assert lower_bound(model(layers), plain_link()) == bound
    assert ddp_bound(model(layers), plain_link()) == ddp


def test_messages_cost_latency_once() -> None:
    profile = model([(10, 1, 2), (10, 1, 2)])  # b_L + C + f_L = 23
    assert lower_bound(profile, plain_link(latency=1.5)) == 23 + 3
    assert ddp_bound(profile, plain_link(latency=1.5)) == 2 + 20 + 2 + 3


@unhurried
@given(profile=models, link=links)
def test_order_among_bounds(profile: ModelProfile, link: LinkModel) -> None:
    assert profile.compute_seconds <= lower_bound(profile, link) * CLOSE
    assert lower_bound(profile, link) <= ddp_bound(profile, link) * CLOSE


@unhurried
@given(profile=models, link=links, data=st.data())
def test_bounds_grow_with_what_makes_a_network_slow(
    profile: ModelProfile, link: LinkModel, data: st.DataObject
) -> None:
    factor = data.draw(st.floats(1, 100))
    slower = LinkModel(
        workers=link.workers,
        bandwidth=link.bandwidth / factor,
        latency=link.latency * factor,
    )
    for bound in BOUNDS:
        assert bound(profile, link) <= bound(profile, slower) * CLOSE


def test_order_alone_wins_a_third_at_most() -> None:
    # Forward half as long as backward and communication as long as both, in many equal layers.
    profile = model([(3, 1, 2)] * 1000)
    assert ddp_bound(profile, plain_link()) / lower_bound(profile, plain_link()) == pytest.approx(4 / 3, rel=2e-3)


@unhurried
@given(profile=models, link=links)
def test_order_never_wins_more_than_the_forward_pass(profile: ModelProfile, link: LinkModel) -> None:
    assert ddp_bound(profile, link) <= (lower_bound(profile, link) + profile.forward_seconds) * CLOSE
