"""What would come too late: the play of transfers against a simulation in small slices, and when compressing begins."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_bytescheduler.scheduler.lateness import LateTransfers, LinkPace, Transfer, lateness

_TICK = 1.0
moments = st.integers(0, 20).map(float)
transfers = st.lists(
    st.builds(Transfer, ready=moments, due=moments, priority=st.integers(-3, 3), seconds=st.integers(1, 6).map(float)),
    max_size=8,
)


def by_ticks(start: float, given_: list[Transfer]) -> float:
    """The same, second by second; all times are whole."""
    left = {at: each.seconds for at, each in enumerate(given_)}
    order = sorted(range(len(given_)), key=lambda at: given_[at].ready)
    rank = {at: position for position, at in enumerate(order)}
    now, worst = start, -math.inf
    while left:
        here = [at for at in left if given_[at].ready <= now]
        if not here:
            now = min(given_[at].ready for at in left)
            continue
        at = min(here, key=lambda at: (given_[at].priority, rank[at]))
        left[at] -= _TICK
        now += _TICK
        if not left[at]:
            del left[at]
            worst = max(worst, now - given_[at].due)
    return worst


@given(start=moments, given_=transfers)
def test_like_a_simulation_in_small_slices(start: float, given_: list[Transfer]) -> None:
    assert lateness(start, given_) == by_ticks(start, given_)


@given(start=moments, given_=transfers, at=st.integers(0, 7))
def test_fewer_bytes_never_make_anything_later(start: float, given_: list[Transfer], at: int) -> None:
    smaller = [
        Transfer(each.ready, each.due, each.priority, each.seconds / 2 if n == at else each.seconds)
        for n, each in enumerate(given_)
    ]
    assert lateness(start, smaller) <= lateness(start, given_)


class Steps:
    """Ten equal layers, on a link that sends what it is told to, in a clock of its own."""

    LAYERS = 10
    BYTES = 1000.0

    def __init__(self, ratio: float, *, halves: bool = False, smaller: float = 8.0) -> None:
        self.late = LateTransfers(LinkPace({0: 1.0, 1: smaller}), halves=halves)
        self.compute = 1.0
        self.per_byte = ratio * self.compute / (self.LAYERS * self.BYTES)
        self.smaller = smaller
        self.now = 0.0

    def step(self, *, stumble: float = 0.0) -> tuple[float, float]:
        """Take a step; returns (its seconds over those of computing alone, share of parts that were smaller)."""
        late, layers = self.late, self.LAYERS
        late.begin("overlapped", self.now)
        backward = [self.now + (n + 1) * 2 / 3 / layers for n in range(layers)]
        free, sent, compressed = self.now, [], 0
        waiting: dict[int, float] = {}
        arrived: dict[int, float] = {}
        told = 0

        def launch(until: float) -> None:
            nonlocal free, compressed
            while waiting and free <= until:
                layer = min(waiting)
                del waiting[layer]
                form = int(late.is_late(layer, 0, self.BYTES, free))
                compressed += form
                late.sent(layer, layer, 0, form, self.BYTES)
                start, free = free, free + self.BYTES * self.per_byte / (self.smaller if form else 1.0)
                arrived[layer] = free
                sent.append((layer, start, free))

        def tell(until: float) -> None:
            nonlocal told
            while told < len(sent) and sent[told][2] <= until:
                layer, start, end = sent[told]
                late.ended(layer, start - 1e-9, end)
                told += 1

        for n, at in enumerate(backward):
            launch(at - 1e-12)
            tell(at)
            free = max(free, at)
            layer = layers - 1 - n
            late.ready(layer, self.BYTES, layer, at, last=not layer)
            waiting[layer] = at
        now = backward[-1] + stumble
        for layer in range(layers):
            launch(now)
            late.times.needed(layer, now)
            late.times.waiting(now)
            while layer not in arrived:
                launch(free)
            now = max(now, arrived[layer])
            late.times.waiting_ends(now)
            tell(now)
            now += 1 / 3 / layers
        taken, self.now = now - self.now, now
        return taken, compressed / layers


def test_what_hides_is_left_alone() -> None:
    steps = Steps(0.5)
    taken = [steps.step(stumble=0.4 if n == 6 else 0.0) for n in range(20)]
    assert {share for _, share in taken} == {0.0}


def test_what_cannot_hide_is_compressed_as_far_as_needed() -> None:
    steps = Steps(2.0)
    assert steps.step()[0] > 1.8
    taken = [steps.step() for _ in range(20)][5:]
    assert max(seconds for seconds, _ in taken) < 1.15  # ten layers: a part is a tenth
    assert 0.4 < sum(share for _, share in taken) / len(taken) < 0.8


def test_another_link_is_noticed() -> None:
    steps = Steps(2.0)
    for _ in range(10):
        steps.step()
    steps.per_byte /= 8
    for _ in range(15):
        steps.step()
    assert steps.step()[1] == 0.0
    steps.per_byte *= 12
    for _ in range(15):
        steps.step()
    assert steps.step()[1] > 0.3


def test_buckets_that_are_to_be_smaller_are_so_but_for_a_part_of_one() -> None:
    """Where only parts are looked at, as many begin as they are as could still come in time if nothing else did so."""
    steps = Steps(2.0)
    for _ in range(5):
        steps.step()
    late, last = steps.late, Steps.LAYERS - 1
    late.begin("overlapped", steps.now)
    at, share, small_part = steps.now, {}, steps.BYTES / 4
    for layer in range(last, 3, -1):
        at += 2 / 3 / Steps.LAYERS
        late.ready(layer, steps.BYTES, layer, at, last=False)
        share[layer] = late.late_share(layer, steps.BYTES, at)
    assert not share[last], "there is time yet"
    assert list(share.values()) == sorted(share.values()), "what is ready later is more urgent"
    settled = [layer for layer in share if share[layer]]
    assert settled
    assert sum(0 < each < 1 for each in share.values()) <= 1
    assert share[settled[-1]] == 1.0
    assert all(late.is_planned(layer) for layer in settled)
    for _ in range(int(4 * share[settled[0]])):
        assert late.is_late(settled[0], 0, small_part, at)
    assert not late.is_late(settled[0], 0, small_part, at), "the others could all be smaller"
    before = next(layer for layer in share if not share[layer])
    assert not late.is_late(before, 0, small_part, at)
    late.begin("overlapped", at)
    assert not late.is_planned(settled[0])


def test_codecs_that_cannot_keep_up_are_not_used() -> None:
    pace = LinkPace({0: 1.0, 1: 8.0})
    for n in range(10):
        pace.ended(0, 100, n - 1.5, n)
    assert pace.helps(1)
    for n in range(10, 20):
        pace.ended(1, 100, n - 1.5, n)
    assert not pace.helps(1)
    pace.forget(1)
    assert pace.helps(1)


def test_parts_that_share_the_link_are_told_apart() -> None:
    """Large ones take 1 s alone. Small ones, 8 times smaller, take 1/8 s; together both have half of the link."""
    pace = LinkPace({0: 1.0, 1: 8.0})
    for n in range(10):
        pace.ended(0, 100, n - 1.0, n)
    now = 9.0
    for _ in range(20):
        pace.ended(1, 100, now, now + 0.25, beside=[0])  # while an eighth of the large one has gone
        pace.ended(0, 100, now, now + 1.125)
        pace.ended(0, 100, now + 0.25, now + 2.125)
        now += 2.125
    assert pace.seconds_per_byte() == pytest.approx(0.01)
    assert pace.seconds_per_byte(1) == pytest.approx(0.01 / 8, rel=0.05)
    for _ in range(60):  # codecs take as long again
        pace.ended(1, 100, now - 1e-9, now + 0.25)
        now += 0.25
    assert pace.seconds_per_byte(1) == pytest.approx(0.02 / 8, rel=0.3)


def test_waits_for_slower_ranks_are_no_pace_of_the_link() -> None:
    pace = LinkPace({0: 1.0, 1: 8.0}, 0.01)
    for n in range(10):
        pace.ended(0, 100, 10.0 * n, 10.0 * n + 5)  # each began when the one before had long ended
    assert pace.seconds_per_byte() == pytest.approx(0.01)
    assert pace.seconds_per_byte(1) == pytest.approx(0.01 / 8)


def test_parts_that_arrive_at_once_do_not_make_the_link_fast() -> None:
    """Otherwise exact transfers would be taken to hide, and with nothing compressed that would stay so."""
    pace = LinkPace({0: 1.0, 1: 8.0})
    for n in range(10):
        pace.ended(0, 100, n - 1.5, n)
    pace.ended(1, 100, 9.0, 9.0 + 1e-6)
    assert pace.seconds_per_byte() == pytest.approx(0.01)
    for n in range(1, 200):
        assert pace.seconds_per_byte() == pytest.approx(0.01 if n < 96 else 0.005, rel=0.05)
        pace.ended(1, 100, 9.0, 9.0 + n / 16)  # on a link that is twice as fast by now
    for n in range(2):  # the first may have waited for others
        pace.ended(0, 100, 21.5 + 0.9 * n, 22.5 + n)
    assert pace.seconds_per_byte() == pytest.approx(0.01)
