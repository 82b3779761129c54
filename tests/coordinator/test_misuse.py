"""What is wrong gets an answer that says so, and changes nothing."""

from __future__ import annotations

import asyncio
import gzip
import tempfile
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import xxhash
from aiohttp import WSMsgType

from lightning_bytescheduler.coordinator import routes, service
from lightning_bytescheduler.coordinator.connection import Stalls
from lightning_bytescheduler.coordinator.service import CoordinatorServer
from lightning_bytescheduler.coordinator.update_sum import UploadRoom
from lightning_bytescheduler.diloco import coordinator_protocol as protocol
from lightning_bytescheduler.diloco import messages
from lightning_bytescheduler.exceptions import OptionError
from lightning_bytescheduler.serving import ServerAccess
from tests.coordinator.runs import ELEMENTS, in_a_run, options_of, updates_of
from tests.coordinator.small_worker import SmallWorker, described


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"protocol": 99}, "Install the same version everywhere"),
        ({"package": "0.0.0"}, "This worker has lightning-bytescheduler 0.0.0"),
        ({"options": {"outer_lr": 0.1}}, "outer_lr=0.1 is not what the coordinator was started with, outer_lr=0.7"),
        ({"options": {"nope": 1}}, "knows no option 'nope'"),
        (
            {"model": described({"a": torch.zeros(2)})},
            "its parameter 0 is 'a' (float32, (2,)), and the run's is 'layer.weight' (float32, (6, 4))",
        ),
        (
            {"model": described({"layer.weight": torch.zeros(6, 5), "layer.bias": torch.zeros(6)})},
            "its parameter 0 is 'layer.weight' (float32, (6, 5)), and the run's",
        ),
        (
            {"model": described({"layer.weight": torch.zeros(6, 4).half(), "layer.bias": torch.zeros(6)})},
            "its parameter 0 is 'layer.weight' (float16, (6, 4)), and the run's",
        ),
        (
            {"model": described({"layer.weight": torch.zeros(6, 4)})},
            "its parameter 1 is missing, and the run's is 'layer.bias' (float32, (6,))",
        ),
    ],
)
def test_a_worker_that_does_not_fit_hears_what_differs(changes: dict[str, Any], reason: str) -> None:
    async def work(one: SmallWorker, other: SmallWorker) -> None:
        await one.join()
        answer = await other.hello(**changes)
        assert isinstance(answer, protocol.Refusal)
        assert reason in answer.reason

    with CoordinatorServer(options_of()) as server:
        in_a_run(server, 2, work)
        assert [worker.name for worker in server.status().workers] == ["w0"]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("nonsense", "message of w0"),
        ('{"kind":"Batch","number":1,"messages":[]}', "number=1 is not allowed: number must be 2"),
        ('{"kind":"Batch","number":3,"messages":[]}', "number=3 is not allowed"),
        ('{"kind":"Batch","number":2,"messages":[{"kind":"LeaveRounds","worker":"w1"}]}', "worker='w1' is not allowed"),
        (
            '{"kind":"Batch","number":2,"messages":[{"kind":"TrainingOver","round":1}]}',
            "message='TrainingOver' is not allowed",
        ),
    ],
)
def test_a_wrong_frame_ends_the_connection_and_nothing_else(text: str, reason: str) -> None:
    async def work(one: SmallWorker) -> None:
        await one.join()
        await one.socket.send_str(text)
        while (received := await one.socket.receive(timeout=60)).type is WSMsgType.TEXT:
            pass
        assert one.socket.close_code == 1008
        assert reason in str(received.extra)
        await one.join()  # with its session: it is the same worker, in the same round
        await one.say(messages.RoundStarted(worker=one.name, round=1))
        assert (await one.push(1, updates_of(1)[0], samples=3))[1]["verdict"] == "added"

    with CoordinatorServer(options_of()) as server:
        in_a_run(server, 1, work)
        assert server.status().counters["wrong_frames"] == 1


@pytest.mark.parametrize("name", ["anna\n", "an na", "anna\x1b[2J", ""])
def test_a_name_that_would_spoil_a_log_is_no_name(name: str) -> None:
    with pytest.raises(OptionError):
        protocol.decode_frame(
            protocol.encode_frame(
                protocol.Hello(protocol=protocol.PROTOCOL, package="1", worker=name, model=described({}))
            ),
            sender="a worker",
        )


