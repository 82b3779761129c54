"""The coordinator's service: aiohttp on one port, with the routes of ``diloco/coordinator_protocol.py``.

The run's core lives on the event loop, and nothing there waits or computes for long: updates are added, means are made
and the outer step is taken in threads, one merge after the other. A merge waits for the additions under way. While the
outer step is taken, the weights must not be read.
"""

from __future__ import annotations

import asyncio
import functools
import gc
import logging
import os
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import contextmanager
from typing import Any, TypeVar

import msgspec
from aiohttp import WSCloseCode, WSMsgType, web
from aiohttp.typedefs import Middleware
from torch import Tensor

from lightning_bytescheduler.coordinator.connection import Connection, RateLimit, Stalls
from lightning_bytescheduler.coordinator.global_weights import GlobalWeights
from lightning_bytescheduler.coordinator.membership import Member
from lightning_bytescheduler.coordinator.page import PUBLIC_PATHS, add_pages
from lightning_bytescheduler.coordinator.routes import BulkRoutes, problem
from lightning_bytescheduler.coordinator.run import CoordinatorOptions, Merge, Run
from lightning_bytescheduler.coordinator.slice_routes import SliceRoutes
from lightning_bytescheduler.coordinator.state_store import StateStore
from lightning_bytescheduler.coordinator.status import RoundSummary, RunStatus, WorkerStatus, summary_of
from lightning_bytescheduler.coordinator.update_sum import UploadRoom
from lightning_bytescheduler.diloco.coordinator_protocol import (
    HEALTH_PATH,
    SESSION_HEADER,
    SLICES_PATH,
    STATE_PATH,
    STATUS_PATH,
    UPDATE_PATH,
    WORKER_PATH,
    Hello,
    Refusal,
    decode_frame,
    encode_frame,
)
from lightning_bytescheduler.diloco.messages import ToWorker
from lightning_bytescheduler.diloco.round_record import RoundFile, RoundRecord
from lightning_bytescheduler.diloco.round_roster import WorkerProgress
from lightning_bytescheduler.exceptions import ByteSchedulerError, OptionError, SchedulerTimeoutError
from lightning_bytescheduler.registration import __version__
from lightning_bytescheduler.serving import BackgroundServer, Refusals, ServerAccess, guard
from lightning_bytescheduler.slices.tracker import encode

log = logging.getLogger(__name__)

_YOUNG = 20_000  # new objects before a young collection; seventy reports make Python's default of 700
_NEVER = 1_000_000  # collections of the middle generation before a full one
_MOST_ENDED = 1000  # ended connections after which a full collection is not put off


@contextmanager
def collected_rarely() -> Iterator[None]:
    """Let the coordinator alone make full garbage collections, in a process that does nothing else.

    With a thousand workers a full collection stops all answers for 0.2 s, and catching up takes seconds. Only ended
    connections leave cycles, and these are few. So full collections wait for a round's end, or many ended connections.
    """
    gc.collect()
    gc.freeze()  # torch's modules stay
    young, middle, old = gc.get_threshold()
    gc.set_threshold(max(young, _YOUNG), middle, _NEVER)
    try:
        yield
    finally:
        gc.set_threshold(young, middle, old)
        gc.unfreeze()


_LONGEST_TICK_S = 0.25
_HELLO_SECONDS = 20.0
_HELLO_BYTES = 1 << 24  # the names of all parameters
_SLICE_BYTES = 1 << 22  # keys of all slices in a cache
_SLICE_HELD_BACK_S = 1.0
_STOP_SECONDS = 5.0
_MERGE_SECONDS = 30.0  # a step of a large model
_STALLED_SECONDS = 60.0
_ROOM_BYTES = 2**31  # memory for uploads; for a large model, as much as a round's sum takes
_SUM_BYTES = 16  # of a round's sum, for each parameter
_ROUNDS_SHOWN = 200
_ROUNDS_DRAWN = 4
_WORKERS_DRAWN = 40
_NUMBER = r"\d{1,15}"


