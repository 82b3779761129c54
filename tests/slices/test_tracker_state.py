"""A tracker goes on where its state was saved, and refuses what is not its own."""

from __future__ import annotations

import copy
import io
from collections import Counter

import pytest
import torch

from lightning_bytescheduler.exceptions import TrackerStateError
from lightning_bytescheduler.slices.catalogue import SliceCatalogue
from lightning_bytescheduler.slices.slice import SliceState
from lightning_bytescheduler.slices.tracker import Assignment, JoinAgain, QuarantineSlice, ReportProgress, SliceTracker
from tests.slices.tracker_workers import Clock, Worker, finish, make_tracker, slices, state_of

COUNTS = [5, 9, 2, 7, 4, 6]


def with_two_epochs(**options):
    """The same, when a third worker has gone on to the next epoch, and has trained on some of it."""
    tracker, workers, trained = in_mid_epoch(**options)
    fast = EachEpoch(tracker, "2", trained)
    while isinstance(fast.ask(), Assignment):
        fast.train(9)
    fast.epoch = 1
    for _ in range(2):
        assert fast.ask().epoch == 1
        fast.train(1)
    return tracker, [*workers, fast], trained


class EachEpoch(Worker):
    """Tells the epochs of what it trains on apart."""

    def count(self, held, sample):
        self.trained[held.key, sample, held.epoch] += 1


def round_trip(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def in_mid_epoch(**options):
    """A tracker with two workers in mid-slice, one of them with slices ahead, and what was trained on."""
    clock, trained = Clock(), Counter[tuple[str, int]]()
    tracker = make_tracker(COUNTS, clock, **options)
    workers = [Worker(tracker, name, trained) for name in "01"]
    for worker in (*workers, workers[0], workers[0]):
        worker.ask()
        worker.train(1)
    return tracker, workers, trained


@pytest.mark.parametrize("stay", [None, ["0", "1"]])
def test_a_worker_of_the_same_name_continues_exactly_what_it_held(stay):
    tracker, workers, _ = in_mid_epoch()
    state = round_trip(tracker.state_dict())
    resumed = make_tracker(COUNTS)
    resumed.load_state_dict(state, workers=stay)
    for before in reversed(workers):
        after = Worker(resumed, before.name, Counter(), incarnation="b")
        for held in before.held:
            assignment = after.ask()
            assert (assignment.key, assignment.todo[0][0]) == (held.key, held.position)


@pytest.mark.parametrize("names", [["0"], ["x", "y", "z"], ["0", "1", "2"]])
@pytest.mark.parametrize("said", [True, False])
def test_any_workers_finish_the_epoch_exactly(names, said):
    """Whether it is said who goes on, or the others are given up later."""
    tracker, _, trained = in_mid_epoch()
    state = round_trip(tracker.state_dict())
    clock = Clock()
    resumed = make_tracker(COUNTS, clock)
    resumed.load_state_dict(state, workers=names if said else None)
    workers = [Worker(resumed, name, trained, incarnation="b") for name in names]
    for name in {"0", "1"} - set(names):
        assert (name in resumed.state_dict()["workers"]) is not said
        resumed.release(name)
    finish(resumed, workers, clock, batch=2)
    assert set(trained.values()) == {1}
    assert sum(trained.values()) == sum(COUNTS)
    assert resumed.report().dropped == 0


def test_the_rest_of_the_epoch_and_the_next_come_in_the_same_order():
    tracker, workers, _ = in_mid_epoch()
    resumed = make_tracker(COUNTS)
    resumed.load_state_dict(round_trip(tracker.state_dict()))
    others = [Worker(resumed, worker.name, Counter(), incarnation="b") for worker in workers]
    for other in others:
        while getattr(other.ask(), "first", 0) or len(other.held) < len(workers[int(other.name)].held):
            pass

    def keys(team):
        team[1].leave()
        found = []
        for team[0].epoch in (0, 1):
            team[0].ask()
            while not team[0].tracker.over:
                team[0].ask()
                team[0].train(9)
                found.append([held.key for held in team[0].held])
        return found

    assert keys(workers) == keys(others)


@pytest.mark.parametrize("names", [["2"], ["x", "y"], ["0", "1", "2"]])
def test_two_open_epochs_go_on_exactly(names):
    tracker, before, trained = with_two_epochs()
    state = round_trip(tracker.state_dict())
    clock = Clock()
    resumed = make_tracker(COUNTS, clock)
    resumed.load_state_dict(state)
    assert resumed.report() == tracker.report()
    assert resumed.report().ahead > 0
    workers = [EachEpoch(resumed, name, trained, incarnation="b") for name in names]
    if "2" in names:
        held = [workers[-1].ask() for _ in before[2].held]
        assert [(one.epoch, one.key, one.todo[0][0]) for one in held] == [
            (one.epoch, one.key, one.position) for one in before[2].held
        ]
    for name in {"0", "1", "2"} - set(names):
        resumed.release(name)
    finish(resumed, workers, clock, batch=2)
    assert (resumed.epoch, resumed.report().dropped) == (1, 0)
    assert set(trained.values()) == {1}
    assert len(trained) == 2 * sum(COUNTS)


def test_what_was_saved_at_the_end_of_an_epoch_goes_on_with_the_next():
    tracker = make_tracker([4])
    worker = Worker(tracker, "0", Counter())
    worker.ask()
    worker.train(4)
    assert (tracker.epoch, tracker.over) == (0, True)
    resumed = make_tracker([4])
    resumed.load_state_dict(round_trip(tracker.state_dict()), workers=["0"])
    assert (resumed.epoch, resumed.over) == (1, False)


def test_sessions_and_grants_of_before_do_not_count():
    tracker, workers, _ = in_mid_epoch()
    old = ReportProgress(session=workers[0].session, grant=workers[0].held[0].grant, trained=2)
    tracker.load_state_dict(tracker.state_dict())
    assert tracker.progress(old) == JoinAgain()
    worker = Worker(tracker, "0", Counter())
    assert worker.session not in {before.session for before in workers}
    assert worker.ask().grant not in {held.grant for before in workers for held in before.held}


def test_quarantine_and_dropped_samples_are_kept():
    tracker, workers, _ = in_mid_epoch()
    tracker.quarantine(QuarantineSlice(session=workers[1].session, key="slice4", reason="broken"))
    tracker.release("1")
    before = tracker.report()
    assert before.dropped > 0
    resumed = make_tracker(COUNTS)
    resumed.load_state_dict(round_trip(tracker.state_dict()))
    assert resumed.report() == before
    assert state_of(resumed, "slice4") == SliceState.QUARANTINED


def test_a_checkpoint_is_a_byte_a_slice():
    tracker = make_tracker([3] * 20_000)
    worker = Worker(tracker, "0", Counter())
    for _ in range(5000):
        worker.ask()
        worker.train(3)
    file = io.BytesIO()
    torch.save(tracker.state_dict(), file)
    assert file.tell() < 20_000 + 8_000


def test_a_state_is_not_changed_by_what_the_tracker_does_next():
    tracker, workers, _ = in_mid_epoch()
    state = tracker.state_dict()
    kept = copy.deepcopy(state)
    for _ in range(5):
        workers[0].ask()
        workers[0].train(5)
    tracker.quarantine(QuarantineSlice(session=workers[1].session, key="slice4", reason="broken"))
    assert str(state) == str(kept)


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (slices([*COUNTS, 1]), "slices was 6, is 7 now"),
        (slices([5, 9, 2, 7, 4, 7]), "samples was 33, is 34 now"),
        (slices([5, 9, 7, 2, 4, 6]), "keys, order or sample counts"),
        (slices(COUNTS, prefix="other"), "keys, order or sample counts"),
    ],
)
def test_a_state_of_other_data_is_refused_with_what_differs(found, message):
    tracker, _, _ = in_mid_epoch()
    other = SliceTracker(SliceCatalogue(found), clock=Clock())
    with pytest.raises(TrackerStateError, match=message):
        other.load_state_dict(tracker.state_dict())


