"""The tracker's rules, one by one."""

from __future__ import annotations

from collections import Counter

import pytest

from lightning_bytescheduler.exceptions import OptionError
from lightning_bytescheduler.slices.slice import SliceState
from lightning_bytescheduler.slices.tracker import (
    AskLater,
    EpochSlices,
    JoinAgain,
    JoinTracker,
    QuarantineSlice,
    ReportProgress,
    RequestSlice,
    WaitReason,
)
from tests.slices.tracker_workers import Clock, Worker, finish, is_over, make_tracker, state_of


def exactly(counts, times=1):
    return Counter({(f"slice{index}", sample): times for index, count in enumerate(counts) for sample in range(count)})


def test_a_slice_is_available_then_assigned_then_used():
    tracker = make_tracker([5])
    worker = Worker(tracker, "0", Counter())
    assert state_of(tracker, "slice0") == SliceState.AVAILABLE
    worker.ask()
    assert state_of(tracker, "slice0") == SliceState.ASSIGNED
    worker.train(5)
    assert state_of(tracker, "slice0") == SliceState.USED
    assert is_over(worker.ask())


def test_one_worker_trains_on_each_sample_once_in_each_epoch():
    counts, clock, trained = [3, 1, 7], Clock(), Counter[tuple[str, int]]()
    tracker = make_tracker(counts, clock)
    worker = Worker(tracker, "0", trained)
    for epoch in range(3):
        worker.epoch = epoch
        worker.ask()
        finish(tracker, [worker], clock)
    assert trained == exactly(counts, times=3)


def test_the_order_is_another_one_in_each_epoch_and_the_same_for_the_same_seed():
    def orders(seed, shuffle=True):
        tracker = make_tracker([1] * 50, seed=seed, shuffle=shuffle)
        worker = Worker(tracker, "0", Counter())
        found: list[list[int]] = []
        for worker.epoch in (0, 1):
            found.append([])
            for _ in range(50):
                found[-1].append(worker.ask().slice_index)
                worker.train(1)
        return found

    first, second = orders(7)
    assert first != second
    assert [first, second] == orders(7)
    assert first not in orders(8)
    assert orders(7, shuffle=False) == [list(range(50))] * 2


def test_an_answer_that_was_lost_is_sent_again():
    tracker = make_tracker([5, 5, 5])
    worker = Worker(tracker, "0", Counter())
    lost = worker.ask(lose_answer=True)
    assert worker.ask() == lost
    assert worker.ask().grant != lost.grant


def test_a_late_copy_of_a_request_hands_nothing_begun_out_again():
    tracker = make_tracker([5, 5, 5])
    worker = Worker(tracker, "0", Counter())
    worker.ask()
    worker.train(2)
    answer = tracker.request(RequestSlice(session=worker.session, epoch=0))  # it knew of no grant yet
    assert answer.key != worker.held[0].key
    assert worker.ask() == answer


def test_a_dead_workers_slice_comes_back_where_it_is_known_to_be():
    counts, clock, trained = [10], Clock(), Counter[tuple[str, int]]()
    tracker = make_tracker(counts, clock)
    dead = Worker(tracker, "dead", trained)
    dead.ask()
    dead.train(4)
    dead.train(2, report=False)
    tracker.release("dead")
    tracker.release("dead")
    worker = Worker(tracker, "0", trained)
    assert worker.ask().todo == ((4, 10),)
    finish(tracker, [worker], clock)
    assert trained == exactly(counts) + Counter({("slice0", 4): 1, ("slice0", 5): 1})
    report = tracker.report()
    assert (report.trained, report.dropped) == (10, 0)


def test_a_worker_that_leaves_gives_everything_back_where_it_stands():
    counts, clock, trained = [10, 10], Clock(), Counter[tuple[str, int]]()
    tracker = make_tracker(counts, clock)
    worker = Worker(tracker, "0", trained)
    worker.ask()
    worker.train(4)
    worker.leave()
    finish(tracker, [Worker(tracker, "1", trained)], clock)
    assert trained == exactly(counts)


def test_a_late_message_of_a_worker_that_was_given_up_does_not_count():
    trained = Counter[tuple[str, int]]()
    tracker = make_tracker([10])
    late = Worker(tracker, "late", trained)
    late.ask()
    late.train(4)
    session, grant = late.session, late.held[0].grant
    tracker.release("late")
    other = Worker(tracker, "other", trained)
    assert other.ask().todo[0][0] == 4
    assert tracker.progress(ReportProgress(session=session, grant=grant, trained=10)) == JoinAgain()
    assert tracker.report().trained == 4
    assert state_of(tracker, "slice0") == SliceState.ASSIGNED


