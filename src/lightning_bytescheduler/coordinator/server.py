"""A coordinator with its thread: what the command runs, and tests."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import errno
import threading
from collections.abc import Callable
from types import TracebackType
from typing import TypeVar

from aiohttp import web

from lightning_bytescheduler.coordinator.options import CoordinatorOptions
from lightning_bytescheduler.coordinator.run_status import RunStatus
from lightning_bytescheduler.coordinator.service import CoordinatorService
from lightning_bytescheduler.coordinator.slice_desk import SliceDesk
from lightning_bytescheduler.exceptions import SchedulerTimeoutError

__all__ = ["CoordinatorServer"]

_START_SECONDS = 10.0
_STOP_SECONDS = 30.0
_T = TypeVar("_T")


class CoordinatorServer:
    """Runs a coordinator until it is closed, in a thread ``bytescheduler-coordinator``.

    Args:
        options: Of the run.
        host: Address to listen at.
        port: 0 takes a free one.
        term: Of this coordinator.
        slices: Hands out the training data, or ``None``.

    Raises:
        OSError: If the address cannot be listened at.
    """

    def __init__(
        self,
        options: CoordinatorOptions,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        term: int = 1,
        slices: SliceDesk | None = None,
    ) -> None:
        self._host = host
        self._port = port
        self._loop = asyncio.new_event_loop()
        self._started = threading.Event()
        self._error: BaseException | None = None
        self._runner: web.AppRunner | None = None
        self._make = lambda: CoordinatorService(options, term=term, slices=slices)
        self._service: CoordinatorService | None = None
        self._thread = threading.Thread(target=self._run, name="bytescheduler-coordinator", daemon=True)
        self._thread.start()
        if not self._started.wait(_START_SECONDS):
            raise SchedulerTimeoutError(f"The coordinator at {host} did not begin within {_START_SECONDS:.0f} s.")
        if self._error is not None:
            self._thread.join(_START_SECONDS)
            raise self._not_listening(self._error) from self._error

    @property
    def service(self) -> CoordinatorService:
        """What runs: to be used on its event loop alone."""
        if self._service is None:
            raise RuntimeError("The coordinator did not begin.")
        return self._service

    @property
    def url(self) -> str:
        """Where workers find it on this machine."""
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"http://{host}:{self._port}"

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
        """Stop it; workers hear that they may come back. May be repeated."""
        if not self._thread.is_alive():
            return
        stopping = asyncio.run_coroutine_threadsafe(self._stop(), self._loop)
        with contextlib.suppress(TimeoutError, concurrent.futures.TimeoutError):
            stopping.result(_STOP_SECONDS)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_STOP_SECONDS)

    def __enter__(self) -> CoordinatorServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _not_listening(self, error: BaseException) -> BaseException:
        if not isinstance(error, OSError):
            return error
        reason = error.strerror or str(error)
        if error.errno == errno.EADDRINUSE:
            reason = "it is in use by another program; choose another port, or 0 for any free one"
        return OSError(error.errno, f"{self._host}:{self._port} cannot be listened at: {reason}")

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._start())
        except BaseException as error:  # raised where the server was made
            self._error = error
        self._started.set()
        try:
            if self._error is None:
                self._loop.run_forever()
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.run_until_complete(self._loop.shutdown_default_executor())
        finally:
            self._loop.close()

    async def _start(self) -> None:
        self._service = self._make()
        self._runner = web.AppRunner(self._service.application(), access_log=None, shutdown_timeout=1.0)
        await self._runner.setup()
        try:
            site = web.TCPSite(self._runner, self._host, self._port)
            await site.start()
        except BaseException:
            await self._runner.cleanup()
            raise
        self._port = self._runner.addresses[0][1]
        self._service.start()
        if self._service.failed is not None:
            self._service.failed.add_done_callback(self._fail)

    def _fail(self, failed: asyncio.Future[BaseException]) -> None:
        if not failed.cancelled():
            self._error = failed.result()
            self._loop.stop()

    async def _stop(self) -> None:
        if self._service is not None:
            await self._service.stop()
        if self._runner is not None:
            await self._runner.cleanup()