@pytest.mark.parametrize("options", [{"seed": 1}, {"shuffle": False}])
def test_a_state_of_another_order_is_refused(options):
    tracker, _, _ = in_mid_epoch()
    other = make_tracker(COUNTS, **options)
    with pytest.raises(TrackerStateError, match=next(iter(options))):
        other.load_state_dict(tracker.state_dict())


DAMAGE = {
    "version": [None, 1, True],
    "order": [None, {}, {"slices": 6, "samples": 33, "keys": "", "seed": 0, "shuffle": 1}],
    "epochs": [None, []],
    "epoch": [-1, None, 0.5],
    "used": [None, [True] * 6, torch.zeros(6, dtype=torch.uint8), torch.zeros(5, dtype=torch.bool)],
    "done": [
        None,
        {0: None},
        {-1: [(0, 1)]},
        {0: [(-1, 1)]},
        {0: [(0, 0.5)]},
        {6: [(0, 1)]},
        {0: [(0, 99)]},
        {0: [(1, 1)]},
        {0: [(0, 2), (1, 3)]},
    ],
    "workers": [
        None,
        {"0": 1},
        {"": []},
        {"0": [[0, 0]]},
        {"0": [[0, 0, 1]]},
        {"0": [[0, -1, True]]},
        {"0": [[0, 0, True, 1]]},
    ],
    "quarantined": [None, {7: "?"}, {1: None}, {"one": "?"}, {-1: "?"}],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in DAMAGE.items() for value in values])
def test_a_damaged_state_is_refused_and_changes_nothing(name, value):
    tracker, workers, _ = in_mid_epoch()
    state = tracker.state_dict()
    (epoch,) = state["epochs"]
    before = str(tracker.state_dict())
    with pytest.raises(TrackerStateError):
        tracker.load_state_dict(
            {**state, "epochs": [{**epoch, name: value}]} if name in epoch else {**state, name: value}
        )
    assert str(tracker.state_dict()) == before
    assert workers[0].ask() is not None
    assert len(workers[0].held) == 4
