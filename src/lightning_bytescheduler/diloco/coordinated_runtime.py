"""What a rank has in a coordinator's run, put together and taken apart in one place.

The first rank of a worker has the client's thread and the one that encodes; the worker's other ranks have none. Both
are named ``bytescheduler-*`` and stopped by :meth:`CoordinatedRuntime.stop` within a bound.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cached_property
from typing import Any

import msgspec
from torch import nn

from lightning_bytescheduler.__about__ import __version__
from lightning_bytescheduler.diloco.coordinated_session import (
    CoordinatedRounds,
    CoordinatedSession,
)
from lightning_bytescheduler.diloco.coordinator_address import CoordinatorAddress
from lightning_bytescheduler.diloco.coordinator_client import CoordinatorClient
from lightning_bytescheduler.diloco.coordinator_protocol import (
    PROTOCOL,
    FromCoordinator,
    FromWorker,
    Hello,
    LeaderAppointed,
    ModelParameter,
    RunOptions,
    Welcome,
)
from lightning_bytescheduler.diloco.coordinator_transport import START, CoordinatorTransport
from lightning_bytescheduler.diloco.fragments import TrainedWeights
from lightning_bytescheduler.diloco.messages import LeaveRounds
from lightning_bytescheduler.diloco.outer_optimizer import OuterState
from lightning_bytescheduler.diloco.outer_timeline import OuterTimeline, beside
from lightning_bytescheduler.diloco.process_groups import WorkerGroup
from lightning_bytescheduler.diloco.runtime import SessionRuntime
from lightning_bytescheduler.diloco.training_loop import CoordinatedBoundaries
from lightning_bytescheduler.exceptions import RankFailedError
from lightning_bytescheduler.failures.board import FaultBoard
from lightning_bytescheduler.lightning_api import pl, rank_zero_info

log = logging.getLogger(__name__)

_STOP_S = 5.0
_MOMENT_S = 1.0
_LOOK_S = 1.0


class _Place(msgspec.Struct, frozen=True):
    """What the first rank tells the others of its worker once it is one of the run."""

    worker: str
    options: RunOptions
    leads: bool


class CoordinatedRuntime(SessionRuntime[CoordinatedRounds]):
    """See the module.

    Locks: what is known before there is a session is noted under one of its own, which is taken before the transport's
    and never after it.

    Args:
        address: Of the coordinator.
        module: What is trained.
        given: Of the options of ``RunOptions`` those that the user gave.
        group: The worker's ranks.
        board: Where failures within the worker are published; not closed with the runtime.
        flush: Brings the weights up to date.
        timeout: Longest wait for the first connection, and at the end of a round, in seconds.
        timeline: File of the timeline, which gets the worker's name before its suffix; ``None`` for none.
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
        timeline: str | os.PathLike[str] | None = None,
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
        self._path = timeline
        self._timeline = OuterTimeline()
        self._begin = begin
        self._led = False  # to begin with, as all ranks of the worker know it
        self._boundaries: CoordinatedBoundaries | None = None
        self._arrived = threading.Condition()
        # What follows changes under the condition, until there is a session that is told instead.
        self._welcome: Welcome | None = None
        self._place: _Place | None = None  # as the first coordinator has said
        self._error: BaseException | None = None
        self._fault: RankFailedError | None = None
        self._leading: CoordinatedSession | None = None
        self._transport: CoordinatorTransport | None = None
        self._stopped = False

    def connect(self) -> None:
        """Become one of the run; on the other ranks, hear of it.

        Raises:
            CoordinatorError: If the coordinator refuses this worker.
            RankFailedError: If another rank of the worker fails meanwhile.
            SchedulerTimeoutError: If there is none in time.
        """
        self._board.watch(self)
        _ = self._model  # as it is before training
        place = ""
        if self.group.leads:
            self.client = CoordinatorClient(
                self._address,
                hello=self._hello,
                timeout=self._timeout,
                on_welcome=self._welcomed,
                on_message=self._heard,
                on_lost=self._lost,
                on_error=self._ended,
            )
            with self._arrived:
                # The client gives up in time, until it has heard something. If that is gone again, the session waits.
                while self._place is None and self._ended_with is None and not self._stopped:
                    self._arrived.wait(_LOOK_S)
                if self._ended_with is not None or self._place is None:
                    raise self._ended_with or RuntimeError("The connection to the coordinator ended.")
                place = msgspec.json.encode(self._place).decode()
        found = msgspec.json.decode(self.group.tell(place), type=_Place)
        self.worker, self.options, self._led = found.worker, found.options, found.leads
        rank_zero_info(
            f"diloco: this is {self.worker!r} in the run of {self._address.url}"
            f"{', which leads: it validates, logs and saves for all' if self._led else ''}."
        )

    def prepare(self) -> None:
        """Make the session, as the run's options say."""
        options = self.options
        trained = TrainedWeights(self._module, options.fragment_options)
        if self.client is None:
            self.session = CoordinatedRounds(worker=self.worker, group=self.group, trained=trained)
            return
        state = OuterState(
            trained,
            weighting=options.weighting,
            lr=options.outer_lr,
            momentum=options.outer_momentum,
            factory=None,
        )
        sizes = [sum(p.numel() for p in trained.of(fragment)) for fragment in range(len(trained.fragments))]
        if self._path is not None:
            self._timeline = OuterTimeline(beside(self._path, self.worker), worker=self.worker)
        self._transport = CoordinatorTransport(self.client, wire=options.wire, sizes=sizes, timeline=self._timeline)
        session = CoordinatedSession(
            worker=self.worker,
            group=self.group,
            state=state,
            transport=self._transport,
            overlap=options.overlap,
            flush=self._flush,
            timeout=self._timeout,
        )
        self.session, self.state = session, state
        with self._arrived:
            if self._ended_with is not None:
                raise self._ended_with
            self._leading = session
            if self._welcome is not None:
                session.welcomed(self._welcome)

    def start(self, state: Mapping[str, Any] | None = None) -> None:
        """Take the global weights and begin the first round.

        Args:
            state: Of a checkpoint; it counts only if these are the run's first weights.
        """
        if state is not None and self._leading is not None:
            self._leading.state.load_state_dict(state["outer"])
        self.session.begin()

    @cached_property
    def _model(self) -> tuple[ModelParameter, ...]:
        return tuple(
            ModelParameter(name=name, shape=tuple(p.shape), dtype=str(p.dtype).removeprefix("torch."))
            for name, p in self._module.named_parameters()
            if p.requires_grad
        )

    def begin(self, trainer: pl.Trainer, state: Mapping[str, Any] | None) -> CoordinatedBoundaries:
        """Begin the first round, and take the place of the loop's decisions.

        Args:
            trainer: Whose loop it is.
            state: See :meth:`start`.
        """
        self.start(state)
        self._boundaries = CoordinatedBoundaries(trainer, self.session, group=self.group, leads=self._led)
        self._boundaries.attach()
        return self._boundaries

    @property
    def leads(self) -> bool:
        """Whether this worker validates, logs and saves for all; the same on all of its ranks."""
        return self._led if self._boundaries is None else self._boundaries.leads

    def end_all(self) -> None:
        """The end of this worker, if it leads, is to be that of all."""
        if self._boundaries is not None:
            self._boundaries.ends_all = True

    def check(self) -> None:
        """Raise what another thread or rank has failed with, if any."""
        if self._begun:
            self.session.check()

    def waits(self) -> bool:
        """See ``Idle``: this worker takes no part in rounds while other workers hold all that is left.

        Lightning fetches a first batch before it says that training begins. A worker that waited there without having
        joined the rounds would be waited for, if the first round is to have so many workers, by those who hold what it
        waits for.
        """
        if self._boundaries is None and self._begun:
            self._begin()
        return self._boundaries is not None and self._boundaries.wait_aside()

    def goes_on(self) -> None:
        """See ``Idle``."""
        if self._boundaries is not None:
            self._boundaries.come_back()

    def state_dict(self) -> dict[str, Any] | None:
        """What to keep beside the global weights, with which a run without a coordinator can go on, too."""
        if self._leading is None:
            return None
        statistics = self._leading.statistics
        rounds = {"round": self._leading.version, "samples": statistics.merged_samples}
        return {"outer": self._leading.state.state_dict(), "rounds": rounds}

    # ------------------------------------------------------------------ what the fault board asks and tells

    def rank_failed(self, fault: RankFailedError, step: int | None) -> None:
        """Stop: another rank of the worker has failed."""
        self.group.abort(fault)
        with self._arrived:
            self._fault = fault
            self._arrived.notify_all()
        super().rank_failed(fault, step)

    def own_failure(self) -> BaseException | None:
        """What has ended the connection."""
        return self._error

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
                if failed and self._error is None:
                    self.client.post(LeaveRounds(worker=self.client.worker))
                    self.client.flush(_MOMENT_S)
                threads = self.client if self._transport is None else self._transport
                if not threads.stop(_STOP_S):
                    log.warning("%s: the coordinator's threads did not end within %.0f s", self.worker, _STOP_S)
        with suppress(Exception):
            self._timeline.close()
        return not failed

    # ------------------------------------------------------------------ the client's thread

    def _hello(self, worker: str, session: str) -> Hello:
        transport = self._transport
        version, chain = 0, START
        if transport is not None:
            with transport.changed:
                version, chain = transport.version, transport.chain
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

    def _welcomed(self, welcome: Welcome) -> None:
        with self._arrived:
            self._welcome = welcome
            if self._place is None:
                self._place = _Place(welcome.worker, welcome.options, welcome.leads)
            leading = self._leading
            self._arrived.notify_all()
        if leading is not None:
            leading.welcomed(welcome)

    def _heard(self, message: FromCoordinator | FromWorker) -> None:
        with self._arrived:
            leading = self._leading
            if leading is None and isinstance(message, LeaderAppointed) and self._welcome is not None:
                self._welcome = msgspec.structs.replace(self._welcome, leads=message.worker == self._welcome.worker)
        if leading is not None:
            leading.receive(message)

    def _lost(self) -> None:
        with self._arrived:
            self._welcome = None
            leading = self._leading
        if leading is not None:
            leading.lost()

    @property
    def _ended_with(self) -> BaseException | None:
        return self._fault or self._error

    def _ended(self, error: BaseException) -> None:
        with self._arrived:
            self._error = error
            leading = self._leading
            self._arrived.notify_all()
        if leading is not None and not self._stopped:
            leading.fail(error)
