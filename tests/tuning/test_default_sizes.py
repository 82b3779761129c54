from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_bytescheduler.tuning.sizes import LinkEstimate, default_sizes, is_slow

KIB, MIB = 1024, 1024 * 1024

alphas = st.floats(1e-6, 0.1)
betas = st.floats(1e-11, 1e-5)


@given(alpha=alphas, beta=betas, small=st.integers(1, 16 * MIB), more=st.integers(1, 16 * MIB))
def test_a_fit_recovers_the_line(alpha: float, beta: float, small: int, more: int) -> None:
    truth, large = LinkEstimate(alpha=alpha, beta=beta), small + more
    fitted = LinkEstimate.fit((small, truth.seconds(small)), (large, truth.seconds(large)))
    for size in (small, large):
        assert fitted.seconds(size) == pytest.approx(truth.seconds(size), rel=1e-6, abs=1.1e-6)


@given(small=st.floats(0, 1), large=st.floats(0, 1))
def test_noise_never_makes_a_link_impossible(small: float, large: float) -> None:
    link = LinkEstimate.fit((4 * KIB, small), (128 * KIB, large))
    assert link.alpha >= 1e-6
    assert link.beta >= 1e-12
    default_sizes(parameters=1000, bytes_per_parameter=4, link=link)


@given(parameters=st.integers(0, 10**11), width=st.sampled_from([1, 2, 4, 8]), alpha=st.floats(0, 10), beta=betas)
def test_default_sizes_keep_what_they_promise(parameters: int, width: int, alpha: float, beta: float) -> None:
    sizes = default_sizes(parameters=parameters, bytes_per_parameter=width, link=LinkEstimate(alpha=alpha, beta=beta))
    partition_bytes = sizes.partition_size * width
    assert 128 * KIB <= partition_bytes <= 32 * MIB
    assert partition_bytes <= max(parameters * width / 16, 128 * KIB)
    assert sizes.bucket_bytes >= partition_bytes
    assert sizes.bucket_bytes <= max(25 * MIB, partition_bytes + width)
    assert sizes.credit in [number * sizes.partition_size for number in (2, 3, 4)]


@pytest.mark.parametrize(("alpha", "partitions"), [(0.0, 2), (3e-4, 2), (1.6e-3, 2), (3e-3, 3), (4e-3, 4), (1.0, 4)])
def test_credit_hides_what_starting_up_takes(alpha: float, partitions: int) -> None:
    link = LinkEstimate(alpha=alpha, beta=1e-9)  # a sixteenth of the model takes 5 ms
    sizes = default_sizes(parameters=20_000_000, bytes_per_parameter=4, link=link)
    assert sizes.credit == partitions * sizes.partition_size


def test_the_slower_the_start_the_larger_the_partition() -> None:
    model = {"parameters": 10**9, "bytes_per_parameter": 4}
    partitions = [
        default_sizes(**model, link=LinkEstimate(alpha=alpha, beta=1e-9)).partition_size
        for alpha in (0.0, 1e-4, 1e-3, 1.0)
    ]
    assert partitions == [32 * KIB, 75_000, 750_000, 8 * MIB]


@pytest.mark.parametrize(
    ("alpha", "partition", "partitions"), [(0.0, 1_000_000, 4), (2e-3, 1_500_000, 3), (1e-2, 7_500_000, 2)]
)
def test_a_busy_processor_is_given_more_at_once(alpha: float, partition: int, partitions: int) -> None:
    link = LinkEstimate(alpha=alpha, beta=1e-9)
    sizes = default_sizes(parameters=10**9, bytes_per_parameter=4, link=link, busy_processor=True)
    assert (sizes.partition_size, sizes.credit) == pytest.approx((partition, partitions * partition), abs=4)
    small = default_sizes(parameters=10**6, bytes_per_parameter=4, link=link, busy_processor=True)
    assert small.partition_size == 10**6, "4 ms carry the whole model"
    assert small.bucket_bytes == 4 * 10**6
    slow = LinkEstimate(alpha=alpha, beta=1e-6)  # 4 ms carry less than a partition
    sizes = default_sizes(parameters=10**6, bytes_per_parameter=4, link=slow, busy_processor=True)
    assert sizes.bucket_bytes == 128 * KIB


