"""Calls over a store, in one process."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch.distributed as dist

from lightning_bytescheduler.diloco.mailbox import Caller, CallServer
from lightning_bytescheduler.exceptions import RankFailedError, SchedulerTimeoutError

LONG = 30.0
NAME = "bytescheduler-test-answers"


def answer(text: str) -> str:
    if text == "bad":
        raise ValueError("no such thing")
    return text[::-1]


def nothing() -> None:
    pass


@pytest.fixture
def store() -> dist.Store:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@pytest.fixture
def server(store: dist.Store) -> Iterator[CallServer]:
    server = CallServer(store, "here", name=NAME, answer=answer)
    yield server
    assert server.stop(LONG)
    assert server.stop(LONG)
    assert NAME not in {thread.name for thread in threading.enumerate()}


def caller_of(store: dist.Store) -> Caller:
    return Caller(store, "here", timeout=LONG, check=nothing)


def test_each_caller_gets_its_own_answers(store: dist.Store, server: CallServer) -> None:
    first, second = caller_of(store), caller_of(store)
    assert [first.call("abc"), second.call(""), first.call("a\nb"), second.call("xy")] == ["cba", "", "b\na", "yx"]


def test_a_caller_may_come_before_the_server(store: dist.Store) -> None:
    answers: list[str] = []
    caller = caller_of(store)
    thread = threading.Thread(target=lambda: answers.append(caller.call("ab")))
    thread.start()
    server = CallServer(store, "here", name=NAME, answer=answer)
    thread.join(LONG)
    assert answers == ["ba"]
    assert server.stop(LONG)


def test_what_cannot_be_answered_is_the_caller_s(store: dist.Store, server: CallServer) -> None:
    caller = caller_of(store)
    with pytest.raises(RuntimeError, match="ValueError: no such thing"):
        caller.call("bad")
    assert caller.call("good") == "doog"


def test_nobody_answers(store: dist.Store) -> None:
    seconds = iter(range(100))
    with pytest.raises(SchedulerTimeoutError, match="Nobody answered at 'here' for 5 s"):
        Caller(store, "here", timeout=5, check=nothing, clock=lambda: next(seconds)).call("a")


def test_a_failure_ends_the_waiting(store: dist.Store, server: CallServer) -> None:
    def failed() -> None:
        raise RankFailedError(1, "on purpose")

    with pytest.raises(RankFailedError, match="on purpose"):
        Caller(store, "nowhere", timeout=LONG, check=failed).call("a")
    with pytest.raises(RankFailedError, match="on purpose"):
        server.await_farewells(1, timeout=LONG, check=failed)


def test_farewells_are_counted(store: dist.Store, server: CallServer) -> None:
    callers = [caller_of(store) for _ in range(2)]
    assert server.await_farewells(0, timeout=0.0, check=nothing)
    assert not server.await_farewells(1, timeout=0.0, check=nothing)
    for caller in callers:
        assert caller.call("ab") == "ba"
        caller.bid_farewell()
    assert server.await_farewells(2, timeout=LONG, check=nothing)
