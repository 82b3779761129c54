"""Steps as DDP's: buckets merged to the sizes DDP would have made, reduced at once, waited for at the end of backward.

The buckets are smaller than DDP's, as they are what gates a layer, and cannot be changed after DDP has made them. So a
step without gates merges them as they come.

Why ranks agree: DDP calls its hook in the order of buckets on every rank, and only the training thread sends here. The
data group is otherwise the scheduler core's; it is idle, as all of the last step has arrived on this rank, for which
every rank has launched it.
"""

from __future__ import annotations

from contextlib import suppress
from functools import partial

import torch
import torch.distributed as dist

__all__ = ["MergedBuckets"]

_Waiting = list[tuple[torch.Tensor, torch.futures.Future[torch.Tensor]]]

_FIRST_BYTES = dist._DEFAULT_FIRST_BUCKET_BYTES
_BYTES = 25 * 1024 * 1024  # DDP's default


class MergedBuckets:
    """The buckets of one backward pass.

    Args:
        group: The scheduler's data group.
        device: Where gradients live.
        merges: Whether to merge; otherwise buckets are sent as they are.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, *, merges: bool = True) -> None:
        self._group = group
        self._scale = 1.0 / group.size()
        self._devices: list[int | str | torch.device] | None = [device] if device.type == "cuda" else None
        # Gloo sends several tensors as one on a CPU only.
        self._merges = device.type == "cpu" or group._get_backend(device).name() != "gloo"
        self._waiting: _Waiting = []
        self._waiting_bytes = 0
        self._open: list[torch.futures.Future[torch.Tensor]] = []  # all of them, ended or not
        self._error: BaseException | None = None
        self._limit = _FIRST_BYTES if merges else 0
        self._next_limit = _BYTES if merges else 0

    def reduce(self, buffer: torch.Tensor, *, last: bool) -> torch.futures.Future[torch.Tensor]:
        """Average ``buffer`` over all ranks, in place, together with its neighbours.

        Args:
            buffer: A bucket.
            last: Whether it is the backward pass's last one.

        Returns:
            A future of ``buffer``.
        """
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=self._devices)
        self._open.append(future)
        if self._error is not None:
            self.fail(self._error)
            return future
        if self._waiting and self._waiting[0][0].dtype != buffer.dtype:
            self._send()
        self._waiting.append((buffer, future))
        self._waiting_bytes += buffer.numel() * buffer.element_size()
        if last or self._waiting_bytes >= self._limit:
            self._send()
            self._limit = self._next_limit
        return future

    @property
    def under_way(self) -> bool:
        """Whether something has not arrived."""
        return not all(future.done() for future in self._open)

    def fail(self, error: BaseException) -> None:
        """End what has not arrived, and what is still to come, with ``error``; for any thread.

        DDP waits for futures inside of torch: nothing else would wake it.
        """
        self._error = error
        for future in list(self._open):
            if not future.done():
                with suppress(RuntimeError):  # it has just arrived
                    future.set_exception(error)  # type: ignore[arg-type]

    def _send(self) -> None:
        waiting, self._waiting = self._waiting, []
        self._waiting_bytes = 0
        torch._foreach_mul_([buffer for buffer, _ in waiting], self._scale)
        for together in [waiting] if self._merges else [[each] for each in waiting]:
            buffers = [buffer for buffer, _ in together]
            work = self._group.allreduce(buffers) if len(buffers) == 1 else self._group.allreduce_coalesced(buffers)
            work.get_future().add_done_callback(partial(_arrived, together))


def _arrived(waiting: _Waiting, reduced: torch.futures.Future[object]) -> None:
    for buffer, future in waiting:
        with suppress(RuntimeError):  # it was ended by MergedBuckets.fail
            try:
                reduced.value()
            except Exception as error:
                future.set_exception(error)  # type: ignore[arg-type]
            else:
                future.set_result(buffer)