class CoordinatorService:
    """One run's service, on the event loop that it is started on.

    Args:
        options: The run's options.
        refusals: Counts clients that were not let in.
        fail: Called with an error that ends the run.
        store: Saves the run's state; ``None`` keeps the state in memory alone.
        slices: Hands out the training data; ``None`` where workers bring their own.
        rounds_file: Record of the rounds; closed when the service stops.
    """

    def __init__(
        self,
        options: CoordinatorOptions,
        *,
        refusals: Refusals,
        fail: Callable[[BaseException], None],
        store: StateStore | None,
        slices: SliceRoutes | None,
        rounds_file: RoundFile | None,
    ) -> None:
        self.slices = slices
        self._refusals = refusals
        self._fail = fail
        self._store = store
        self._rounds_file = rounds_file or RoundFile(None, append=False)
        # State of the run and the slices after the last round, until it is handed over to be saved; none amid a step.
        self._boundary: tuple[dict[str, Any], dict[str, Any] | None] | None = None
        self._started = time.monotonic()
        self._merges: asyncio.Queue[Merge | None] = asyncio.Queue()  # ends with None
        self.run = Run(
            options,
            post=self._post,
            merge=self._merges.put_nowait,
            on_round=self._note,
            on_leave=self._forget,
            slices=slices,
        )
        self._threads = ThreadPoolExecutor(os.cpu_count() or 1, thread_name_prefix="bytescheduler-coordinator")
        self.room = UploadRoom(_ROOM_BYTES, self._threads)
        self.stalls = Stalls(_STALLED_SECONDS)
        self.bulk = BulkRoutes(self.run, self.room, self.stalls, self._begin_with)
        self._ended_connections = 0  # since the last collection
        self._connections: dict[str, Connection] = {}
        self._slice_limits: dict[str, RateLimit] = {}  # by member's name
        self._tasks: list[asyncio.Task[None]] = []
        self._stopping = False
        self.rounds: deque[RoundSummary] = deque(maxlen=_ROUNDS_SHOWN)
        self.timeline: deque[RoundRecord] = deque(maxlen=_ROUNDS_DRAWN)

    def application(self, *middlewares: Middleware) -> web.Application:
        """The routes.

        Args:
            middlewares: Each request passes through these before a route answers it.
        """
        application = web.Application(middlewares=[self._worded, *middlewares], client_max_size=_SLICE_BYTES)
        place = UPDATE_PATH.format(round=f"{{round:{_NUMBER}}}", fragment=f"{{fragment:{_NUMBER}}}")
        router = application.router
        router.add_get(WORKER_PATH, self._socket)
        router.add_put(place, self._of_member(self.bulk.put))
        router.add_get(place, self._of_member(self.bulk.get), allow_head=False)
        router.add_get(STATE_PATH, self._of_member(self.bulk.get_state), allow_head=False)
        router.add_put(STATE_PATH, self._of_member(self.bulk.put_state))
        router.add_post(SLICES_PATH, self._of_member(self._slices))
        router.add_get(STATUS_PATH, self._status)
        router.add_get(HEALTH_PATH, self._health)
        add_pages(router, self.status)
        return application

    def start(self, state: Mapping[str, Any] | None = None) -> None:
        """Begin the run, or continue it; on the event loop.

        Args:
            state: A saved state to continue from.

        Raises:
            OptionError: If the state is of a run with other options or other slices.
        """
        if state is not None:
            self._load(state)
        for work, name in ((self._tick(), "tick"), (self._merge_all(), "merge")):
            task = asyncio.get_running_loop().create_task(work, name=f"bytescheduler-{name}")
            task.add_done_callback(self._ended)
            self._tasks.append(task)

    def _load(self, state: Mapping[str, Any]) -> None:
        if "tensors" not in state:
            raise OptionError("state", f"one with {sorted(state)}", "one that this version of the package has written")
        self.run.load_state_dict(state["run"], time.monotonic())
        self._make_weights(state["tensors"])
        if self.slices is not None:
            if state["slices"] is None:
                raise OptionError("train", "some", "left out, as when the saved run was started")
            members, patience = [member.name for member in self.run.members], self.run.options.rounds.silent_after
            self.slices.tracker.load_state_dict(state["slices"], workers=members, patience=patience)
        log.info("The run goes on after round %d, with %d samples.", self.run.lineage.version, self.run.samples)

    @property
    def over(self) -> bool:
        """Whether the last round is merged and every worker has left, so that this coordinator is not needed now."""
        run = self.run
        return run.rounds.finished and not run.rounds.stand_still and not len(run.members)

    async def stop(self) -> None:
        """End everything; workers hear that they may come back, and the state is saved."""
        self._stopping = True
        reason = "The coordinator stops. Nothing is lost."
        if closing := [asyncio.ensure_future(one.close(reason, code=1012)) for one in self._connections.values()]:
            await asyncio.wait(closing, timeout=_STOP_SECONDS)
        if self._tasks:
            tick, merge = self._tasks
            self._merges.put_nowait(None)  # pending merges end first: the state has every round whose end workers know
            await asyncio.wait([merge], timeout=_MERGE_SECONDS)
            for task in (tick, merge):
                task.cancel()
            await asyncio.wait([tick, merge], timeout=_STOP_SECONDS)
        await self._save()
        self._rounds_file.close()
        ended = asyncio.get_running_loop().run_in_executor(
            None, functools.partial(self._threads.shutdown, cancel_futures=True)
        )
        await asyncio.wait([ended], timeout=_STOP_SECONDS)

    def _ended(self, task: asyncio.Task[None]) -> None:
        if task.cancelled() or self._stopping:
            return
        error = task.exception()
        if error is not None:
            log.error("The coordinator has failed.", exc_info=error)
            self._fail(error)

    def status(self) -> RunStatus:
        """How the run stands."""
        run, now = self.run, time.monotonic()
        refused = {f"refused_{reason}": count for reason, count in self._refusals.counts().items()}
        return RunStatus(
            version=__version__,
            uptime=now - self._started,
            round=run.rounds.round,
            phase=run.phase,
            last_round=run.rounds.last_round,
            target=run.options.run.target_in_words,
            left=max(run.rounds.left, 0),
            weights_version=run.lineage.version,
            parameters=0 if self.weights is None else self.weights.parameters,
            samples=run.samples,
            workers=tuple(self._worker_status(one, now) for one in sorted(run.members, key=lambda one: one.name)),
            rounds=tuple(self.rounds),
            slices=None if self.slices is None else self.slices.tracker.report(),
            counters={**run.counters, **refused},
            spool_bytes=self.room.taken,
            saved_round=None if self._store is None else self._store.saved_round,
            timeline=tuple(self.timeline),
        )

    def _worker_status(self, member: Member, now: float) -> WorkerStatus:
        run, name = self.run, member.name
        known = run.rounds.workers.get(name)
        progress = WorkerProgress(name=name, heard=now) if known is None else known
        return WorkerStatus(
            name=name,
            state="joining" if known is None else known.state.value,
            connected=name in self._connections,
            leads=name == run.leader,
            ranks=member.ranks,
            steps=progress.steps,
            samples=progress.samples,
            samples_per_second=progress.samples_per_second,
            heard_ago=max(now - member.heard, 0.0),
            slices=0 if self.slices is None else self.slices.tracker.held(name),
            bytes_in=member.bytes_in,
            bytes_out=member.bytes_out,
            merged=member.merged,
            late=member.late,
        )

    @property
    def weights(self) -> GlobalWeights | None:
        """The global weights; ``None`` before there are any."""
        return self.bulk.weights

    # ── Rounds ───────────────────────────────────────────────────────────

    def _post(self, name: str, message: ToWorker) -> None:
        connection = self._connections.get(name)
        if connection is not None:
            connection.post(message)

    def _note(self, record: RoundRecord) -> None:
        live = len({*self._connections, *record.merged})  # a worker may have gone after its update came
        summary = summary_of(record, time.time(), live=live)
        self.rounds.append(summary)
        self.timeline.append(msgspec.structs.replace(record, workers=record.workers[:_WORKERS_DRAWN]))
        self._rounds_file.write(record)
        loss = "" if summary.loss is None else f", loss {summary.loss:.4f}"
        log.info(
            "Round %d: %d samples of %d of %d workers, participation %.2f, in %.1f s%s.",
            summary.round,
            summary.samples,
            summary.merged,
            summary.workers,
            summary.participation,
            summary.seconds,
            loss,
        )

    def _forget(self, member: Member) -> None:
        self.bulk.cut(member)
        self._slice_limits.pop(member.name, None)
        if self.slices is not None:
            self.slices.release(member)
        connection = self._connections.pop(member.name, None)
        if connection is not None:
            connection.end("The worker was silent for too long, or has left.")

    async def _tick(self) -> None:
        alive_at = 0.0
        while True:
            now = time.monotonic()
            if now >= alive_at:
                quiet = min(self.run.options.lease / 8, self.run.options.rounds.silent_after / 4)
                alive_at = now + min(quiet, _LONGEST_TICK_S)
                heard = dict.fromkeys(self.bulk.uploading, 0.0)
                for name, connection in list(self._connections.items()):
                    last = connection.last_heard(now, every=quiet, patience=self.run.options.lease / 3)
                    if last is not None:
                        self.run.members.hear(connection.member, last)
                        heard[name] = last
                self.run.rounds.note_connections(heard, now=now)
            self.run.tick(now)
            self.stalls.look()
            if self.slices is not None:
                self.slices.take_back(self.run.members, self.run.rounds.workers, self.run.options.rounds, now)
            following = self.run.rounds.next_tick
            wait = _LONGEST_TICK_S if following is None else min(max(following - now, 0.005), _LONGEST_TICK_S)
            await asyncio.sleep(wait)

    async def _merge_all(self) -> None:
        while True:
            # No timeout: rounds may take any time, the next one comes from the same loop, and stop() ends this task.
            merge, weights = await self._merges.get(), self.weights
            if merge is None:
                return
            if weights is None:
                raise RuntimeError(f"Round {merge.round} ended before there were weights.")
            sums = await self.bulk.settled(merge)
            await weights.mean(merge, sums)
            is_last = self.run.rounds.finished
            async with weights.still:
                self.run.merged(merge, oldest_mean=weights.oldest_mean)
                boundary, self._boundary = self._at_boundary(), None  # nothing is saved amid a step
                # Workers hear of the merge before the step is taken here, as they take the step themselves. Of the last
                # one they hear when it is saved: they end then, and none would be there to train that round again.
                if not is_last:
                    self.run.announce(merge)
                await self.bulk.give_way(merge)
                await weights.step(merge, sums)
                self._boundary = boundary
            self._collect()
            await self._save()
            if is_last:
                if self._store is not None:
                    await asyncio.get_running_loop().run_in_executor(None, self._store.flush)
                self.run.announce(merge)
                log.info(
                    "The run is over after round %d, with %d samples. Workers still here can get its weights.",
                    merge.round,
                    self.run.samples,
                )

    def _at_boundary(self) -> tuple[dict[str, Any], dict[str, Any] | None]:
        """Return the state of run and slices that belongs to the weights after this merge."""
        return self.run.state_dict(), None if self.slices is None else self.slices.tracker.state_dict()

    async def _save(self) -> None:
        """Hand the state at the last boundary to the code that saves it."""
        weights, store = self.weights, self._store
        if weights is None or store is None:
            return
        async with weights.still:
            if self._boundary is None:
                return
            run, slices = self._boundary
            tensors = await weights.snapshot()
            self._boundary = None
        store.save({"run": run, "slices": slices, "tensors": tensors})

    # ── Routes ───────────────────────────────────────────────────────────

    @web.middleware
    async def _worded(self, request: web.Request, handler: Callable[[web.Request], object]) -> web.StreamResponse:
        """Answer errors in JSON."""
        if self._stopping and request.path != HEALTH_PATH:
            return problem(503, "This coordinator stops.", retry_after=1)
        try:
            return await handler(request)  # type: ignore[misc, no-any-return]
        except web.HTTPException as error:
            if error.status < 400:
                raise
            answer = problem(error.status, error.text or error.reason)
            answer.headers.update({name: value for name, value in error.headers.items() if name in _PASSED_ON})
            return answer
        except SchedulerTimeoutError as error:
            return problem(503, str(error), retry_after=1)
        except ByteSchedulerError as error:
            return problem(400, str(error))

    def _of_member(
        self, answer: Callable[[web.Request, Member], Awaitable[web.StreamResponse]]
    ) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        async def handle(request: web.Request) -> web.StreamResponse:
            member = self.run.members.by_session(request.headers.get(SESSION_HEADER, ""))
            if member is None:
                return problem(403, f"The header {SESSION_HEADER} has no session of this run. Say Hello first.")
            self.run.members.hear(member, time.monotonic())
            return await answer(request, member)

        return handle

    async def _socket(self, request: web.Request) -> web.StreamResponse:
        socket = web.WebSocketResponse(autoping=False, max_msg_size=_HELLO_BYTES, timeout=_STOP_SECONDS, compress=False)
        await socket.prepare(request)
        connection = None
        try:
            first = await asyncio.wait_for(socket.receive(), _HELLO_SECONDS)
            if first.type is not WSMsgType.TEXT:
                raise OptionError("frame", first.type.name, "a Hello")
            hello = decode_frame(first.data, sender=request.remote or "a worker")
            if not isinstance(hello, Hello):
                raise OptionError("frame", type(hello).__name__, "a Hello")
            answer = self.run.hello(hello, time.monotonic())
            if isinstance(answer, Refusal):
                log.info("%s at %s was refused: %s", hello.worker, request.remote, answer.reason)
                await socket.send_str(encode_frame(answer))
                await socket.close(code=WSCloseCode.POLICY_VIOLATION, message=b"refused")
                return socket
            member, welcome = answer
            connection = Connection(socket, request.transport, member, stalls=self.stalls, hear=self.run.hear)
            await socket.send_str(encode_frame(welcome))
            former = self._connections.get(member.name)
            self._connections[member.name] = connection
            if former is not None:
                former.cut("The worker has come back with another connection.")
            log.info("%s is here, from %s.", member.name, request.remote)
            await connection.serve()
        except OptionError as error:
            self.run.count("wrong_frames")
            await socket.close(code=WSCloseCode.POLICY_VIOLATION, message=str(error).encode()[:120])
        except (asyncio.TimeoutError, ConnectionError, RuntimeError) as error:
            log.debug("A connection of %s ended: %s", request.remote, error)
        finally:
            if connection is not None:
                self.run.members.disconnect(connection.member)
                if self._connections.get(connection.member.name) is connection:
                    del self._connections[connection.member.name]
            self._ended_connections += 1
            if self._ended_connections >= _MOST_ENDED:
                self._collect()
        return socket

    def _collect(self) -> None:
        if self._ended_connections and gc.get_threshold()[2] == _NEVER:
            gc.collect()
        self._ended_connections = 0

    async def _begin_with(self, tensors: Mapping[str, Tensor]) -> None:
        """Take the first weights; rounds can then begin."""
        self._make_weights(tensors)
        self.run.provided(time.monotonic())
        self._boundary = self._at_boundary()
        await self._save()

    def _make_weights(self, tensors: Mapping[str, Tensor]) -> None:
        made = GlobalWeights(self.run.model, self.run.options.run, tensors, executor=self._threads)
        self.bulk.weights = made
        self.room.limit = max(_ROOM_BYTES, _SUM_BYTES * made.parameters)

    async def _slices(self, request: web.Request, member: Member) -> web.StreamResponse:
        if self.slices is None:
            return problem(404, "This coordinator hands out no data: it was started without --train.")
        pause = self._slice_limits.setdefault(member.name, RateLimit(time.monotonic)).take(longest=_SLICE_HELD_BACK_S)
        if pause is None:
            self.run.count("slow_downs")
            return problem(429, f"{member.name} asks about slices too often: try again later.", retry_after=1)
        await asyncio.sleep(pause)
        text = await request.read()
        if self.run.members.by_name(member.name) is not member:  # slices given now would not be taken back
            return problem(403, f"{member.name} has left, or was given up, while it asked.")
        reply = self.slices.answer(member, text)
        return web.Response(text=encode(reply), content_type="application/json")

    async def _status(self, request: web.Request) -> web.StreamResponse:
        return web.Response(body=msgspec.json.encode(self.status()), content_type="application/json")

    async def _health(self, request: web.Request) -> web.StreamResponse:
        return web.json_response({"stops": self._stopping}, status=503 if self._stopping else 200)


