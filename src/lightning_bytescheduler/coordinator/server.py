"""A coordinator that listens, with its thread: what the command runs, and tests."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import logging
import threading
from collections.abc import Callable
from concurrent.futures import TimeoutError as FutureTimeoutError
from types import TracebackType
from typing import TypeVar

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from lightning_bytescheduler.checks import importing
from lightning_bytescheduler.coordinator.options import CoordinatorOptions
from lightning_bytescheduler.coordinator.page import PUBLIC_PATHS
from lightning_bytescheduler.coordinator.service import CoordinatorService
from lightning_bytescheduler.coordinator.slice_routes import SliceRoutes
from lightning_bytescheduler.coordinator.state_store import StateStore
from lightning_bytescheduler.coordinator.status import RunStatus
from lightning_bytescheduler.diloco.round_record import RoundFile
from lightning_bytescheduler.exceptions import SchedulerTimeoutError
from lightning_bytescheduler.serving import Refusals, ServerAccess, guard

log = logging.getLogger(__name__)

_START_SECONDS = 60.0
_STOP_SECONDS = 90.0  # saving the last state may take a while
_SHUTDOWN_SECONDS = 2.0
_ASK_SECONDS = 10.0
_HANDLER_SECONDS = 75.0  # of aiohttp, between two requests of a connection
_LONGEST_LINE = 8190
_LINGER_SECONDS = 1.0  # that a refused body, or what follows a closed WebSocket, keeps its handler in memory
_T = TypeVar("_T")


class CoordinatorServer:
    """Runs a coordinator until it is closed, in a thread ``bytescheduler-coordinator``.

    Args:
        options: Of the run.
        access: Where it listens, and who gets in.
        port: 0 takes a free one.
        store: Of the run's state, which is closed with the server; ``None`` keeps it in memory alone.
        slices: Hands out the training data, or ``None``.
        rounds_file: Record of the rounds, or ``None``.

    Raises:
        OSError: If the address cannot be listened at.
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
        self._access = ServerAccess() if access is None else access
        self._port = port
        self._store = store
        self._refusals = Refusals()
        with importing("coordinator", extra="coordinator"):
            import uvloop
        self._loop = uvloop.new_event_loop()  # a third faster than asyncio's own, and a report is mostly that
        self._started = threading.Event()
        self._error: BaseException | None = None
        self._runner: web.AppRunner | None = None
        self._make = functools.partial(CoordinatorService, options, store=store, slices=slices, rounds_file=rounds_file)
        self._service: CoordinatorService | None = None
        self._thread = threading.Thread(target=self._run, name="bytescheduler-coordinator", daemon=True)
        try:
            self._state = None if store is None else store.load()
            self._thread.start()
        except BaseException:
            self._loop.close()
            if store is not None:
                store.close()
            raise
        began = self._started.wait(_START_SECONDS)
        if self._error is not None:
            self.close()
            raise self._not_listening(self._error) from self._error
        if not began:
            self.close()
            raise SchedulerTimeoutError(f"The coordinator did not begin within {_START_SECONDS:.0f} s.")

    @property
    def service(self) -> CoordinatorService:
        """What runs: to be used on its event loop alone."""
        if self._service is None:
            raise RuntimeError("The coordinator did not begin.")
        return self._service

    @property
    def url(self) -> str:
        """Where clients on this machine find it."""
        return self._access.url(self._port).rstrip("/")

    @property
    def over(self) -> bool:
        """Whether the run is over, and every worker has left or was given up."""
        if self._error is not None:
            return False
        try:
            return self.call(lambda: self.service.over, timeout=_ASK_SECONDS)
        except (TimeoutError, FutureTimeoutError, RuntimeError):  # it is busy, or has just failed, which it says itself
            return False

    def status(self) -> RunStatus:
        """How the run stands."""
        return self.call(self.service.status)

    def call(self, work: Callable[[], _T], *, timeout: float = 10.0) -> _T:
        """Call something on the event loop, and wait for what it returns."""

        async def called() -> _T:
            return work()

        return asyncio.run_coroutine_threadsafe(called(), self._loop).result(timeout)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it has failed or is closed; returns whether it still runs."""
        self._thread.join(timeout)
        return self._thread.is_alive()

    @property
    def error(self) -> BaseException | None:
        """What it has failed with."""
        return self._error

    def close(self) -> None:
        """Stop it: workers hear that they may come back, and the state is saved. May be repeated."""
        with contextlib.suppress(RuntimeError):  # it has ended by itself
            self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_STOP_SECONDS)
        if self._store is not None:
            self._store.close(_STOP_SECONDS)

    def __enter__(self) -> CoordinatorServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _not_listening(self, error: BaseException) -> BaseException:
        if not isinstance(error, OSError) or isinstance(error, SchedulerTimeoutError):
            return error
        reason = error.strerror or str(error)
        if error.errno == errno.EADDRINUSE:
            reason = "it is in use by another program; choose another port, or 0 for any free one"
        return OSError(error.errno, f"{self._access.host}:{self._port} cannot be listened at: {reason}")

    # ── The thread ───────────────────────────────────────────────────────────

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._start())
            self._started.set()
            self._loop.run_forever()
            self._loop.run_until_complete(self._end())
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.run_until_complete(self._loop.shutdown_default_executor())
        except BaseException as error:  # raised where the server was made
            self._error = error
        finally:
            self._started.set()
            self._loop.close()

    async def _start(self) -> None:
        self._service = service = self._make()
        service.start(self._state)
        self._state = None
        if service.failed is not None:
            service.failed.add_done_callback(self._fail)
        service.refusals = self._refusals.counts
        checked = guard(self._access, self._refusals, public=PUBLIC_PATHS, any_host=False)
        application = service.application(checked)
        self._runner = web.AppRunner(
            application,
            access_log=None,
            logger=_http_log(self._refusals),
            shutdown_timeout=_SHUTDOWN_SECONDS,
            keepalive_timeout=_HANDLER_SECONDS,
            max_line_size=_LONGEST_LINE,
            lingering_time=_LINGER_SECONDS,
        )
        await self._runner.setup()
        try:
            tls = self._access.tls(self._refusals)
            site = web.TCPSite(self._runner, self._access.host, self._port, ssl_context=tls)
            await site.start()
        except BaseException:
            await self._runner.cleanup()
            raise
        self._port = self._runner.addresses[0][1]

    def _fail(self, failed: asyncio.Future[BaseException]) -> None:
        if not failed.cancelled():
            self._error = failed.result()
            self._loop.stop()

    async def _end(self) -> None:
        runner, self._runner = self._runner, None
        if runner is None:
            return
        if self._service is not None:
            await self._service.stop()
        await runner.cleanup()


def _http_log(refusals: Refusals) -> logging.Logger:
    """What aiohttp logs to: what is no HTTP is counted, and said once a minute, so that nobody can fill the log."""

    def passes(record: logging.LogRecord) -> bool:
        if not record.exc_info or not isinstance(record.exc_info[1], HttpProcessingError):
            return True
        refusals.count("http")
        return False

    logger = logging.Logger(f"{__name__}.http")
    logger.parent = log
    logger.addFilter(passes)
    return logger
