"""``compression="auto"``: how many layers are compressed, found in trainings that are played, and put in force."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_bytescheduler.ddp.compression_rules import CompressedLayers, LayerSearch
from lightning_bytescheduler.simulation.link import LinkModel
from lightning_bytescheduler.simulation.profiles import ModelProfile, network_profile
from lightning_bytescheduler.simulation.simulator import Schedule, simulate
from tests.ddp.test_point_in_force import OneRank

RATIO = 7.5
COMPUTE = 1.0


class Training:
    """A model on a link, step by step.

    Args:
        ratio: Communication of exact gradients, over computation.
        network: One of the well-known ones.
        codecs: How much of its own time on the link encoding a gradient takes.
    """

    def __init__(self, ratio: float, network: str = "uniform", codecs: float = 0.0) -> None:
        self.profile = network_profile(network).scaled_to(COMPUTE)
        self.search = LayerSearch(RATIO)
        self.search.sizes = [layer.parameter_bytes for layer in self.profile.layers]
        self.ratio = ratio
        self.codecs = codecs
        self.counts: list[int] = []
        self._known: dict[tuple[int, float], float] = {}

    @property
    def share(self) -> float:
        sizes = self.search.sizes
        return sum(sizes[: self.search.count]) / sum(sizes)

    def seconds(self, count: int) -> float:
        """Of a step in which so many layers are compressed."""
        key = count, self.ratio
        if key not in self._known:
            link = LinkModel(workers=2, bandwidth=self.profile.parameter_bytes / (self.ratio * COMPUTE))
            fewer = 1 / RATIO + self.codecs
            layers = [
                replace(layer, parameter_bytes=int(layer.parameter_bytes * fewer)) if at < count else layer
                for at, layer in enumerate(self.profile.layers)
            ]
            profile = ModelProfile(name="compressed", layers=tuple(layers))
            size = self.profile.parameter_bytes // 100
            schedule = Schedule(partition_bytes=size, credit_bytes=2 * size)
            self._known[key] = simulate(profile, link, schedule)
        return self._known[key]

    def run(self, steps: int, noise: Callable[[int], float] = lambda step: 1.0) -> None:
        for step in range(steps):
            count = self.search.count
            took = self.seconds(count) * noise(step)
            sizes = self.search.sizes
            sent = sum(sizes[count:]) + sum(sizes[:count]) * (1 / RATIO + self.codecs)
            self.search.step_took(took, max(took - COMPUTE, 0.0), self.ratio * COMPUTE * sent / sum(sizes))
            self.counts.append(self.search.count)


@pytest.mark.parametrize("network", ["uniform", "resnet50", "vgg16", "transformer"])
@pytest.mark.parametrize("ratio", [1.5, 2.0, 3.0])
def test_a_step_is_within_a_twentieth_of_the_best(network: str, ratio: float) -> None:
    training = Training(ratio, network)
    training.run(60)
    best = min(training.seconds(count) for count in range(len(training.search.sizes) + 1))
    assert training.seconds(training.search.count) <= 1.05 * best
    assert training.search.is_settled


def test_as_little_as_it_takes() -> None:
    training = Training(2.0)
    training.run(60)
    assert training.seconds(training.search.count) <= 1.06 * COMPUTE
    assert 0.5 < training.share <= 0.75


def test_what_hides_stays_exact() -> None:
    training = Training(0.5)
    training.run(300, noise=lambda step: 3.0 if step % 10 in (3, 4) else 1.0)
    assert set(training.counts) == {0}
    assert training.search.is_settled


def test_compressing_that_brings_nothing_is_taken_back_and_not_tried_for_long() -> None:
    training = Training(2.0, codecs=1.0)
    training.run(100)
    assert training.search.count == 0
    assert 3 <= sum(count > 0 for count in training.counts) <= 10, "it was tried, once"


def test_the_more_has_brought_nothing_the_later_is_the_next_try() -> None:
    training = Training(2.0, codecs=1.0)
    training.run(1600)
    tries = [at for at, (before, now) in enumerate(itertools.pairwise(training.counts)) if now and not before]
    apart = [later - earlier for earlier, later in itertools.pairwise(tries)]
    assert len(tries) == 5
    assert all(later > 1.8 * earlier for earlier, later in itertools.pairwise(apart))


def test_a_link_that_changes_is_followed() -> None:
    training = Training(2.0)
    training.run(60)
    usual = training.search.count
    training.ratio = 4.0
    training.run(160)
    assert training.search.count > usual
    assert training.seconds(training.search.count) <= 1.06 * COMPUTE
    training.ratio = 0.5
    training.run(200)
    assert training.search.count < usual / 2


def test_steps_that_do_not_count_change_nothing() -> None:
    search = LayerSearch(RATIO)
    search.sizes = [100] * 10
    for _ in range(50):
        search.step_took(2.0, 1.0, 2.0)
        search.step_took(2.0, 1.0, 2.0, counts=False)
    assert search.count == 0
    assert not search.is_settled


class Fit:
    """One rank of a training of which only times are there."""

    def __init__(self, values: Any, *, decides: bool, buckets: Sequence[int] = (10, 10, 10, 10)) -> None:
        self.now, self.step = 0.0, 0
        self.buckets = buckets
        self.exact_s = 2.0  # that the link takes for exact gradients
        self.statistics: Any = SimpleNamespace(exposed_s=0.0, communication_s=0.0)
        self.layers = CompressedLayers(
            RATIO, values, decides=decides, statistics=self.statistics, clock=lambda: self.now
        )

    def take(self, *, exact: bool = False) -> list[int]:
        """A step; returns which of its buckets are compressed."""
        self.step += 1
        self.layers.before_step(self.step, counts=self.step > 2)
        self.layers.begin_backward(exact=exact)
        compressed = [index for index, size in enumerate(self.buckets) if self.layers.include(index, size)]
        share = len(compressed) / len(self.buckets)
        busy = self.exact_s * (1 - share + share / RATIO)
        self.now += max(busy, 1.0)
        self.statistics.exposed_s += max(busy - 1.0, 0.0)
        self.statistics.communication_s += busy
        return compressed


def test_the_last_buckets_are_the_first_layers() -> None:
    fit = Fit(OneRank(), decides=True)
    taken = [fit.take() for _ in range(30)]
    assert taken[0] == []
    assert taken[-1] == [1, 2, 3], "60% of the bytes, and as many whole buckets as have them"


def test_ranks_that_follow_do_as_rank_0_says_whatever_they_see() -> None:
    said: list[list[int] | None] = []

    class Leading(OneRank):
        def before_step(
            self, step: int, wanted: Sequence[int], *, interval: int, seen: Sequence[int] = ()
        ) -> list[int] | None:
            said.append(super().before_step(step, wanted, interval=interval, seen=seen))
            return said[-1]

    class Following(OneRank):
        def before_step(
            self, step: int, wanted: Sequence[int], *, interval: int, seen: Sequence[int] = ()
        ) -> list[int] | None:
            assert list(wanted) == [0], "nothing is asked of it"
            return said[-1]

    leading, following = Fit(Leading(), decides=True), Fit(Following(), decides=False)
    following.statistics = SimpleNamespace(exposed_s=0.0, communication_s=0.0)
    for _ in range(40):
        assert leading.take() == following.take()
    assert leading.layers.count == 3
    assert leading.layers.is_settled
    assert following.layers.is_settled


def test_several_passes_of_one_step_are_one() -> None:
    fit = Fit(OneRank(), decides=True)
    for _ in range(8):
        fit.take()
        fit.layers.before_step(fit.step, counts=True)
    assert fit.layers.count == 0
    assert [fit.take() for _ in range(20)][-1] == [1, 2, 3]


def test_what_ddp_arranges_anew_is_gone_by_in_the_next_step() -> None:
    fit = Fit(OneRank(), decides=True)
    for _ in range(30):
        fit.take()
    fit.buckets = (5, 5)
    fit.take()
    assert fit.take() == [0, 1], "as many as before, where there are fewer"


def test_steps_as_ddps_are_exact_and_the_next_ones_as_before() -> None:
    fit = Fit(OneRank(), decides=True)
    for _ in range(30):
        fit.take()
    assert fit.take(exact=True) == []
    assert fit.take() == [1, 2, 3]


def test_disturbed_steps_say_nothing() -> None:
    fit = Fit(OneRank(), decides=True)
    fit.exact_s = 0.9
    for _ in range(60):
        assert fit.take() == []
        if fit.step % 3:  # all wait for a rank that writes a checkpoint
            fit.now += 5.0
            fit.statistics.exposed_s += 5.0
            fit.layers.disturb()


def test_waits_that_begin_soon_are_answered_soon() -> None:
    fit = Fit(OneRank(), decides=True)
    fit.exact_s = 0.9
    for _ in range(14):
        fit.take()
    assert fit.layers.is_settled, "others may try something"
    fit.exact_s = 2.0
    taken = [fit.take() for _ in range(12)]
    assert taken[-1] == [1, 2, 3]


def test_exchanges_are_rare_once_nothing_was_to_be_changed_for_long() -> None:
    values = OneRank()
    fit = Fit(values, decides=True)
    for _ in range(200):
        fit.take()
    assert len(values.exchanges) < 60
