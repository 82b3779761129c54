"""The core of a run: members, rounds, what becomes of updates, what workers are told. No I/O; the clock is an argument.

It hosts the rounds; the next one begins when the mean of the last is there. Slow work (adding updates, the
mean, the outer step) is not done here: ``merge`` is called with a round to merge, and the service calls
:meth:`Run.merged` when that is done.

For one thread.

:class:`Contributions` records which updates are part of a round's sum, and changes together with the sum. So a round's
record and weights are those of the sum, even if a worker has left since.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import msgspec

from lightning_bytescheduler.checks import require_positive
from lightning_bytescheduler.coordinator.membership import Member, Membership, difference
from lightning_bytescheduler.diloco.coordinator_protocol import (
    Hello,
    ModelParameter,
    Refusal,
    RunOptions,
    Welcome,
    chain_after,
)
from lightning_bytescheduler.diloco.fragments import fragment_of
from lightning_bytescheduler.diloco.messages import (
    EndRound,
    FromWorker,
    JoinRounds,
    LeaderAppointed,
    LeaveRounds,
    Message,
    PassedRoundEnd,
    PauseRounds,
    PseudoGradientArrived,
    RoundEnded,
    SendingPseudoGradient,
    ToWorker,
)
from lightning_bytescheduler.diloco.round_end import RoundOptions
from lightning_bytescheduler.diloco.round_record import RoundRecord, WorkerRound
from lightning_bytescheduler.diloco.rounds import Rounds
from lightning_bytescheduler.exceptions import OptionError
from lightning_bytescheduler.slices.tracker import TrainedRun

if TYPE_CHECKING:
    from torch import Tensor

    from lightning_bytescheduler.coordinator.slice_routes import SliceRoutes


@dataclass(frozen=True, kw_only=True, slots=True)
class CoordinatorOptions:
    """How a coordinator runs; validated when made.

    Attributes:
        run: What all workers have in common.
        rounds: When rounds end, and which workers they wait for; ``outer_steps`` is that of ``run``, and
            ``closing_rounds`` follows from its ``fragments``.
        lease: Seconds without a sign of life after which a worker is given up.

    Raises:
        OptionError: Names the value that is not allowed.
    """

    run: RunOptions = field(default_factory=RunOptions)
    rounds: RoundOptions = field(default_factory=RoundOptions)
    lease: float = 60.0

    def __post_init__(self) -> None:
        require_positive("lease", self.lease, of="seconds")
        own = replace(self.rounds, outer_steps=self.run.outer_steps, closing_rounds=self.run.fragments - 1)
        object.__setattr__(self, "rounds", own)


class Place(NamedTuple):
    """What an update counts for.

    Attributes:
        weight: Its weight in the sum of its round; 0 if it is dropped.
        is_late: Whether that round is over.
    """

    weight: int
    is_late: bool = False


class Offer(msgspec.Struct, frozen=True, kw_only=True):
    """An update that a worker wants to send.

    Attributes:
        member: Whose.
        round: In which it was made.
        fragment: That it is of.
        steps: Taken in that round.
        samples: Processed since the fragment was last sent: its weight.
        round_samples: Processed in that round.
        trained: The samples of slices that it was made of, where the coordinator hands slices out.
    """

    member: Member
    round: int
    fragment: int
    steps: int
    samples: int
    round_samples: int
    trained: tuple[TrainedRun, ...] = ()


_REMEMBERED = 8  # last rounds, for which repeated updates are recognised


class Contributions:
    """Booked updates of the current round, and of the last merged rounds, by which repeated ones are recognised."""

    def __init__(self) -> None:
        self._of_round: dict[int, list[Offer]] = {}
        self._seen: dict[tuple[str, int, int, int], Place] = {}  # by worker, incarnation, round and fragment

    def seen(self, offer: Offer) -> Place | None:
        """What became of the same update when it came before, or ``None`` if it did not come in time."""
        return self._seen.get((offer.member.name, offer.member.incarnation, offer.round, offer.fragment))

    def book(self, offer: Offer, place: Place) -> None:
        """Take note of an update that came in time; one of weight 0 is only remembered."""
        self._seen[offer.member.name, offer.member.incarnation, offer.round, offer.fragment] = place
        if place.weight:
            self._of_round.setdefault(offer.round, []).append(offer)

    def take(self, round: int) -> tuple[Offer, ...]:
        """Return the updates in the sum of a round at its end, and forget them."""
        taken = tuple(self._of_round.pop(round, ()))
        self._seen = {key: seen for key, seen in self._seen.items() if key[2] > round - _REMEMBERED}
        return taken


def corrected(record: RoundRecord, merged: Mapping[str, Offer]) -> RoundRecord:
    """A round's record as the sum has it: a worker is merged if its update is in the sum, even if it has left since.

    Args:
        record: The batch scheduler's record.
        merged: The updates that were merged, by worker.
    """
    workers = []
    for worker in record.workers:
        found = merged.get(worker.worker)
        samples = worker.samples if found is None else found.round_samples
        workers.append(msgspec.structs.replace(worker, merged=found is not None, samples=samples))
    known = {worker.worker for worker in workers}
    workers += [
        WorkerRound(worker=name, steps=one.steps, samples=one.round_samples, merged=True, spans=())
        for name, one in merged.items()
        if name not in known
    ]
    return msgspec.structs.replace(record, workers=tuple(workers))


log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True, eq=False)
class Merge:
    """A round that is to be merged, and the result.

    Attributes:
        round: Its number.
        fragment: The fragment that it synchronises.
        counts: Whether its sum is to become part of the weights; not without a quorum.
        record: The record of the round; once it is merged, as the sum has it.
        payload: Its mean in the wire format, as workers get it; ``None`` if nothing was merged, or not yet.
        digest: The payload's digest; empty without a payload.
        total: The sum of the weights.
    """

    round: int
    fragment: int
    counts: bool
    record: RoundRecord
    payload: Tensor | None = None
    digest: str = ""
    total: int = 0


class Lineage:
    """The version and chain of the global weights, and those of the last rounds, from which kept means lead to them.

    Args:
        version: Version of the weights.
        chain: The chain of that version; by default that of a run's beginning.
    """

    def __init__(self, version: int = 0, chain: str = "0" * 32) -> None:
        self.version = version
        self.chain = chain
        self.chains = {version: chain}  # chains by version, as far back as kept means reach

    def merged(self, merge: Merge, *, oldest_mean: int) -> None:
        """A round has become part of the weights; see ``Run.merged``."""
        if merge.round != self.version + 1:
            raise ValueError(f"Round {merge.round} cannot follow version {self.version} of the weights.")
        self.chain = chain_after(
            self.chain, round=merge.round, fragment=merge.fragment, digest=merge.digest, total=merge.total
        )
        self.version = merge.round
        self.chains[merge.round] = self.chain
        self.chains = {version: chain for version, chain in self.chains.items() if version >= oldest_mean - 1}


class SavedRun(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a run that is kept over a restart, beside its weights and slices."""

    version: Annotated[int, msgspec.Meta(ge=0)]
    chain: str
    samples: Annotated[int, msgspec.Meta(ge=0)]
    model: tuple[ModelParameter, ...]
    options: RunOptions
    members: dict[str, Any]


