"""The simulator against the bounds, and both against every order there is, on random models."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.configuration import ddp_bound
from lightning_bytescheduler.predicting.link import LinkModel
from lightning_bytescheduler.predicting.profiles import ModelProfile
from lightning_bytescheduler.predicting.simulator import Schedule, lower_bound, simulate
from tests.predicting.profiles import (
    links,
    model,
    models,
    plain_link,
    schedules,
    silent_links,
    sizes,
    unhurried,
)

CLOSE = 1 + 1e-9
partitions = st.integers(5, 100)


def seconds(profile: ModelProfile, link: LinkModel, schedule: Schedule) -> float:
    return simulate(profile, link, schedule)


def by_priority(partition: int) -> Schedule:
    """One piece at a time."""
    return Schedule(partition_bytes=partition, credit_bytes=1)


@unhurried
@given(profile=models, link=links, schedule=schedules)
def test_no_schedule_beats_the_bound(profile: ModelProfile, link: LinkModel, schedule: Schedule) -> None:
    bound = ddp_bound if schedule.barrier else lower_bound
    assert bound(profile, link) <= seconds(profile, link, schedule) * CLOSE


@unhurried
@given(profile=models, link=silent_links, partition=partitions)
def test_priority_is_one_partition_from_the_bound(profile: ModelProfile, link: LinkModel, partition: int) -> None:
    """What is urgent waits for at most the one piece that is on the link."""
    took = seconds(profile, link, by_priority(partition))
    assert took <= (lower_bound(profile, link) + partition * link.seconds_per_byte) * CLOSE


@unhurried
@given(profile=models, link=silent_links, latency=st.sampled_from([0.0, 0.01, 0.3]), data=st.data())
def test_a_window_that_covers_latency_costs_no_more_than_itself(
    profile: ModelProfile, link: LinkModel, latency: float, data: st.DataObject
) -> None:
    """The link is never idle while something waits, and what is urgent waits for what was launched before it."""
    link = replace(link, latency=latency)
    partition = data.draw(partitions)
    covering = int(link.latency_seconds / link.seconds_per_byte) + partition + 1
    credit = covering + data.draw(st.integers(0, 100))
    took = seconds(profile, link, Schedule(partition_bytes=partition, credit_bytes=credit))
    assert took <= (lower_bound(profile, link) + (credit + partition) * link.seconds_per_byte) * CLOSE


@unhurried
@given(profile=models, link=silent_links, bucket=sizes, latency=st.sampled_from([0.0, 0.3]))
def test_ddp_with_a_bucket_for_each_layer_is_its_formula(
    profile: ModelProfile, link: LinkModel, bucket: int | None, latency: float
) -> None:
    link = replace(link, latency=latency)
    formula = ddp_bound(profile, link)
    assert seconds(profile, link, Schedule.ddp(bucket_bytes=1)) == pytest.approx(formula)
    # Gathering layers only delays them.
    assert seconds(profile, link, Schedule.ddp(bucket_bytes=bucket)) * CLOSE >= formula


@unhurried
@given(profile=models, link=links, bucket=sizes, barrier=st.booleans(), factor=st.floats(1, 100))
def test_a_faster_network_is_never_slower_in_order_of_arrival(
    profile: ModelProfile, link: LinkModel, bucket: int | None, barrier: bool, factor: float
) -> None:
    schedule = Schedule(bucket_bytes=bucket, barrier=barrier)
    before = seconds(profile, link, schedule) * CLOSE
    for option in ("bandwidth", "latency"):
        value = getattr(link, option)
        better = replace(link, **{option: value * factor if option == "bandwidth" else value / factor})
        assert seconds(profile, better, schedule) <= before


@unhurried
@given(profile=models, link=silent_links, partition=partitions, factor=st.floats(1, 100))
def test_a_faster_network_costs_priority_one_partition_at_most(
    profile: ModelProfile, link: LinkModel, partition: int, factor: float
) -> None:
    """A faster network can start a piece just before a more urgent one is ready, where a slower one had not."""
    schedule = by_priority(partition)
    faster = replace(link, bandwidth=link.bandwidth * factor)
    once = partition * faster.seconds_per_byte
    assert seconds(profile, faster, schedule) <= (seconds(profile, link, schedule) + once) * CLOSE


tiny_models = (
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=4)
    .filter(lambda layers: sum(f + b for _, f, b in layers) > 0 and sum(size for size, _, _ in layers) <= 8)
    .map(model)
)


def every_order(pieces: list[int]) -> Iterator[list[int]]:
    """All orders of pieces that are known by their layers; those of one layer are alike."""
    if not pieces:
        yield []
    for layer in set(pieces):
        others = list(pieces)
        others.remove(layer)
        for order in every_order(others):
            yield [layer, *order]


def best_of_all(profile: ModelProfile, piece_bytes: int | None) -> float:
    """The shortest step that any order gives, on the plain link; reckoned by itself, not by the simulator."""
    layers = profile.layers
    ready = [sum(layer.backward_seconds for layer in layers[index:]) for index in range(len(layers))]
    size = [piece_bytes or layer.parameter_bytes for layer in layers]
    pieces = [
        index
        for index, layer in enumerate(layers)
        if layer.parameter_bytes
        for _ in range(layer.parameter_bytes // size[index])
    ]
    best = float("inf")
    for order in every_order(pieces):
        link, arrived = 0.0, [0.0] * len(layers)
        for piece in order:
            link = max(link, ready[piece]) + size[piece]
            arrived[piece] = link
        now = profile.backward_seconds
        for index, layer in enumerate(layers):
            now = max(now, arrived[index]) + layer.forward_seconds
        best = min(best, now)
    return best


@unhurried
@given(profile=tiny_models)
def test_priority_is_the_best_of_all_orders_of_small_pieces(profile: ModelProfile) -> None:
    # All times are whole, so that nothing becomes ready while a piece of one second is on the link.
    best = best_of_all(profile, 1)
    assert lower_bound(profile, plain_link()) == best
    assert seconds(profile, plain_link(), by_priority(1)) == best


@unhurried
@given(profile=tiny_models)
def test_whole_layers_by_priority_are_one_layer_from_the_best_of_all_orders(profile: ModelProfile) -> None:
    best = best_of_all(profile, None)
    largest = max(layer.parameter_bytes for layer in profile.layers)
    took = seconds(profile, plain_link(), Schedule(credit_bytes=1))
    assert lower_bound(profile, plain_link()) <= best <= took <= best + largest
    assert took <= 2 * best
