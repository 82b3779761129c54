"""The members of a run: names, sessions, leases and the leader. Pure; the clock is an argument.

A session is 128 random bits. A worker gets it with its name, and shows it with every request. It is the worker's
identity: a worker that comes back with it is the same one, under the same name, even after a restart of the coordinator
or after it had been given up. Sessions are stored and looked up as digests. So a run's saved state holds no secret, and
the time that an answer takes reveals nothing.

A member lives as long as its lease, which every sign of life renews. When the lease runs out, the member is given up.
Its name is reserved for ``expiry`` seconds more, as it may only have been cut off; then it is forgotten. The name of a
member that has left is free at once.

A member without a connection that was not heard of for ``silence`` seconds is silent, long before its lease runs out.

When a leader is appointed, it is the connected member that joined first. It stays leader until it leaves, is given up,
or is silent while another member is connected. So a short break of its connection, or a long validation, does not move
the lead. A leader that comes back does not lead again, unless its successor is gone.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import math
import secrets
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypedDict

import msgspec

from lightning_bytescheduler.diloco.coordinator_protocol import PROTOCOL, Hello, ModelParameter, RunOptions
from lightning_bytescheduler.diloco.fragments import split_fragments
from lightning_bytescheduler.diloco.messages import JoinRounds
from lightning_bytescheduler.exceptions import OptionError
from lightning_bytescheduler.registration import __version__

log = logging.getLogger(__name__)

_LONGEST_NAME = 200  # the protocol's limit
_Count = Annotated[int, msgspec.Meta(ge=0)]


@dataclass(slots=True, kw_only=True, eq=False)
class Member:
    """A worker that takes part.

    Attributes:
        name: Its name in this run.
        digest: Digest of its session.
        session: Its secret; empty after a restart of the coordinator, until it is heard of.
        incarnation: A number that no other process has.
        ranks: Number of ranks that train together as this worker.
        heard: Time of the last sign of life.
        connections: Number of open connections.
        silent: Whether it has no connection, and was not heard of for a while.
        given_up: Whether its lease is over: it is not a member, but its name is kept for it.
        ready: The message with which it last joined the rounds, even before there are any.
        begins_anew: Whether it gets other weights as it joins, so that its steps so far do not count.
        bytes_in: Bytes of updates received from it.
        bytes_out: Bytes of means and states sent to it.
        merged: Rounds that its updates were part of.
        late: Updates that came too late for their round.
    """

    name: Annotated[str, msgspec.Meta(min_length=1, max_length=_LONGEST_NAME)]
    digest: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]
    session: str = ""
    incarnation: _Count
    ranks: _Count
    heard: float = 0.0
    connections: int = 0
    silent: bool = False
    given_up: bool = False
    ready: JoinRounds | None = None
    begins_anew: bool = False
    bytes_in: int = 0
    bytes_out: int = 0
    merged: int = 0
    late: int = 0

    @property
    def connected(self) -> bool:
        """Whether a message can be sent to it now."""
        return self.connections > 0

    def __repr__(self) -> str:
        return f"Member(name={self.name!r}, incarnation={self.incarnation})"  # without the secret


class MembershipState(TypedDict):
    """What a ``Membership`` continues from after a restart."""

    members: list[Member]
    leader: str | None
    incarnations: _Count


class Membership:
    """The members of a run, in the order in which they became members. For one thread.

    Args:
        lease: Seconds without a sign of life after which a member is given up.
        silence: Seconds without a sign of life after which a member without a connection is silent.
        expiry: Seconds for which the name and session of a member that was given up are kept.
        most: Most members at a time, and most of those given up that are remembered.
        make_session: Makes a session; tests replace it.
    """

    def __init__(
        self,
        lease: float,
        *,
        silence: float = math.inf,
        expiry: float = 600.0,
        most: int = 10_000,
        make_session: Callable[[], str] = lambda: secrets.token_hex(16),
    ) -> None:
        self._lease = lease
        self._silence = min(silence, lease)
        self._expiry = expiry
        self._most = most
        self._make_session = make_session
        self._known: dict[str, Member] = {}  # by name, with those given up, in the order in which they became either
        self._by_digest: dict[str, Member] = {}
        self._incarnations = 0
        self._appointed: str | None = None

    def __iter__(self) -> Iterator[Member]:
        return iter([member for member in self._known.values() if not member.given_up])

    def __len__(self) -> int:
        return sum(not member.given_up for member in self._known.values())

    @property
    def leader(self) -> str | None:
        """The member that validates, logs and saves for all; ``None`` while no member is connected."""
        return self._appointed if any(member.connected for member in self) else None

    def by_session(self, session: str) -> Member | None:
        """The member with that session, or ``None``; the call is no sign of life."""
        member = self._by_digest.get(_digest(session)) if session else None
        return None if member is None or member.given_up else member

    def by_name(self, name: str) -> Member | None:
        """The member with that name, or ``None``."""
        member = self._known.get(name)
        return None if member is None or member.given_up else member

    def join(self, hello: Hello, now: float) -> Member:
        """Make a worker that has connected a member, or recognise it by its session.

        Args:
            hello: What the worker says about itself.
            now: The time, in seconds.

        Raises:
            OptionError: If there is no room for another member.
        """
        self._forget_given_up(now)
        member = self._by_digest.get(_digest(hello.session)) if hello.session else None
        if member is None or member.given_up:
            self._require_room()
        if member is None:
            session = self._make_session()
            self._incarnations += 1
            member = Member(
                name=self._free_name(hello.worker),
                digest=_digest(session),
                session=session,
                incarnation=self._incarnations,
                ranks=hello.ranks,
                heard=now,
            )
            self._by_digest[member.digest] = self._known[member.name] = member
        else:
            member.session = hello.session  # unknown since a restart
            if member.given_up:  # it was only away
                self._put_last(member, given_up=False)
        member.ranks, member.heard, member.silent = hello.ranks, now, False
        member.connections += 1
        self._appoint()
        return member

    def disconnect(self, member: Member) -> None:
        """Note that one of a member's connections is closed. It stays a member as long as its lease lasts."""
        member.connections = max(member.connections - 1, 0)

    def hear(self, member: Member, now: float) -> None:
        """Note a sign of life, which renews the lease."""
        member.heard, member.silent = max(member.heard, now), False

    def leave(self, member: Member) -> None:
        """Forget a member that has left, and free its name."""
        if self.by_name(member.name) is member:
            del self._known[member.name]
            del self._by_digest[member.digest]
            member.connections = 0
            self._appoint()

    def fall_silent(self, now: float) -> tuple[Member, ...]:
        """Mark silent members, and replace a silent leader if another member is connected. Call it regularly.

        Returns:
            Members that have become silent, each once per silence.
        """
        since = now - self._silence
        silent = [one for one in self if not one.connections and one.heard <= since]
        new = tuple(one for one in silent if not one.silent)
        for member in new:
            member.silent = True
            log.warning(
                "%s has no connection, and was not heard of for %.0f s. No round counts on it, and others get its "
                "slices, and the lead if it leads. After %.0f s it is given up.",
                member.name,
                now - member.heard,
                self._lease,
            )
        if silent:
            self._appoint()
        return new

    def expire(self, now: float) -> tuple[Member, ...]:
        """Give up members whose lease is over, and forget those given up long ago. Call it regularly.

        Nothing else gives up a member, so the caller learns of each one.

        Returns:
            Members that were given up, the one silent for longest first.
        """
        over = sorted((one for one in self if now >= one.heard + self._lease), key=lambda member: member.heard)
        for member in over:
            # Its connections still count until each is closed, as the member may be back before that.
            self._put_last(member, given_up=True)
        self._forget_given_up(now)
        self._appoint()
        return tuple(over)

    def state_dict(self) -> dict[str, Any]:
        """What to keep over a restart: primitives only, and no secrets."""
        return {
            "members": [
                {"name": one.name, "digest": one.digest, "incarnation": one.incarnation, "ranks": one.ranks}
                for one in sorted(self._known.values(), key=lambda member: member.given_up)
            ],
            "leader": self._appointed,
            "incarnations": self._incarnations,
        }

    def load_state_dict(self, state: Mapping[str, Any], now: float) -> None:
        """Continue from a saved state. All members get a fresh lease, and are recognised by their session.

        Raises:
            OptionError: If it is not what :meth:`state_dict` gave; names what is wrong. Nothing is changed then.
        """
        try:
            known = msgspec.convert(state, MembershipState)
        except msgspec.ValidationError as error:
            raise OptionError("state of the members", state, f"what a membership has kept ({error})") from error
        members = known["members"]
        for member in members:
            member.heard = now
        names, digests = {one.name for one in members}, {one.digest for one in members}
        if len(names) < len(members) or len(digests) < len(members):
            raise OptionError("state of the members", state, "one with each name and session once")
        self._known = {one.name: one for one in members}
        self._by_digest = {one.digest: one for one in members}
        self._incarnations = max([known["incarnations"], *(one.incarnation for one in members)])
        self._appointed = known["leader"] if known["leader"] in self._known else None

    def _forget_given_up(self, now: float) -> None:
        gone = [member for member in self._known.values() if member.given_up]  # the first to be given up is first
        for index, member in enumerate(gone):
            if len(gone) - index > self._most or now >= member.heard + self._lease + self._expiry:
                del self._known[member.name], self._by_digest[member.digest]

    def _put_last(self, member: Member, *, given_up: bool) -> None:
        member.given_up = given_up
        self._known[member.name] = self._known.pop(member.name)

    def _free_name(self, wish: str) -> str:
        ends = ("", *(f"-{number}" for number in range(2, len(self._known) + 2)))
        names = (wish[: _LONGEST_NAME - len(end)] + end for end in ends)
        return next(name for name in names if name not in self._known)

    def _require_room(self) -> None:
        if len(self) >= self._most:
            allowed = f"{self._most} at most; one can join when another one has left"
            raise OptionError("members", len(self) + 1, allowed)

    def _appoint(self) -> None:
        leader = None if self._appointed is None else self.by_name(self._appointed)
        if leader is None or leader.silent:
            connected = next((member.name for member in self if member.connected), None)
            if leader is None or connected is not None:
                self._appointed = connected


