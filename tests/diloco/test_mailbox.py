"""Mailboxes over a store, in one process."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch.distributed as dist

from lightning_bytescheduler.diloco.mailbox import (
    Caller,
    Mailbox,
    Postman,
    await_key,
    connection_to,
)
from lightning_bytescheduler.diloco.messages import Message, TrainingOver, decode
from lightning_bytescheduler.exceptions import OptionError, RankFailedError, SchedulerTimeoutError

LONG = 60.0
NAME = "bytescheduler-test-answers"


def answer(sender: str, text: str) -> bytes:
    if text == "bad":
        raise ValueError("no such thing")
    return text[::-1].encode() * (3_000_000 if text == "long" else 1)


def nothing() -> None:
    pass


def unexpected(error: BaseException) -> None:
    raise AssertionError from error


@pytest.fixture
def store() -> dist.Store:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@pytest.fixture
def server(store: dist.Store) -> Iterator[Mailbox]:
    server = Mailbox(store, "here", thread=NAME, handle=answer, on_error=unexpected)
    yield server
    assert server.stop(LONG)
    assert server.stop(LONG)
    assert NAME not in {thread.name for thread in threading.enumerate()}


def caller_of(store: dist.Store) -> Caller:
    return Caller(store, sender="worker1", timeout=LONG, check=nothing)


def call(caller: Caller, text: str) -> str:
    return caller.call("here", text).decode()


def test_each_caller_gets_its_own_answers(store: dist.Store, server: Mailbox) -> None:
    first, second = caller_of(store), caller_of(store)
    assert [call(first, "abc"), call(second, ""), call(first, "a\nb"), call(second, "xy")] == ["cba", "", "b\na", "yx"]


@pytest.mark.parametrize("posts", [False, True])
def test_a_sender_that_died_before_it_wrote_its_letter_does_not_hold_the_reader(store: dist.Store, posts: bool) -> None:
    postman = Postman(store, "here", to="there", on_error=unexpected) if posts else None
    server = Mailbox(store, "here", thread=NAME, handle=answer, on_error=unexpected, postman=postman)
    assert call(caller_of(store), "ab") == "ba"
    connection_to(store).add("here", 1)
    assert server.stop(1.0)
    assert server.stop(LONG)
    assert postman is None or postman.stop(LONG)


def test_a_caller_may_come_before_the_server(store: dist.Store) -> None:
    answers: list[str] = []
    caller = caller_of(store)
    thread = threading.Thread(target=lambda: answers.append(call(caller, "ab")))
    thread.start()
    server = Mailbox(store, "here", thread=NAME, handle=answer, on_error=unexpected)
    thread.join(LONG)
    assert answers == ["ba"]
    assert server.stop(LONG)


def test_what_cannot_be_answered_is_the_caller_s(store: dist.Store, server: Mailbox) -> None:
    caller = caller_of(store)
    with pytest.raises(RuntimeError, match="ValueError: no such thing"):
        call(caller, "bad")
    assert call(caller, "good") == "doog"


def test_an_answer_may_be_larger_than_a_value_of_the_store(store: dist.Store, server: Mailbox) -> None:
    assert call(caller_of(store), "long") == "gnol" * 3_000_000


def test_no_rank_answers(store: dist.Store) -> None:
    with pytest.raises(SchedulerTimeoutError, match="No answer came at 'here' for 0 s"):
        Caller(store, sender="worker1", timeout=0, check=nothing).call("here", "a")


def test_a_failure_ends_the_waiting(store: dist.Store) -> None:
    def failed() -> None:
        raise RankFailedError(1, "on purpose")

    with pytest.raises(RankFailedError, match="on purpose"):
        Caller(store, sender="worker1", timeout=LONG, check=failed).call("nowhere", "a")
    with pytest.raises(RankFailedError, match="on purpose"):
        await_key(store, "nothing", limit=LONG, check=failed)
    assert not await_key(store, "nothing", limit=0.0, check=nothing)


class Inbox:
    """What a mailbox was sent, by whom, and what ended its reading."""

    def __init__(self, store: dist.Store, postman: Postman | None = None) -> None:
        self.heard: list[tuple[str, Message]] = []
        self.errors: list[BaseException] = []
        self.ended = threading.Event()
        self.mailbox = Mailbox(store, "worker0", thread=NAME, handle=self.handle, on_error=self.fail, postman=postman)

    def handle(self, sender: str, text: str) -> None:
        self.heard.append((sender, decode(text, sender=sender)))

    def fail(self, error: BaseException) -> None:
        self.errors.append(error)
        self.ended.set()


def test_what_was_posted_is_read_in_order_before_the_end(store: dist.Store) -> None:
    postman = Postman(store, "worker3", to="worker0", on_error=unexpected)
    inbox = Inbox(store, postman)
    messages = [TrainingOver(round=number) for number in range(20)]
    for message in messages:
        postman.post(message)
    assert inbox.mailbox.stop(LONG)
    assert postman.stop(LONG)
    assert inbox.heard == [("worker3", message) for message in messages]
    assert not inbox.errors


@pytest.mark.parametrize(
    ("letter", "says"),
    [
        ('{"sender": "worker3", "text": "{}"}', "message of worker3=.*required field `kind`"),
        ('{"sender": "worker3", "text": "{\\"kind\\": \\"TrainingOver\\""}', "worker3.*truncated"),
        ('{"sender": "worker3"', "message of a rank to worker0=.*truncated"),
        ('{"sender": 3, "text": ""}', r"message of a rank to worker0=.*\$\.sender"),
        ('{"letter": "other", "sender": "worker3"}', "message of a rank to worker0="),
    ],
)
def test_a_damaged_letter_ends_the_reading_with_its_sender_or_field(store: dist.Store, letter: str, says: str) -> None:
    inbox = Inbox(store)
    post_raw(store, "worker0", letter)
    assert inbox.ended.wait(LONG)
    with pytest.raises(OptionError, match=says):
        raise inbox.errors[0]
    assert inbox.mailbox.stop(LONG)


def post_raw(store: dist.Store, mailbox: str, text: str) -> None:
    connection = connection_to(store)
    connection.set(f"{mailbox}/{connection.add(mailbox, 1)}", text)


def test_letters_of_many_at_once_are_each_heard_once(store: dist.Store) -> None:
    inbox = Inbox(store)
    postmen = [Postman(store, f"worker{number}", to="worker0", on_error=unexpected) for number in range(3)]
    for round in range(10):
        for postman in postmen:
            postman.post(TrainingOver(round=round))
    assert all(postman.stop(LONG) for postman in postmen)
    assert inbox.mailbox.stop(LONG)
    for number in range(3):
        own = [message for sender, message in inbox.heard if sender == f"worker{number}"]
        assert own == [TrainingOver(round=round) for round in range(10)]
    assert len(inbox.heard) == 30