def test_repeated_and_late_reports_change_nothing():
    tracker = make_tracker([10, 10])
    worker = Worker(tracker, "0", Counter())
    grant = worker.ask().grant
    for trained in (6, 2, 6):
        assert tracker.progress(ReportProgress(session=worker.session, grant=grant, trained=trained)).accepted
        assert tracker.report().trained == 6
    assert tracker.progress(ReportProgress(session=worker.session, grant=grant, trained=10)).accepted
    for trained in (10, 3, 0):
        late = ReportProgress(session=worker.session, grant=grant, trained=trained)
        assert not tracker.progress(late).accepted
    assert tracker.report().trained == 10


def test_at_the_end_an_idle_worker_gets_a_slice_of_the_busiest_one():
    clock, trained = Clock(), Counter[tuple[str, int]]()
    tracker = make_tracker([100] * 5, clock, shuffle=False)
    slow, slower, fast = (Worker(tracker, name, trained) for name in ("slow", "slower", "fast"))
    for worker in (slow, slower):
        worker.ask()
        worker.ask()
    fast.ask()
    for _ in range(5):
        clock.now += 1.0
        slow.train(4)
        slower.train(2)
        fast.train(20)
    answer = fast.ask()
    assert answer.key == "slice3"
    assert slower.held[1].key == "slice3"
    assert slower.ask().revoked == (slower.held[0].grant + 1,)
    finish(tracker, [slow, slower, fast], clock, batch=10)
    assert trained == exactly([100] * 5)


def test_a_slice_ahead_is_taken_also_if_it_is_not_of_the_worker_with_most_to_do():
    tracker = make_tracker([50, 50, 100, 1], shuffle=False)
    busy, full, idle = (Worker(tracker, name, Counter()) for name in ("busy", "full", "idle"))
    busy.ask()
    busy.ask()
    busy.train(10)
    full.ask()  # its only slice, which is not taken
    idle.ask()
    idle.train(1)
    assert idle.ask().key == "slice1"


def test_a_begin_decides_whose_slice_it_is():
    clock, trained = Clock(), Counter[tuple[str, int]]()
    tracker = make_tracker([100] * 3, clock, shuffle=False)
    busy = Worker(tracker, "busy", trained)
    for _ in range(2):
        busy.ask()
    thief = Worker(tracker, "thief", trained)
    thief.ask()
    stolen = thief.ask()
    assert isinstance(stolen, AskLater)  # it would have as much to do as the other one has
    busy.train(50)
    thief.train(100)
    assert thief.ask().key == "slice1"
    busy.train(50)
    assert busy.train(50) == 0
    finish(tracker, [busy, thief], clock, batch=10)
    assert trained == exactly([100] * 3)


def test_quarantine_ends_the_epoch_without_the_slice_and_the_next_ones_too():
    clock, trained = Clock(), Counter[tuple[str, int]]()
    tracker = make_tracker([4, 4], clock)
    worker, other = Worker(tracker, "0", trained), Worker(tracker, "1", trained)
    worker.ask()
    worker.train(1)
    broken = worker.held[0]
    told = QuarantineSlice(session=other.session, key=broken.key, reason="wrong checksum")
    assert tracker.quarantine(told).accepted
    assert tracker.quarantine(told).accepted
    assert not tracker.progress(ReportProgress(session=worker.session, grant=broken.grant, trained=4)).accepted
    finish(tracker, [worker, other], clock)
    assert (tracker.report().trained, tracker.report().dropped) == (5, 3)
    assert tracker.report().quarantined == {broken.key: "wrong checksum"}
    worker.epoch = 1
    worker.ask()
    finish(tracker, [worker], clock)
    assert (tracker.report().trained, tracker.report().dropped) == (4, 4)


def test_where_nothing_can_be_read_a_worker_is_told_instead_of_going_from_epoch_to_epoch():
    tracker = make_tracker([4, 4])
    worker = Worker(tracker, "0", Counter())
    for key in ("slice0", "slice1"):
        tracker.quarantine(QuarantineSlice(session=worker.session, key=key, reason="wrong checksum"))
    with pytest.raises(OptionError, match=r"2 slices.*all are quarantined"):
        worker.ask()


def test_the_next_epoch_opens_while_the_last_slices_of_this_one_are_held():
    tracker = make_tracker([2, 2])
    first, second = Worker(tracker, "0", Counter()), Worker(tracker, "1", Counter())
    first.epoch = 1
    assert first.ask().epoch == 0  # before anything of the next one
    second.ask()
    second.train(1)
    first.train(2)
    assert first.ask().epoch == 1
    first.train(2)
    second.train(1)
    assert is_over(second.ask())
    second.epoch = 1
    assert second.ask().epoch == 1


