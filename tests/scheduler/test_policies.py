"""What each policy wants of the buckets of a step, and policies of users."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_bytescheduler.exceptions import OptionError
from lightning_bytescheduler.scheduler.options import SchedulerOptions
from lightning_bytescheduler.scheduler.policies import (
    POLICIES,
    Arrangement,
    BucketFacts,
    LinkCost,
    best_equal_part,
    policy_of,
    tac_order,
    unequal_blocks,
)

MILLION = 1_000_000
# Four buckets of a million, in the order of the backward pass, a second apart; the forward pass takes a second each.
BUCKETS = [BucketFacts(index=n, size=MILLION, position=3 - n, ready=n - 3.0, needed=float(3 - n)) for n in range(4)]
LINK = LinkCost(start_up=0.0, per_parameter=1.5e-6)  # a bucket takes one and a half of these seconds


def by_name(bucket: BucketFacts) -> int:
    return -bucket.size


def not_a_number(bucket: BucketFacts) -> int:
    return "first"  # type: ignore[return-value]


def priorities(name: str) -> list[int]:
    arranged = policy_of(name).arrange(BUCKETS, LINK)
    return [arranged[bucket.index].priority for bucket in BUCKETS]


def test_the_default_and_p3_send_first_what_is_used_first() -> None:
    assert POLICIES[0] == policy_of("bytescheduler").name == "bytescheduler"
    for name in ("bytescheduler", "p3", "us-byte"):
        assert priorities(name) == [3, 2, 1, 0]
    assert policy_of("p3").own_partition_size(10 * MILLION) == 50_000
    assert policy_of("p3").one_at_a_time


def test_fifo_sends_whole_buckets_as_they_come() -> None:
    fifo = policy_of("fifo")
    assert priorities("fifo") == [0, 1, 2, 3]
    assert fifo.own_partition_size(10 * MILLION) == 10 * MILLION
    assert not fifo.one_at_a_time


def test_what_is_not_known_yet_is_ordered_by_first_use() -> None:
    unknown = [BucketFacts(index=bucket.index, size=bucket.size, position=bucket.position) for bucket in BUCKETS]
    for name in ("tictac", "us-byte"):
        for link in (LINK, None):
            arranged = policy_of(name).arrange(unknown, link)
            assert arranged == {bucket.index: Arrangement(bucket.position) for bucket in BUCKETS}


# ---------------------------------------------------------------------- tictac


def test_tictac_follows_the_observed_pass_not_the_first_one() -> None:
    # Positions are of another pass: what counts is when training reached for the buckets.
    needed = {0: 0.0, 1: 2.0, 2: 1.0, 3: 3.0}
    observed = [BucketFacts(index=n, size=MILLION, position=n, ready=n - 3.0, needed=needed[n]) for n in range(4)]
    arranged = policy_of("tictac").arrange(observed, LINK)
    assert sorted(arranged, key=lambda index: arranged[index].priority) == [0, 2, 1, 3]
    assert policy_of("tictac").one_at_a_time


def test_tac_takes_first_what_lets_something_compute() -> None:
    # The paper's figure 1: the first operation needs the first transfer, the second needs both.
    assert tac_order({"second": 1.0, "first": 1.0}, [(1.0, ["first"]), (1.0, ["first", "second"])]) == [
        "first",
        "second",
    ]


def test_tac_weighs_computation_against_communication() -> None:
    # Two branches: a short transfer for much computation, a long one for little.
    transfers = {"long": 3.0, "short": 1.0}
    assert tac_order(transfers, [(1.0, ["long"]), (4.0, ["short"])]) == ["short", "long"]
    # Of two without computation of their own, the one that needs less company.
    three = {"a": 2.0, "b": 1.0, "c": 1.0}
    assert tac_order(three, [(1.0, ["a", "b"]), (1.0, ["b", "c"])])[0] == "b"


@given(st.data())
def test_tac_is_best_for_two_transfers_that_each_let_one_operation_compute(data: st.DataObject) -> None:
    times = st.floats(0.01, 10)
    transfers = {"a": data.draw(times), "b": data.draw(times)}
    computations = {"a": data.draw(times), "b": data.draw(times)}

    def makespan(order: tuple[str, ...]) -> float:
        arrived = computed = 0.0
        for key in order:
            arrived += transfers[key]
            computed = max(computed, arrived) + computations[key]
        return computed

    order = tuple(tac_order(transfers, [(seconds, [key]) for key, seconds in computations.items()]))
    assert makespan(order) <= min(map(makespan, itertools.permutations(transfers))) + 1e-9


# ---------------------------------------------------------------------- us-byte


def test_us_byte_ends_a_block_when_the_next_gradient_exists() -> None:
    # A bucket takes 1.5 s, the next one exists after 1 s: two thirds of each travel first. After the last one the
    # backward pass is over, and what is left of each is one block.
    # Blocks are multiples of 1,024.
    assert unequal_blocks(BUCKETS, LINK) == {
        0: (667_648, 332_352),
        1: (666_624, 333_376),
        2: (666_624, 333_376),
        3: (MILLION,),
    }


def test_us_byte_cuts_nothing_that_nothing_overtakes() -> None:
    fast = LinkCost(start_up=0.0, per_parameter=0.5e-6)
    assert set(unequal_blocks(BUCKETS, fast).values()) == {(MILLION,)}
    forwards = [BucketFacts(index=n, size=MILLION, position=n, ready=n - 3.0) for n in range(4)]
    assert set(unequal_blocks(forwards, LINK).values()) == {(MILLION,)}


@given(
    sizes=st.lists(st.integers(1, 5 * MILLION), min_size=1, max_size=12),
    gaps=st.lists(st.floats(0, 2), min_size=12, max_size=12),
    start_up=st.floats(0, 0.5),
    per_parameter=st.floats(1e-9, 1e-5),
    data=st.data(),
)
def test_blocks_are_the_bucket_and_none_is_too_small(
    sizes: list[int], gaps: list[float], start_up: float, per_parameter: float, data: st.DataObject
) -> None:
    positions = data.draw(st.permutations(range(len(sizes))))
    ready = list(itertools.accumulate(gaps[: len(sizes)]))
    buckets = [
        BucketFacts(index=n, size=size, position=positions[n], ready=ready[n] - ready[-1])
        for n, size in enumerate(sizes)
    ]
    blocks = unequal_blocks(buckets, LinkCost(start_up, per_parameter))
    assert {index: sum(cut) for index, cut in blocks.items()} == dict(enumerate(sizes))
    for cut in blocks.values():
        assert len(cut) == 1 or min(cut) >= 32 * 1024


def test_equal_parts_are_best_where_start_ups_and_waiting_cost_alike() -> None:
    link = LinkCost(start_up=0.001, per_parameter=1e-7)
    best = best_equal_part(10 * MILLION, link)

    def cost(part: int) -> float:
        return link.start_up * 10 * MILLION / part + link.per_parameter * part

    assert best == pytest.approx(math.sqrt(0.001 * 1e7 / 1e-7), rel=1e-3)
    assert cost(best) <= min(cost(best // 2), cost(2 * best))


# ---------------------------------------------------------------------- users'


def test_a_function_orders_buckets() -> None:
    for given_policy in (by_name, "tests.scheduler.test_policies:by_name"):
        policy = policy_of(given_policy)  # type: ignore[arg-type]
        assert policy.name == "tests.scheduler.test_policies:by_name"
        assert policy.arrange(BUCKETS, None)[0] == Arrangement(-MILLION)
        assert policy == policy_of(by_name) != policy_of(not_a_number)


def test_a_function_has_to_return_a_whole_number() -> None:
    with pytest.raises(OptionError, match=r"whole number between .*it returned 'first'"):
        policy_of(not_a_number).arranged(BUCKETS[0])


@pytest.mark.parametrize(
    ("policy", "says"),
    [
        ("ticktack", "Did you mean 'tictac'?"),
        ("no_such_module:function", "No module named 'no_such_module'"),
        ("tests.scheduler.test_policies:nobody", "has no attribute 'nobody'"),
        ("tests.scheduler.test_policies:MILLION", "a function, and that is of type int"),
        (3, "one of 'bytescheduler'"),
    ],
)
def test_what_is_no_policy_is_refused(policy: object, says: str) -> None:
    with pytest.raises(OptionError) as caught:
        SchedulerOptions.resolve(policy=policy, environ={})  # type: ignore[arg-type]
    assert caught.value.option == "policy"
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"policy": "fifo", "partition_size": 4}, "partition_size must be left out, as policy='fifo' has its own"),
        ({"policy": "tictac", "credit": 4}, "credit must be left out, as policy='tictac' has its own"),
        ({"policy": "p3", "credit": 4}, "credit must be left out"),
        ({"policy": "p3", "credit_tuning": True}, "credit_tuning must be left out, as policy='p3' has nothing to tune"),
        ({"policy": "p3", "mode": "ddp"}, "policy must be left out where mode='ddp'"),
    ],
)
def test_options_that_a_policy_does_not_take_are_refused(options: Mapping[str, object], says: str) -> None:
    with pytest.raises(OptionError, match=says):
        SchedulerOptions.resolve(**options, environ={})  # type: ignore[arg-type]


def test_what_a_policy_takes_is_kept() -> None:
    slices = SchedulerOptions.resolve(policy="p3", partition_size=10_000, environ={})
    assert (slices.policy.name, slices.partition_size, slices.tunes_credit) == ("p3", 10_000, False)
    assert SchedulerOptions.resolve(policy=by_name, environ={}).tunes_credit