@pytest.mark.parametrize(("alpha", "megabytes"), [(0.04, 3.2), (0.09, 6.575)])
def test_over_long_ways_an_eighth_of_what_hides_them_travels_at_once(alpha: float, megabytes: float) -> None:
    link = LinkEstimate(alpha=alpha, beta=2e-8)
    sizes = default_sizes(parameters=10**9, bytes_per_parameter=4, link=link, far=True, busy_processor=True)
    assert sizes.credit * 4 == pytest.approx(megabytes * 1e6, rel=1e-3)
    assert sizes.credit == 8 * sizes.partition_size
    # A small model's partitions are smaller, and more of them are under way.
    small = default_sizes(parameters=10**6, bytes_per_parameter=4, link=link, far=True)
    assert small.partition_size == 62_500
    assert small.credit == math.ceil(megabytes * 4) * small.partition_size
    slow = default_sizes(parameters=10**6, bytes_per_parameter=4, link=LinkEstimate(alpha=100.0, beta=2e-8), far=True)
    assert slow.credit == 32 * slow.partition_size


def test_partitions_that_are_two_operations_are_twice_as_large() -> None:
    link = LinkEstimate(alpha=2e-3, beta=1e-9)
    whole, sharded = (
        default_sizes(parameters=10**9, bytes_per_parameter=4, link=link, in_shards=shards) for shards in (False, True)
    )
    assert (whole.partition_size, sharded.partition_size) == (1_500_000, 3_000_000)
    assert sharded.credit == 2 * sharded.partition_size


def test_a_model_of_many_buckets_gets_64_of_them() -> None:
    link = LinkEstimate(alpha=1e-5, beta=1e-9)
    assert default_sizes(parameters=64 * MIB, bytes_per_parameter=4, link=link).bucket_bytes == 4 * MIB


@given(
    parameters=st.integers(0, 10**11),
    width=st.sampled_from([1, 2, 4, 8]),
    beta=st.sampled_from([1e-7, 1e-8, 1e-9, 1e-10, 1e-12]),
)
def test_servers_get_the_published_partitions_and_credit(parameters: int, width: int, beta: float) -> None:
    link = LinkEstimate(alpha=1e-3, beta=beta)
    sizes = default_sizes(parameters=parameters, bytes_per_parameter=width, link=link, architecture="ps")
    parts, rest = divmod(sizes.credit, sizes.partition_size)
    assert not rest
    assert 16 <= parts <= 24
    assert sizes.credit <= max(parameters // 8, 16 * sizes.partition_size)
    assert sizes.credit <= 16_000_000
    if parameters >= 128_000_000 and beta < 5e-10:
        assert (sizes.partition_size, sizes.credit) == (1_000_000, 16_000_000)
    assert sizes.partition_size <= max(parameters // 128, 128 * KIB // width)
    assert sizes.partition_size * width * beta <= max(0.0075, 128 * KIB * beta) * (1 + 1e-9)
    assert sizes.bucket_bytes >= sizes.partition_size * width


def test_no_rate_is_told_that_could_not_be_measured() -> None:
    assert LinkEstimate.fit((4, 1e-4), (264, 9e-5)).at_rate == ""
    assert LinkEstimate(alpha=1e-4, beta=1e-8).at_rate == " at 100 MB/s"


@pytest.mark.parametrize(
    ("megabytes_per_s", "megabytes", "busy", "slow"),
    [
        (100, 100, True, True),  # ordinary Ethernet: the processor waits for what comes
        (100, 1, True, False),  # too little to matter
        (1000, 100, True, False),  # the processor copies most of the time
        (1000, 100, False, True),  # it is free, as a GPU computes
    ],
)
def test_a_link_is_slow_where_much_can_be_hidden(megabytes_per_s: int, megabytes: int, busy: bool, slow: bool) -> None:
    link = LinkEstimate(alpha=1e-4, beta=1e-6 / megabytes_per_s)
    assert is_slow(link, nbytes=megabytes * 10**6, busy_processor=busy) is slow
