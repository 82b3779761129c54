from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_bytescheduler.tuning.sizes import ALIGNMENT, PLAIN_DDP, SearchSpace, TuningPoint
from tests.tuning.training import inside

MILLION = 1_000_000
SIZES = [(300, 40), (1, 1), (262_144, 65_536), (40 * MILLION, 8 * MILLION)]


@given(
    parameters=st.integers(1, 10**12),
    architecture=st.sampled_from(["allreduce", "ps"]),
    start=st.sampled_from(SIZES),
    tunes_credit=st.booleans(),
    tunes_partitions=st.booleans(),
    largest_bucket=st.none() | st.integers(1, 10**9),
    octaves=st.floats(0.5, 3),
)
def test_all_points_are_legal_and_the_start_is_one(
    parameters, architecture, start, tunes_credit, tunes_partitions, largest_bucket, octaves
) -> None:
    start = TuningPoint(*start)
    space = SearchSpace.for_model(
        parameters,
        start,
        architecture=architecture,
        tunes_credit=tunes_credit,
        tunes_partitions=tunes_partitions,
        largest_bucket=largest_bucket,
    )
    points = space.points(octaves=octaves)
    assert inside(start, space)
    assert len(set(points)) == len(points)
    for credit, partition in points:
        assert inside(TuningPoint(credit, partition), space)
        assert 1 <= partition <= credit
        assert tunes_credit or credit == start.credit
        assert tunes_partitions or partition == start.partition_size
        if partition not in (start.partition_size, start.credit):
            assert partition % ALIGNMENT == 0
            assert partition <= max(parameters + ALIGNMENT, start.partition_size)
            assert partition <= max((largest_bucket or parameters) + ALIGNMENT, start.partition_size)
    assert space.tunes_partitions or len({partition for _, partition in points}) == 1


def near(bounds: tuple[int, int], low: float, high: float) -> bool:
    return bounds[0] == pytest.approx(low, rel=0.001) and bounds[1] == pytest.approx(high, rel=0.001)


def test_large_models_get_the_published_ranges() -> None:
    start = TuningPoint(credit=8 * MILLION, partition_size=4 * MILLION)
    space = SearchSpace.for_model(1000 * MILLION, start)
    assert near(space.credits, 4 * MILLION, 64 * MILLION)
    assert near(space.partitions, 2 * MILLION, 32 * MILLION)
    servers = SearchSpace.for_model(1000 * MILLION, start, architecture="ps")
    assert near(servers.credits, 1 * MILLION, 16 * MILLION)
    assert servers.partitions[0] < 1 * MILLION < servers.partitions[1], "the published default"


def test_a_small_model_gets_what_was_best_on_ethernet() -> None:
    space = SearchSpace.for_model(6_250_000, TuningPoint(credit=MILLION, partition_size=MILLION))
    assert inside(TuningPoint(credit=262_144, partition_size=65_536), space)
    assert space.credits[1] >= 6_250_000, "on a long link the window may hold the whole model"


def test_a_space_grows_to_hold_what_the_link_suggests() -> None:
    start = TuningPoint(credit=131_072, partition_size=32_768)
    space = SearchSpace.for_model(138 * MILLION, start)
    assert space.credits[0] == start.credit
    assert space.partitions[0] == start.partition_size
    usual = SearchSpace.for_model(138 * MILLION, TuningPoint(credit=8 * MILLION, partition_size=4 * MILLION))
    assert not inside(start, usual)
    assert (usual.credits[1], usual.partitions[1]) == (space.credits[1], space.partitions[1])


def test_a_small_model_has_one_partition_size() -> None:
    space = SearchSpace.for_model(1500, TuningPoint(credit=300, partition_size=40))
    assert space.partitions == (40, 40)


def test_a_point_says_what_it_is() -> None:
    assert str(PLAIN_DDP) == "plain DDP"
    assert str(TuningPoint(credit=2048, partition_size=1024)) == "credit 2,048, partition 1,024"
