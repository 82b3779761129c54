"""What a rank has in one training in rounds, put together and taken apart in one place.

A rank that leads its worker has threads and connections; one that follows its leader has none. All threads are named
``bytescheduler-*`` and stopped by ``stop`` within a bound. A leader that was launched with others has four: one reads
its mailbox, one posts (on worker 0 that of the rounds does), and two are the exchange's. A leader in a coordinator's
run has two: the client's, and one that encodes.
"""

from __future__ import annotations

import atexit
import logging
from collections.abc import Callable, Mapping
from concurrent.futures import InvalidStateError
from contextlib import suppress
from functools import cached_property
from typing import Any

import msgspec
from torch import nn

from lightning_bytescheduler.diloco.coordinator_client import (
    CoordinatorAddress,
    CoordinatorClient,
    CoordinatorTransport,
)
from lightning_bytescheduler.diloco.coordinator_protocol import PROTOCOL, Hello, ModelParameter, RunOptions, Welcome
from lightning_bytescheduler.diloco.fragments import TrainedWeights
from lightning_bytescheduler.diloco.mailbox import Mailbox, Postman, connection_to, post
from lightning_bytescheduler.diloco.messages import LeaveRounds, PseudoGradientArrived, ToWorker, decode, encode
from lightning_bytescheduler.diloco.options import DiLoCoOptions
from lightning_bytescheduler.diloco.outer_optimizer import OuterState
from lightning_bytescheduler.diloco.process_groups import WorkerGroup, WorkerWorld, worker_name
from lightning_bytescheduler.diloco.pseudo_gradient_exchange import PseudoGradientExchange, size_of_parts
from lightning_bytescheduler.diloco.round_record import RoundRecord
from lightning_bytescheduler.diloco.rounds import RoundsThread
from lightning_bytescheduler.diloco.session import START, Session
from lightning_bytescheduler.diloco.training_loop import CoordinatedBoundaries, LoopBoundaries
from lightning_bytescheduler.diloco.worker_restart import WRITER, Resumed, WorkerStates
from lightning_bytescheduler.exceptions import RankFailedError
from lightning_bytescheduler.failures.board import NATIVE_S, FaultBoard
from lightning_bytescheduler.failures.messages import is_communication_error
from lightning_bytescheduler.failures.standstill import Standing
from lightning_bytescheduler.lightning_api import pl, rank_zero_info
from lightning_bytescheduler.registration import __version__

log = logging.getLogger(__name__)

_STOP_S = 5.0
_MOMENT_S = 2.0
_HOST = "scheduler"  # the mailbox of who hosts the rounds


class Runtime:
    """A session, watched by the fault board. By itself that of a rank whose leader speaks for it: there are no threads.

    Args:
        session: The rounds of this rank.
        board: Where failures are published; not closed with the runtime.

    Attributes:
        session: The same, once there is one.
        state: The global weights, on a rank that leads its worker.
        boundaries: Where the loop and the rounds meet, once they have begun.
        states: What a checkpoint is to have of this worker, and of others.
    """

    session: Session
    state: OuterState | None = None
    boundaries: LoopBoundaries | None = None
    states: WorkerStates | None = None

    def __init__(self, session: Session, board: FaultBoard) -> None:
        self.session = session
        self._board = board
        board.watch(self, self._standing)

    # What the fault board asks and tells, on its own thread.

    def rank_failed(self, fault: RankFailedError, step: int | None) -> None:
        """Stop: another rank has failed."""
        self._end_session(fault)

    def own_failure(self) -> BaseException | None:
        """What has stopped this rank, on whichever thread."""
        return None

    def _standing(self) -> Standing:
        if self._begun:
            return Standing(place=f"in round {self.session.round}, step {self.session.statistics.steps}")
        return Standing(place="connecting to the coordinator")

    def steps_handed_over(self) -> int:
        """How many rounds' pseudo-gradients were merged."""
        return self.session.statistics.rounds if self._begun else 0

    @property
    def _begun(self) -> bool:
        return hasattr(self, "session")

    # What the strategy calls.

    def begin(self, boundaries: LoopBoundaries, resumed: Resumed | None) -> None:
        """Join the other workers, begin the first round, and take the place of the loop's decisions.

        Args:
            boundaries: Of the session.
            resumed: What a checkpoint had, to carry on from.
        """
        self.boundaries = boundaries
        self._carry_on(None if resumed is None else resumed.outer)
        self.session.begin()
        if resumed is not None:
            resumed.go_on(boundaries.trainer)
        if self.states is not None:
            self.states.begun()
        boundaries.attach(self.states)

    def _carry_on(self, state: Mapping[str, Any] | None) -> None:
        if state is not None and self.state is not None:
            self.state.load_state_dict(state["outer"])

    @property
    def leads(self) -> bool:
        """Whether this worker validates, logs and saves for all; the same on all of its ranks."""
        return True

    def state_dict(self) -> dict[str, Any] | None:
        """What to keep beside the global weights; ``None`` on ranks that have none."""
        if self.state is None:
            return None
        return {"outer": self.state.state_dict(), "rounds": {"round": self.session.version}}

    def fail(self, error: BaseException) -> None:
        """Stop for good, because of this rank's failure or another's."""
        self._end_session(error)
        self.stop(failed=True)

    def _end_session(self, error: BaseException) -> None:
        """Nothing is to be expected of the others any more."""
        if self._begun:
            self.session.fail(error)

    def stop(self, *, failed: bool) -> bool:
        """Stop every thread; bounded, idempotent.

        Args:
            failed: Whether training ended with an error: then no rank is waited for, and nothing is raised.

        Returns:
            Whether nothing is under way on the group of the leaders.

        Raises:
            Exception: If another rank has failed that this one waits for in the end; all threads are stopped then.
        """
        self._board.unwatch(self)
        return not failed


