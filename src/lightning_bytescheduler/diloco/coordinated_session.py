"""A worker's part in the rounds of a coordinator, where workers come and go.

The training thread looks at the end of each batch whether there is something to do, which takes no message. If there
is, it sends what it has trained, waits for the end of the round, takes the outer steps that it is behind, and begins
the next round. Nobody stands still for another worker's epoch or validation, and a worker's own end ends it alone.

While the coordinator is away there is nothing to do: the worker takes steps on the weights it has, and what was sent
without an answer is sent again with what was trained since. Samples are counted as sent when the round that they were
sent for is part of the weights here.

With ``overlap_steps="auto"`` the same look says when to merge what travels beside steps, see ``fragments.py``.

The ranks of one worker go through the same calls in the same order. The first one has the session, the others follow it
(``CoordinatedRounds``): they are told after each synchronisation what has changed, and get the first rank's weights,
bit for bit.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass

import msgspec
import torch

from lightning_bytescheduler.diloco.coordinator_protocol import (
    FromCoordinator,
    FromWorker,
    LeaderAppointed,
    PauseRounds,
    ResumeRounds,
    Welcome,
)
from lightning_bytescheduler.diloco.coordinator_transport import (
    CatchUp,
    CoordinatedExchange,
    CoordinatorTransport,
    Mean,
)
from lightning_bytescheduler.diloco.fragments import Overlap
from lightning_bytescheduler.diloco.messages import (
    EndRound,
    JoinRounds,
    LeaveRounds,
    RoundEnded,
    RoundStatus,
    SendingPseudoGradient,
    StepMetrics,
    StepReport,
    TrainingOver,
)
from lightning_bytescheduler.diloco.outer_optimizer import OuterState, pack_state, unpack_state
from lightning_bytescheduler.diloco.process_groups import WorkerGroup
from lightning_bytescheduler.diloco.round_counter import RoundCounter
from lightning_bytescheduler.diloco.session import Contribution, RankSession

log = logging.getLogger(__name__)


class CoordinatedRounds(RankSession):
    """One rank of a worker in a coordinator's run; by itself, one that follows. For the training thread, but ``fail``.

    Args:
        worker: The worker's name.
        group: The worker's ranks.
        trained: What is trained.
    """

    @property
    def leads(self) -> bool:
        """Whether this rank's worker validates, logs and saves for all, as far as this rank says it."""
        return False

    def synchronise(self) -> None:
        """Do what is due: send, merge, catch up, and begin the next round."""
        self._together(self._synchronise)

    def pause(self, *, shows: bool = True) -> None:
        """Send what was trained, and do something else until :meth:`resume`.

        Args:
            shows: Whether to have the global weights meanwhile.
        """
        self._together(lambda: self._pause(shows))

    def is_over_elsewhere(self) -> bool:
        """Whether the run has ended while this worker did something else; looks only."""
        return False

    def resume(self) -> None:
        """Go on with the rounds: where the others are by now."""
        self._together(self._resume)

    def leave(self, *, quickly: bool, for_all: bool = False) -> None:
        """Take part no more, and have the global weights. What was trained counts.

        Args:
            quickly: Whether not to wait for the end of the round.
            for_all: Whether this worker leads, and the training of all is to end with this round.
        """
        self._together(lambda: self._leave(quickly, for_all))

    # As in RankSession, for the first rank alone.

    def _synchronise(self) -> None:
        """See :meth:`synchronise`."""

    def _pause(self, shows: bool) -> None:
        """See :meth:`pause`."""

    def _resume(self) -> None:
        """See :meth:`resume`."""

    def _leave(self, quickly: bool, for_all: bool) -> None:
        """See :meth:`leave`."""


@dataclass(slots=True, kw_only=True)
class Sent:
    """A pseudo-gradient that is on its way.

    Attributes:
        said: Of the round in which it was made.
        fragment: Which.
        exchange: Carries it.
        samples: Processed since the fragment was last sent.
        tokens: The same in tokens.
        longest: Steps beside it after which the worker waits.
        steps_since: Steps taken beside it.
    """

    said: SendingPseudoGradient
    fragment: int
    exchange: CoordinatedExchange
    samples: int
    tokens: int
    longest: int
    steps_since: int = 0

    @property
    def round(self) -> int:
        """In which it was made."""
        return self.said.round


