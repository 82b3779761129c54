"""Copies of a GPU's buckets in host memory, on a GPU that is not there: made when its streams get there, and kept."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from lightning_bytescheduler.collectives.host_copies import travel_by_host
from lightning_bytescheduler.exceptions import SchedulerClosedError
from tests.support.late_copies import LateCopies
from tests.support.waiting import WAIT, until

CPU = torch.device("cpu")


@pytest.fixture
def errors() -> list[BaseException]:
    return []


@pytest.fixture
def copies(errors: list[BaseException]) -> Iterator[LateCopies]:
    made = LateCopies(CPU, errors.append)
    yield made
    assert made.stop(WAIT)


def test_a_copy_is_made_behind_what_writes_the_bucket_and_told_of_on_one_thread(copies: LateCopies) -> None:
    bucket, written = torch.zeros(4), threading.Event()

    def write() -> None:
        bucket.fill_(7.0)

    copies.fake.training.enqueue(write, when=written.is_set)
    copy, exists, made = copies.take_out(0, bucket)
    told: list[tuple[str, float]] = []
    began: list[float] = []
    there = threading.Event()

    def then() -> None:
        told.append((threading.current_thread().name, float(copy[0])))
        there.set()

    copies.when_made(exists, lambda: began.append(float(bucket[0])))
    copies.when_made(made, then)
    assert not there.wait(0.05), "it has not been written"
    written.set()
    assert there.wait(WAIT)
    assert told == [("bytescheduler-device", 7.0)]
    assert began == [7.0]


def test_what_is_put_back_is_there(copies: LateCopies) -> None:
    bucket = torch.arange(6.0)
    copy, _, made = copies.take_out(3, bucket)
    there = threading.Event()
    copies.when_made(made, there.set)
    assert there.wait(WAIT)
    copy.mul_(2.0)
    copies.put_back(copy[2:4], bucket[2:4])
    assert bucket.tolist() == [0, 1, 4, 6, 4, 5], "a part, and nothing else"


def test_memory_is_used_again_for_the_same_bucket(copies: LateCopies) -> None:
    first, *_ = copies.take_out(0, torch.ones(8))
    again, *_ = copies.take_out(0, torch.ones(8))
    other, *_ = copies.take_out(1, torch.ones(8))
    assert first.data_ptr() == again.data_ptr() != other.data_ptr()
    larger, *_ = copies.take_out(0, torch.ones(9))
    assert copies._copies.keys() == {0}, "buckets were arranged anew: there may be no second one any more"
    wider, *_ = copies.take_out(1, torch.ones(8, dtype=torch.float64))
    assert (larger.numel(), wider.dtype) == (9, torch.float64)


def test_what_goes_wrong_is_told(copies: LateCopies, errors: list[BaseException]) -> None:
    *_, made = copies.take_out(0, torch.ones(2))
    copies.when_made(made, lambda: 1 / 0)  # type: ignore[arg-type,return-value]
    until(lambda: bool(errors))
    assert [type(error) for error in errors] == [ZeroDivisionError]


def test_who_waits_for_the_way_back_learns_that_the_fit_has_ended() -> None:
    copies = LateCopies(CPU, lambda error: None)
    copies._back.enqueue(lambda: None, when=lambda: False)  # type: ignore[attr-defined]
    raised: list[BaseException] = []

    def put_back() -> None:
        try:
            copies.put_back(torch.ones(2), torch.ones(2))
        except SchedulerClosedError as error:
            raised.append(error)

    waiting = threading.Thread(target=put_back)
    waiting.start()
    waiting.join(0.05)
    assert waiting.is_alive()
    assert copies.stop(WAIT)
    waiting.join(WAIT)
    assert "on their way back to the device" in str(raised[0])


@pytest.mark.parametrize("device", ["cpu", "cuda", "mps"])
@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("served", [False, True])
def test_only_what_needs_it_travels_from_host_memory(device: str, compressed: bool, served: bool) -> None:
    by_host = travel_by_host(torch.device(device), compressed=compressed, served=served)
    assert by_host == (device == "cuda" and (compressed or served))
