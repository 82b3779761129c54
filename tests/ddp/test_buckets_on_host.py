"""Parts that travel as copies in host memory, and come back."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from lightning_bytescheduler.collectives.operations import Passage, StartedOperation
from lightning_bytescheduler.ddp.reduction import Reduction
from lightning_bytescheduler.ddp.sample_weights import StepWeight
from tests.ddp.routes import idle_route
from tests.support.late_copies import LateCopies
from tests.support.waiting import WAIT


@pytest.fixture
def copies() -> Iterator[LateCopies]:
    copies = LateCopies(torch.device("cpu"))
    yield copies
    assert copies.stop(WAIT)


def test_a_part_comes_back_to_its_place_and_its_pull_ends_before(copies: LateCopies) -> None:
    buffer = torch.arange(4.0)
    passage = Passage(where={"server": 0}, pushed=8)

    def add_ten(group: Any, part: torch.Tensor, number: int) -> StartedOperation:
        assert part.tolist() == [2.0, 3.0]
        part.add_(10.0)
        return StartedOperation([], passage=passage)

    nothing: Any = None
    start = Reduction(nothing, idle_route(), 1, StepWeight(2))._on_copies(3, add_ten, copies)
    started = start(nothing, buffer[2:], 1)
    assert buffer.tolist() == [0.0, 1.0, 2.0, 3.0]
    assert started.finish is not None
    started.finish()
    assert buffer.tolist() == [0.0, 1.0, 12.0, 13.0]
    assert 0 < passage.came < time.perf_counter() - 1e-3, "copies take a millisecond here"
