"""Joins, leaves, breaks, returns and restarts in any order: one name, one session and one leader."""

from __future__ import annotations

import itertools
import json
import time
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from lightning_bytescheduler import __version__
from lightning_bytescheduler.coordinator.membership import Member, Membership, difference
from lightning_bytescheduler.diloco.coordinator_protocol import PROTOCOL, Hello, ModelParameter, run_options
from lightning_bytescheduler.exceptions import OptionError

LEASE, EXPIRY = 10.0, 30.0


def hello(worker: str = "host", session: str = "", ranks: int = 1) -> Hello:
    return Hello(protocol=1, package="1", worker=worker, session=session, model=(), ranks=ranks)


def membership(**options: Any) -> Membership:
    numbers = itertools.count(1)
    return Membership(LEASE, expiry=EXPIRY, make_session=lambda: f"{next(numbers):032x}", **options)


def greeting(*names: str, **options: Any) -> Hello:
    model = tuple(ModelParameter(name=name, shape=(2,), dtype="float32") for name in names)
    return Hello(protocol=PROTOCOL, package=__version__, worker="host", model=model, options=options)


def test_an_option_that_says_the_default_is_no_other_one() -> None:
    assert difference(greeting("a", inner_steps=100), run_options(), ()) is None
    assert "inner_steps=50 is not what" in str(difference(greeting("a", inner_steps=50), run_options(), ()))


def test_a_name_that_is_there_twice_is_found_at_once() -> None:
    names = [str(number) for number in range(60_000)]
    began = time.process_time()
    assert "two parameters of the name '59999'" in str(difference(greeting(*names, names[-1]), run_options(), ()))
    assert time.process_time() - began < 5


def test_a_session_of_other_letters_is_none() -> None:
    assert membership().by_session(b"\xff".decode(errors="surrogateescape")) is None


def test_wishes_are_made_unique() -> None:
    members = membership()
    assert [members.join(hello(), 0.0).name for _ in range(3)] == ["host", "host-2", "host-3"]
    long = [members.join(hello("x" * 200), 0.0).name for _ in range(2)]
    assert long == ["x" * 200, "x" * 198 + "-2"]


def test_sessions_are_hard_to_guess() -> None:
    members = Membership(LEASE)
    sessions = {members.join(hello(), 0.0).session for _ in range(50)}
    assert len(sessions) == 50
    assert all(len(bytes.fromhex(session)) == 16 for session in sessions)


def test_one_who_comes_back_is_the_same() -> None:
    members = membership()
    first = members.join(hello(), 0.0)
    members.disconnect(first)
    again = members.join(hello("another", first.session, ranks=4), 5.0)
    assert again is first
    assert (again.name, again.incarnation, again.ranks) == ("host", 1, 4)
    assert members.by_session(first.session) is first
    assert members.by_session("f" * 32) is None
    assert members.by_session("") is None


def test_a_lease_is_renewed_by_signs_of_life_and_runs_out() -> None:
    members = membership()
    one, two = members.join(hello("one"), 0.0), members.join(hello("two"), 0.0)
    members.hear(one, 6.0)
    assert members.expire(9.9) == ()
    assert members.expire(10.0) == (two,)
    assert members.by_session(two.session) is members.by_name("two") is None
    assert members.expire(15.9) == ()
    assert members.expire(16.0) == (one,)


def test_a_join_gives_up_no_member_unheard() -> None:
    members = membership()
    one = members.join(hello("one"), 0.0)
    members.join(hello("two"), 50.0)
    assert members.by_name("one") is one
    assert members.expire(50.0) == (one,)


def test_a_name_is_kept_for_the_one_who_was_given_up() -> None:
    members = membership()
    one = members.join(hello(), 0.0)
    members.expire(10.0)
    assert members.join(hello(), 11.0).name == "host-2"
    assert members.join(hello(session=one.session), 12.0) is one
    assert [member.name for member in members] == ["host-2", "host"]
    members.expire(22.0)
    assert members.join(hello(), 52.0).name == "host"  # the name is free again
    assert members.join(hello(session=one.session), 52.0).session != one.session


def test_one_who_was_forgotten_is_another_one_also_after_a_restart() -> None:
    members = membership()
    one = members.join(hello(), 0.0)
    members.expire(45.0)
    two = members.join(hello(session=one.session), 45.0)
    again = membership()
    again.load_state_dict(members.state_dict(), 45.0)
    three = again.join(hello(session=one.session), 45.0)
    assert (two.name, three.name) == ("host", "host-2")
    assert again.by_session(two.session).name == "host"  # type: ignore[union-attr]