def _digest(session: str) -> str:
    return hashlib.blake2b(session.encode(errors="surrogateescape"), digest_size=32).hexdigest()


_UNSET = object()


def difference(hello: Hello, options: RunOptions, model: Sequence[ModelParameter]) -> str | None:
    """What keeps a worker from taking part, or ``None``.

    Args:
        hello: What the worker says about itself.
        options: The run's options.
        model: The run's model; empty before the first worker.
    """
    if hello.protocol != PROTOCOL or hello.package != __version__:
        return (
            f"This worker has lightning-bytescheduler {hello.package} (protocol {hello.protocol}), and the coordinator "
            f"{__version__} (protocol {PROTOCOL}). Install the same version everywhere."
        )
    for name, value in hello.options.items():
        ours = getattr(options, name, _UNSET)
        if ours is _UNSET:
            return f"The coordinator knows no option {name!r}."
        if value != ours or isinstance(value, bool) != isinstance(ours, bool):
            return (
                f"{name}={value!r} is not what the coordinator was started with, {name}={ours!r}. Leave it out, and "
                "the coordinator's holds."
            )
    if not hello.model:
        return "This worker has no parameter to train."
    if not model:
        return _model_fault(hello.model, options)
    for index, (theirs, ours) in enumerate(itertools.zip_longest(hello.model, model)):
        if theirs != ours:
            return (
                f"This worker trains another model than the run: its parameter {index} is {_shown(theirs)}, and the "
                f"run's is {_shown(ours)}."
            )
    return None


def _shown(parameter: ModelParameter | None) -> str:
    return "missing" if parameter is None else f"{parameter.name!r} ({parameter.dtype}, {parameter.shape})"


def _model_fault(model: Sequence[ModelParameter], options: RunOptions) -> str | None:
    twice = next((name for name, count in Counter(one.name for one in model).items() if count > 1), None)
    if twice is not None:
        return f"This worker says that it has two parameters of the name {twice!r}."
    sizes = {parameter.name: math.prod(parameter.shape) for parameter in model}
    if not sum(sizes.values()):
        return "This worker has no parameter to train: all are empty."
    try:
        split_fragments(sizes, options.fragments)
    except OptionError as error:
        return str(error)
    return None
