"""A coordinator that listens, with its thread: what the command runs, and tests."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import TypeVar

from aiohttp import web

from lightning_bytescheduler.checks import importing
from lightning_bytescheduler.coordinator.options import CoordinatorOptions
from lightning_bytescheduler.coordinator.page import PUBLIC_PATHS
from lightning_bytescheduler.coordinator.service import CoordinatorService
from lightning_bytescheduler.coordinator.slice_routes import SliceRoutes
from lightning_bytescheduler.coordinator.state_store import StateStore
from lightning_bytescheduler.coordinator.status import RunStatus
from lightning_bytescheduler.diloco.round_record import RoundFile
from lightning_bytescheduler.serving import BackgroundServer, ServerAccess, guard

_ASK_SECONDS = 10.0
_T = TypeVar("_T")


class CoordinatorServer(BackgroundServer):
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
        self._store = store
        self._make = functools.partial(
            CoordinatorService, options, fail=self._fail, store=store, slices=slices, rounds_file=rounds_file
        )
        self._service: CoordinatorService | None = None
        with importing("coordinator", extra="coordinator"):
            import uvloop
        try:
            self._state = None if store is None else store.load()
            # Its loop is a third faster than asyncio's own, and a report is mostly that.
            super().__init__(
                access or ServerAccess(), port, name="bytescheduler-coordinator", make_loop=uvloop.new_event_loop
            )
        except BaseException:
            if store is not None:
                store.close()
            raise

    @property
    def service(self) -> CoordinatorService:
        """What runs: to be used on its event loop alone."""
        if self._service is None:
            raise RuntimeError("The coordinator did not begin.")
        return self._service

    @property
    def url(self) -> str:
        """Where workers on this machine find it."""
        return super().url.rstrip("/")

    @property
    def over(self) -> bool:
        """Whether the run is over, and every worker has left or was given up."""
        if self.error is not None:
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

    def close(self) -> None:
        """Stop it: workers hear that they may come back, and the state is saved. May be repeated."""
        super().close()
        if self._store is not None:
            self._store.close()

    async def application(self) -> web.Application:
        """The coordinator's routes; it begins to run, or to carry on."""
        self._service = service = self._make(refusals=self.refusals)
        service.start(self._state)
        self._state = None
        return service.application(guard(self._access, self.refusals, public=PUBLIC_PATHS, any_host=False))

    async def stop(self) -> None:
        """End the run; its state is saved."""
        await self.service.stop()

    def _fail(self, error: BaseException) -> None:
        self.error = error
        self._loop.stop()
