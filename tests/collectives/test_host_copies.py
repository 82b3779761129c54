"""Payloads of a device that is not there: a thread goes on when its stream has done what it was given."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from lightning_bytescheduler.collectives.device_streams import travel_by_host
from lightning_bytescheduler.exceptions import SchedulerClosedError
from tests.support.late_copies import LateCopies
from tests.support.simulated_device import DEVICE, LatePayloads, OnDevice
from tests.support.waiting import WAIT, until


@pytest.fixture
def payloads() -> Iterator[LatePayloads]:
    made = LatePayloads(torch.device("cpu"))
    yield made
    assert made.stop(WAIT)


def test_what_is_copied_to_host_memory_is_there_when_the_work_is_left(payloads: LatePayloads) -> None:
    gets_there = threading.Event()
    with payloads.working():
        payloads.fake.current_stream().enqueue(lambda: None, when=gets_there.is_set)
        copy = payloads.to_host(OnDevice(torch.arange(9, dtype=torch.uint8)))
        assert not copy.any(), "it is made when the device gets there"
        gets_there.set()
    assert copy.tolist() == list(range(9))
    with payloads.working():
        back = payloads.to_device(copy)
        assert back.device == DEVICE
    assert back.tolist() == copy.tolist()


def test_a_mark_is_behind_what_the_current_stream_was_given(payloads: LatePayloads) -> None:
    written = threading.Event()
    payloads.fake.training.enqueue(lambda: None, when=written.is_set)
    mark = payloads.mark()
    assert mark.event is not None
    assert not mark.event.query()
    written.set()
    until(mark.event.query)


def test_each_thread_has_a_stream_of_its_own_and_waits_for_that_alone(payloads: LatePayloads) -> None:
    seen = []

    def work() -> None:
        for _ in range(2):
            with payloads.working():
                seen.append(payloads.fake.current_stream())

    work()
    seen[0].enqueue(lambda: None, when=lambda: False)  # nothing behind it is done
    other = threading.Thread(target=work)
    other.start()
    other.join(WAIT)
    assert not other.is_alive()
    assert seen[0] is seen[1]
    assert seen[2] is seen[3] is not seen[0]


def test_a_wait_for_the_device_learns_that_the_fit_has_ended(payloads: LatePayloads) -> None:
    raised: list[BaseException] = []

    def work() -> None:
        try:
            with payloads.working():
                payloads.fake.current_stream().enqueue(lambda: None, when=lambda: False)
        except SchedulerClosedError as error:
            raised.append(error)

    waiting = threading.Thread(target=work)
    waiting.start()
    waiting.join(0.05)
    assert waiting.is_alive()
    assert payloads.stop(WAIT)
    waiting.join(WAIT)
    assert "encoded or decoded on the device" in str(raised[0])


def test_a_failure_is_raised_after_a_short_wait(payloads: LatePayloads) -> None:
    def fail() -> None:
        with payloads.working():
            payloads.fake.current_stream().enqueue(lambda: None, when=lambda: False)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()


def test_what_is_looked_at_aside_is_on_the_streams_of_threads(payloads: LatePayloads) -> None:
    with payloads.working():
        own = payloads.fake.current_stream()
    with payloads.aside():
        assert payloads.fake.current_stream() is own is not payloads.fake.training


def test_a_mark_is_told_of_on_one_thread_and_so_is_what_goes_wrong(payloads: LatePayloads) -> None:
    written, there = threading.Event(), threading.Event()
    payloads.fake.training.enqueue(lambda: None, when=written.is_set)
    mark, told, errors = payloads.mark(), list[str](), list[BaseException]()

    def then() -> None:
        told.append(threading.current_thread().name)
        there.set()

    payloads.when_made(mark, then, errors.append)
    payloads.when_made(mark, lambda: 1 / 0, errors.append)  # type: ignore[arg-type,return-value]
    assert not there.wait(0.05), "it has not been written"
    written.set()
    assert there.wait(WAIT)
    assert told == ["bytescheduler-device"]
    until(lambda: bool(errors))
    assert [type(error) for error in errors] == [ZeroDivisionError]


def test_what_is_brought_back_is_there() -> None:
    copies = LateCopies(torch.device("cpu"))
    bucket = torch.arange(6.0)
    with copies.working():
        copy = copies.to_host(bucket[2:4])
    copy.mul_(2.0)
    with copies.working():
        copies.bring_back(copy, bucket[2:4])
    assert bucket.tolist() == [0, 1, 4, 6, 4, 5], "a part, and nothing else"
    assert copies.stop(WAIT)


@pytest.mark.parametrize("device", ["cpu", "cuda", "mps"])
@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("served", [False, True])
def test_only_what_needs_it_travels_from_host_memory(device: str, compressed: bool, served: bool) -> None:
    by_host = travel_by_host(torch.device(device), compressed=compressed, served=served)
    assert by_host == (device == "cuda" and (compressed or served))
