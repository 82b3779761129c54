"""What a worker says if there is no coordinator at its address."""

from __future__ import annotations

import asyncio
import gc
import logging
import random
import socket
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest

from lightning_bytescheduler import CoordinatorError
from lightning_bytescheduler.diloco import coordinator_client
from lightning_bytescheduler.diloco.coordinator_client import CoordinatorAddress, CoordinatorClient
from lightning_bytescheduler.diloco.coordinator_protocol import (
    WORKER_PATH,
    Batch,
    Hello,
    ModelParameter,
    Welcome,
    encode_frame,
    run_options,
)
from lightning_bytescheduler.diloco.messages import LeaveRounds
from lightning_bytescheduler.serving import BackgroundServer, ServerAccess
from tests.support.waiting import WAIT

pytest.importorskip("aiohttp")


def test_pauses_do_not_draw_from_the_users_numbers() -> None:
    """Which are seeded alike on all workers."""
    random.seed(7)
    before, pauses = random.getstate(), set[float]()
    for _ in range(2):
        random.seed(7)
        pauses |= {coordinator_client._pause(tries) for tries in range(3)}
    assert random.getstate() == before
    assert len(pauses) == 6


@contextmanager
def answering(words: bytes) -> Iterator[str]:
    """HOST:PORT of a server that gives every client the same answer, and hangs up."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            with suppress(OSError):
                while True:
                    connection, _ = server.accept()
                    with connection, suppress(OSError):
                        connection.settimeout(WAIT)
                        connection.recv(4096)
                        connection.sendall(words)

        thread = threading.Thread(target=serve, name="bytescheduler-test-server", daemon=True)
        thread.start()
        try:
            yield f"127.0.0.1:{server.getsockname()[1]}"
        finally:
            with suppress(OSError):
                server.shutdown(socket.SHUT_RDWR)
            thread.join(WAIT)


def hello_of(worker: str, session: str) -> Hello:
    return Hello(protocol=1, package="1", worker=worker, model=(ModelParameter(name="w", shape=(1,), dtype="float32"),))


def welcome_of(worker: str) -> Welcome:
    return Welcome(
        worker=worker, session="5" * 32, options=run_options(), version=0, chain="0" * 32, fetch=True, lease=6000.0
    )


class Worker:
    """One that only tries to connect, unless it is told how to greet."""

    def __init__(self, url: str, *, hello: Callable[[str, str], Hello] | None = None) -> None:
        self.error: BaseException | None = None
        self.ended = threading.Event()
        self.client = CoordinatorClient(
            CoordinatorAddress(url=url, worker="anna"),
            hello=hello or self._hello,
            timeout=60.0,
        )
        self.client.listen(self)

    def welcomed(self, welcome: Welcome) -> None:
        pass

    def receive(self, message: object) -> None:
        pass

    def lost(self) -> None:
        pass

    def _hello(self, worker: str, session: str) -> Hello:
        raise RuntimeError("There is no hello.")

    def fail(self, error: BaseException) -> None:
        self.error = error
        self.ended.set()


def test_a_coordinator_without_tls_is_said_to_have_none() -> None:
    with answering(b"HTTP/1.1 400 Bad Request\r\n\r\n") as address:
        worker = Worker(f"https://{address}")
        try:
            assert worker.ended.wait(60)
        finally:
            worker.client.stop(5)
    assert isinstance(worker.error, CoordinatorError)
    assert f"no TLS connection to https://{address}" in str(worker.error)
    assert "http://" in str(worker.error)


@pytest.mark.parametrize("status", ["200 OK", "302 Found", "404 Not Found"])
def test_another_web_server_is_told_from_a_coordinator(status: str) -> None:
    """At once, not at the timeout."""
    with answering(f"HTTP/1.1 {status}\r\nContent-Length: 0\r\n\r\n".encode()) as address:
        worker = Worker(f"http://{address}")
        try:
            assert worker.ended.wait(60)
        finally:
            worker.client.stop(5)
    assert isinstance(worker.error, CoordinatorError)
    assert f"What answers at http://{address} is no coordinator" in str(worker.error)
    assert f"status {status[:3]} at {WORKER_PATH}, as another web server does" in str(worker.error)


def test_a_worker_that_finds_none_says_so_once_and_goes_on_trying(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(coordinator_client, "_FIRST_QUIET_S", 0.0)
    tried = threading.Semaphore(0)

    def paused(_: int) -> float:
        tried.release()
        return 0.01

    monkeypatch.setattr(coordinator_client, "_pause", paused)
    with answering(b"") as address, caplog.at_level(logging.WARNING):
        worker = Worker(f"http://{address}")
        try:
            assert all(tried.acquire(timeout=60) for _ in range(3))
        finally:
            worker.client.stop(5)
    [said] = [record.getMessage() for record in caplog.records if record.name == coordinator_client.__name__]
    assert f"at http://{address} for" in said
    assert "port and no path, and with TLS it begins with https://" in said
    assert worker.error is None


class Hasty:
    """A connection in which the last answer and the end come in one turn of the event loop."""

    def __init__(self, client: CoordinatorClient) -> None:
        self.said: list[Any] = [welcome_of("anna"), Batch(number=1, heard=1)]
        self.client = client

    def ws_connect(self, url: str, **_: Any) -> Hasty:
        return self

    async def __aenter__(self) -> Hasty:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    async def send_str(self, frame: str) -> None:
        pass

    async def receive(self) -> Any:
        from aiohttp import WSMessage, WSMsgType

        if not self.said:
            return WSMessage(WSMsgType.CLOSED, None, None)
        if isinstance(self.said[0], Batch):
            while self.client._talk is None or not self.client._talk._sent:
                await asyncio.sleep(0)
            await asyncio.sleep(0.05)  # the frame is waited for
        return WSMessage(WSMsgType.TEXT, encode_frame(self.said.pop(0)), None)


def test_a_connection_that_ends_with_an_answer_is_left_at_once() -> None:
    worker = Worker("http://127.0.0.1:9")
    client = worker.client
    assert client.stop(10)  # what follows is without its thread
    client._hello = hello_of  # type: ignore[method-assign]
    worker.welcomed = lambda _: client._put([LeaveRounds(worker="anna")])  # type: ignore[method-assign, assignment]
    client._http = Hasty(client)  # type: ignore[assignment]
    began = time.monotonic()
    assert asyncio.run(client._connection())  # it has left
    assert time.monotonic() - began < 60.0  # and not after a quarter of the lease


class ReadsLate(BackgroundServer):
    """A coordinator that welcomes a worker, and reads nothing of an upload until it is told to."""

    def __init__(self) -> None:
        self.uploading, self.may_read, self.has_read = threading.Event(), threading.Event(), threading.Event()
        super().__init__(ServerAccess(), 0, name="bytescheduler-test-server")

    async def application(self) -> Any:
        from aiohttp import web

        application = web.Application()
        application.router.add_get(WORKER_PATH, self._welcome)
        application.router.add_put("/upload", self._read)
        return application

    async def _welcome(self, request: Any) -> Any:
        from aiohttp import web

        talk = web.WebSocketResponse()
        await talk.prepare(request)
        await talk.receive()
        await talk.send_str(encode_frame(welcome_of("anna")))
        async for _ in talk:
            pass
        return talk

    async def _read(self, request: Any) -> Any:
        self.uploading.set()
        while not self.may_read.is_set():
            await asyncio.sleep(0.01)
        try:
            async for _ in request.content.iter_any():
                pass
        finally:
            self.has_read.set()


@pytest.mark.parametrize(
    "reads", [pytest.param(False, id="not read", marks=pytest.mark.slow), pytest.param(True, id="read")]
)
def test_no_connection_outlives_a_client_that_stops_after_part_of_an_upload(reads: bool) -> None:
    """What aiohttp's buffer has of an upload that is cancelled goes on waiting to be sent."""
    gc.collect()
    with ReadsLate() as server, warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        worker = Worker(server.url.rstrip("/"), hello=hello_of)
        client = worker.client
        client.first.result(WAIT)
        sent = client.start(client.request("PUT", "/upload", body=bytes(50_000_000)))
        assert server.uploading.wait(WAIT)
        if reads:
            sent.cancel()
            server.may_read.set()
            assert server.has_read.wait(WAIT)
        assert client.stop(WAIT)
        assert sent.cancelled()
        assert client.error is None
        del worker, client, sent
        gc.collect()
    assert not [str(one.message) for one in warned]


def test_a_client_ends_also_where_work_on_its_thread_loses_a_cancel() -> None:
    """As ``wait_for`` does up to Python 3.11, in the turn that it ends in."""
    worker = Worker("http://127.0.0.1:9")
    begun = threading.Event()

    async def loses_one() -> None:
        for _ in range(2):
            with suppress(asyncio.CancelledError):
                begun.set()
                await asyncio.sleep(2 * WAIT)

    work = worker.client.start(loses_one())
    assert begun.wait(WAIT)
    assert worker.client.stop(WAIT)
    assert work.done()


def test_a_body_that_is_sent_again_is_sent_whole() -> None:
    """As aiohttp does by itself where a connection ends amid a request."""

    async def sent(body: coordinator_client._Pieces) -> bytes:
        return b"".join([bytes(piece) async for piece in body])

    whole = bytes(range(256)) * 10_000
    body = coordinator_client._Pieces(whole)
    assert asyncio.run(sent(body)) == asyncio.run(sent(body)) == whole
