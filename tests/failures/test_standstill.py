"""When ranks wait for each other forever, when that is believed, and how a waiting thread is seen."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch.distributed as dist
from msgspec.structs import replace

from lightning_bytescheduler.failures import standstill
from lightning_bytescheduler.failures.standstill import (
    BATCH,
    Sign,
    Standing,
    VitalSigns,
    find_standstill,
    wait_of,
    waiting,
    whereabouts,
)

TRAINS = Standing(place="in epoch 0, batch 4", steps=3, launched=20, batches=4)
GRADIENTS = replace(TRAINS, steps=4, awaited_step=4)  # waits for those of the step it has handed over
BEHIND = replace(TRAINS, batches=3, launched=19)
COLLECTIVE = replace(BEHIND, collective="all_reduce", launched=21)
NEXT_BATCH = replace(TRAINS, collective=BATCH)
ENDED = replace(BEHIND, ended=True)
AHEAD = replace(NEXT_BATCH, batches=5)
VALIDATES = replace(COLLECTIVE, place="in batch 5 of the validation")


def test_it_travels_as_text() -> None:
    assert Standing.decode(COLLECTIVE.encode().encode()) == COLLECTIVE


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (GRADIENTS, COLLECTIVE),  # each can go on only after the other
        (COLLECTIVE, replace(COLLECTIVE, collective="barrier")),
        (COLLECTIVE, replace(COLLECTIVE, place="in the sanity check (on_validation_epoch_end)")),
        (COLLECTIVE, NEXT_BATCH),
        (GRADIENTS, ENDED),
        (NEXT_BATCH, ENDED),
        (AHEAD, COLLECTIVE),
        (AHEAD, replace(COLLECTIVE, batches=4)),  # both have begun four, and this one begins the fifth
        (GRADIENTS, replace(AHEAD, steps=3)),  # of a rank that begins a batch which the other does not have
        (AHEAD, ENDED),
    ],
)
def test_ranks_that_wait_for_each_other(one: Standing, other: Standing) -> None:
    for standings in ({0: one, 1: other}, {0: other, 1: one}):
        found = find_standstill(standings)
        assert found is not None
        assert "rank 0 " in found
        assert "rank 1 " in found


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (GRADIENTS, TRAINS),  # slow, or at a breakpoint
        (GRADIENTS, replace(TRAINS, place="in validation")),  # a long validation on one rank
        (GRADIENTS, GRADIENTS),  # a slow network
        (GRADIENTS, NEXT_BATCH),  # this one has begun that batch
        (GRADIENTS, replace(COLLECTIVE, launched=20)),
        (GRADIENTS, replace(COLLECTIVE, steps=4)),  # the gradients are on their way, and this one comes next
        (replace(GRADIENTS, awaited_step=3), replace(GRADIENTS, steps=3, awaited_step=3)),
        (COLLECTIVE, COLLECTIVE),
        (replace(COLLECTIVE, place="in batch 4 of the validation"), VALIDATES),  # ranks may have other numbers of them
        (COLLECTIVE, TRAINS),
        (COLLECTIVE, ENDED),  # it may be called after the fit there
        (GRADIENTS, replace(ENDED, steps=4)),  # its gradients are on their way
        (NEXT_BATCH, replace(ENDED, batches=4)),
        (GRADIENTS, replace(COLLECTIVE, collective="broadcast", launched=19)),  # its root may run ahead
        (ENDED, ENDED),
        (AHEAD, AHEAD),
        (AHEAD, replace(COLLECTIVE, launched=20, collective="broadcast")),  # this one was its root
        (AHEAD, replace(COLLECTIVE, batches=5)),  # it has begun the fifth
        (AHEAD, replace(GRADIENTS, batches=5)),
        (AHEAD, replace(ENDED, batches=5)),
        (GRADIENTS, replace(AHEAD, steps=4)),
    ],
)
def test_ranks_that_may_go_on(one: Standing, other: Standing) -> None:
    assert find_standstill({0: one, 1: other}) is None
    assert find_standstill({0: other, 1: one}) is None


def test_a_rank_that_computes_may_still_come() -> None:
    assert find_standstill({0: GRADIENTS, 1: COLLECTIVE, 2: TRAINS}) is None
    assert find_standstill({0: GRADIENTS, 1: COLLECTIVE, 2: GRADIENTS}) is not None
    assert find_standstill({0: GRADIENTS, 1: ENDED, 2: TRAINS}) is not None  # but nothing brings that one back


def test_what_to_do_is_said() -> None:
    found = find_standstill({0: NEXT_BATCH, 1: ENDED})
    assert found is not None
    assert "Trainer(limit_train_batches=N)" in found
    assert "trainer.should_stop" in found
    assert "self.log(sync_dist=True)" in found


def test_each_rank_is_described() -> None:
    waits = replace(GRADIENTS, place="in epoch 1, batch 4 (backward)", expected=9)
    validates = replace(COLLECTIVE, place="in batch 2 of the validation (on_validation_epoch_end)")
    assert waits.describe() == (
        "is in epoch 1, batch 4 (backward), waits for the gradients of step 4 "
        "(has begun 4 batches, 9 in each epoch, and handed over 4 gradients)"
    )
    assert validates.describe() == (
        "is in batch 2 of the validation (on_validation_epoch_end), waits in all_reduce, collective 21 of the default "
        "group (has begun 3 batches, and handed over 3 gradients)"
    )
    assert NEXT_BATCH.describe().startswith("is in epoch 0, batch 4, waits for the others to begin this batch (")
    assert Standing().describe() == "is in setup"
    assert ENDED.describe() == "has ended the fit after 3 batches"


# A standstill is believed once it has been seen for a while, on ranks that are seen to live.

WAITING = Standing(steps=4, awaited_step=4, launched=20, batches=4)
IN_BARRIER = Standing(steps=3, launched=21, collective="barrier", batches=3)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


class Other:
    def __init__(self, store: dist.Store) -> None:
        self.store = store
        self.sign = Sign()

    def beat(self) -> None:
        self.tell(self.sign.standing, left=self.sign.left)

    def tell(self, standing: Standing, *, left: bool = False) -> None:
        self.sign = Sign(beat=self.sign.beat + 1, standing=standing, left=left)
        self.store.set("signs/1", self.sign.encode())


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(standstill, "time", clock)
    return clock


def signs() -> tuple[VitalSigns, Other]:
    store = dist.HashStore()
    return VitalSigns(store, 0, [1], 0.25), Other(store)


def seen_after(
    clock: Clock,
    own: VitalSigns,
    other: Other,
    *,
    limit: float = 30.0,
    beats: bool = True,
    **changes: Any,
) -> float | None:
    """Seconds until it is believed."""
    start = clock.now
    while clock.now < start + limit:
        if beats:
            other.beat()
        own.give(replace(WAITING, **changes))
        own.look()
        if own.standstill() is not None:
            return clock.now - start
        clock.now += 0.25
    return None


def test_what_the_numbers_prove_is_believed_after_seconds(clock: Clock) -> None:
    own, other = signs()
    other.tell(IN_BARRIER)
    after = seen_after(clock, own, other)
    assert after is not None
    assert 3.0 <= after <= 5.5


def test_every_change_begins_it_anew(clock: Clock) -> None:
    own, other = signs()
    other.tell(IN_BARRIER)
    assert seen_after(clock, own, other, limit=3.0) is None
    other.tell(replace(IN_BARRIER, launched=22))
    after = seen_after(clock, own, other)
    assert after is not None
    assert after >= 2.9
    assert seen_after(clock, own, other, limit=2.9, launched=19) is None


def test_a_rank_without_a_beat_is_not_believed(clock: Clock) -> None:
    own, other = signs()
    other.tell(IN_BARRIER)
    other.beat()
    assert seen_after(clock, own, other, limit=1.0) is None
    assert seen_after(clock, own, other, beats=False) is None


def test_one_that_has_ended_needs_no_beat(clock: Clock) -> None:
    own, other = signs()
    other.tell(replace(IN_BARRIER, collective="", ended=True), left=True)
    assert seen_after(clock, own, other, beats=False) is not None


def test_a_rank_that_computes_concludes_nothing(clock: Clock) -> None:
    own, other = signs()
    other.tell(IN_BARRIER)
    assert seen_after(clock, own, other, awaited_step=0) is None


def test_a_rank_that_has_told_nothing_yet_is_waited_for(clock: Clock) -> None:
    own, other = signs()
    assert seen_after(clock, own, other) is None


def test_all_are_known_to_stand_where_they_told_last(clock: Clock) -> None:
    own, other = signs()
    own.give(WAITING)
    own.look()
    assert own.standings() == {}
    there = replace(IN_BARRIER, place="in epoch 0, batch 3")
    other.tell(there)
    own.look()
    assert own.standings() == {0: WAITING, 1: there}
    assert "; rank 1 is in epoch 0, batch 3, waits in barrier" in whereabouts(own.standings())


def test_a_rank_is_silent_when_it_has_missed_five_beats(clock: Clock) -> None:
    own, other = signs()
    for _ in range(4):  # late, but not silent
        other.beat()
        for _ in range(5):
            own.look()
            assert own.silent() == []
            clock.now += 0.25
    own.look()
    assert own.silent() == []
    clock.now += 0.25
    own.look()
    assert own.silent() == [1]
    assert own.silent(at_least=2.0) == []
    other.beat()
    own.look()
    assert own.silent() == []


def test_the_rank_that_was_silent_first_is_named_first(clock: Clock) -> None:
    store = dist.HashStore()
    own = VitalSigns(store, 0, [1, 2], 0.25)
    for beat in range(1, 40):
        for rank, lives in ((1, beat < 12), (2, beat < 4)):
            if lives:
                store.set(f"signs/{rank}", Sign(beat=beat).encode())
        own.look()
        clock.now += 0.25
    assert own.silent() == [2, 1]


def test_one_that_has_left_is_not_silent_and_says_why(clock: Clock) -> None:
    store = dist.HashStore()
    own = VitalSigns(store, 0, [1, 2], 0.25)
    for rank, why in ((1, ""), (2, "boom")):
        VitalSigns(store, rank).give(Standing(place=why), left=True)
    for _ in range(10):
        own.look()
        clock.now += 0.25
    assert own.silent() == []
    assert own.left == {1: "", 2: "boom"}
    assert own.live(clock.now) == [1, 2]


# What a thread waits in.


def test_a_thread_says_what_it_waits_in() -> None:
    thread = threading.get_ident()
    with waiting("all_reduce"):
        assert wait_of(thread) == "all_reduce"
        with waiting(BATCH):
            assert wait_of(thread) == BATCH
        assert wait_of(thread) == "all_reduce"
        assert not wait_of(0)
    assert not wait_of(thread)
    with pytest.raises(ValueError, match="boom"), waiting("barrier"):
        raise ValueError("boom")
    assert not wait_of(thread)