class LeadingRuntime(Runtime):
    """The threads and connections of a leader that was launched with others.

    Worker 0 hosts the rounds: what these and its own session say to each other goes nowhere else. Its mailbox is
    theirs, and their thread posts.

    Args:
        trainer: The Trainer of the fit.
        trained: What is trained.
        make_session: Makes the session, with all but the global weights and the ways to the others.
        world: Where this worker is.
        board: See :class:`Runtime`.
        options: The user's.
        timeout: Longest wait for the other workers, in seconds.
        on_round: Called with each round that has ended, on worker 0, on a thread of its own.
    """

    state: OuterState
    states: WorkerStates

    def __init__(
        self,
        trainer: pl.Trainer,
        trained: TrainedWeights,
        make_session: Callable[..., Session],
        *,
        world: WorkerWorld,
        board: FaultBoard,
        options: DiLoCoOptions,
        timeout: float,
        on_round: Callable[[RoundRecord], object],
    ) -> None:
        if world.leaders is None:
            raise RuntimeError("Cannot exchange pseudo-gradients: only the first rank of a worker does.")
        self._board = board
        self._name = name = worker_name(world.worker)
        self._stopped = self._idle = False
        self.state = OuterState(trained, **options.outer_step)
        size = size_of_parts(max(trained.sizes))
        self._exchange = PseudoGradientExchange(
            world.leaders,
            wire=options.run.wire,
            partition_size=size,
            credit=2 * size,
            on_error=self._on_error,
            arrived=lambda update: link.post(PseudoGradientArrived(worker=name, round=update.round)),
        )
        self._postman: Postman | None = None
        self._rounds: RoundsThread | None = None
        link: Postman | RoundsThread
        if world.worker:
            link = self._postman = Postman(world.store, name, to=_HOST, on_error=self._on_error)
        else:
            self._store = connection_to(world.store)
            link = self._rounds = RoundsThread(
                options.run.target,
                options.rounds(timeout),
                workers=[worker_name(number) for number in range(world.workers)],
                post=self._say,
                on_round=on_round,
                # What a validation or a checkpoint does may keep the interpreter for longer than a step does.
                look=lambda halted: board.look_after_others((2.0 if halted else 1.25) * min(NATIVE_S, timeout / 4)),
                on_error=self._on_error,
            )
        super().__init__(make_session(state=self.state, link=link, exchange=self._exchange), board)
        self.states = WorkerStates(
            trainer,
            self.session,
            world,
            full=options.worker_states,
            timeout=timeout,
            count=2 if options.run.overlap_steps else 1,
            unsent=self._exchange.state_dict,
        )
        self._mailbox = Mailbox(
            world.store,
            _HOST if self._rounds is not None else name,
            thread="bytescheduler-outer-mail",
            handle=self._hear,
            on_error=self._on_error,
            postman=self._postman,
        )
        atexit.register(self.stop, failed=True)  # a thread inside torch while the interpreter ends would abort it

    def _hear(self, sender: str, text: str) -> bytes | None:
        """On the thread of the mailbox."""
        if sender == WRITER:
            return self.states.answer(text)
        hears: Callable[[Any], None] = self.session.receive if self._rounds is None else self._rounds.post
        hears(decode(text, sender=sender))
        return None

    def _say(self, to: str, message: ToWorker) -> None:
        """On the thread of the rounds."""
        if to == self._name:
            self.session.receive(message)
        else:
            post(self._store, to, _HOST, encode(message))

    def _carry_on(self, state: Mapping[str, Any] | None) -> None:
        super()._carry_on(state)
        if state is not None and "unsent" in state:  # not of a coordinator's run
            self._exchange.load_state_dict(state["unsent"])
        rounds_over = 0 if state is None else state["rounds"]["round"]
        if self._rounds is not None:
            self._rounds.start(rounds_over)
        self.session.stand_at(rounds_over)

    def state_dict(self) -> dict[str, Any] | None:
        """See Runtime; ``None`` on all workers but the first."""
        state = None if self._rounds is None else super().state_dict()
        return state and {**state, "unsent": self._exchange.state_dict()}

    def _end_session(self, error: BaseException) -> None:
        super()._end_session(error)
        self._exchange.abort(error)

    def own_failure(self) -> BaseException | None:
        """What has stopped the exchange, on whichever thread."""
        return self._exchange.abort_cause

    def stop(self, *, failed: bool) -> bool:
        """See Runtime."""
        if self._stopped:
            return self._idle
        try:
            self.states.leave(failed=failed)
        finally:  # an interrupt of that wait leaves no thread either
            self._stopped = True
            super().stop(failed=failed)
            atexit.unregister(self.stop)
            with suppress(Exception):
                for thread in (self._mailbox, self._postman, self._rounds):
                    if thread is not None:
                        thread.stop(_MOMENT_S if failed else _STOP_S)
            self._idle = self._exchange.stop(_STOP_S) and not failed
        return self._idle

    def _on_error(self, error: BaseException) -> BaseException:
        """Something failed on one of the threads: find out why, and tell all waits here."""
        if self._stopped:
            return error
        cause = self._exchange.abort_cause or self._board.explain(error)
        if is_communication_error(cause):
            cause = RankFailedError(None, f"which one is not known; this broke here: {error}")
            cause.__cause__ = error
        self._end_session(cause)
        return cause