class UnsentWork:
    """Counts of one worker. For the training thread.

    A round without a quorum changes no weights. What was done in it is *carried*: it stays in the local weights and in
    these counts, and the next update of the fragment has all of it.

    Args:
        fragments: How many.

    Attributes:
        samples: By fragment: since it was last part of a mean.
        tokens: The same in tokens.
        steps: That were carried from rounds without a quorum.
        round_samples: Of these steps.
    """

    def __init__(self, fragments: int) -> None:
        self.samples = [0] * fragments
        self.tokens = [0] * fragments
        self.steps = 0
        self.round_samples = 0

    def count(self, *, samples: int, tokens: int) -> None:
        """Take note of a step."""
        for fragment in range(len(self.samples)):
            self.samples[fragment] += samples
            self.tokens[fragment] += tokens

    def taken(self, sent: Sent) -> None:
        """An update has become part of a mean, or is late; steps beside which it travelled are still to be sent."""
        self.samples[sent.fragment] -= sent.samples
        self.tokens[sent.fragment] -= sent.tokens
        self.steps = self.round_samples = 0

    def carry(self, done: SendingPseudoGradient | RoundCounter) -> None:
        """A round is over that has changed nothing, and what was done in it is to be sent later."""
        self.steps += done.steps
        self.round_samples += done.samples

    def withdraw(self, sent: Sent) -> None:
        """An update is not to be part of its round: what it has is carried."""
        sent.exchange.cancel()
        self.carry(sent.said)

    def overwritten(self, fragment: int) -> None:
        """The trained weights of a fragment are the global ones now: nothing of it is left to send."""
        self.samples[fragment] = self.tokens[fragment] = 0
        self.steps = self.round_samples = 0

    def start_anew(self) -> None:
        """All weights are the global ones now."""
        for fragment in range(len(self.samples)):
            self.overwritten(fragment)


_RECEIPT_S = 30.0  # for what is sent before the worker does something else, or goes
_KEPT_ENDS = 16


