"""Messages go to one receiver after the other, each receiver's in their order; an error is told once."""

from __future__ import annotations

import itertools
import threading
from typing import Any

import torch

from lightning_bytescheduler.collectives.summing_server import SendingTurns, turns_by_need
from tests.support.waiting import WAIT


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
        assert self.open.wait(WAIT)
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
    assert turns.stop(WAIT)
    assert len(link.sent) <= 2
    assert not errors


def test_a_receiver_that_needs_more_has_more_turns_evenly_spread() -> None:
    assert turns_by_need([3, 1, 2], [0.25] * 3) == [3, 1, 2], "as they are given"
    assert turns_by_need([4, 1, 2, 3], [1 / 3, 1 / 6, 1 / 6, 1 / 6]) == [1, 4, 2, 4, 3]
    turns = turns_by_need([4, 5, 1, 2, 3], [0.3, 0.3, 0.1, 0.1, 0.1])
    assert [turns.count(receiver) for receiver in (4, 5, 1, 2, 3)] == [3, 3, 1, 1, 1]
    for receiver in (4, 5):
        at = [position for position, to in enumerate([*turns, *turns]) if to == receiver]
        assert max(b - a for a, b in itertools.pairwise(at)) == 3
    assert turns_by_need([4, 1], [0.9, 0.0]) == [4, 1], "a question may go to one that adds up nothing"
    assert turns_by_need([4, 1], [0.999, 0.001]).count(4) == 8, "no receiver waits for long"
    assert turns_by_need([], []) == []


def test_one_with_several_turns_gets_its_messages_in_order() -> None:
    link, errors = Link(), list[BaseException]()
    turns = turns_of(link, [4, 5, 1, 4, 5], errors)
    for number in range(1, 9):
        for receiver in (1, 4, 5):
            turns.put(torch.zeros(1), receiver, number)
    link.open.set()
    turns.close()
    assert not errors
    assert len(link.sent) == 24
    for receiver in (1, 4, 5):
        assert [number for to, number in link.sent if to == receiver] == list(range(1, 9))
