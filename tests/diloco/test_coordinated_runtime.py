"""A rank of a coordinator's run learns of failures, its own and others', while it starts."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, patch

import pytest
from torch import nn

from lightning_bytescheduler.coordinator.service import CoordinatorServer
from lightning_bytescheduler.diloco import runtime as runtimes
from lightning_bytescheduler.diloco.coordinator_client import CoordinatorAddress, CoordinatorClient
from lightning_bytescheduler.diloco.coordinator_protocol import Welcome
from lightning_bytescheduler.diloco.process_groups import WorkerGroup
from lightning_bytescheduler.diloco.runtime import CoordinatedRuntime
from lightning_bytescheduler.exceptions import RankFailedError
from tests.diloco.coordinated_fits import coordinator_options
from tests.support.rank_pool import free_port


@contextmanager
def beginning(url: str) -> Iterator[CoordinatedRuntime]:
    """A rank that has said nothing yet."""
    board: Any = SimpleNamespace(watch=lambda *_: None, unwatch=lambda _: None)
    runtime = CoordinatedRuntime(
        CoordinatorAddress(url=url, worker="anna"),
        nn.Linear(2, 1),
        given={},
        group=WorkerGroup(),
        board=board,
        flush=lambda: None,
        timeout=60.0,
    )
    try:
        yield runtime
    finally:
        runtime.stop(failed=True)


FAULT = RankFailedError(1, "ValueError: on purpose")


def test_a_rank_that_looks_for_a_coordinator_hears_that_another_one_has_failed() -> None:
    with beginning(f"http://127.0.0.1:{free_port()}") as runtime:
        fails = threading.Timer(0.05, runtime.rank_failed, [FAULT, None])
        fails.start()
        with pytest.raises(RankFailedError, match="on purpose"):
            runtime.connect()
        fails.join()


def test_a_rank_that_fails_before_there_is_a_session_ends_it() -> None:
    with CoordinatorServer(coordinator_options(inner_steps=5)) as server, beginning(server.url) as runtime:
        runtime.connect()
        runtime.rank_failed(FAULT, None)
        with pytest.raises(RankFailedError, match="on purpose"):
            runtime.prepare()


def test_a_coordinator_that_is_gone_as_soon_as_it_has_answered_is_waited_for_within_bounds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its answer is enough to go on. The session waits for it to come back, for a bounded time."""

    class Gone:
        error = None

        def __init__(self, *_: Any, **__: Any) -> None:
            self.worker = "bert"
            self.first: Future[Any] = Future()
            welcome = {
                "worker": "bert",
                "session": "0" * 32,
                "version": 0,
                "chain": "0" * 32,
                "fetch": False,
                "lease": 60.0,
            }
            self.first.set_result(Welcome(options=runtimes.RunOptions(), leads=True, **welcome))

        def post(self, *_: Any) -> None:
            pass

        def flush(self, _: float) -> bool:
            return False

        def stop(self, _: float) -> bool:
            return True

    monkeypatch.setattr(runtimes, "CoordinatorClient", Gone)
    with beginning("http://127.0.0.1:1") as runtime:
        runtime.connect()
        assert (runtime.worker, runtime.leads) == ("bert", True)


def test_a_wait_for_an_answer_says_what_has_ended_the_connection() -> None:
    """Not only that it was closed, which hides the cause."""
    cause = ValueError("cannot be taken in")
    welcomed, ended = threading.Event(), threading.Event()

    def welcomed_as(*names: str) -> Any:
        assert listening.wait(60)
        return known._hello(*names)

    def welcome(_: object) -> None:
        waiting.append(client.start(asyncio.sleep(60)))  # a request might be answered before the connection has ended
        welcomed.set()
        assert went_on.wait(60)
        raise cause

    waiting: list[Any] = []
    listening, went_on = threading.Event(), threading.Event()
    with CoordinatorServer(coordinator_options(inner_steps=5)) as server, beginning(server.url) as known:
        client = CoordinatorClient(
            known._address,
            hello=welcomed_as,
            timeout=60.0,
        )
        told: Any = SimpleNamespace(
            welcomed=welcome, receive=lambda _: None, lost=lambda: None, fail=lambda _: ended.set()
        )
        client.listen(told)
        listening.set()
        try:
            assert welcomed.wait(60)
            went_on.set()
            assert ended.wait(60)
            waiting.append(client.start(client.request("GET", "/nothing/answers/this")))
            for future in waiting:
                assert future.exception(60) is cause
        finally:
            client.stop(5)


def test_work_that_comes_as_the_thread_ends_is_refused() -> None:
    """The loop accepts it, but has stopped running."""
    too_late: list[Any] = []
    with CoordinatorServer(coordinator_options(inner_steps=5)) as server, beginning(server.url) as runtime:
        runtime.connect()
        client = runtime.client
        assert client is not None
        close = client._loop.close

        def ask_and_close() -> None:
            too_late.append(client.start(client.request("GET", "/too/late")))
            close()

        with patch.object(client._loop, "close", ask_and_close):
            assert client.stop(60)
        assert too_late[0].cancelled()
        assert client.start(client.request("GET", "/much/too/late")).cancelled()


def test_a_thread_that_does_not_end_is_said(caplog: pytest.LogCaptureFixture) -> None:
    for transport in (Mock(**{"stop.return_value": False}), Mock(**{"stop.side_effect": OSError})):
        with CoordinatorServer(coordinator_options(inner_steps=5)) as server, beginning(server.url) as runtime:
            runtime.connect()
            assert runtime.client is not None
            runtime.client.stop(10.0)
            runtime._transport = transport
            assert runtime.stop(failed=False)
            assert transport.stop.called
    assert "anna: the coordinator's threads did not end within 5 s" in caplog.text
