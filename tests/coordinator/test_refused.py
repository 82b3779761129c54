"""A refused client leaves nothing behind: no connection in memory, and no endless lines in the log."""

from __future__ import annotations

import asyncio
import gc
import logging

import aiohttp

from lightning_bytescheduler.coordinator.service import CoordinatorServer
from lightning_bytescheduler.diloco.coordinator_protocol import WORKER_PATH
from tests.coordinator.runs import in_a_run, options_of
from tests.coordinator.small_worker import SmallWorker

_NO_HTTP = b"PUT /v1/state HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n"


def _open_sockets() -> int:
    gc.collect()
    return sum(type(one) is aiohttp.web.WebSocketResponse for one in gc.get_objects())


def test_a_refused_websocket_is_let_go():
    others = _open_sockets()  # of other tests in this process, whose last frames may still be alive

    async def refused(url: str) -> None:
        async with aiohttp.ClientSession() as http:
            for _ in range(5):
                async with http.ws_connect(url + WORKER_PATH) as socket:
                    await socket.send_str("no frame")
                    assert (await socket.receive(timeout=60)).data == 1008
        for _ in range(3000):
            if _open_sockets() <= others:
                return
            await asyncio.sleep(0.02)

    with CoordinatorServer(options_of(lease=3600.0)) as server:
        asyncio.run(refused(server.url))
        assert _open_sockets() <= others


def test_a_connection_that_answers_no_ping_has_not_said_anything_wrong():
    async def work(one: SmallWorker) -> None:
        await one.hello()
        while server.status().workers[0].connected:  # the worker does not read, so it does not answer
            await asyncio.sleep(0.05)

    with CoordinatorServer(options_of(lease=1.2)) as server:
        in_a_run(server, 1, work)
        assert server.status().counters.get("wrong_frames", 0) == 0


def test_what_is_no_http_does_not_fill_the_log(caplog):
    async def send(port: int) -> None:
        for _ in range(5):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(_NO_HTTP)
            writer.write_eof()
            await asyncio.wait_for(reader.read(), 60)
            writer.close()
            await writer.wait_closed()

    with caplog.at_level(logging.WARNING), CoordinatorServer(options_of()) as server:
        asyncio.run(send(int(server.url.rpartition(":")[2])))
    assert not caplog.records
