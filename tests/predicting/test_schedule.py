from __future__ import annotations

from hypothesis import given

from lightning_bytescheduler.predicting.profiles import ModelProfile, network_profile
from lightning_bytescheduler.predicting.simulator import Schedule
from tests.predicting.profiles import model, models, schedules, unhurried

MIB = 1024 * 1024


@unhurried
@given(profile=models, schedule=schedules)
def test_every_byte_is_in_one_piece_of_one_bucket(profile: ModelProfile, schedule: Schedule) -> None:
    buckets = list(schedule.buckets(profile))
    with_parameters = [i for i, layer in enumerate(profile.layers) if layer.parameter_bytes]
    assert [layer for bucket in buckets for layer in bucket.layers] == with_parameters[::-1]
    for bucket in buckets:
        assert bucket.size == sum(profile.layers[layer].parameter_bytes for layer in bucket.layers)
        assert bucket.priority == min(bucket.layers)
        pieces = schedule.pieces(bucket)
        assert sum(pieces) == bucket.size
        assert max(pieces) <= (schedule.partition_bytes or bucket.size)
        assert min(pieces) > 0


@unhurried
@given(profile=models, schedule=schedules)
def test_a_bucket_closes_as_soon_as_it_is_large_enough(profile: ModelProfile, schedule: Schedule) -> None:
    buckets = list(schedule.buckets(profile))
    limit = schedule.bucket_bytes or 1
    for bucket in buckets[:-1]:
        assert bucket.size >= limit
    for bucket in buckets:
        assert bucket.size - profile.layers[bucket.priority].parameter_bytes < limit


def test_ddp_s_first_bucket_is_small_unless_a_size_is_given() -> None:
    profile = model([(1 * MIB, 1, 1)] * 60)
    assert [bucket.size // MIB for bucket in Schedule.ddp().buckets(profile)] == [1, 25, 25, 9]
    assert [b.size // MIB for b in Schedule.ddp(bucket_bytes=25 * MIB).buckets(profile)] == [25, 25, 10]


def test_ddp_s_default_buckets_of_vgg16() -> None:
    buckets = list(Schedule.ddp().buckets(network_profile("vgg16")))
    # The last layer (fc8) alone, fc7 alone, fc6 alone as larger than a bucket, then convolutions.
    assert [bucket.layers for bucket in buckets[:3]] == [(15,), (14,), (13,)]
    assert len(buckets) == 6
