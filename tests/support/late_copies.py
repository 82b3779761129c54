"""Copies between a simulated GPU and host memory: made late, in any order that streams and events allow."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch

from lightning_bytescheduler.collectives.device_streams import PayloadCopies
from lightning_bytescheduler.ddp import decided_fit, wire
from lightning_bytescheduler.ddp.compressed_reduction import GradientCompression
from tests.support.fake_device import FakeDevice

__all__ = ["LateCopies", "by_host"]

LATE_S = 1e-3
_seeds = itertools.count()


class LateCopies(PayloadCopies):
    """See the module; a bucket of the CPU stands in for one of the GPU."""

    def __init__(self, device: torch.device) -> None:
        self.fake = FakeDevice(next(_seeds))
        self.fake.__enter__()
        cuda: Any = self.fake
        super().__init__(device, cuda=cuda)

    def _copied(self, payload: torch.Tensor, there: torch.Tensor) -> torch.Tensor:
        def late() -> None:
            time.sleep(LATE_S)
            there.copy_(payload)

        # a reader that does not wait finds that
        there.fill_(torch.nan) if there.dtype.is_floating_point else there.zero_()
        self.fake.current_stream().enqueue(late)
        return there

    def stop(self, timeout: float) -> bool:
        stopped = super().stop(timeout)
        self.fake.__exit__()
        return stopped


@contextmanager
def by_host() -> Iterator[None]:
    """Have gradients travel by host memory, as from a GPU, and be encoded there."""
    with ExitStack() as stack:
        stack.enter_context(patch.object(decided_fit, "travel_by_host", lambda *_, **__: True))
        stack.enter_context(patch.object(wire, "PayloadCopies", LateCopies))
        stack.enter_context(patch.object(GradientCompression, "work_on", lambda *_: None))
        yield