def test_one_who_was_given_up_after_a_restart_is_told_its_session() -> None:
    members = membership()
    one = members.join(hello(), 0.0)
    again = membership()
    again.load_state_dict(members.state_dict(), 0.0)
    again.expire(10.0)
    back = again.join(hello(session=one.session), 11.0)
    assert (back.name, back.session) == ("host", one.session)


def test_the_name_of_one_who_has_left_is_free() -> None:
    members = membership()
    one = members.join(hello(), 0.0)
    members.leave(one)
    members.leave(one)
    again = members.join(hello(session=one.session), 1.0)
    assert (again.name, again.incarnation) == ("host", 2)
    assert again.session != one.session


def test_the_leader_is_the_longest_standing_and_a_break_moves_nothing() -> None:
    members = membership()
    assert members.leader is None
    a, b, c = (members.join(hello(name), 0.0) for name in "abc")
    assert members.leader == "a"
    members.disconnect(a)
    assert members.leader == "a"
    members.disconnect(b)
    members.leave(a)
    assert members.leader == "c"  # b has been there for longer, and cannot be told
    members.join(hello(session=b.session), 1.0)
    assert members.leader == "c"
    members.hear(b, 11.0)
    members.expire(11.0)
    assert members.leader == "b"
    members.disconnect(b)
    assert members.leader is None
    members.disconnect(c)  # it was given up, and its connection is closed then
    assert not c.connected


def test_another_one_leads_once_the_leader_is_silent_and_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    members = membership(silence=3.0)
    a, _ = (members.join(hello(name), 0.0) for name in "ab")
    members.disconnect(a)
    assert members.fall_silent(2.9) == ()
    assert members.leader == "a"
    assert members.fall_silent(3.0) == (a,)
    assert members.leader == "b"
    assert members.fall_silent(4.0) == ()
    (line,) = caplog.messages
    assert "a has no connection, and was not heard of for 3 s" in line
    assert "After 10 s it is given up" in line
    members.join(hello(session=a.session), 5.0)
    assert members.leader == "b"  # one leads, and a leader that comes back is told that it does not
    members.disconnect(a)
    assert members.fall_silent(8.0) == (a,)


def test_a_silent_leader_leads_on_while_no_other_member_can(caplog: pytest.LogCaptureFixture) -> None:
    members = membership(silence=3.0)
    a, b = (members.join(hello(name), 0.0) for name in "ab")
    members.disconnect(a)
    members.disconnect(b)
    assert set(members.fall_silent(3.0)) == {a, b}
    members.join(hello(session=a.session), 4.0)
    assert members.leader == "a"
    members.disconnect(a)
    members.join(hello(session=b.session), 5.0)
    assert members.leader == "a"  # a short break moves nothing
    members.fall_silent(7.0)
    assert members.leader == "b"


def test_a_connection_that_is_found_closed_late_is_not_the_new_one() -> None:
    members = membership()
    one = members.join(hello(), 0.0)
    members.join(hello(session=one.session), 1.0)
    members.disconnect(one)
    assert one.connected


def test_one_who_was_given_up_and_is_back_is_not_disconnected_by_its_former_connection() -> None:
    members = membership()
    one = members.join(hello("one"), 0.0)
    assert members.expire(LEASE) == (one,)
    assert members.join(hello("one", one.session), LEASE) is one
    members.disconnect(one)  # the connection that it was given up with has ended only now
    assert one.connected
    assert members.leader == "one"
    members.disconnect(one)
    assert not one.connected


def test_a_restart_knows_everybody_by_the_session_and_holds_no_secret() -> None:
    members = membership()
    one, two = members.join(hello("one"), 0.0), members.join(hello("two"), 0.0)
    text = json.dumps(members.state_dict())
    assert one.session not in text
    again = membership()
    again.load_state_dict(json.loads(text), 1000.0)
    assert again.leader is None
    back = again.join(hello("any", two.session), 1005.0)
    assert (back.name, back.session, back.incarnation) == ("two", two.session, two.incarnation)
    assert again.leader == "one"
    assert [member.name for member in again.expire(1010.0)] == ["one"]
    assert again.leader == "two"
    assert again.join(hello("new"), 1011.0).incarnation == 3


