"""What DDP is given in return for a bucket: a future of the bucket's own buffer.

On a GPU a future goes with the streams that are current when it gets its result: whoever waits for it waits for what is
queued on them then, by stream and not on the host (``torch.futures.Future``).
"""

from __future__ import annotations

from typing import Any

import torch

from lightning_bytescheduler.scheduler.task import CommTask

__all__ = ["BucketFutures", "complete"]


class BucketFutures:
    """Makes the futures of one engine.

    Args:
        device: Where gradients live.
    """

    def __init__(self, device: torch.device) -> None:
        self._devices: list[int | str | torch.device] | None = [device] if device.type == "cuda" else None
        self._completed: dict[int, tuple[Any, torch.futures.Future[torch.Tensor]]] = {}  # by index of the bucket

    def new(self) -> torch.futures.Future[torch.Tensor]:
        """One without a result."""
        return torch.futures.Future(devices=self._devices)

    def completed(self, index: int, buffer: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
        """What lets DDP go on; kept for later steps, as setting a result gives away the GIL, which others want now."""
        made_for = (buffer.data_ptr(), buffer.numel(), buffer.dtype)
        known, future = self._completed.get(index, (None, None))
        if future is None or known != made_for:
            future = self.new()
            future.set_result(buffer)
            self._completed[index] = (made_for, future)
        return future


def complete(future: torch.futures.Future[torch.Tensor], buffer: torch.Tensor, task: CommTask) -> None:
    """Give ``future`` the buffer that ``task`` has reduced, or what it failed with."""
    if task.error is None:
        future.set_result(buffer)
    else:
        future.set_exception(task.error)  # type: ignore[arg-type]