class CoordinatedSession(CoordinatedRounds):
    """The first rank of a worker, often the only one.

    Lock: that of the transport, for what the client's thread changes.

    Args:
        worker: The name that the coordinator gave.
        group: The worker's ranks.
        state: The global weights.
        transport: To the coordinator.
        overlap: When what was sent is merged.
        flush: Called before weights are read or replaced: brings them up to date.
        timeout: Longest wait at the end of a round, in seconds.
    """

    def __init__(
        self,
        *,
        worker: str,
        group: WorkerGroup,
        state: OuterState,
        transport: CoordinatorTransport,
        overlap: Overlap,
        flush: Callable[[], None],
        timeout: float,
    ) -> None:
        super().__init__(worker=worker, group=group, trained=state.trained)
        self._state = state
        self._transport = transport
        self._overlap = overlap
        self._flush = flush
        self._timeout = timeout
        # What follows changes under the transport's lock.
        self._counter = RoundCounter(worker)
        self._round_ends: dict[int, RoundEnded] = {}
        self._last_round: int | None = None  # of the run, once it is over
        self._left: int | None = None
        self._leads = False
        self._begun = False  # has the run's weights
        self._joined = False  # over this connection
        self._away = False  # pauses, or has left
        self._reported: StepReport | None = None
        # The training thread's own.
        self._unsent = UnsentWork(len(state.trained.fragments))
        self._sent: Sent | None = None
        self._beside = 0 if overlap.follows_mean else overlap.longest(0)  # steps beside the last mean, at most
        self._carries = False  # what was trained, over to weights from before it
        self._shown = ExitStack()

    @property
    def round(self) -> int:
        """The round this worker is in."""
        return self._transport.version + 1

    @property
    def leads(self) -> bool:
        """Whether this worker validates, logs and saves for all."""
        return self._leads

    @property
    def state(self) -> OuterState:
        """The global weights."""
        return self._state

    @property
    def _fragments(self) -> range:
        return range(len(self._trained.fragments))

    def progress(self) -> dict[str, float]:
        """How the rounds go, by name; what is not known is left out."""
        known = {"round": self.round, "to_go": self._left, "steps_left": self._counter.steps_left}
        return {name: float(value) for name, value in known.items() if value is not None} | super().progress()

    # ------------------------------------------------------------------ the client's thread

    def welcomed(self, welcome: Welcome) -> None:
        """There is a connection, and maybe another coordinator."""
        transport = self._transport
        with transport.changed:
            transport.welcomed(welcome, begun=self._begun)
            self.worker, self._leads, self._joined = welcome.worker, welcome.leads, False
            self._counter.worker = welcome.worker
            if self._reported is not None:
                self._reported = msgspec.structs.replace(self._reported, worker=self.worker)
            if self._begun and not transport.realign and transport.ended == transport.version:
                self._join()
            transport.changed.notify_all()

    def lost(self) -> None:
        """There is no connection any more."""
        with self._transport.changed:
            self._transport.lost()
            self._joined = False
            self._transport.changed.notify_all()

    def receive(self, message: FromCoordinator | FromWorker) -> None:
        """Take in what the coordinator says."""
        transport = self._transport
        with transport.changed:
            if isinstance(message, RoundEnded):
                self._round_ends[message.round] = message
                self._round_ends = dict(list(self._round_ends.items())[-_KEPT_ENDS:])
                transport.round_ended(message.round)
                if message.stop:
                    self._last_round = message.round
            elif isinstance(message, RoundStatus):
                self._left = message.left
            elif isinstance(message, LeaderAppointed):
                self._leads = message.worker == self.worker
            elif isinstance(message, TrainingOver):
                self._last_round = message.round
            elif not isinstance(message, (PauseRounds, ResumeRounds)):
                self._counter.receive(message)
            transport.changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """See CoordinatedRounds."""
        super().fail(error)
        self._transport.abort(error)

    # ------------------------------------------------------------------ a step

    def _together(self, work: Callable[[], None]) -> None:
        def done() -> None:
            work()
            self.version, self.over = self._transport.version, self._over_here

        super()._together(done)

    def _report(self, *, samples: int, seconds: float, tokens: int, loss: float | None) -> None:
        self._transport.timeline.trained(self.round)
        self._state.count(samples=samples, tokens=tokens)
        self._unsent.count(samples=samples, tokens=tokens)
        with self._transport.changed:
            report = self._reported = self._counter.step(batch_size=samples, seconds=seconds, tokens=tokens)
            if self._joined:
                measured = StepMetrics(
                    worker=self.worker, round=report.round, batch_size=samples, seconds=seconds, loss=loss
                )
                self._transport.client.post(report, measured)
        if self._sent is not None:
            self._sent.steps_since += 1

    def _is_due(self) -> bool:
        transport = self._transport
        with transport.changed:
            if self._failure is not None or self._over_here:
                return True
            if not transport.connected:
                return False
            if (sent := self._sent) is not None:
                return sent.steps_since >= sent.longest or (self._overlap.follows_mean and self._is_concluded(sent))
            return self._late or (self._joined and self._counter.due)

    def _is_concluded(self, sent: Sent) -> bool:
        """Whether nothing is left to wait for before the next round, or to find out where the others are."""
        transport = self._transport
        if not sent.exchange.is_there():
            return False
        is_last = self._last_round is not None and sent.round >= self._last_round
        told = max(self._counter.next_round or 0, transport.ended) > sent.round
        return transport.realign or is_last or told

    @property
    def _late(self) -> bool:
        """Whether the round that this worker is in is over, or another one."""
        return self._transport.realign or self._transport.ended > self._transport.version

    @property
    def _over_here(self) -> bool:
        """Whether the run is over, and nothing is left to merge."""
        return self._last_round is not None and self._transport.version >= self._last_round

    # ------------------------------------------------------------------ the end of a round

    def _begin(self) -> None:
        self._transport.wait(lambda: self._transport.realign, "the coordinator", self._timeout)
        while not (self._align() and self._follow_others() and self._start_round()):
            self.check()
            self._transport.await_connection(self._timeout)
        self._changed.update(self._fragments)

    def _synchronise(self) -> None:
        self.check()
        self._flush()
        travels = self._sent is None and self._send() and self._overlap and not self._counter.closes
        if not travels:
            self._conclude()

    def _conclude(self) -> bool:
        """Merge the round that is due and all others that have ended; returns whether the next one has begun."""
        sent = self._sent
        if sent is not None:
            began = time.monotonic()
            found = sent.exchange.wait(self._timeout)
            self.statistics.exchange_s += time.monotonic() - began
            if not isinstance(found, CatchUp) and sent.exchange.mean is not None:
                self._merge(sent.round, sent.exchange.mean)
            elif not self._transport.connected:
                self._reopen()
                return False
        if self._follow_others() and self._start_round():
            return True
        if self._sent is not None:
            self._reopen()
        else:
            self._open_next()
        return False

    def _send(self) -> bool:
        """Send what was trained in this round; returns if that was on before: no step depends on how it is after."""
        transport, fragment = self._transport, self._trained.fragment_of(self.round)
        late = self._late
        self._carries = transport.rewound
        if self._carries or (late and not self._unsent.samples[fragment]):
            return False
        with transport.changed:
            if self._counter.round != self.round:
                self._open_next()
            message = self._counter.send()
            self._reported = None
            if self._joined and not late:
                transport.post(message)
        with transport.timeline.doing("pseudo-gradient"):
            pseudo_gradient, weight = self._state.pseudo_gradient(fragment)
        unsent = self._unsent
        samples, tokens = unsent.samples[fragment], unsent.tokens[fragment]
        contribution = Contribution(
            worker=message.worker,
            round=message.round,
            fragment=fragment,
            pseudo_gradient=pseudo_gradient,
            weight=weight,
            samples=samples,
            tokens=tokens,
            steps=message.steps + unsent.steps,
            round_samples=message.samples + unsent.round_samples,
        )
        self._sent = Sent(
            said=message,
            fragment=fragment,
            exchange=transport.start(contribution),
            samples=samples,
            tokens=tokens,
            longest=self._overlap.longest(message.steps),
        )
        return not late

    def _merge(self, round: int, mean: Mean) -> None:
        """Take the outer step of a round, and let the trained weights follow.

        A round without a quorum changes nothing: what was trained is carried into the next one, unless it is late and
        counts there already.
        """
        transport, unsent = self._transport, self._unsent
        fragment = self._trained.fragment_of(round)
        with transport.changed:
            ended = self._round_ends.get(round)
        sent, counts = self._sent, False
        if self._overlap.follows_mean:
            self._beside = 0 if sent is None or sent.round != round else sent.steps_since
        if sent is not None and sent.round == round:
            self._sent = None
            counts = sent.exchange.settle(total=mean.total, timeout=_RECEIPT_S)
            if mean.total or counts:
                unsent.taken(sent)
            else:
                unsent.carry(sent.said)
        elif not mean.total or self._trained.mixing:
            with transport.changed:
                if (counter := self._counter).round == round:
                    unsent.carry(counter)
                    counter.steps = counter.samples = counter.tokens = 0
        else:
            unsent.overwritten(fragment)
        if mean.total or counts:
            with transport.timeline.doing("outer step"):
                self._state.merge(fragment, mean.values, total=mean.total, exactly=False)
            self._changed.add(fragment)
        transport.took(round, mean)
        self.statistics.rounds += 1
        if ended is not None:
            self.statistics.merged_samples += ended.samples
            self.round_end = ended

    def _follow_others(self) -> bool:
        """Catch up: mean by mean, or with the state; returns whether this worker is where the others are."""
        transport = self._transport
        while True:
            self.check()
            if transport.realign:
                sent, self._sent = self._sent, None
                if sent is not None and transport.rewound:
                    self._unsent.withdraw(sent)
                    self._carries = True
                if not self._align():
                    return False
            elif transport.ended <= transport.version:
                break
            else:
                round = transport.version + 1
                mean = transport.mean(round, self._timeout)
                if not isinstance(mean, CatchUp):
                    self._merge(round, mean)
                elif not transport.connected:
                    return False
                else:
                    log.info("%s takes the global state: %s", self.worker, mean.reason)
                    with transport.changed:
                        transport.realign = True
        with transport.changed:
            if not self._joined and transport.connected and not self._away:
                self._join()
        return transport.connected

    def _ask(self) -> None:
        """Say that this worker waits for a round: it may have been taken for lost. With the lock held."""
        if self._joined and not self._away:
            self._transport.client.post(JoinRounds(worker=self.worker))

    def _told_what_is_next(self) -> bool:
        return (self._counter.next_round or 0) >= self.round or self._late or self._over_here

    def _start_round(self) -> bool:
        """Wait for the next round and begin it; returns whether it has begun, or the run is over."""
        transport = self._transport
        while not self._over_here:
            if self._away:
                return True
            began = time.monotonic()
            there = transport.wait(self._told_what_is_next, "the next round", self._timeout, meanwhile=self._ask)
            self.statistics.start_s += time.monotonic() - began
            if not there:
                return False
            if self._late:
                if not self._follow_others():
                    return False
                continue
            if self._over_here:
                break
            with transport.changed:
                next_round = self._counter.next_round
                if next_round is not None and next_round == transport.version + 1:
                    message = self._counter.start()
                    if self._joined:
                        transport.post(message)
                    return True
        return True

    # ------------------------------------------------------------------ where the others are

    def _align(self) -> bool:
        """Give the first weights, or take those that there are; returns whether that was done."""
        transport = self._transport
        if not transport.realign:
            return True
        if transport.provides and not transport.provide(pack_state(self._state.full_state()), self._timeout):
            return False
        # What was provided is fetched, too: all begin with what the coordinator has made of it.
        began = time.monotonic()
        found = transport.fetch_state(self._timeout)
        self.statistics.exchange_s += time.monotonic() - began
        if isinstance(found, CatchUp):
            return False
        self._flush()
        # What was trained after a round that is to be repeated is not sent before: a worker has one update in a round.
        with self._state.carried() if self._carries else nullcontext():
            self._state.load_state_dict(unpack_state(found.payload, self._state.full_state()))
            self._take_global_weights()
        if self._carries:
            self._unsent.carry(self._counter)
        else:
            self._unsent.start_anew()
        self._carries = False
        transport.aligned(found.version, found.chain)
        with transport.changed:
            self._begun = True
            self._counter = RoundCounter(self.worker)
            self._reported = None
        return True

    def _take_global_weights(self) -> None:
        for fragment in self._fragments:
            self._state.merge(fragment, torch.empty(0, dtype=torch.float32), total=0, exactly=True)
        self._changed.update(self._fragments)

    def _join(self) -> None:
        """Say over this connection that this worker takes part, and how far it is. With the lock held."""
        if self._away:
            return
        self._joined = True
        counter, round = self._counter, self._transport.version + 1
        message = JoinRounds(worker=self.worker)
        if counter.round == round and self._reported is not None and self._sent is None:
            message = msgspec.structs.replace(
                message, round=round, steps=counter.steps, samples=counter.samples, tokens=counter.tokens
            )
        self._transport.client.post(message)
        if message.round and self._reported is not None:
            self._transport.client.post(self._reported)

    def _reopen(self) -> None:
        """The coordinator is away: go on with the round, and send all of it again."""
        sent, self._sent = self._sent, None
        if sent is None:
            return
        sent.exchange.cancel()
        with self._transport.changed:
            self._counter = self._counter.carried_into(
                sent.round, steps=sent.said.steps, samples=sent.said.samples, tokens=sent.said.tokens
            )

    def _open_next(self) -> None:
        """Take steps in the next round though nobody has said that it has begun: the coordinator is away."""
        with self._transport.changed:
            if self._counter.round != self.round:
                self._counter = self._counter.carried_into(self.round)

    # ------------------------------------------------------------------ doing something else, and going

    def is_over_elsewhere(self) -> bool:
        """See CoordinatedRounds."""
        return self._last_round is not None

    def _pause(self, shows: bool) -> None:
        self._flush()
        # Neither what was carried alone, nor the few steps beside the last mean, which mixing keeps for the next round.
        if self._sent is not None or self._counter.steps > (self._beside if self._trained.mixing else 0):
            self._hand_in()
        with self._transport.changed:
            self._away = True
            if self._joined:
                self._transport.client.post(PauseRounds(worker=self.worker))
        if shows:
            self._shown.enter_context(self._state.shown())
            self._changed.update(self._fragments)

    def _resume(self) -> None:
        self._shown.close()
        transport = self._transport
        transport.timeline.stood("validation or another pause")
        with transport.changed:
            self._away = False
            if self._joined:
                transport.client.post(ResumeRounds(worker=self.worker))
            if transport.connected and not self._joined and not self._late:  # it was away meanwhile
                self._join()
            stays = self._sent is None and not self._late and self._counter.round == self.round
        if not stays:
            self._conclude()
        self._changed.update(self._fragments)

    def _leave(self, quickly: bool, for_all: bool) -> None:
        self._shown.close()
        transport, told = self._transport, None
        while for_all and self._leads and transport.connected and not self._over_here:
            if told is not transport.welcome:  # a coordinator that was started again knows of no wish
                told, steps = transport.welcome, self._counter.steps
                transport.client.post(EndRound(worker=self.worker, round=self.round, now=True, steps=steps, stop=True))
            if quickly:
                break
            self._synchronise()  # each of them is bounded: to the run's last weights
        if self._failure is None:
            if not quickly and self._sent is not None and transport.connected:
                self._conclude()  # what travels beside the last steps
            self._hand_in()
            with transport.changed:
                self._away = True
            if not quickly and self._sent is not None and transport.connected:
                self._conclude()
            with transport.changed:
                if self._joined:
                    transport.client.post(LeaveRounds(worker=self.worker))
            if transport.connected:
                transport.client.flush(_RECEIPT_S / 3)
        self._sent = None
        self._take_global_weights()

    def _hand_in(self) -> None:
        """Send what was trained so far in this round, and wait for the receipt, if there is a connection."""
        self._flush()
        fragment = self._trained.fragment_of(self.round)
        if self._transport.connected and not self._over_here and self._sent is None and self._unsent.samples[fragment]:
            self._send()
        if self._sent is not None:
            self._sent.exchange.await_receipt(_RECEIPT_S)