@pytest.mark.parametrize(
    "change",
    [
        {"members": [{"name": "", "digest": "0" * 64, "incarnation": 1, "ranks": 1}]},
        {"incarnations": -1},
        {"leader": 7},
    ],
)
def test_a_damaged_state_is_refused(change: dict[str, Any]) -> None:
    members = membership()
    members.join(hello(), 0.0)
    with pytest.raises(OptionError, match="state of the members"):
        membership().load_state_dict({**members.state_dict(), **change}, 0.0)
    state = members.state_dict()
    with pytest.raises(OptionError, match="once"):
        membership().load_state_dict({**state, "members": state["members"] * 2}, 0.0)


def test_there_is_room_for_so_many_and_no_more_is_kept() -> None:
    members = membership(most=20)
    for number in range(500):
        member = members.join(hello(f"w{number}"), number)
        members.expire(number)
        if number % 2:
            members.leave(member)
    assert len(members) <= 20
    assert len(members.state_dict()["members"]) <= 40
    full = membership(most=2)
    full.join(hello(), 0.0)
    full.join(hello(), 0.0)
    with pytest.raises(OptionError, match="2 at most"):
        full.join(hello(), 0.0)


def test_no_secret_is_shown() -> None:
    member = membership().join(hello(), 0.0)
    assert member.session not in repr(member)
    assert member.digest not in repr(member)


class AnyOrder(RuleBasedStateMachine):
    """Workers hold their sessions; the coordinator is restarted from its state."""

    sessions = Bundle("sessions")

    def __init__(self) -> None:
        super().__init__()
        numbers = itertools.count(1)
        self.make = lambda: f"{next(numbers):032x}"
        self.members = Membership(LEASE, expiry=EXPIRY, make_session=self.make)
        self.now = 0.0
        self.given: list[str] = []
        self.last: dict[str, tuple[str, float]] = {}  # session: name, last sign of life

    def note(self, member: Member, session: str) -> None:
        for other, (name, heard) in list(self.last.items()):
            if name == member.name and other != session:
                assert self.now >= heard + LEASE + EXPIRY  # a name is free when its owner is forgotten for good
                del self.last[other]
        self.last[session] = member.name, self.now

    @rule(target=sessions, wish=st.sampled_from(["a", "b", "a-2"]))
    def join(self, wish: str) -> str:
        member = self.members.join(hello(wish), self.now)
        self.given.append(member.session)
        self.note(member, member.session)
        return member.session

    @rule(target=sessions, session=sessions)
    def come_back(self, session: str) -> Any:
        name, heard = self.last.get(session, ("", -1e9))
        member = self.members.join(hello("a", session), self.now)
        if self.now < heard + LEASE:
            assert (member.name, member.session) == (name, session)
        self.note(member, member.session)
        if member.session == session:
            return multiple()
        self.given.append(member.session)
        return member.session

    @rule(session=sessions)
    def say_something(self, session: str) -> None:
        member = self.members.by_session(session)
        if member is not None:
            self.members.hear(member, self.now)
            self.note(member, session)  # the member's own is empty from a restart until it says Hello

    @rule(session=sessions)
    def lose_connection(self, session: str) -> None:
        member = self.members.by_session(session)
        if member is not None:
            self.members.disconnect(member)

    @rule(session=consumes(sessions))
    def leave(self, session: str) -> None:
        member = self.members.by_session(session)
        if member is not None:
            self.members.leave(member)
            self.last.pop(session, None)

    @rule(seconds=st.sampled_from([0.5, 4.0, 11.0, 45.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        before = {member.name for member in self.members}
        over = self.members.expire(self.now)
        assert {member.name for member in over} == before - {member.name for member in self.members}
        assert all(self.now >= member.heard + LEASE for member in over)

    @rule()
    def restart(self) -> None:
        state = json.loads(json.dumps(self.members.state_dict()))
        self.members = Membership(LEASE, expiry=EXPIRY, make_session=self.make)
        self.members.load_state_dict(state, self.now)
        self.last = {session: (name, self.now) for session, (name, _) in self.last.items() if name in self.names()}

    def names(self) -> list[str]:
        return [member.name for member in self.members]

    @invariant()
    def names_are_unique(self) -> None:
        names = self.names()
        assert len(set(names)) == len(names)
        assert all(self.members.by_name(member.name) is member for member in self.members)

    @invariant()
    def sessions_never_repeat(self) -> None:
        assert len(set(self.given)) == len(self.given)

    @invariant()
    def one_leads_if_anybody_is_connected(self) -> None:
        connected = any(member.connected for member in self.members)
        assert (self.members.leader is not None) == connected
        assert not connected or self.members.leader in self.names()


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(stateful_step_count=30)
