"""A worker's part in the rounds, on each of its ranks: steps, pseudo-gradients, standing still.

Every rank of a worker makes the same calls at the same steps; see ``WorkerGroup`` for why. Only the worker's first rank
talks to other workers: it counts the worker's steps, sends its pseudo-gradient when that is due, and merges the mean.
The worker's other ranks follow: an ``Outcome`` tells them what the first one has done, and they get its weights, bit
for bit.

A session has two ways to the others. Messages go over a ``Link``: a mailbox of ranks that were launched together, or a
coordinator's WebSocket. Pseudo-gradients go through an ``Exchange``: among those ranks, or up to a coordinator and down
from it. Either way a round ends with a weighted mean, the same bits on every worker, and each takes the outer step
itself.

At the end of each batch the training thread checks whether there is something to do, which takes no message. If there
is, it sends what it has trained, waits for the end of the round, takes the outer steps that it is behind, and begins
the next round. With ``overlap_steps`` it trains on while its update travels, see ``fragments.py``.

*Standing still.* A round's end may say that it ``halts``: all workers stand still there until each has passed it. Ranks
that were launched together validate, end an epoch, or stop like this. Then all fragments are synchronised.

*A coordinator's run*, where workers come and go. No worker stands still for another one's epoch or validation, and a
worker's own end ends it alone. While the coordinator is away the worker takes steps on the weights it has, and updates
without an answer are sent again, with what was trained since. Samples count as sent when their round is part of the
weights here. A round without a quorum changes no weights. The work done in it is *carried*: it stays in the local
weights and in the counts of samples, and the next update of the fragment has all of it.

``receive``, ``welcomed``, ``lost``, ``fail`` and ``standing`` are for any thread; the training thread calls all others.
One lock guards the state. No call under it takes another lock, except for posts to others; no thread waits for this
lock while it holds one of theirs.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from threading import Condition
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
import torch

from lightning_bytescheduler.diloco.coordinator_protocol import Welcome
from lightning_bytescheduler.diloco.fragments import TrainedWeights
from lightning_bytescheduler.diloco.messages import (
    EndRound,
    FromWorker,
    JoinRounds,
    LeaderAppointed,
    LeaveRounds,
    Message,
    PassedRoundEnd,
    PauseRounds,
    RoundEnded,
    SendingPseudoGradient,
    TrainingOver,
)
from lightning_bytescheduler.diloco.outer_optimizer import (
    Contribution,
    Mean,
    OuterState,
    Upload,
    pack_state,
    unpack_state,
)
from lightning_bytescheduler.diloco.process_groups import WorkerGroup
from lightning_bytescheduler.diloco.round_counter import RoundCounter
from lightning_bytescheduler.exceptions import SchedulerTimeoutError, UnsupportedError

if TYPE_CHECKING:
    from lightning_bytescheduler.diloco.coordinator_client import CoordinatorTransport
    from lightning_bytescheduler.slices.tracker import TrainedRun
    from lightning_bytescheduler.slices.training import TrackedTraining

log = logging.getLogger(__name__)

START = "0" * 32
"""The chain before the first round."""

_LOOK_S = 1.0
_RECEIPT_S = 30.0  # wait for a receipt before the worker pauses or leaves
_BACK_S = 60.0  # for which a worker that ends waits for a coordinator that is away


class Link(Protocol):
    """A worker's way to the batch scheduler or the coordinator."""

    def post(self, *messages: FromWorker) -> None:
        """Send messages; at once, never blocks."""


class Exchange(Protocol):
    """A worker's way to the others' pseudo-gradients. No call waits; results come as futures."""

    @property
    def source(self) -> CoordinatorTransport | None:
        """The source of the global weights; ``None`` among ranks launched together, which all have them."""

    def start(self, contribution: Contribution) -> Upload:
        """Begin to send an update."""

    def settle(self, upload: Upload, *, total: int) -> None:
        """Note that the round of an update is over.

        Args:
            upload: The update, whose receipt is not waited for any more.
            total: The sum of the weights in the mean of its round.
        """

    def fetch_mean(self, round: int, chain: str) -> Future[Mean | None]:
        """Return the mean of an ended round, or ``None`` if it does not follow weights of that chain."""


@dataclass(slots=True)
class SessionStatistics:
    """Where a worker's time went.

    Attributes:
        rounds: Rounds that have become part of the weights here.
        steps: Taken.
        samples: Processed.
        merged_samples: Samples of all workers in these rounds.
        exchange_s: Seconds for which the training thread waited for pseudo-gradients, its own and the others'.
        start_s: Seconds for which it waited for a round to start.
    """

    rounds: int = 0
    steps: int = 0
    samples: int = 0
    merged_samples: int = 0
    exchange_s: float = 0.0
    start_s: float = 0.0


