"""Placing tensors on servers: BytePS's hashes as they are, and the default, which keeps to the formula's shares."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_bytescheduler.exceptions import OptionError
from lightning_bytescheduler.scheduler.placement import (
    PLACEMENTS,
    chosen_placement,
    cut,
    place,
    server_weights,
    spare_share,
)

# What BytePS's own functions make of a part, by the tensor's position and the part's number: naive, djb2, sdbm, and
# std::hash of GCC.
HASHED_BY_BYTEPS = {
    (0, 0): (0, 177621, 48, 2297668033614959926),
    (1, 0): (9973, 210653553582, 3850799628401345593, 243660463169716517),
    (2, 5): (69811, 6951369072472, 16622825045864838337, 13176452407996815284),
    (1234, 7): (12376493, 7570335656650981, 14725239764290990200, 12402822314873385031),
}
CONVOLUTIONS = [(3, 64), (64, 64), (64, 128), (128, 128), (128, 256), (256, 256), (256, 256)]
CONVOLUTIONS += [(256, 512), *[(512, 512)] * 5]
FULLY_CONNECTED = [(25088, 4096), (4096, 4096), (4096, 1000)]
VGG16 = {
    f"layer{n}.{kind}": 4 * size
    for n, (width, out) in enumerate([*((9 * a, b) for a, b in CONVOLUTIONS), *FULLY_CONNECTED])
    for kind, size in (("weight", width * out), ("bias", out))
}
PARTS = cut(VGG16, 4_000_000)  # BytePS's servers get parts of this size by default


def test_shares_are_those_of_byteps() -> None:
    assert spare_share(4, 2) == pytest.approx(0.6)
    assert spare_share(4, 4) == spare_share(4, 9) == spare_share(1, 1) == 1
    assert spare_share(4, 0) == 0
    assert server_weights(4, 2) == pytest.approx((0.3, 0.3, 0.1, 0.1, 0.1, 0.1))


@given(workers=st.integers(1, 64), data=st.data())
def test_the_shares_make_all_links_busy_for_equally_long(workers: int, data: st.DataObject) -> None:
    spare = data.draw(st.integers(0, workers))
    weights = server_weights(workers, spare)
    assert sum(weights) == pytest.approx(1)
    at_spare = [workers * weight for weight in weights[:spare]]  # each worker sends it that share of its gradients
    # Beside a worker: its own gradients but for those it keeps, and the others' that it serves.
    beside = [(1 - weight) + (workers - 1) * weight for weight in weights[spare:]]
    if workers > 1:
        assert [*at_spare, *beside] == pytest.approx([beside[0]] * len(weights))


@pytest.mark.parametrize(("workers", "servers"), [(4, 0), (4, 1), (4, 2), (4, 3), (4, 4), (8, 2), (8, 4), (8, 8)])
def test_bytes_of_a_model_like_vgg16_are_where_the_formula_wants_them(workers: int, servers: int) -> None:
    placement = place(PARTS, workers, servers)
    assert sum(placement.bytes_per_server) == sum(VGG16.values()) == 553_430_176
    assert placement.spare_share == pytest.approx(spare_share(workers, servers), rel=0.02)
    assert placement.fullest <= 1.05


@pytest.mark.parametrize("how", PLACEMENTS[1:])
def test_it_beats_every_hash(how: str) -> None:
    assert place(PARTS, 4, 2, how).fullest > 1.2 > 1.05 > place(PARTS, 4, 2).fullest


@pytest.mark.parametrize(("key", "expected"), HASHED_BY_BYTEPS.items())
def test_hashes_are_those_of_byteps(key: tuple[int, int], expected: tuple[int, ...]) -> None:
    position, part = key
    before, name = {f"tensor {n}": 1 for n in range(position)}, f"tensor {position}[{part}]"
    for how, value in zip(("naive", "djb2", "sdbm", "built_in"), expected, strict=True):
        assert place({**before, name: 1}, 8, 3, how).owner(name) == value % 11
        assert place({**before, name: 1}, 64, 37, how).owner(name) == value % 101


@pytest.mark.parametrize(("key", "servers"), [(0, [1, 0, 3, 4, 7, 8]), (1, [0, 0, 1, 0, 5, 0])])
def test_mixed_mode_is_that_of_byteps(key: int, servers: list[int]) -> None:
    networks = [(workers, spare) for workers in (2, 4, 8) for spare in (1, 2)]
    sizes = {"first": 1, "second": 1}
    assert [place(sizes, *network, "mixed").owner(list(sizes)[key]) for network in networks] == servers


def test_mixed_mode_comes_to_about_the_shares() -> None:
    placement = place({f"tensor {n}": 1 for n in range(2000)}, 4, 2, "mixed")
    assert placement.spare_share == pytest.approx(0.6, abs=0.05)


@given(
    sizes=st.dictionaries(st.text(), st.integers(0, 10**9), max_size=30),
    workers=st.integers(1, 9),
    servers=st.integers(0, 12),
    how=st.sampled_from(PLACEMENTS),
)
def test_every_tensor_is_on_one_server_that_is_there(
    sizes: dict[str, int], workers: int, servers: int, how: str
) -> None:
    placement = place(sizes, workers, servers, how)
    assert placement == place(dict(sizes), workers, servers, how)
    assert placement.spare_servers == min(workers, servers)
    assert len(placement.bytes_per_server) == workers + min(workers, servers)
    for server, has in enumerate(placement.bytes_per_server):
        assert has == sum(size for name, size in sizes.items() if placement.owner(name) == server)
    if servers >= workers and how in ("balanced", "mixed"):
        assert not any(placement.bytes_per_server[workers:])


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=60), st.integers(1, 8), st.integers(0, 8))
def test_no_server_has_more_than_its_ideal_and_one_tensor(sizes: list[int], workers: int, servers: int) -> None:
    placement = place({str(n): size for n, size in enumerate(sizes)}, workers, servers)
    weights = server_weights(workers, servers)
    usable = [weight for weight in weights if weight]
    for has, weight in zip(placement.bytes_per_server, weights, strict=True):
        # When it got its last tensor, no other server would have been less full with it.
        assert has <= weight * (sum(sizes) + len(usable) * max(sizes))


def test_parts_are_those_of_a_task() -> None:
    assert cut({"a": 10, "b": 4}, 4) == {"a[0]": 4, "a[1]": 4, "a[2]": 2, "b": 4}
    with pytest.raises(OptionError, match="size of 'a'=0"):
        cut({"a": 0}, 4)


def test_a_table_shows_bytes_per_server() -> None:
    placement = place({"a": 600, "b": 400}, 2, 1)
    assert placement.table() == [
        ("spare server 0", 600, 0.6, 0.5),
        ("server of worker 0", 400, 0.4, 0.25),
        ("server of worker 1", 0, 0.0, 0.25),
    ]
    assert str(placement).splitlines()[:2] == [
        "placement 'balanced': 2 tensors on 3 servers, the fullest 1.600 times its ideal",
        "spare server 0                  600 bytes   60.0% of  50.0%",
    ]
    assert [row[0] for row in place({"a": 1}, 1, 1).table()] == ["spare server 0"]


def test_what_was_not_placed_has_no_server() -> None:
    with pytest.raises(OptionError, match=r"one of the 1 keys that were placed. Did you mean 'bucket 1'\?"):
        place({"bucket 1": 4}, 2, 0).owner("bucket 2")


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"how": "murmur"}, "placement='murmur' is not allowed: placement must be one of 'balanced'"),
        ({"workers": 0}, "workers"),
        ({"servers": -1}, "servers"),
        ({"sizes_bytes": {"a": -1}}, "size of 'a'"),
    ],
)
def test_what_cannot_be_is_refused(changed: dict[str, object], says: str) -> None:
    with pytest.raises(OptionError, match=says):
        place(**{"sizes_bytes": {"a": 1}, "workers": 2, "servers": 0, **changed})  # type: ignore[arg-type]


def test_the_variable_of_byteps_asks_for_mixed_mode() -> None:
    variable = "BYTEPS_ENABLE_MIXED_MODE"
    assert chosen_placement(None, {}) == chosen_placement(None, {variable: "0"}) == "balanced"
    assert chosen_placement(None, {variable: "1"}) == "mixed"
    assert chosen_placement("naive", {variable: "1"}) == "naive"
    with pytest.raises(OptionError, match=f"{variable}='yes' is not allowed: {variable} must be 0 or 1"):
        chosen_placement(None, {variable: "yes"})
