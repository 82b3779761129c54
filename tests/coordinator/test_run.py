"""The core of a run, without a service: who joins in mid-round, who leaves with an update under way, and a restart."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from lightning_bytescheduler import __version__
from lightning_bytescheduler.coordinator.membership import Member
from lightning_bytescheduler.coordinator.run import Merge, Offer, Place, Run
from lightning_bytescheduler.diloco import coordinator_protocol as protocol
from lightning_bytescheduler.diloco import messages
from lightning_bytescheduler.diloco.round_record import RoundRecord
from lightning_bytescheduler.exceptions import OptionError
from tests.coordinator.runs import options_of, weights_of
from tests.coordinator.small_worker import described

DIGEST = "d" * 32


class Played:
    """A run whose clock moves only when a test moves it."""

    def __init__(self, **options: Any) -> None:
        self.now = 0.0
        self.posted: list[tuple[str, Any]] = []
        self.merges: list[Merge] = []
        self.records: list[RoundRecord] = []
        self.run = Run(
            options_of(**options),
            post=lambda name, message: self.posted.append((name, message)),
            merge=self.merges.append,
            on_round=self.records.append,
        )

    def hello(self, name: str, *, session: str = "", version: int = 0, chain: str = "0" * 32) -> Member:
        hello = protocol.Hello(
            protocol=protocol.PROTOCOL,
            package=__version__,
            worker=name,
            session=session,
            model=described(weights_of()),
            version=version,
            chain=chain,
        )
        answer = self.run.hello(hello, self.now)
        assert isinstance(answer, tuple), answer
        member, self.welcome = answer
        if not self.run.has_weights:
            self.run.provided(self.now)
        return member

    def say(self, member: Member, *said: Any) -> list[Any]:
        """Returns what the same worker is told."""
        del self.posted[:]
        self.run.hear(member, said, self.now)
        return [message for name, message in self.posted if name == member.name]

    def alive(self, member: Member) -> None:
        """It answers a ping; the others have a connection, too."""
        self.run.members.hear(member, self.now)
        heard = {**dict.fromkeys(self.run.rounds.workers, 0.0), member.name: self.now}
        self.run.rounds.note_connections(heard, now=self.now)

    def step(self, member: Member, round: int, steps: int) -> list[Any]:
        return self.say(
            member,
            messages.StepReport(
                worker=member.name, round=round, steps=steps, samples=steps, batch_size=1, seconds=0.01
            ),
        )

    def offer(self, member: Member, round: int, steps: int) -> Offer:
        return Offer(member=member, round=round, fragment=0, steps=steps, samples=steps, round_samples=steps)

    def send(self, member: Member, round: int, steps: int) -> None:
        offer = self.offer(member, round, steps)
        self.run.sending(offer, self.now)
        self.run.arrived(offer, self.now, Place(steps))

    def merge(self) -> None:
        merge = self.merges.pop()
        booked = self.run.contributions._of_round.get(merge.round, ())
        total = sum(one.samples for one in booked) if merge.counts else 0
        digest = DIGEST if total else ""
        merge.digest, merge.total = digest, total
        self.run.merged(merge, oldest_mean=1)
        self.run.announce(merge)

    def one_round(self, *members: Member, round: int, steps: int) -> None:
        for member in members:
            self.say(member, messages.RoundStarted(worker=member.name, round=round))
            self.step(member, round, steps)
        for member in members:
            self.send(member, round, steps)
        self.merge()


def join(worker: Member, **done: int) -> messages.JoinRounds:
    return messages.JoinRounds(worker=worker.name, **done)


def begun(**options: Any) -> tuple[Played, Member, Member]:
    """Two workers, after round 1."""
    played = Played(samples_per_round=100, inner_steps=None, workers=2, **options)
    one, other = played.hello("one"), played.hello("other")
    played.say(one, join(one))
    played.say(other, join(other))
    played.one_round(one, other, round=1, steps=50)
    return played, one, other


def test_a_worker_that_was_killed_and_started_anew_is_waited_for_once() -> None:
    played, one, other = begun()
    assert played.hello("other").name == "other-2"  # while that one has a connection, another one has its name
    played.run.members.disconnect(other)
    again = played.hello("other")
    assert again.name == "other"
    assert again.incarnation > other.incarnation
    assert list(played.run.rounds.workers) == [one.name]  # until it joins
    played.say(again, join(again))
    assert len(played.run.rounds.workers) == 2


def test_an_update_of_a_former_process_does_not_end_the_round_of_the_one_that_has_its_name() -> None:
    played, _, other = begun()
    number = played.run.rounds.round
    played.step(other, number, 10)
    offer = played.offer(other, number, 10)
    played.run.sending(offer, played.now)
    played.run.members.disconnect(other)
    again = played.hello("other")
    played.say(again, join(again))
    played.run.arrived(offer, played.now, Place(10))
    assert played.run.place_of(played.offer(again, number, 3)) == Place(3)


@pytest.mark.parametrize("version", [0, 1])
def test_steps_of_a_worker_that_was_given_up_count_when_it_comes_back_in_the_same_round(version: int) -> None:
    played, one, other = begun()
    session = other.session
    played.now = 59.0
    played.step(one, 2, 10)
    played.now = 61.0
    played.run.tick(played.now)
    assert [member.name for member in played.run.members] == ["one"]
    chain = played.run.lineage.chains.get(version, "") or "0" * 32
    back = played.hello("other", session=session, version=version, chain=chain)  # if it is behind, it merges first
    assert not played.welcome.fetch
    told = played.say(back, join(back, round=2, steps=30, samples=30))
    assert messages.Acknowledge(round=2, reported=30) in told
    assert played.run.rounds.left == 60


def test_the_lead_of_a_worker_that_has_died_does_not_wait_for_its_lease() -> None:
    played, one, other = begun()
    assert played.run.leader == "one"
    del played.posted[:]
    played.run.members.disconnect(one)
    played.now = played.run.options.rounds.silent_after
    played.alive(other)
    played.run.tick(played.now)
    assert played.run.leader == "other"
    assert ("other", messages.LeaderAppointed(worker="other")) in played.posted
    assert played.run.counters["silent"] == 1
    played.hello("one", session=one.session, version=1, chain=played.run.lineage.chain)
    assert not played.welcome.leads


def test_steps_with_other_weights_do_not_count() -> None:
    played, one, other = begun()
    played.now = 59.0
    played.step(one, 2, 10)
    played.now = 61.0
    played.run.tick(played.now)
    back = played.hello("other", session=other.session, version=1, chain="e" * 32)
    assert played.welcome.fetch
    played.say(back, join(back, round=2, steps=30, samples=30))
    assert played.run.rounds.left == 90


def test_steps_of_the_open_round_count_after_a_restart() -> None:
    played, one, other = begun()
    sessions = one.session, other.session
    state, chain = played.run.state_dict(), played.run.lineage.chain
    again = Played(samples_per_round=100, inner_steps=None, workers=2)
    again.run.load_state_dict(state, again.now)
    one, other = (
        again.hello(name, session=session, version=1, chain=chain)
        for name, session in zip(("one", "other"), sessions, strict=True)
    )
    assert again.say(one, join(one, round=2, steps=30, samples=30)) == []
    again.step(one, 2, 31)
    again.say(other, join(other, round=2, steps=40, samples=40))
    assert (again.run.rounds.round, again.run.rounds.left) == (2, 30)
    again.step(one, 2, 32)
    assert again.run.rounds.left == 28


def test_a_restarted_coordinator_does_not_wait_for_a_worker_that_pauses() -> None:
    played, one, other = begun()
    sessions = one.session, other.session
    again = Played(samples_per_round=100, inner_steps=None, workers=2)
    again.run.load_state_dict(played.run.state_dict(), again.now)
    one, other = (again.hello(name, session=session) for name, session in zip(("one", "other"), sessions, strict=True))
    again.say(one, join(one))
    again.run.tick(again.now)
    assert again.run.rounds.round == 1
    again.say(other, messages.PauseRounds(worker="other"))
    again.run.tick(again.now)
    assert again.run.rounds.round == 2


def test_an_update_of_earlier_rounds_counts_if_its_worker_leaves_before_a_step_of_this_one() -> None:
    played = Played(samples_per_round=100, inner_steps=None, fragments=2)
    one = played.hello("one")
    played.say(one, join(one))
    played.one_round(one, round=1, steps=100)
    offer = Offer(member=one, round=2, fragment=1, steps=0, samples=100, round_samples=0)
    played.run.sending(offer, played.now)
    played.run.arrived(offer, played.now, Place(100))
    played.say(one, messages.LeaveRounds(worker="one"))
    assert [(merge.round, merge.counts) for merge in played.merges] == [(2, True)]


@pytest.mark.parametrize(("damage", "says"), [({"version": -1}, r"\$\.version"), ({"chain": None}, r"\$\.chain")])
def test_a_damaged_state_is_refused_with_what_is_wrong(damage: dict[str, Any], says: str) -> None:
    played, _, _ = begun()
    again = Played(samples_per_round=100, inner_steps=None, workers=2)
    state = played.run.state_dict()
    with pytest.raises(OptionError, match=rf"state=.*what a coordinator has saved of a run.*{says}"):
        again.run.load_state_dict({**state, **damage}, again.now)
    del state["model"]
    with pytest.raises(OptionError, match="missing required field `model`"):
        again.run.load_state_dict(state, again.now)


def test_a_restart_before_the_first_round_waits_for_as_many_workers_as_the_start() -> None:
    played = Played(inner_steps=1, samples_per_round=None, workers=2)
    played.hello("one")
    again = Played(inner_steps=1, samples_per_round=None, workers=2)
    again.run.load_state_dict(played.run.state_dict(), again.now)
    again.now = 2 * again.run.options.rounds.silent_after
    one = again.hello("one")
    again.say(one, join(one))
    again.run.tick(again.now)
    assert again.run.rounds.round == 0
    other = again.hello("other")
    again.say(other, join(other))
    assert again.run.rounds.round == 1


def test_an_update_without_samples_that_is_sent_twice_is_known() -> None:
    played, one, _ = begun()
    offer = played.offer(one, 2, 0)
    played.run.sending(offer, played.now)
    played.run.arrived(offer, played.now, Place(0))
    assert played.run.contributions.seen(offer) == Place(0)
    assert played.run.contributions.take(2) == ()


def test_an_update_that_was_under_way_when_its_worker_left_counts() -> None:
    played, one, other = begun()
    offer = played.offer(other, 2, 20)
    played.run.sending(offer, played.now)
    played.say(other, messages.LeaveRounds(worker="other"))
    played.run.arrived(offer, played.now, Place(20))
    played.say(one, messages.LeaveRounds(worker="one"))  # so that no other update is part of the round
    assert [(merge.round, merge.counts) for merge in played.merges] == [(2, True)]
    played.merge()
    assert played.run.samples == 120


def test_a_worker_that_fetches_weights_and_answers_pings_is_counted_on() -> None:
    played, one, other = begun()
    for _ in range(4):
        played.now += played.run.options.rounds.silent_after
        played.step(one, 2, int(played.now))
        played.alive(other)
    played.say(one, messages.PauseRounds(worker="one"))
    assert not played.run.rounds.collecting  # the other's update is still to come
    assert played.merges == []


@pytest.mark.parametrize(
    ("field", "value"),
    [("steps", 2**41), ("samples", 10**30), ("batch_size", 10**320), ("in_flight", 2**64), ("seconds", 1e308)],
)
def test_numbers_that_would_break_the_sums_of_all_are_no_message(field: str, value: float) -> None:
    said = {"kind": "StepReport", "worker": "w", "round": 1, "steps": 1, "samples": 1, "batch_size": 1, "seconds": 1.0}
    with pytest.raises(OptionError, match=field):
        messages.decode(json.dumps({**said, field: value}))


@pytest.mark.parametrize("seconds", [5e-324, 1e-30, 1e-9, 1e9])
@pytest.mark.parametrize("number", [0, 1, messages.MOST])
def test_a_member_with_ill_will_does_not_end_the_run(number: int, seconds: float) -> None:
    played = Played(workers=2, inner_steps=3)
    good, other = played.hello("good"), played.hello("other")
    for member in (good, other):
        played.say(member, messages.JoinRounds(worker=member.name))
    for round in (1, 2):
        report = messages.StepReport(
            worker="other",
            round=round,
            steps=max(number, 1),
            samples=number,
            batch_size=number,
            seconds=seconds,
            in_flight=number,
            loss=1e308,
        )
        played.say(other, report)
        for steps in (1, 2, 3):
            played.step(good, round, steps)
        for member, steps in ((good, 3), (other, number)):
            if played.run.rounds.expects(member.name, round):
                played.send(member, round, steps)
        played.run.tick(played.now)
        if not played.merges:  # a round goes on without it at its deadline
            assert played.run.rounds.next_tick is not None
            played.now = max(played.now, played.run.rounds.next_tick)
            played.run.tick(played.now)
        played.merge()
        for _, message in played.posted:  # which honest workers read, too
            messages.decode(json.dumps(msgspec.to_builtins(message)))
    assert [record.round for record in played.records] == [1, 2]