class Outcome(msgspec.Struct, frozen=True):
    """The message of the first rank to the worker's other ranks, once it has acted for all of them.

    Attributes:
        changed: Fragments whose weights have changed.
        version: Number of rounds that are part of the global weights.
        over: Whether training is over.
        halted: Whether all workers stand still.
        ended: The last round's end.
        rounds: See :class:`SessionStatistics`.
        merged_samples: See there.
    """

    changed: list[int]
    version: int
    over: bool
    halted: bool
    ended: RoundEnded | None
    rounds: int
    merged_samples: int


@dataclass(slots=True, kw_only=True)
class Sent:
    """A pseudo-gradient that is on its way.

    Attributes:
        said: The message that announced it, with the counts of its round.
        update: What is sent.
        upload: Carries it.
        steps_since: Steps taken since it was sent.
    """

    said: SendingPseudoGradient
    update: Contribution
    upload: Upload
    steps_since: int = 0

    @property
    def round(self) -> int:
        """The round in which it was made."""
        return self.said.round

    @property
    def is_dropped(self) -> bool:
        """Whether the coordinator has answered that its samples do not count."""
        receipt = self.upload.receipt
        known = receipt.done() and not receipt.cancelled() and not self.upload.failed
        answer = self.upload.answer
        return known and bool(self.update.samples) and (answer is None or not answer.weight)


@dataclass(slots=True)
class Place:
    """A worker's position among the others; all of it changes under the session's lock.

    Attributes:
        counter: Counts its steps.
        connected: Whether there is a connection.
        joined: Whether this worker has joined the rounds over this connection.
        realign: Whether this worker has to fetch the global state before it can go on.
        away: Whether it pauses, or has left.
        version: Version of the weights here, as all ranks of the worker know it after each ``Outcome``.
        chain: Chain of these weights.
        ended: The last round that is known to have ended.
        mean: That of this worker's round, which has ended; on its way, or here.
        end: The last round's end that it was told of.
        last_round: Of the run, once it is over; also while this worker does something else.
        shown: Closed once the global weights are not shown any more, as in a pause.
    """

    counter: RoundCounter
    connected: bool = False
    joined: bool = False
    realign: bool = True
    away: bool = False
    version: int = 0
    chain: str = START
    ended: int = 0
    mean: Future[Mean | None] | None = None
    end: RoundEnded | None = None
    last_round: int | None = None
    shown: ExitStack = field(default_factory=ExitStack)


class Unmerged:
    """What a worker has trained that is not in the global weights: on its way, carried, or newer.

    Attributes:
        sent: The pseudo-gradient that is on its way.
        data: The slices that it was trained on, if a coordinator hands them out.
    """

    def __init__(self) -> None:
        self.sent: Sent | None = None
        self.data: TrackedTraining | None = None
        self._runs: tuple[TrainedRun, ...] = ()  # trained on, and in no update that counts or is on its way

    def stepped(self) -> None:
        """A step was taken."""
        if self.data is not None:
            self._runs += tuple(self.data.take_trained())
        if self.sent is not None:
            self.sent.steps_since += 1

    @property
    def has_samples(self) -> bool:
        """Whether samples of slices were trained on and not sent yet."""
        return bool(self._runs)

    def take(self) -> tuple[TrainedRun, ...]:
        """Return the samples of slices that an update is made of."""
        runs, self._runs = self._runs, ()
        if runs:
            from lightning_bytescheduler.slices.tracker import touching  # only if needed, as the import takes time

            runs = touching(runs)
        return runs

    def carry(self, update: Contribution) -> None:
        """Keep the samples of an update whose round has changed nothing; they are sent with the next one."""
        self._runs = update.trained + self._runs

    def call_off(self) -> Sent | None:
        """Call off the update on its way, if any, and return it; its samples go with the next one."""
        sent, self.sent = self.sent, None
        if sent is not None:
            sent.upload.receipt.cancel()
            self.carry(sent.update)
        return sent

    def counts(self, sent: Sent) -> None:
        """Note that a sent update is in the weights."""
        receipt = sent.upload.answer
        # "again" may be the answer for an earlier form of the update, with fewer samples.
        if self.data is not None and receipt is not None and receipt.weight and receipt.verdict == "added":
            self.data.merged(sent.update.trained)
        else:
            self._tell_rest()

    def lose(self) -> None:
        """What was trained since the last update is in no weights, nor will it be."""
        self._runs = ()
        self._tell_rest()

    def _tell_rest(self) -> None:
        """Tell the data which samples are not merged here; the coordinator alone knows which others are."""
        if self.data is not None:
            on_its_way = () if self.sent is None else self.sent.update.trained
            self.data.reset((*on_its_way, *self._runs))


class AwayError(Exception):
    """No coordinator can be reached, or it lacks what was asked for: the worker goes on alone."""


