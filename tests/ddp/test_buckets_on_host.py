"""Buckets that travel as copies in host memory, and come back part by part."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_bytescheduler.collectives.operations import Passage
from lightning_bytescheduler.ddp.reduction import GradientBucket, StepTasks
from lightning_bytescheduler.ddp.sample_weights import StepWeight
from lightning_bytescheduler.scheduler.task import CommTask
from tests.ddp.transports import idle_transport
from tests.support.late_copies import LateCopies
from tests.support.waiting import WAIT

CPU = torch.device("cpu")


@pytest.fixture
def copies() -> Iterator[LateCopies]:
    copies = LateCopies(CPU, lambda error: None)
    yield copies
    assert copies.stop(WAIT)


def copied(copies: LateCopies, buffer: torch.Tensor) -> GradientBucket:
    """What travels of ``buffer``, once it has been copied."""
    bucket = GradientBucket(3, [], buffer, 7)
    core: Any = SimpleNamespace()
    transport = idle_transport()
    transport.host_copies = copies
    on_host = StepTasks(core, transport, 1, StepWeight(2)).on_host(bucket)
    assert (on_host.index, on_host.priority) == (3, 7)
    assert on_host.buffer.data_ptr() != buffer.data_ptr()
    there = threading.Event()
    assert on_host.exists is not None
    copies.when_made(on_host.exists, there.set)
    assert there.wait(WAIT)
    return on_host


def test_a_part_comes_back_to_its_place_and_its_pull_ends_before(copies: LateCopies) -> None:
    buffer = torch.arange(4.0)
    on_host = copied(copies, buffer)
    assert torch.equal(on_host.buffer, buffer)
    on_host.buffer.add_(10.0)
    part = CommTask("bucket 3", 4, launch=lambda _: None).partition(2)[1]
    part.passage = Passage(0, pushed=8, pulled=8)
    assert on_host.on_part is not None
    on_host.on_part(part)
    assert buffer.tolist() == [0.0, 1.0, 12.0, 13.0]
    assert 0 < part.passage.came < time.perf_counter() - 1e-3, "copies take a millisecond here"


def test_pairs_of_real_numbers_come_back_to_the_complex_ones_that_they_are_of(copies: LateCopies) -> None:
    """Where norms are told a bucket of complex numbers travels as twice as many real ones."""
    buffer = torch.tensor([1 + 2j, 3 + 4j])
    on_host = copied(copies, buffer)
    torch.view_as_real(on_host.buffer).add_(10.0)
    first, second = CommTask("bucket 3 gather", 4, launch=lambda _: None).partition(2)
    assert on_host.on_part is not None
    on_host.on_part(second)
    assert buffer.tolist() == [1 + 2j, 13 + 14j]
    on_host.on_part(first)
    assert buffer.tolist() == [11 + 12j, 13 + 14j]
    (whole,) = CommTask("bucket 3", 2, launch=lambda _: None).partition(2)
    on_host.buffer.fill_(5j)
    on_host.on_part(whole)
    assert buffer.tolist() == [5j, 5j], "an all-reduce counts complex ones"