_PASSED_ON = ("WWW-Authenticate", "Allow", "Retry-After")


_ASK_SECONDS = 10.0
_T = TypeVar("_T")


class CoordinatorServer(BackgroundServer):
    """Runs a coordinator until it is closed, in a thread ``bytescheduler-coordinator``.

    Args:
        options: The run's options.
        access: Where the server listens, and which clients it lets in.
        port: 0 takes a free port.
        store: Saves the run's state, and is closed with the server; ``None`` keeps the state in memory alone.
        slices: Hands out the training data, or ``None``.
        rounds_file: Record of the rounds, or ``None``.

    Raises:
        OSError: If the server cannot listen at the address.
        OptionError: If the state is of another run, or cannot be loaded.
    """

    def __init__(
        self,
        options: CoordinatorOptions,
        *,
        access: ServerAccess | None = None,
        port: int = 0,
        store: StateStore | None = None,
        slices: SliceRoutes | None = None,
        rounds_file: RoundFile | None = None,
    ) -> None:
        self.store = store
        self._make = functools.partial(
            CoordinatorService, options, fail=self._fail, store=store, slices=slices, rounds_file=rounds_file
        )
        self._service: CoordinatorService | None = None
        import uvloop

        try:
            self._state = None if store is None else store.load()
            # The loop of uvloop is a third faster than asyncio's, and most of a report's time is spent in the loop.
            super().__init__(
                access or ServerAccess(), port, name="bytescheduler-coordinator", make_loop=uvloop.new_event_loop
            )
        except BaseException:
            if store is not None:
                store.close()
            raise

    @property
    def service(self) -> CoordinatorService:
        """The service; use it on its event loop alone."""
        if self._service is None:
            raise RuntimeError("The coordinator did not begin.")
        return self._service

    @property
    def url(self) -> str:
        """The URL at which workers on this machine find the coordinator."""
        return super().url.rstrip("/")

    @property
    def over(self) -> bool:
        """Whether the run is over, and every worker has left or was given up."""
        if self.error is not None:
            return False
        try:
            return self.call(lambda: self.service.over, timeout=_ASK_SECONDS)
        except (TimeoutError, FutureTimeoutError, RuntimeError):  # it is busy, or has just failed and reports that
            return False

    def status(self) -> RunStatus:
        """How the run stands."""
        return self.call(self.service.status)

    def call(self, work: Callable[[], _T], *, timeout: float = 10.0) -> _T:
        """Call ``work`` on the event loop, and return its result."""

        async def called() -> _T:
            return work()

        return asyncio.run_coroutine_threadsafe(called(), self._loop).result(timeout)

    def close(self) -> None:
        """Stop the run: workers hear that they may come back, and the state is saved. May be repeated."""
        super().close()
        if self.store is not None:
            self.store.close()

    async def application(self) -> web.Application:
        """Return the coordinator's routes, and begin or continue the run."""
        self._service = service = self._make(refusals=self.refusals)
        service.start(self._state)
        self._state = None
        return service.application(guard(self._access, self.refusals, public=PUBLIC_PATHS))

    async def stop(self) -> None:
        """End the run; its state is saved."""
        await self.service.stop()

    def _fail(self, error: BaseException) -> None:
        self.error = error
        self._loop.stop()
