"""Messages go to one receiver after the other, each receiver's in their order; an error is told once."""

from __future__ import annotations

import threading
from typing import Any

import torch

from lightning_bytescheduler.collectives.sending_turns import SendingTurns


class Link:
    """Notes what is sent; nothing leaves before it is opened."""

    def __init__(self, broken: bool = False) -> None:
        self.sent: list[tuple[int, int]] = []
        self.open = threading.Event()
        self.broken = broken

    def send(self, tensors: list[torch.Tensor], receiver: int, number: int) -> Any:
        self.sent.append((receiver, number))
        return self

    def wait(self, timeout: object = None) -> None:
        assert self.open.wait(10)
        if self.broken:
            raise RuntimeError("Connection closed by peer")


def turns_of(link: Link, receivers: list[int], errors: list[BaseException]) -> SendingTurns:
    return SendingTurns(link, receivers, name="test-turns", on_error=errors.append)  # type: ignore[arg-type]


def test_receivers_have_turns_and_each_gets_its_messages_in_order() -> None:
    link, errors = Link(), list[BaseException]()
    turns = turns_of(link, [2, 3, 1], errors)
    message = torch.zeros(1)
    for number in (1, 2):  # as many as are under way at once
        turns.put(message, 1, number)
    for receiver in (1, 2, 3):
        for number in range(10, 13):
            turns.put(message, receiver, number)
    link.open.set()
    turns.close()
    assert not errors
    assert len(link.sent) == 11
    for receiver in (1, 2, 3):
        numbers = [number for to, number in link.sent if to == receiver]
        assert numbers == sorted(numbers)
    while_all_had_some = [to for to, _ in link.sent[2:8]]
    assert while_all_had_some[:3] == while_all_had_some[3:]
    assert set(while_all_had_some) == {1, 2, 3}


def test_what_waits_is_forgotten_when_sending_fails_and_that_is_told_once() -> None:
    link, errors = Link(broken=True), list[BaseException]()
    turns = turns_of(link, [1, 2], errors)
    for number in range(1, 9):
        turns.put(torch.zeros(1), 1 + number % 2, number)
    link.open.set()
    turns.close()
    assert [str(error) for error in errors] == ["Connection closed by peer"]
    assert len(link.sent) <= 2


def test_a_stop_sends_nothing_more() -> None:
    link, errors = Link(), list[BaseException]()
    turns = turns_of(link, [1], errors)
    for number in range(1, 9):
        turns.put(torch.zeros(1), 1, number)
    assert not turns.stop()
    link.open.set()
    assert turns.stop(10.0)
    assert len(link.sent) <= 2
    assert not errors