def test_updates_that_are_wrong_add_nothing() -> None:
    async def work(one: SmallWorker) -> None:
        await one.join()
        round = await one.start()
        good = updates_of(1)[0]
        size = 4 * ELEMENTS
        wrong: list[tuple[int, str, Any]] = [
            (422, "infinities or NaN", {"body": torch.full((ELEMENTS,), float("nan")).numpy().tobytes()}),
            (422, "weighted and summed", {"body": torch.full((ELEMENTS,), 1e38).numpy().tobytes()}),
            (422, "came in damaged", {"body": bytes(size), protocol.DIGEST_HEADER: "0" * 32}),
            (400, "32 hexadecimal digits", {"body": bytes(size), protocol.DIGEST_HEADER: "?"}),
            (400, "the size of fragment 0", {"body": bytes(size - 4)}),
            (400, "a whole number", {"body": bytes(size), protocol.SAMPLES_HEADER: "-1"}),
            (400, "a whole number", {"body": bytes(size), protocol.STEPS_HEADER: str(2**41)}),
            (409, "a round that has begun", {"body": bytes(size), "round": round + 1}),
        ]
        for status, reason, said in wrong:
            body = said.pop("body")
            found, answer = await one.push_bytes(said.pop("round", round), body, samples=3, **said)
            assert (found, reason in answer["error"]) == (status, True), answer
        url = one.url + protocol.update_path(round, 0)
        async with one.http.put(url, data=b"", headers={protocol.SESSION_HEADER: "0" * 32}) as response:
            assert response.status == 403
        assert (await one.push(round, good, samples=3))[1] == {"kind": "UpdateReceipt", "verdict": "added", "weight": 3}
        assert (await one.push(round, good, samples=3))[1]["verdict"] == "again"
        await one.wait_for(messages.RoundEnded)
        await one.pull(round)
        expected = one.first_weights["layer.bias"] - 0.7 * 1.9 * good[24:]
        assert torch.allclose(one.outer.weights["layer.bias"], expected)

    with CoordinatorServer(options_of()) as server:
        in_a_run(server, 1, work)
        status = server.status()
        assert status.spool_bytes == 0
        assert (status.workers[0].bytes_in, status.workers[0].bytes_out) == (4 * 4 * ELEMENTS, 4 * ELEMENTS)


def test_weights_that_unpack_to_more_than_was_announced_end_there() -> None:
    async def work(one: SmallWorker) -> None:
        await one.hello()
        body = gzip.compress(bytes(10**7))
        headers = {**one.headers, "Content-Encoding": "gzip"}
        async with one.http.put(one.url + protocol.STATE_PATH, data=body, headers=headers) as answer:
            assert (answer.status, f"{len(body)} bytes, as announced" in await answer.text()) == (422, True)

    with CoordinatorServer(options_of()) as server:
        in_a_run(server, 1, work)


def test_weights_that_came_in_damaged_may_be_sent_again() -> None:
    async def work(one: SmallWorker) -> None:
        await one.hello()
        headers = {**one.headers, protocol.DIGEST_HEADER: "0" * 32}
        async with one.http.put(one.url + protocol.STATE_PATH, data=bytes(8), headers=headers) as answer:
            assert (answer.status, "came in damaged" in await answer.text()) == (400, True)  # not 422: they are wrong

    with CoordinatorServer(options_of()) as server:
        in_a_run(server, 1, work)


@pytest.mark.parametrize(
    "changes",
    [
        {"model": (protocol.ModelParameter(name="a", shape=(2,) * 20_000, dtype="float32"),)},
        {"options": {"outer_lr": "x" * 10_000}},
        {"options": {str(number): 1 for number in range(1000)}},
    ],
)
def test_a_hello_beyond_all_bounds_is_none(changes: dict[str, Any]) -> None:
    said = {"protocol": protocol.PROTOCOL, "package": "1", "worker": "a", "model": described({}), **changes}
    with pytest.raises(OptionError):
        protocol.decode_frame(protocol.encode_frame(protocol.Hello(**said)), sender="a worker")