class CoordinatedRuntime(Runtime):
    """See the module.

    Args:
        address: Of the coordinator.
        module: What is trained.
        given: Of the options of ``RunOptions`` those that the user gave.
        group: The worker's ranks.
        board: Where failures within the worker are published; not closed with the runtime.
        flush: Brings the weights up to date.
        timeout: Longest wait for the first connection, and at the end of a round, in seconds.
        begin: Begins the rounds before training does, if there are no data for this worker to begin with.

    Attributes:
        options: The run's, after :meth:`connect`.
        worker: This worker's name in the run, after :meth:`connect`.
        client: The connection, on the first rank.
        group: The worker's ranks.
    """

    def __init__(
        self,
        address: CoordinatorAddress,
        module: nn.Module,
        *,
        given: Mapping[str, Any],
        group: WorkerGroup,
        board: FaultBoard,
        flush: Callable[[], None],
        timeout: float,
        begin: Callable[[], None] = lambda: None,
    ) -> None:
        self.options = RunOptions()
        self.worker = address.worker
        self.client: CoordinatorClient | None = None
        self._address = address
        self._module = module
        self._given = dict(given)
        self.group = group
        self._board = board
        self._flush = flush
        self._timeout = timeout
        self._begin = begin
        self._led = False  # to begin with, as all ranks of the worker know it
        self.boundaries: CoordinatedBoundaries | None = None
        self._transport: CoordinatorTransport | None = None
        self._stopped = False

    def connect(self) -> None:
        """Become one of the run; on the other ranks, hear of it.

        Raises:
            CoordinatorError: If the coordinator refuses this worker.
            RankFailedError: If another rank of the worker fails before.
            SchedulerTimeoutError: If there is none in time.
        """
        self._board.watch(self, self._standing)
        _ = self._model  # as it is before training
        text = ""
        if self.group.leads:
            self.client = CoordinatorClient(self._address, hello=self._hello, timeout=self._timeout)
            self.group.check()
            text = msgspec.json.encode(self.client.first.result()).decode()  # the client gives up in time
        welcome = msgspec.json.decode(self.group.tell(text), type=Welcome)
        self.worker, self.options, self._led = welcome.worker, welcome.options, welcome.leads
        rank_zero_info(
            f"diloco: this is {self.worker!r} in the run of {self._address.url}"
            f"{', which leads: it validates, logs and saves for all' if self._led else ''}."
        )

    def prepare(self) -> None:
        """Make the session, as the run's options say."""
        options = self.options
        trained = TrainedWeights(self._module, fragments=options.fragments, overlaps=bool(options.overlap_steps))
        if self.client is not None:
            self.state = OuterState(trained, lr=options.outer_lr, momentum=options.outer_momentum)
            self._transport = CoordinatorTransport(self.client, wire=options.wire, sizes=trained.sizes)
        self.session = Session(
            worker=self.worker,
            group=self.group,
            trained=trained,
            overlap_steps=options.overlap_steps,
            flush=self._flush,
            state=self.state,
            link=self.client,
            exchange=self._transport,
            timeout=self._timeout,
        )
        self.group.check()
        if self.client is not None:
            self.client.listen(self.session)

    @cached_property
    def _model(self) -> tuple[ModelParameter, ...]:
        return tuple(
            ModelParameter(name=name, shape=tuple(p.shape), dtype=str(p.dtype).removeprefix("torch."))
            for name, p in self._module.named_parameters()
            if p.requires_grad
        )

    @property
    def leads(self) -> bool:
        """Whether this worker validates, logs and saves for all; the same on all of its ranks."""
        return self._led if self.boundaries is None else self.boundaries.leads

    def end_all(self) -> None:
        """The end of this worker, if it leads, is to be that of all."""
        if self.boundaries is not None:
            self.boundaries.ends_all = True

    def waits(self) -> bool:
        """See ``Idle``: this worker takes no part in rounds while other workers hold all that is left.

        Lightning fetches a first batch before it says that training begins. A worker that waited there without having
        joined the rounds would be waited for, if the first round is to have so many workers, by those who hold what it
        waits for.
        """
        if self.boundaries is None and self._begun:
            self._begin()
        return self.boundaries is not None and self.boundaries.wait_aside()

    def goes_on(self) -> None:
        """See ``Idle``."""
        if self.boundaries is not None:
            self.boundaries.come_back()

    # ------------------------------------------------------------------ what the fault board asks and tells

    def rank_failed(self, fault: RankFailedError, step: int | None) -> None:
        """Stop: another rank of the worker has failed."""
        self.group.abort(fault)
        if self.client is not None:
            with suppress(InvalidStateError):
                self.client.first.set_exception(fault)
        super().rank_failed(fault, step)

    def own_failure(self) -> BaseException | None:
        """What has ended the connection."""
        return None if self.client is None else self.client.error

    def stop(self, *, failed: bool) -> bool:
        """Stop every thread; bounded, never raises, idempotent. Says so in the log where one has not ended by then.

        Args:
            failed: Whether training ended with an error: then the coordinator is told, if that is quick.

        Returns:
            Whether nothing is under way in the worker's group, which has none of these threads.
        """
        if self._stopped:
            return not failed
        self._stopped = True
        self._board.unwatch(self)
        with suppress(Exception):
            if self.client is not None:
                if failed and self.client.error is None:
                    self.client.post(LeaveRounds(worker=self.client.worker))
                    self.client.flush(_MOMENT_S)
                threads = self.client if self._transport is None else self._transport
                if not threads.stop(_STOP_S):
                    log.warning("%s: the coordinator's threads did not end within %.0f s", self.worker, _STOP_S)
        return not failed

    def _hello(self, worker: str, session: str) -> Hello:
        version, chain = self.session.standing() if self._begun else (0, START)
        return Hello(
            protocol=PROTOCOL,
            package=__version__,
            worker=worker,
            session=session,
            model=self._model,
            options=self._given,
            ranks=self.group.size,
            version=version,
            chain=chain,
        )
