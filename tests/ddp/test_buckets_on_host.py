"""Parts that travel as copies in host memory, and come back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from lightning_bytescheduler.collectives.operations import StartedOperation
from lightning_bytescheduler.ddp.reduction import _on_copies
from tests.support.late_copies import LateCopies
from tests.support.waiting import WAIT


@pytest.fixture
def copies() -> Iterator[LateCopies]:
    copies = LateCopies(torch.device("cpu"))
    yield copies
    assert copies.stop(WAIT)


def test_a_part_comes_back_to_its_place(copies: LateCopies) -> None:
    buffer = torch.arange(4.0)

    def add_ten(group: Any, part: torch.Tensor, number: int) -> StartedOperation:
        assert part.tolist() == [2.0, 3.0]
        part.add_(10.0)
        return StartedOperation([])

    nothing: Any = None
    started = _on_copies(add_ten, copies)(nothing, buffer[2:], 1)
    assert buffer.tolist() == [0.0, 1.0, 2.0, 3.0]
    assert started.finish is not None
    started.finish()
    assert buffer.tolist() == [0.0, 1.0, 12.0, 13.0]