class Run:
    """The core of a run.

    Args:
        options: The coordinator's options.
        post: Sends a message to a worker, without waiting.
        merge: Called when a round is to be merged. :meth:`merged` has to be called when that is done.
        on_round: Called with each round that has ended.
        on_leave: Called with each worker that has left or was given up.
        slices: The training data, if the coordinator hands it out.
    """

    def __init__(
        self,
        options: CoordinatorOptions,
        *,
        post: Callable[[str, ToWorker], None],
        merge: Callable[[Merge], None],
        on_round: Callable[[RoundRecord], None] = lambda record: None,
        on_leave: Callable[[Member], None] = lambda member: None,
        slices: SliceRoutes | None = None,
    ) -> None:
        self.options = options
        self._slices = slices
        self.model: tuple[ModelParameter, ...] = ()
        self.lineage = Lineage()
        self.members = Membership(options.lease, silence=options.rounds.silent_after)
        self.has_weights = False
        self.counters: dict[str, int] = {}
        self.samples = 0
        self.rounds = Rounds(options.run.target, options.rounds, post=post, end=self._end_of_round)
        self._post = post
        self._merge = merge
        self._on_round = on_round
        self._on_leave = on_leave
        self.contributions = Contributions()
        self._awaited: set[str] = set()  # after a restart: workers that are not back yet
        self._hold_until: float | None = None  # until then no round begins
        self.leader: str | None = None  # the worker that validates, logs and saves for all

    # ── Joining and leaving ───────────────────────────────────────────────────────────

    def hello(self, hello: Hello, now: float) -> tuple[Member, Welcome] | Refusal:
        """Take a worker in, or say why not. Once its connection is closed, ``members.disconnect`` is to be called.

        Raises:
            OptionError: If there are too many workers.
        """
        self._expire(now)
        reason = difference(hello, self.options.run, self.model)
        if reason is not None:
            self.count("refused_hellos")
            return Refusal(reason=reason)
        former = self.members.by_name(hello.worker)
        if former is not None and not former.connected and not hello.session:
            log.warning("%s was started anew: its slices go back. Each worker needs its own name.", former.name)
            self.leave(former, now)
        member = self.members.join(hello, now)
        self.count("rejoined" if member.session == hello.session else "joined")
        if not self.model:
            self.model = hello.model
        self._appoint()
        # Every worker begins with version 0 and the first chain. These are not the run's first weights.
        has_place = bool(hello.session) and self.lineage.chains.get(hello.version) == hello.chain
        member.begins_anew = fetch = not (self.has_weights and has_place)
        return member, Welcome(
            worker=member.name,
            session=member.session,
            options=self.options.run,
            version=self.lineage.version,
            chain=self.lineage.chain,
            fetch=fetch,
            lease=self.options.lease,
            leads=member.name == self.leader,
        )

    def provided(self, now: float) -> None:
        """The first weights are there: workers that wait for them can begin."""
        self.has_weights = True
        self._let_in(now)

    def _let_in(self, now: float) -> None:
        """Workers that are ready join the rounds, all at the same moment."""
        self._awaited.clear()
        ready = sorted((one.ready for one in self.members if one.ready is not None), key=lambda joins: joins.worker)
        if self._hold_until is not None:
            if self.rounds.round:  # else the first round is still to come, and waits for start_workers
                self.rounds.expect(len(ready))
            self._hold_until = None
        for joins in ready:
            self.rounds.handle(joins, now=now)

    def leave(self, member: Member, now: float) -> None:
        """A worker has left, or was given up. What it has sent counts."""
        self.members.leave(member)
        self._forget(member, now)

    def _forget(self, member: Member, now: float) -> None:
        member.ready = None
        self._awaited.discard(member.name)
        if not self.has_weights and not len(self.members):
            self.model = ()  # no worker is left that has this model
        self._on_leave(member)
        self.rounds.handle(LeaveRounds(worker=member.name), now=now)
        self._appoint()

    def _appoint(self) -> None:
        leader = self.members.leader
        if leader == self.leader:
            return
        self.leader = leader
        if leader is not None:
            log.info("%s leads: it validates, logs and saves for all.", leader)
            for member in self.members:
                self._post(member.name, LeaderAppointed(worker=leader))

    # ── Rounds ───────────────────────────────────────────────────────────

    def hear(self, member: Member, messages: Sequence[Message], now: float) -> None:
        """Handle a worker's messages: all of them, or none if one is wrong.

        Raises:
            OptionError: If a message is in another worker's name, or only a coordinator may send it.
        """
        said: list[FromWorker] = []
        for message in messages:
            if not isinstance(message, FromWorker) or isinstance(message, PseudoGradientArrived):
                kind = type(message).__name__
                raise OptionError("message", kind, f"one that workers send, and {member.name} sent it")
            if message.worker != member.name:
                raise OptionError("worker", message.worker, f"{member.name!r}, whose session it is")
            said.append(message)
        self.members.hear(member, now)
        for message in said:
            self._hear(member, message, now)

    def _hear(self, member: Member, message: FromWorker, now: float) -> None:
        name = member.name
        if isinstance(message, PauseRounds):
            member.ready = None
            self._awaited.discard(name)
        if isinstance(message, JoinRounds):
            member.ready = joins = self._checked(message, member)
            self._awaited.discard(name)
            if self.has_weights and not self._awaited:
                if self._hold_until is not None:
                    self._let_in(now)
                else:
                    self.rounds.handle(joins, now=now)
        elif isinstance(message, LeaveRounds):
            self.count("left")
            self.leave(member, now)
        elif isinstance(message, EndRound):
            self._take_wish(message, now)
        elif name in self.rounds.workers and not isinstance(message, PassedRoundEnd):
            self.rounds.handle(message, now=now)

    def _checked(self, joins: JoinRounds, member: Member) -> JoinRounds:
        """A joining worker's message for the scheduler: with the number of its process, and its steps in a round.

        A worker reports steps only if it has the weights with which that round begins. They count if the round is on,
        or begins next. A worker that was told to take other weights has taken no steps with them.
        """
        if member.begins_anew:
            member.begins_anew = False
            return JoinRounds(worker=member.name, session=member.incarnation)
        return msgspec.structs.replace(joins, session=member.incarnation)

    def _take_wish(self, wish: EndRound, now: float) -> None:
        if wish.stop and wish.worker == self.leader:
            log.info("%s leads, and ends the training of all.", wish.worker)
            self.rounds.end_soon()
        if wish.now and wish.round == self.rounds.round:
            self.rounds.handle(wish, now=now)

    def tick(self, now: float) -> None:
        """Take note that time has passed."""
        self._expire(now)
        if self._hold_until is not None and (not self._awaited or now >= self._hold_until):
            self._let_in(now)
        if self.has_weights:
            self.rounds.tick(now=now)

    def _expire(self, now: float) -> None:
        if silent := self.members.fall_silent(now):
            self.count("silent", by=len(silent))
            self._appoint()
        for member in self.members.expire(now):
            self.count("expired")
            log.info("%s was not heard of for %.0f s, and is given up.", member.name, now - member.heard)
            self._forget(member, now)

    # ── Updates ───────────────────────────────────────────────────────────

    def place_of(self, offer: Offer) -> Place:
        """What an update counts for at this moment.

        Raises:
            OptionError: If there is no such round or fragment yet, or the worker has no part in it.
        """
        rounds = self.rounds
        if not self.has_weights:
            raise OptionError("round", offer.round, "sent when there are weights and a round has begun")
        if not 1 <= offer.round <= rounds.round:
            raise OptionError("round", offer.round, f"a round that has begun; the last one is {rounds.round}")
        expected = self.fragment_of(offer.round)
        if offer.fragment != expected:
            raise OptionError("fragment", offer.fragment, f"{expected}, which round {offer.round} synchronises")
        if offer.round == rounds.round and rounds.is_open:
            if not rounds.expects(offer.member.name, offer.round):
                raise OptionError("round", offer.round, f"one that {offer.member.name} takes part in")
            return Place(offer.samples if self._fits(offer) else 0)
        return Place(0, is_late=True)

    def _fits(self, offer: Offer) -> bool:
        if self._slices is None or self._slices.tracker.fits(offer.member.name, offer.trained):
            return True
        log.info(
            "The update of %s for round %d is dropped: some of its samples are in the weights, or another worker's.",
            offer.member.name,
            offer.round,
        )
        return False

    def fragment_of(self, round: int) -> int:
        """Which fragment a round synchronises."""
        return fragment_of(round, fragments=self.options.run.fragments)

    def sending(self, offer: Offer, now: float) -> None:
        """An update of the current round begins to arrive."""
        self.members.hear(offer.member, now)
        if offer.member.name in self.rounds.workers and offer.round == self.rounds.round:
            sending = SendingPseudoGradient(
                worker=offer.member.name, round=offer.round, steps=offer.steps, samples=offer.round_samples
            )
            self._handle_offer(offer, sending, now)

    def arrived(self, offer: Offer, now: float, place: Place) -> None:
        """An update is complete and verified, and is being added to a sum, or is dropped.

        It may end the round: then ``merge`` is called, and has to wait until the update is added.
        """
        self.members.hear(offer.member, now)
        if not place.is_late:
            self.contributions.book(offer, place)
        if place.weight and self._slices is not None:
            self._slices.tracker.book(offer.member.name, offer.trained)
        if place.is_late:
            offer.member.late += 1
            self.count("updates_late")
            lost = offer.member.name, offer.round, offer.round_samples
            log.warning("The update of %s of round %d came late: its %d samples are in no weights.", *lost)
        self.count("updates_added" if place.weight else "updates_dropped")
        self._handle_offer(offer, PseudoGradientArrived(worker=offer.member.name, round=offer.round), now)

    def _handle_offer(self, offer: Offer, message: Any, now: float) -> None:
        """Tell the scheduler, also if the worker has left, but not if another process has its name now."""
        if self.members.by_name(offer.member.name) in (None, offer.member):
            self.rounds.handle(message, now=now)

    def merged(self, merge: Merge, *, oldest_mean: int) -> None:
        """A round has become part of the weights; see :meth:`announce`.

        Args:
            merge: The object that ``merge`` was called with, now with its mean.
            oldest_mean: The earliest round whose mean is kept.
        """
        self.lineage.merged(merge, oldest_mean=oldest_mean)
        taken = self.contributions.take(merge.round)
        if self._slices is not None:
            for one in taken:
                self._slices.tracker.settle(one.trained, merged=bool(merge.total))
        booked = taken if merge.total else ()  # without a quorum nothing was merged
        merge.record = corrected(merge.record, {one.member.name: one for one in booked})
        for one in booked:
            self.samples += one.round_samples
            one.member.merged += 1
        self.count("rounds" if merge.total else "empty_rounds")

    def announce(self, merge: Merge) -> None:
        """Tell all workers of a round that is part of the weights, and go on."""
        record, over = merge.record, self.rounds.finished
        ended = RoundEnded(round=merge.round, samples=record.samples, metrics=record.metrics, stop=over)
        for member in self.members:
            self._post(member.name, ended)
        self.rounds.go_on()
        self._on_round(record)

    def _end_of_round(self, record: RoundRecord) -> None:
        fragment = self.fragment_of(record.round)
        self._merge(Merge(round=record.round, fragment=fragment, counts=bool(record.merged), record=record))

    # ── What is kept and shown ───────────────────────────────────────────────────────────

    @property
    def phase(self) -> str:
        """What the run does: see ``RunStatus.phase``."""
        if self.rounds.stand_still:
            return "merging"
        if self.rounds.finished:
            return "finished"
        if not self.has_weights or self.rounds.next_tick is None:
            return "waiting"
        return "collecting" if self.rounds.collecting else "training"

    def count(self, event: str, by: int = 1) -> None:
        """Count an event, see ``RunStatus.counters``."""
        self.counters[event] = self.counters.get(event, 0) + by

    def state_dict(self) -> dict[str, Any]:
        """The state to keep over a restart, beside the weights: primitives only. Call it right after a merge."""
        state = SavedRun(
            version=self.lineage.version,
            chain=self.lineage.chain,
            samples=self.samples,
            model=self.model,
            options=self.options.run,
            members=self.members.state_dict(),
        )
        saved: dict[str, Any] = msgspec.to_builtins(state)
        return saved

    def load_state_dict(self, state: Any, now: float) -> None:
        """Carry on from a kept state. Call it before the first worker joins.

        Raises:
            OptionError: If it is not what :meth:`state_dict` gave, or of a run with other options.
        """
        try:
            saved = msgspec.convert(state, SavedRun)
        except msgspec.ValidationError as error:
            raise OptionError("state", "a damaged one", f"what a coordinator has saved of a run ({error})") from error
        for name in saved.options.__struct_fields__:
            ours, theirs = getattr(self.options.run, name), getattr(saved.options, name)
            if ours != theirs and name != "outer_steps":
                raise OptionError(name, ours, f"{theirs!r}, with which the saved run was started")
        self.rounds.resume(saved.version)
        self.model = saved.model
        self.lineage = Lineage(saved.version, saved.chain)
        self.samples = saved.samples
        self.has_weights = True
        self.members.load_state_dict(saved.members, now)
        self._awaited = {member.name for member in self.members}
        self._hold_until = now + self.options.rounds.silent_after