def test_an_update_that_was_announced_is_added_whatever_else_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise its merge would wait for it for ever."""

    async def work(one: SmallWorker) -> None:
        await one.join()
        round = await one.start()
        monkeypatch.setattr(server.service.run.rounds, "handle", fails)
        url, body = one.url + protocol.update_path(round, 0), bytes(4 * ELEMENTS)
        said = {protocol.DIGEST_HEADER: xxhash.xxh3_128_hexdigest(body), protocol.SAMPLES_HEADER: "1"}
        async with one.http.put(url, data=body, headers={**one.headers, **said, protocol.STEPS_HEADER: "1"}) as answer:
            assert answer.status == 500
        assert server.call(lambda: server.service.bulk._sums[round]._settled.is_set())

    def fails(message: messages.FromWorker, *, now: float) -> None:
        if isinstance(message, messages.PseudoGradientArrived):
            raise RuntimeError("unexpected")

    with CoordinatorServer(options_of()) as server:
        in_a_run(server, 1, work)


def test_an_update_that_finds_no_room_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "_ROOM_SECONDS", 0.05)

    async def work(one: SmallWorker) -> None:
        await one.join()
        round = await one.start()
        server.service.room.taken = 2**40
        url, body = one.url + protocol.update_path(round, 0), bytes(4 * ELEMENTS)
        said = {protocol.DIGEST_HEADER: "0" * 32, protocol.SAMPLES_HEADER: "1", protocol.STEPS_HEADER: "1"}
        async with one.http.put(url, data=body, headers={**one.headers, **said}) as answer:
            assert answer.status == 503
        assert not server.call(lambda: server.service.bulk._uploads)

    with CoordinatorServer(options_of()) as server:
        in_a_run(server, 1, work)


def test_an_upload_that_could_only_be_dropped_is_cut() -> None:
    async def work() -> None:
        run: Any = SimpleNamespace()
        bulk = routes.BulkRoutes(run, UploadRoom(1, ThreadPoolExecutor()), Stalls(60.0), nothing)
        late_one, next_one = (asyncio.ensure_future(asyncio.sleep(60)) for _ in range(2))
        bulk._uploads = {("a", 3): late_one, ("b", 4): next_one}  # type: ignore[dict-item]
        merge: Any = SimpleNamespace(round=3, counts=True)
        assert await bulk.settled(merge) is None
        await asyncio.sleep(0)
        assert (late_one.cancelled(), next_one.cancelled()) == (True, False)
        next_one.cancel()

    async def nothing(tensors: Any) -> None:
        pass

    asyncio.run(work())


def test_a_state_that_cannot_be_written_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(one: SmallWorker) -> None:
        await one.join()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("safetensors.torch.save_file", fails)
            async with one.http.get(one.url + protocol.STATE_PATH, headers=one.headers) as answer:
                assert answer.status == 500
        assert not list(tmp_path.glob("*state*"))
        await one.fetch()
        assert not list(tmp_path.glob("*state*"))  # nor by a coordinator that is killed now

    def fails(tensors: Any, name: str) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with CoordinatorServer(options_of()) as server:
        in_a_run(server, 1, work)


def test_an_upload_that_dies_leaves_nothing() -> None:
    async def work(one: SmallWorker) -> None:
        await one.join()
        round = await one.start()
        _, writer = await asyncio.open_connection("127.0.0.1", int(one.url.rpartition(":")[2]))
        head = f"PUT {protocol.update_path(round, 0)} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {4 * ELEMENTS}\r\n"
        said = {protocol.DIGEST_HEADER: "0" * 32, protocol.SAMPLES_HEADER: "1", protocol.STEPS_HEADER: "1"}
        lines = "".join(f"{name}: {value}\r\n" for name, value in {**one.headers, **said}.items())
        writer.write(f"{head}{lines}\r\n".encode() + b"half")
        await writer.drain()
        writer.close()
        await writer.wait_closed()
        assert (await one.push(round, updates_of(1)[0], samples=1))[1]["verdict"] == "added"

    with CoordinatorServer(options_of()) as server:
        in_a_run(server, 1, work)
        assert server.status().spool_bytes == 0


def test_an_update_that_is_larger_than_all_room_is_taken_alone() -> None:
    async def work(one: SmallWorker) -> None:
        await one.join()
        server.service.room.limit = 8
        status, answer = await one.push(await one.start(), updates_of(1)[0], samples=1)
        assert (status, answer["verdict"]) == (200, "added")

    with CoordinatorServer(options_of()) as server:
        in_a_run(server, 1, work)


def test_uploads_of_a_large_model_have_as_much_room_as_its_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(one: SmallWorker) -> None:
        assert server.service.room.limit == 100
        await one.join()
        assert server.service.room.limit == 16 * ELEMENTS

    monkeypatch.setattr(service, "_ROOM_BYTES", 100)
    with CoordinatorServer(options_of()) as server:
        in_a_run(server, 1, work)


def test_another_worker_gives_the_weights_if_the_first_one_dies() -> None:
    async def half() -> AsyncIterator[bytes]:
        yield bytes(8)
        await asyncio.Event().wait()

    async def state_is(status: int, other: SmallWorker) -> None:
        while True:
            async with other.http.get(other.url + protocol.STATE_PATH, headers=other.headers) as answer:
                if answer.status == status:
                    return
            await asyncio.sleep(0.01)

    async def work(one: SmallWorker, other: SmallWorker) -> None:
        await one.hello()
        await other.hello()
        headers = {**one.headers, "Content-Length": "64"}
        sending = asyncio.ensure_future(one.http.put(one.url + protocol.STATE_PATH, data=half(), headers=headers))
        await state_is(503, other)
        assert (await other.provide()).status == 409
        sending.cancel()
        await state_is(404, other)
        await other.join()
        await other.take_part(updates_of(1)[0], samples=1)

    with CoordinatorServer(options_of()) as server:
        in_a_run(server, 2, work)


def test_without_the_token_no_client_gets_in() -> None:
    async def work(one: SmallWorker) -> None:
        for path in (protocol.WORKER_PATH, protocol.STATE_PATH, protocol.STATUS_PATH, protocol.METRICS_PATH):
            async with one.http.get(one.url + path) as response:
                assert response.status == 401
        async with one.http.get(one.url + protocol.HEALTH_PATH) as response:
            assert response.status == 200

    with CoordinatorServer(options_of(), access=ServerAccess(token="secret-token")) as server:
        in_a_run(server, 1, work)
        status = server.status()
    assert status.workers == ()
    assert status.counters["refused_token"] == 4
