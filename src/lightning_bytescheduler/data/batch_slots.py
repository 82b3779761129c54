"""The way of batches from the processes that read: through memory that they share with the process that trains.

A tensor that is sent to another process costs a file, its mapping and a connection, which for a small batch is several
times what reading it costs. Here its bytes are copied into a slot that both processes have mapped since the fork.
"""

from __future__ import annotations

import contextlib
import mmap
from typing import Any, NamedTuple

import torch
from torch.utils.data import get_worker_info

__all__ = ["BatchSlots"]

_SLOT_BYTES = 4 * 1024 * 1024  # of address space; memory is taken as far as batches reach
_ALIGNMENT = 64


class _Placed(NamedTuple):
    """A tensor in a slot."""

    start: int
    dtype: torch.dtype
    shape: tuple[int, ...]


class BatchSlots:
    """Memory for the batches that are under way. It is inherited by processes that are forked, and by no others.

    A DataLoader asks a worker for its batch number ``n + prefetch_factor`` when it has handed out number ``n``, which
    is unpacked before the next one is asked for: with two more slots none is written to that is still to be read.

    Args:
        workers: Processes that read.
        prefetch_factor: Batches that each of them reads ahead.
    """

    def __init__(self, workers: int, prefetch_factor: int) -> None:
        self._each = prefetch_factor + 2
        self._memory: mmap.mmap | None = None
        with contextlib.suppress(OSError):  # without it tensors are sent as PyTorch sends them
            self._memory = mmap.mmap(-1, workers * self._each * _SLOT_BYTES)
        self._next = 0

    def __getstate__(self) -> dict[str, Any]:
        return {"_each": self._each, "_memory": None, "_next": 0}

    def pack(self, batch: Any) -> Any:
        """In a process that reads: put the tensors of a batch into the next slot, as far as it has room."""
        worker = get_worker_info()
        if self._memory is None or worker is None:
            return batch
        begin = (worker.id * self._each + self._next) * _SLOT_BYTES
        self._next = (self._next + 1) % self._each
        return _Packing(self._memory, begin, begin + _SLOT_BYTES).packed(batch)

    def unpack(self, packed: Any) -> Any:
        """In the process that trains: the batch, in memory of its own."""
        if type(packed) is _Placed:
            return self._tensor(packed).clone()
        if type(packed) in (list, tuple):
            return type(packed)(self.unpack(part) for part in packed) if _holds_tensors(packed) else packed
        if type(packed) is dict:
            return {key: self.unpack(part) for key, part in packed.items()}
        return packed

    def _tensor(self, placed: _Placed) -> torch.Tensor:
        count = 1
        for length in placed.shape:
            count *= length
        if not count or self._memory is None:
            return torch.empty(placed.shape, dtype=placed.dtype)
        whole = torch.frombuffer(self._memory, dtype=placed.dtype, count=count, offset=placed.start)
        return whole.reshape(placed.shape)


class _Packing:
    def __init__(self, memory: mmap.mmap, start: int, stop: int) -> None:
        self._memory, self._start, self._stop = memory, start, stop

    def packed(self, batch: Any) -> Any:
        if type(batch) is torch.Tensor:
            return self._placed(batch)
        if type(batch) in (list, tuple):
            return type(batch)(self.packed(part) for part in batch) if _holds_tensors(batch) else batch
        if type(batch) is dict:
            return {key: self.packed(part) for key, part in batch.items()}
        return batch

    def _placed(self, tensor: torch.Tensor) -> torch.Tensor | _Placed:
        size = tensor.numel() * tensor.element_size()
        is_plain = tensor.layout is torch.strided and tensor.device.type == "cpu" and not tensor.requires_grad
        if (
            not is_plain
            or tensor.is_quantized
            or tensor.is_conj()
            or tensor.is_neg()
            or self._start + size > self._stop
        ):
            return tensor
        if size:
            slot = torch.frombuffer(self._memory, dtype=tensor.dtype, count=tensor.numel(), offset=self._start)
            slot.view(tensor.shape).copy_(tensor)
        placed = _Placed(self._start, tensor.dtype, tuple(tensor.shape))
        self._start += -(-size // _ALIGNMENT) * _ALIGNMENT
        return placed


def _holds_tensors(parts: Any) -> bool:
    """Whether a list may hold tensors: one of texts or numbers is not looked through."""
    return not parts or not isinstance(parts[0], (str, bytes, int, float))