def test_no_worker_waits_for_the_last_slice_of_an_epoch_until_all_of_the_next_one_is_given_out():
    clock, trained = Clock(), Counter[tuple[str, int]]()
    tracker = make_tracker([2, 2], clock)
    slow, fast = Worker(tracker, "slow", trained), Worker(tracker, "fast", trained)
    slow.ask()
    slow.train(1)
    fast.ask()
    fast.train(2)
    assert fast.ask().reason is WaitReason.HELD
    fast.epoch = 1
    for _ in range(2):
        assert fast.ask().epoch == 1
        fast.train(2)
    assert (tracker.epoch, tracker.over, tracker.report().trained, tracker.report().ahead) == (0, False, 3, 4)
    assert fast.ask().reason is WaitReason.HELD
    fast.epoch = 2
    assert fast.ask().reason is WaitReason.EPOCH  # two are open
    grant = slow.held[0].grant
    slow.train(1)
    assert (tracker.epoch, tracker.over, tracker.report().trained, tracker.report().ahead) == (1, True, 4, 0)
    assert not tracker.progress(ReportProgress(session=slow.session, grant=grant, trained=0)).accepted
    assert fast.ask().epoch == 2
    assert trained == exactly([2, 2], times=2)


def test_what_comes_back_of_an_epoch_is_handed_out_before_anything_of_the_next_one():
    counts, clock, trained = [4, 4, 4], Clock(), Counter[tuple[str, int]]()
    tracker = make_tracker(counts, clock)
    dead, *others = (Worker(tracker, name, trained) for name in "abc")
    for worker in (dead, *others):
        worker.ask()
    dead.train(1)
    for worker in others:
        worker.train(4)
        worker.epoch = 1
        assert worker.ask().epoch == 1
    key = dead.held[0].key
    tracker.release("a")
    others[0].train(4)
    answer = others[0].ask()
    assert (answer.epoch, answer.key, answer.todo[0][0]) == (0, key, 1)
    others[0].train(4)
    assert (tracker.epoch, tracker.report().trained) == (1, 4)
    finish(tracker, others, clock)
    assert trained == exactly(counts, times=2)


def test_a_corrupt_slice_leaves_both_open_epochs():
    tracker = make_tracker([2, 2])
    first, second = Worker(tracker, "0", Counter()), Worker(tracker, "1", Counter())
    first.ask()
    second.ask()
    first.train(2)
    first.epoch = 1
    first.ask()
    key = second.held[0].key
    tracker.quarantine(QuarantineSlice(session=second.session, key=key, reason="broken"))
    assert (tracker.epoch, tracker.report().dropped) == (1, 2)
    second.epoch = 1
    finish(tracker, [first, second], Clock())
    assert (tracker.epoch, tracker.report().trained, tracker.report().dropped) == (1, 2, 2)


def test_an_epoch_begins_when_it_is_asked_for_and_all_of_the_one_before_is_given_out():
    tracker = make_tracker([4])
    worker = Worker(tracker, "0", Counter())
    worker.epoch = 1
    assert worker.ask().epoch == 0
    worker.train(4)
    late = Worker(tracker, "1", Counter())
    assert is_over(late.ask())  # it takes part in the end of the epoch that the others are in
    assert (tracker.epoch, tracker.over) == (0, True)
    late.epoch = 1
    late.ask()
    assert (tracker.epoch, tracker.report().trained) == (1, 0)


def test_another_process_of_the_name_takes_the_place_of_a_dead_one_and_a_repeated_join_does_not():
    trained = Counter[tuple[str, int]]()
    tracker = make_tracker([10])
    first = Worker(tracker, "0", trained)
    first.ask()
    first.train(3)
    again = tracker.join(JoinTracker(worker="0", incarnation="a"))
    assert again.session == first.session
    second = Worker(tracker, "0", trained, incarnation="b")
    assert tracker.request(RequestSlice(session=first.session, epoch=0)) == JoinAgain()
    assert second.ask().todo[0][0] == 3


def test_a_request_looks_at_no_more_slices_than_there_are(monkeypatch):
    """Not a matter of time: what is looked at in an epoch does not grow with the number of requests."""
    looked_at, take = [], EpochSlices.take

    def taken(slices, index):
        looked_at.append(index)
        return take(slices, index)

    monkeypatch.setattr(EpochSlices, "take", taken)
    tracker = make_tracker([1] * 2000)
    workers = [Worker(tracker, str(rank), Counter()) for rank in range(3)]
    for epoch in range(2):
        looked_at.clear()
        while not (tracker.over and tracker.epoch == epoch):
            for worker in workers:
                worker.epoch = epoch
                worker.ask()
                worker.train(1)
    assert len(looked_at) <= 2000


def test_messages_that_are_not_allowed():
    tracker = make_tracker([10])
    worker = Worker(tracker, "0", Counter())
    grant = worker.ask().grant
    for trained in (-1, 11, 1.5, True):
        with pytest.raises(OptionError, match="trained="):
            tracker.progress(ReportProgress(session=worker.session, grant=grant, trained=trained))
    with pytest.raises(OptionError, match="key='elsewhere'"):
        tracker.quarantine(QuarantineSlice(session=worker.session, key="elsewhere", reason="?"))
    assert len(tracker._workers) == 1