class Session:
    """One rank of a worker in one training.

    Most members with a leading underscore are for the first rank, which may be the only one.

    Args:
        worker: The worker's name.
        group: The worker's ranks.
        trained: What is trained.
        overlap_steps: Steps after sending an update, after which it is merged.
        flush: Applies pending updates; called on each rank's training thread before weights are read or replaced.
        state: The global weights; given on the first rank only, as are the next two.
        link: The way to the batch scheduler or the coordinator.
        exchange: Carries pseudo-gradients.
        timeout: Longest wait for the other workers, in seconds.

    Attributes:
        worker: As given, until a coordinator gives another one.
        overlap_steps: As given.
        state: As given, on the first rank.
        statistics: Of this rank.
        round_end: The last round's end.
        over: Whether training is over, as all ranks of the worker know it.
        halted: Whether all workers stand still at the end of a round, as all ranks of the worker know it.
        leads: Whether this worker validates, logs and saves for all in a coordinator's run, as far as this rank knows.
        unmerged: What was trained here and is in no global weights yet. An update names its samples of slices: if it
            does not become part of the weights, these are trained on again, here or elsewhere.
        at_begin: Called where a round has begun right after a merge, with nothing of it done yet.
    """

    state: OuterState
    _link: Link
    _exchange: Exchange

    def __init__(
        self,
        *,
        worker: str,
        group: WorkerGroup,
        trained: TrainedWeights,
        overlap_steps: int,
        flush: Callable[[], None],
        state: OuterState | None = None,
        link: Link | None = None,
        exchange: Exchange | None = None,
        timeout: float = 0.0,
    ) -> None:
        self.worker = worker
        self.overlap_steps = overlap_steps
        self.statistics = SessionStatistics()
        self.round_end: RoundEnded | None = None
        self.over = self.halted = self.leads = False
        self.at_begin: Callable[[], None] | None = None
        self.unmerged = Unmerged()
        self._group = group
        self._trained = trained
        self._flush = flush
        self._timeout = timeout
        self._lock = Condition()
        self._place = Place(counter=RoundCounter(worker))  # changes under the lock
        if state is not None and link is not None and exchange is not None:
            self.state, self._link, self._exchange = state, link, exchange
            self._place.realign = exchange.source is not None

    @property
    def round(self) -> int:
        """The round this worker is in."""
        return self.version + 1

    @property
    def version(self) -> int:
        """Rounds that are part of the global weights."""
        return self._place.version

    @property
    def last_round(self) -> int | None:
        """The run's last round, once that is known; also during a pause."""
        return self._place.last_round

    @property
    def _fragments(self) -> range:
        return range(len(self._trained.fragments))

    def progress(self) -> dict[str, float]:
        """Return figures of the rounds by name, without those that this rank does not know."""
        found: dict[str, float] = {}
        if self._group.leads:
            known = {"round": self.round, "steps_left": self._place.counter.steps_left}
            found = {name: float(value) for name, value in known.items() if value is not None}
        if self.round_end is not None:
            found |= self.round_end.metrics
        return found

    # ------------------------------------------------------------------ other threads

    def stand_at(self, version: int) -> None:
        """Set how many rounds are part of the weights, which all ranks have; before the rounds begin."""
        place = self._place
        place.connected = True
        place.version = place.ended = version

    def standing(self) -> tuple[int, str]:
        """Return version and chain of the weights here. For any thread."""
        with self._lock:
            return self._place.version, self._place.chain

    def welcomed(self, welcome: Welcome) -> None:
        """Note a new connection, maybe to another coordinator."""
        place = self._place
        with self._lock:
            place.connected, place.joined = True, False
            # This worker may have merged a round since its Hello that this coordinator, started again, does not have.
            place.realign |= welcome.fetch or (place.version >= welcome.version and place.chain != welcome.chain)
            place.ended = welcome.version
            if place.last_round is not None and welcome.version < place.last_round:
                place.last_round = None  # that round is not in the state of this coordinator, which trains it again
            place.mean = None
            self.worker = place.counter.worker = welcome.worker
            self.leads = welcome.leads
            if place.away:
                self._link.post(PauseRounds(worker=self.worker))  # a restarted coordinator does not know
            if not place.realign and place.ended == place.version:
                self._join()
                self._send_again()
            self._lock.notify_all()

    def lost(self) -> None:
        """Note that the connection is lost."""
        with self._lock:
            self._place.connected = self._place.joined = False
            self._lock.notify_all()

    def receive(self, message: Message) -> None:
        """Handle a message of the batch scheduler or the coordinator. For any thread."""
        with self._lock:
            self._hear(message)
            self._lock.notify_all()

    def _hear(self, message: Message) -> None:
        place = self._place
        if isinstance(message, LeaderAppointed):
            self.leads = message.worker == self.worker
        elif isinstance(message, RoundEnded):
            place.end = message
            place.ended = max(place.ended, message.round)
            # Among peers the mean comes by itself; it can be fetched only after this worker has sent its update.
            if self._exchange.source is not None and message.round == self.round and not place.realign:
                self._mean()
        else:
            place.counter.receive(message)
        if isinstance(message, TrainingOver) or (isinstance(message, RoundEnded) and message.stop):
            place.last_round = message.round

    def fail(self, error: BaseException) -> None:
        """End all waits with ``error``, as the others will not answer."""
        with self._lock:
            self._group.abort(error)
            self._lock.notify_all()

    def check(self) -> None:
        """Raise the error of another thread or rank, if there is one."""
        self._group.check()

    def _notify(self, _: object = None) -> None:
        with self._lock:
            self._lock.notify_all()

    # ------------------------------------------------------------------ all ranks of the worker

    def begin(self) -> None:
        """Join, and wait for the first round."""
        self._together(self._begin)

    def count(self, *, samples: int, seconds: float, loss: float | None = None) -> None:
        """Count a step, and report it without waiting.

        Args:
            samples: Of the step, on all ranks of the worker together.
            seconds: Its time, from the end of the step before.
            loss: Of the step.
        """
        self.check()
        if self._group.leads:
            self._report(samples=samples, seconds=seconds, loss=loss)
        self.statistics.steps += 1
        self.statistics.samples += samples

    def is_due(self) -> bool:
        """Whether there is something to do before the next step, as the leader knows it now."""
        return self._group.any(self._group.leads and self._is_due())

    def synchronise(self) -> None:
        """Do what is due: send, merge, catch up, and begin the next round."""
        self._together(self._synchronise)

    def end_round(
        self, *, for_all: bool = True, epoch: bool = False, validate: bool = False, stop: bool = False
    ) -> None:
        """End the round and merge it; does nothing if all stand still at its end already.

        Args:
            for_all: Whether to ask the others to end it now.
            epoch: Whether an epoch is to end with it; for this and the next two all stand still.
            validate: Whether the weights are to be validated after it.
            stop: Whether training is to end with it.
        """

        def end() -> None:
            if self.halted or self._over_here:  # another worker was first
                return
            if for_all:
                self.ask(now=True, epoch=epoch, validate=validate, stop=stop)
            self._send()
            self._conclude()

        if self.overlap_steps:  # separately, as a checkpoint may be of the next round's beginning
            self.merge_sent()
        self._together(end)

    def is_to_merge(self) -> bool:
        """Whether the sent update is to be merged before the next step, as the leader knows it now."""
        return self._group.any(self._group.leads and self.unmerged.sent is not None and self._is_due())

    def merge_sent(self) -> None:
        """Merge the update on its way, if there is one."""
        self._together(lambda: self._conclude() if self.unmerged.sent is not None else None)

    def ask(self, *, now: bool = False, epoch: bool = False, validate: bool = False, stop: bool = False) -> None:
        """On the leader, ask for what is to happen at the end of this round; ``now`` asks to end it soon."""
        if self._group.leads:
            wish = {"epoch": epoch, "validate": validate, "stop": stop}
            self._post(EndRound(worker=self.worker, round=self.round, now=now, steps=self._place.counter.steps, **wish))

    def pass_on(self, *, stop: bool = False) -> bool:
        """Go on after all stood still, or stop if any worker stops; returns whether training goes on."""
        if self.halted and not self.over:
            self._together(lambda: self._pass_on(stop=stop))
        return not self.over

    def end_last_round(self) -> bool:
        """Make the training end with this round, unless all stand still already; returns whether they do now."""
        if self.over or self.halted:
            return False
        self.end_round(stop=True)
        return self.halted

    def pause(self, *, shows: bool = True) -> None:
        """Send what was trained, and leave the rounds until :meth:`resume`; the others go on.

        Args:
            shows: Whether the module has the global weights until then.
        """
        self._together(lambda: self._pause(shows))

    def is_to_resume(self) -> bool:
        """Whether a pause has to be interrupted: the update before it was decided on, or lost with a coordinator."""
        return self._group.any(self._group.leads and self._is_to_resume())

    def _is_to_resume(self) -> bool:
        with self._lock:
            place = self._place
            return place.connected and (not place.joined or (self.unmerged.sent is not None and self._late))

    def resume(self) -> None:
        """Go on with the rounds, at the others' round."""
        self._together(self._resume)

    def leave(self, *, quickly: bool, for_all: bool = False, hurries: Callable[[], bool] = lambda: False) -> None:
        """Leave the rounds with the global weights. What was trained counts.

        Args:
            quickly: Whether to leave without waiting for the end of the round.
            for_all: Whether this worker leads, and the training of all is to end with this round.
            hurries: Returns whether to stop waiting for a coordinator that is away; called while it is.
        """
        self._together(lambda: self._leave(quickly, for_all, hurries))

    def _together(self, work: Callable[[], None]) -> None:
        """Do ``work`` on the first rank, and give its outcome and the changed weights to the others."""
        before, known = self.version, self.statistics
        if self._group.cause is None:
            self._flush()
        if self._group.leads:
            work()
            self.over = self._over_here
            outcome = Outcome(
                sorted(self.state.changed),
                self.version,
                self.over,
                self.halted,
                self.round_end,
                known.rounds,
                known.merged_samples,
            )
            self.state.changed.clear()
            self._group.tell(msgspec.json.encode(outcome).decode())
        else:
            outcome = msgspec.json.decode(self._group.tell(), type=Outcome)
            self._place.version, self.over, self.halted = outcome.version, outcome.over, outcome.halted
            self.round_end, known.rounds, known.merged_samples = outcome.ended, outcome.rounds, outcome.merged_samples
        for fragment in outcome.changed:
            self._group.share(self._trained.of(fragment))
        if self.version > before and self.at_begin is not None and not (self.halted or self.over):
            self.at_begin()

    # ------------------------------------------------------------------ a step

    def _post(self, *messages: FromWorker) -> None:
        if self._place.joined:
            self._link.post(*messages)

    def _report(self, *, samples: int, seconds: float, loss: float | None) -> None:
        self.state.count(samples)
        with self._lock:
            self._post(self._place.counter.step(batch_size=samples, seconds=seconds, loss=loss))
        self.unmerged.stepped()

    def _is_due(self) -> bool:
        with self._lock:
            if self._group.cause is not None or self._over_here:
                return True
            if not self._place.connected:
                return False
            if (sent := self.unmerged.sent) is not None:
                return sent.steps_since >= self.overlap_steps
            return self._late or (self._place.joined and self._place.counter.due)

    @property
    def _late(self) -> bool:
        """Whether this worker's round, or a later one, is over."""
        return self._place.realign or self._place.ended > self._place.version

    @property
    def _over_here(self) -> bool:
        """Whether the run is over, and nothing is left to merge."""
        return self.last_round is not None and self._place.version >= self.last_round

    # ------------------------------------------------------------------ what is waited for

    def _while_connected(
        self,
        ready: Callable[[], bool],
        what: str,
        *,
        timeout: float | None = None,
        alone: bool = False,
    ) -> None:
        """Wait for something that other threads bring.

        Args:
            ready: Returns whether it is there; called with the lock held.
            what: A description of it, for messages.
            timeout: Longest wait, in seconds; by default that for the other workers.
            alone: Whether to wait without a connection, too.

        Raises:
            AwayError: If there is no connection.
            SchedulerTimeoutError: If it is not there in time.
        """
        since = asked = time.monotonic()
        longest = self._timeout if timeout is None else timeout
        with self._lock:
            while not ready():
                self.check()
                now = time.monotonic()
                if now - asked >= _LOOK_S:
                    asked = now
                    self._lock.release()  # other threads need it, and the call may wait for them
                    try:
                        cause = self._group.no_hope()
                    finally:
                        self._lock.acquire()
                    if cause is not None:
                        raise cause
                    continue  # it may have come in the time without the lock
                if not (alone or self._place.connected):
                    raise AwayError
                if now - since >= longest:
                    raise SchedulerTimeoutError(
                        f"{self.worker} waited {now - since:.0f} s for {what}. Raise the strategy's timeout if that "
                        "may take longer."
                    )
                self._lock.wait(min(_LOOK_S, longest - (now - since)))

    @contextmanager
    def _timed(self, kind: str) -> Iterator[None]:
        """Add the time of this context to the statistics."""
        began = time.monotonic()
        yield
        setattr(self.statistics, kind, getattr(self.statistics, kind) + time.monotonic() - began)

    def _mean(self) -> Future[Mean | None]:
        """Fetch the mean of this worker's round, once that has ended. With the lock held."""
        place = self._place
        if place.mean is None:
            place.mean = self._exchange.fetch_mean(self.round, place.chain)
            place.mean.add_done_callback(self._notify)
        return place.mean

    def _next_mean(self) -> Mean | None:
        """Wait for that mean; ``None`` to take the global state instead."""
        round, place = self.round, self._place
        with self._lock:
            future = self._mean()
        self._while_connected(lambda: future.done() or place.realign, f"the mean of round {round}")
        mean = future.result() if future.done() and not future.cancelled() else None
        if mean is None:
            with self._lock:
                if not place.connected:
                    raise AwayError
                place.realign = True
            log.info("%s takes the global state: no mean of round %d follows its weights", self.worker, round)
        return mean

    def _await_receipt(self, sent: Sent) -> None:
        """Wait for the receipt of an update, as long as there is a connection."""
        with suppress(AwayError, SchedulerTimeoutError):
            self._while_connected(sent.upload.receipt.done, "the receipt of an update", timeout=_RECEIPT_S)

    # ------------------------------------------------------------------ the end of a round

    def _begin(self) -> None:
        while True:
            try:
                self._follow_others()
                self._start_round()
                break
            except AwayError:
                with self._timed("start_s"):
                    self._while_connected(lambda: self._place.connected, "the coordinator", alone=True)

    def _synchronise(self) -> None:
        self.check()
        travels = self.unmerged.sent is None and self._send() and self.overlap_steps and not self._place.counter.closes
        if not travels:
            self._conclude()

    def _conclude(self) -> None:
        """Merge the due round and all others that have ended, and begin the next one, or go on alone."""
        try:
            sent = self.unmerged.sent
            if sent is not None:
                with self._timed("exchange_s"):
                    self._while_connected(lambda: self._late or sent.upload.failed, f"the end of round {sent.round}")
                if sent.upload.failed:
                    sent.upload.receipt.result()  # raises
            self._follow_others()
            if not self.halted:
                self._start_round()
        except AwayError:
            self._go_on_alone()

    def _send(self) -> bool:
        """Send what was trained in this round, unless that is over already; returns whether it was sent."""
        if self._late:
            return False
        with self._lock:
            if self._place.counter.round != self.round:
                self._place.counter = self._place.counter.carried_into(self.round)
            said = self._place.counter.send()
            self._post(said)
        fragment = self._trained.fragment_of(said.round)
        # Those of earlier rounds that have changed nothing, too, if the fragment is not one of several, sent in turn.
        samples = said.samples if len(self._fragments) > 1 else self.state.samples[fragment]
        counts = {"steps": said.steps, "round_samples": samples, "trained": self.unmerged.take()}
        update = self._update(fragment, said.round, **counts)
        self.unmerged.sent = Sent(said=said, update=update, upload=self._start(update))
        return True

    def _send_again(self) -> None:
        """Send an update that has its receipt once more, as the coordinator may have lost it. With the lock held."""
        sent = self.unmerged.sent
        if sent is not None and sent.upload.answer is not None:
            former, sent.upload = sent.upload, self._start(sent.update)
            sent.upload.former = former.answer

    def _start(self, update: Contribution) -> Upload:
        upload = self._exchange.start(update)
        upload.receipt.add_done_callback(self._notify)
        return upload

    def _update(self, fragment: int, round: int, **in_round: Any) -> Contribution:
        return Contribution(
            worker=self.worker,
            round=round,
            fragment=fragment,
            pseudo_gradient=self.state.pseudo_gradient(fragment),
            samples=self.state.samples[fragment],
            **in_round,
        )

    def _merge(self, round: int, mean: Mean) -> None:
        """Take the outer step of a round, and set the trained weights from it.

        A round without a quorum changes nothing: its work is carried into the next one.
        """
        fragment = self._trained.fragment_of(round)
        with self._lock:
            ended = self._place.end if self._place.end is not None and self._place.end.round == round else None
        halts = ended is not None and ended.halts
        unmerged, sent, gives_up = self.unmerged, self.unmerged.sent, False
        if sent is not None and sent.round == round:
            self._await_receipt(sent)
            unmerged.sent = None
            is_dropped = self._exchange.source is not None and sent.is_dropped
            self._exchange.settle(sent.upload, total=mean.total)
            if is_dropped and (mean.total or sent.update.trained):  # else it is carried
                self._say_lost(round, sent.update.round_samples)
            if is_dropped and sent.update.trained:
                gives_up = True
                self._give_up()  # its samples are in the weights already, or belong to another worker
            elif mean.total:
                # Steps taken while it travelled are still to be sent.
                self.state.taken(sent.update)
                unmerged.counts(sent)
            else:
                unmerged.carry(sent.update)
        elif not mean.total or self._trained.mixing:
            with self._lock:
                if self._place.counter.round == round:
                    self._place.counter.clear()
        else:
            self._say_lost(round, self.state.samples[fragment])
            self.state.overwritten(fragment)
            unmerged.lose()
        place = self._place
        with self._lock:  # before the outer step, which takes time: a coordinator may be back without this round
            place.version, place.chain, place.mean = round, mean.chain, None
        if mean.total:
            self.state.merge(fragment, mean.values, total=mean.total, exactly=halts or gives_up)
        self.statistics.rounds += 1
        if ended is not None:
            self.statistics.merged_samples += ended.samples
            self.round_end = ended
        self.halted = halts
        if halts:
            self._synchronise_others(round)

    def _say_lost(self, round: int, samples: int) -> None:
        """Warn that what was trained for a round is not in its mean."""
        if samples:
            again = "" if self.unmerged.data is None else " Its slices are trained on again."
            log.warning(
                "%s: round %d ended without its %d samples, which came too late or were refused, and are in no "
                "weights.%s A longer --grace-s waits for slow workers.",
                self.worker,
                round,
                samples,
                again,
            )

    def _synchronise_others(self, round: int) -> None:
        """Synchronise the fragments other than the round's, as all stand still with the same weights."""
        updates = [self._update(one, 0) for one in self._fragments if one != self._trained.fragment_of(round)]
        for update, upload in [(update, self._start(update)) for update in updates]:
            self.state.taken(update)
            with self._timed("exchange_s"):
                self._while_connected(upload.receipt.done, f"the mean of fragment {update.fragment}")
            mean: Mean = upload.receipt.result()
            self.state.merge(update.fragment, mean.values, total=mean.total, exactly=True)

    def _give_up(self) -> None:
        """Drop what was trained since fragments were last sent, and take the global weights."""
        self._take_global_weights()
        for fragment in self._fragments:
            self.state.overwritten(fragment)
        with self._lock:
            if self._place.counter.round <= self.round:
                self._place.counter.clear()
        self.unmerged.lose()

    def _follow_others(self) -> None:
        """Catch up with the others, mean by mean or with the global state.

        Raises:
            AwayError: If the coordinator is away.
        """
        self.check()
        place = self._place
        while self._late:
            if place.realign:
                lost = self._unsent
                self.unmerged.call_off()
                if lost:
                    log.warning("%s takes the global state, and gives up %d samples of its own", self.worker, lost)
                self._align()
                continue
            with self._timed("exchange_s"):
                mean = self._next_mean()
            if mean is not None:
                self._merge(self.round, mean)
        with self._lock:
            if not place.connected:
                raise AwayError
            if not place.joined:
                self._join()

    def _told_what_is_next(self) -> bool:
        told = self._place.counter.next_round
        if self._exchange.source is None and (told is not None or self.last_round is not None):
            return True  # if it does not follow these weights, _start_round raises
        return (told or 0) >= self.round or self._late or self._over_here

    def _start_round(self) -> None:
        """Wait for the next round and begin it, unless this worker pauses or the run is over.

        Raises:
            AwayError: If the coordinator is away.
            UnsupportedError: If ranks that were launched together have loaded other checkpoints.
        """
        while not (self._over_here or self._place.away):
            self.check()
            with self._lock:
                if self._exchange.source is not None and not self._told_what_is_next():
                    self._post(JoinRounds(worker=self.worker))  # it may count as lost
            with self._timed("start_s"):
                self._while_connected(self._told_what_is_next, "the next round")
            if self._late:
                self._follow_others()
                continue
            with self._lock:
                if not self._over_here and self._place.counter.next_round == self.round:
                    self._post(self._place.counter.start())
                    break
                if self._exchange.source is None and not self._over_here:
                    others = self._place.counter.next_round or self.last_round
                    raise UnsupportedError(
                        f"Round {others} begins, and the weights of {self.worker} are those of round {self.round}: "
                        "give all ranks the same ckpt_path, of a file that each of them can read."
                    )

    # ------------------------------------------------------------------ where the others are

    def _align(self) -> None:
        """Fetch the global state; where there is none, this worker's becomes the first one.

        Raises:
            AwayError: If the connection is lost.
        """
        source, state, place = self._exchange.source, self.state, self._place
        if source is None:
            raise RuntimeError("The mean of a round is missing, and there is no state to take instead.")
        fetched = source.fetch_state(lambda: pack_state(state.full_state()))
        fetched.add_done_callback(self._notify)
        try:
            with self._timed("exchange_s"):
                self._while_connected(fetched.done, "the global weights")
        finally:
            fetched.cancel()  # no effect if it is done
        payload, version, chain = fetched.result()
        state.load_state_dict(unpack_state(payload, state.full_state()))
        self._give_up()
        with self._lock:
            place.version, place.chain, place.realign = version, chain, False
            place.ended = max(place.ended, version)
            place.mean = None
            place.counter = RoundCounter(self.worker)

    def _take_global_weights(self) -> None:
        for fragment in self._fragments:
            self.state.merge(fragment, torch.empty(0, dtype=torch.float32), total=0, exactly=True)

    def _join(self) -> None:
        """Join the rounds over this connection, and say how far this worker is. With the lock held."""
        if self._place.away:
            return
        self._place.joined = True
        sent = self.unmerged.sent
        done = self._place.counter if sent is None else sent.said
        if done.round != self.round:
            self._post(JoinRounds(worker=self.worker))
            return
        self._post(JoinRounds(worker=self.worker, round=done.round, steps=done.steps, samples=done.samples))
        if sent is not None:
            self._post(msgspec.structs.replace(sent.said, worker=self.worker))

    def _go_on_alone(self) -> None:
        """Go on in the round that was sent, without the coordinator. All of it is sent again, in this or the next."""
        sent = self.unmerged.call_off()
        with self._lock:
            if sent is not None:
                self._place.counter = self._place.counter.carried_into(sent.round, sent.said)
            elif self._place.counter.round != self.round:
                self._place.counter = self._place.counter.carried_into(self.round)

    # ------------------------------------------------------------------ doing something else, and going

    def _pass_on(self, *, stop: bool) -> None:
        """Say that this worker has finished what all stood still for, and begin the next round."""
        self._post(PassedRoundEnd(worker=self.worker, round=self._place.version, stop=stop))
        self.halted = False
        self._start_round()

    def _pause(self, shows: bool) -> None:
        # A few steps since the last send stay here, as mixing keeps them for the next round. Carried work alone is
        # sent only if others wait for its samples to be in the weights.
        has_steps = self._place.counter.steps > self.overlap_steps
        if self.unmerged.sent is not None or has_steps or (not shows and self.unmerged.has_samples):
            self._hand_in()
        with self._lock:
            self._place.away = True
            self._post(PauseRounds(worker=self.worker))
        if shows:
            self._place.shown.enter_context(self.state.shown())
            self.state.changed.update(self._fragments)

    def _resume(self) -> None:
        self._place.shown.close()
        place = self._place
        with self._lock:
            place.away = place.joined = False
            if place.connected and not self._late:
                self._join()
            stays = self.unmerged.sent is None and not self._late and self._place.counter.round == self.round
        if not stays:
            self._conclude()
        self.state.changed.update(self._fragments)

    def _leave(self, quickly: bool, for_all: bool, hurries: Callable[[], bool]) -> None:
        place = self._place
        place.shown.close()
        self._send_last(quickly or hurries(), for_all)
        if self._unsent and not (quickly or hurries()):  # the connection is lost, or was for a moment
            self._reconnect(hurries)
            self._send_last(hurries(), for_all)
        if unsent := self._unsent:
            log.warning(
                "%s ends, and %d samples that it has trained on may be in no weights: the coordinator %s.",
                self.worker,
                unsent,
                "has not taken them" if place.connected else "is away",
            )
        if self._group.cause is None:
            with self._lock:
                self._post(LeaveRounds(worker=self.worker))
            source = self._exchange.source
            if place.connected and source is not None:
                source.flush(_RECEIPT_S / 3)
        self.unmerged.sent = None
        self._take_global_weights()

    @property
    def _unsent(self) -> int:
        """Samples that the coordinator has not taken or counted, and still could."""
        if self._exchange.source is None or self._group.cause is not None or self._over_here:
            return 0
        sent, unsent = self.unmerged.sent, self._place.counter.samples
        if sent is None:  # where fragments are sent in turn, what is left of the others is not counted
            return unsent if len(self._fragments) > 1 else self.state.samples[0]
        is_taken = sent.upload.answer is not None and not sent.is_dropped
        return unsent if is_taken else unsent + sent.update.round_samples

    def _reconnect(self, hurries: Callable[[], bool]) -> None:
        """Wait for a connection, for a while, and take part over it."""
        place, seconds = self._place, min(self._timeout, _BACK_S)
        if not place.connected:
            log.warning(
                "The coordinator is away: %s waits for it for up to %.0f s, with %d samples to send.",
                self.worker,
                seconds,
                self._unsent,
            )
        with suppress(AwayError, SchedulerTimeoutError):
            there = "the coordinator"
            self._while_connected(lambda: place.connected or hurries(), there, timeout=seconds, alone=True)
            with self._lock:
                place.away = False
            if not place.realign:  # else what is to be sent would be given up
                self._follow_others()  # a round that has ended without this worker may have changed nothing

    def _end_all(self, quickly: bool) -> None:
        """End the training of all workers, as long as this worker leads."""
        while self.leads and self._place.connected and not self._over_here:
            steps = self._place.counter.steps  # said each time, as a restarted coordinator does not know the request
            self._link.post(EndRound(worker=self.worker, round=self.round, now=True, steps=steps, stop=True))
            if quickly:
                break
            self._synchronise()  # bounded; goes on until the run's last weights are here

    def _send_last(self, quickly: bool, for_all: bool) -> None:
        """Send what is left, and merge it unless in a hurry; begin no round after it."""
        if for_all:
            self._end_all(quickly)
        if self._group.cause is not None:
            return
        if not quickly and self.unmerged.sent is not None:
            self._conclude()  # merges the update sent before the last steps
        self._hand_in()
        with self._lock:
            self._place.away = True
        if not quickly and self.unmerged.sent is not None:
            self._conclude()

    def _hand_in(self) -> None:
        """Send what was trained so far in this round, and wait for the receipt, if there is a connection."""
        place, unsent = self._place, self.state.samples[self._trained.fragment_of(self.round)]
        # A worker that pauses has handed in what it had, and has no part in the round that is on.
        if place.connected and not (place.away or self._over_here) and self.unmerged.sent is None and unsent:
            self._send()
        if self.unmerged.sent is not None:
            self._await_receipt(self.unmerged.sent)
