from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_bytescheduler.checks import ARCHITECTURES
from lightning_bytescheduler.exceptions import OptionError
from lightning_bytescheduler.tuning.sizes import ALIGNMENT, PLAIN_DDP, SearchSpace, TuningPoint

MILLION = 1_000_000


@given(
    parameters=st.integers(1, 10**12),
    architecture=st.sampled_from(ARCHITECTURES),
    partition_size=st.none() | st.integers(1, 10**9),
    largest_bucket=st.none() | st.integers(1, 10**9),
    octaves=st.floats(0.5, 3),
)
def test_all_points_are_legal(parameters, architecture, partition_size, largest_bucket, octaves) -> None:
    space = SearchSpace.for_model(
        parameters, architecture=architecture, partition_size=partition_size, largest_bucket=largest_bucket
    )
    points = space.points(octaves=octaves)
    assert points
    assert len(set(points)) == len(points)
    for point in points:
        credit, partition = point.sizes
        assert 1 <= partition <= credit
        assert point in space
        if partition_size is not None:
            assert partition == partition_size
        else:
            assert partition % ALIGNMENT == 0
            assert partition <= parameters + ALIGNMENT
            assert largest_bucket is None or partition <= largest_bucket + ALIGNMENT
    assert space.tunes_partitions or len({point.partition_size for point in points}) == 1


def near(bounds: tuple[int, int], low: float, high: float) -> bool:
    return bounds[0] == pytest.approx(low, rel=0.001) and bounds[1] == pytest.approx(high, rel=0.001)


def test_large_models_get_the_published_ranges() -> None:
    space = SearchSpace.for_model(1000 * MILLION)
    assert near(space.credits, 4 * MILLION, 64 * MILLION)
    assert near(space.partitions, 2 * MILLION, 32 * MILLION)
    servers = SearchSpace.for_model(1000 * MILLION, architecture="ps")
    assert near(servers.credits, 1 * MILLION, 16 * MILLION)
    assert servers.partitions[0] < 1 * MILLION < servers.partitions[1], "the published default"


def test_a_small_model_gets_what_was_best_on_ethernet() -> None:
    space = SearchSpace.for_model(6_250_000)
    assert TuningPoint(credit=262_144, partition_size=65_536) in space
    assert space.credits[1] >= 6_250_000, "on a long link the window may hold the whole model"


def test_a_space_grows_to_hold_a_point() -> None:
    space = SearchSpace.for_model(138 * MILLION)
    point = TuningPoint(credit=131_072, partition_size=32_768)
    assert point not in space
    larger = space.including(point)
    assert point in larger
    assert set(space.points(octaves=9)) & set(larger.points(octaves=9))
    fixed = SearchSpace.for_model(138 * MILLION, partition_size=500).including(point)
    assert fixed.partitions == (500, 500)


@pytest.mark.parametrize("foreign", [PLAIN_DDP, None, (5, 5), TuningPoint(credit=1, partition_size=1)])
def test_what_is_not_in_a_space(foreign: object) -> None:
    assert foreign not in SearchSpace.for_model(6_250_000)


@pytest.mark.parametrize(
    ("option", "arguments"),
    [
        ("parameters", {"parameters": 0}),
        ("parameters", {"parameters": 1e6}),
        ("architecture", {"parameters": 1, "architecture": "ring"}),
        ("partition_size", {"parameters": 1, "partition_size": 0}),
        ("largest_bucket", {"parameters": 1, "largest_bucket": -5}),
    ],
)
def test_models_that_cannot_be(option: str, arguments: dict) -> None:
    with pytest.raises(OptionError, match=f"^{option}="):
        SearchSpace.for_model(**arguments)


def test_spaces_that_cannot_be() -> None:
    with pytest.raises(OptionError, match="credits"):
        SearchSpace(credits=(5, 4), partitions=(1, 2))
    with pytest.raises(OptionError, match="partitions"):
        SearchSpace(credits=(1, 4), partitions=(0, 2))
    with pytest.raises(OptionError, match="some within the largest credit"):
        SearchSpace(credits=(1, 4), partitions=(5, 6))
    for octaves in (0, -1, float("nan"), True):
        with pytest.raises(OptionError, match="octaves"):
            SearchSpace.for_model(1).points(octaves=octaves)


@pytest.mark.parametrize(("credit", "partition"), [(1, None), (None, 1), (0, 0), (4, 5), (2.0, 1), (True, 1), (-1, -2)])
def test_points_that_cannot_be(credit, partition) -> None:
    with pytest.raises(OptionError):
        TuningPoint(credit=credit, partition_size=partition)


def test_a_point_says_what_it_is() -> None:
    assert str(PLAIN_DDP) == "plain DDP"
    assert str(TuningPoint(credit=2048, partition_size=1024)) == "credit 2,048, partition 1,024"
