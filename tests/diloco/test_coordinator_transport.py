"""What is left out of an update on its way to the coordinator is part of the next one, if the update counts."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Coroutine, Iterator
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_bytescheduler.compression.wire_format import WireFormat
from lightning_bytescheduler.diloco.coordinator_client import CoordinatorTransport
from lightning_bytescheduler.diloco.coordinator_protocol import UpdateReceipt, encode_frame
from lightning_bytescheduler.diloco.outer_optimizer import Contribution
from tests.diloco.coordinated_workers import until

SIZE = 300


class Client:
    """Answers at once, as it was told."""

    worker = "w"

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.answers: list[tuple[int, str]] = []

    def start(self, work: Coroutine[Any, Any, Any]) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(asyncio.run(work))
        return future

    async def request(self, method: str, path: str, *, headers: Any = None, body: bytes = b"") -> Any:
        self.bodies.append(body)
        status, verdict = self.answers.pop(0)
        text = encode_frame(UpdateReceipt(verdict=verdict, weight=int(verdict != "dropped"))) if status == 200 else ""
        return SimpleNamespace(status=status, body=text.encode(), words=verdict)

    def stop(self, timeout: float) -> bool:
        return True


class Sender:
    def __init__(self, dtype: Any) -> None:
        self.client = Client()
        self.wire = WireFormat(dtype=dtype)
        self.transport = CoordinatorTransport(self.client, wire=self.wire, sizes=[SIZE])  # type: ignore[arg-type]
        self.round = 0

    def send(self, values: Tensor, *answers: tuple[int, str], total: int = 1) -> Tensor:
        """What the coordinator gets of an update."""
        self.round += 1
        self.client.answers = list(answers)
        update = Contribution(worker="w", round=self.round, fragment=0, pseudo_gradient=values, samples=8)
        upload = self.transport.start(update)
        self.transport.settle(upload, total=total)
        return self.wire.decode(torch.frombuffer(bytearray(self.client.bodies[-1]), dtype=torch.uint8), SIZE)


@pytest.fixture(params=["int8", "int4", "sparse"])
def sender(request: pytest.FixtureRequest) -> Iterator[Sender]:
    made = Sender(request.param)
    yield made
    made.transport.stop(1.0)


def draw(seed: int) -> Tensor:
    return torch.randn(SIZE, generator=torch.Generator().manual_seed(seed))


def test_what_was_left_out_is_sent_later(sender: Sender) -> None:
    sent = torch.zeros(SIZE)
    for seed in range(20):
        sent += sender.send(draw(seed), (200, "added"))
    for _ in range(200):  # nothing new: only what was left out
        sent += sender.send(torch.zeros(SIZE), (200, "added"))
    assert torch.allclose(sent, sum(map(draw, range(20)), torch.zeros(SIZE)), atol=1e-3)


@pytest.mark.parametrize(
    ("answer", "total"), [((200, "dropped"), 1), ((500, "?"), 1), ((200, "added"), 0), ((500, "?"), 0)]
)
def test_of_what_does_not_count_nothing_is_left(sender: Sender, answer: tuple[int, str], total: int) -> None:
    first = sender.send(draw(1), (200, "added"))
    left = draw(1) - first
    sender.send(draw(2), answer, total=total)
    third = sender.send(torch.zeros(SIZE), (200, "added"))
    after = sender.send(torch.zeros(SIZE), (200, "added"))
    assert (left - third - after).norm() <= left.norm()
    assert (left - third).norm() < 0.99 * left.norm()  # it was sent of, not what the second had


def test_of_an_update_that_was_there_in_another_version_nothing_is_known(sender: Sender) -> None:
    sender.send(draw(1), (200, "again"))
    assert not sender.send(torch.zeros(SIZE), (200, "added")).any()


def test_a_round_that_has_not_begun_there_is_asked_for_again(sender: Sender) -> None:
    sender.send(draw(1), (409, "the last one is 0"), (409, "the last one is 0"), (200, "added"), total=0)
    assert len(set(sender.client.bodies)) == 1
    assert len(sender.client.bodies) == 3


def test_an_encoding_under_way_does_not_hold_up_the_end() -> None:
    sender, begun, goes_on = Sender("int8"), threading.Event(), threading.Event()

    def encode(contribution: Contribution, encoded: Any) -> tuple[bytes, str]:
        begun.set()
        goes_on.wait(60.0)
        return b"", ""

    sender.transport._encode = encode  # type: ignore[method-assign, assignment]
    sender.client.answers = [(200, "added")]
    sending = threading.Thread(target=lambda: sender.transport.start(update(draw(0))))
    sending.start()
    assert begun.wait(60.0)
    until(lambda: sender.transport._coding is not None, "the job of the codec's thread")
    began = time.monotonic()
    assert not sender.transport.stop(0.1)
    assert time.monotonic() - began < 30.0
    goes_on.set()
    sending.join(60.0)
    assert sender.transport.stop(60.0)
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("bytescheduler")]


def update(values: Tensor) -> Contribution:
    return Contribution(worker="w", round=1, fragment=0, pseudo_gradient=values, samples=8)
