"""The weighted mean of a buffer over all workers, in a wire format, the same bits on every worker.

Each part of the buffer is cut into one shard per worker. A worker gets everybody's version of its shard, adds them up
in fixed point, and sends the mean to all. Every worker takes what travelled, its own shard too, so all of them hold the
same bits; and what travels is as little as with a ring all-reduce: ``2 (n - 1) / n`` times the buffer.

Two ranks' messages are told apart by their number and not by their order. Still, every worker has to start the parts in
one order: with a limited number in flight, each could otherwise wait for what the other has not started.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_bytescheduler.collectives.operations import StartedOperation, shard_of
from lightning_bytescheduler.diloco import UpdateAccumulator, WireFormat

__all__ = ["WeightedMean"]

_HEADER = 8  # bytes of the weight before each payload
_TAGS = 2**29


@dataclass(slots=True, kw_only=True)
class WeightedMean:
    """One worker's side of the exchange of one buffer.

    Attributes:
        group: Over all workers; gloo.
        update: This worker's version, in fp32, flat, on the CPU.
        result: Is filled with the mean; like ``update``.
        weight: Of this worker's version, a whole number; 0 if it is not to count.
        wire: What travels.
        total: Sum of all weights, once a part is there. If it is 0, the mean is all zeros.
    """

    group: dist.ProcessGroup
    update: Tensor
    result: Tensor
    weight: int
    wire: WireFormat
    total: int = 0

    def start(self, offset: int, size: int, number: int) -> StartedOperation:
        """Exchange one part of the buffer.

        Args:
            offset: Of the part.
            size: Of the part.
            number: Of this exchange, the same on all workers and used once.

        Raises:
            ValueError: If the part holds infinities or NaN.
        """
        part, result = self.update[offset : offset + size], self.result[offset : offset + size]
        payloads = {
            worker: self._pack(self.weight, part[slice(*shard)], number) for worker, shard in self._shards(size).items()
        }
        own = payloads.pop(self.group.rank(), None)
        length = 0 if own is None else _length(shard_of(size, self.group.rank(), self.group.size()))
        received = {} if own is None else {w: self._buffer(length) for w in self._others()}

        def merge() -> StartedOperation:
            return self._share(result, number, [] if own is None else [own, *received.values()], length)

        return StartedOperation(self._messages(received, payloads, 2 * number), merge, messages=True)

    def _share(self, result: Tensor, number: int, versions: list[Tensor], length: int) -> StartedOperation:
        """Send the mean of this worker's shard to all, and receive theirs."""
        shards = self._shards(result.numel())
        rank = self.group.rank()
        payloads: dict[int, Tensor] = {}
        if versions:
            total, mean = self._merged(versions, length)
            payload = self._pack(total, mean, number + 1)
            self._place(result, shards[rank], payload)
            payloads = dict.fromkeys(self._others(), payload)
        received = {worker: self._buffer(_length(shards[worker])) for worker in self._others() if worker in shards}

        def place() -> None:
            for worker, payload in received.items():
                self._place(result, shards[worker], payload)

        return StartedOperation(self._messages(received, payloads, 2 * number + 1), place, messages=True)

    def _merged(self, versions: list[Tensor], length: int) -> tuple[int, Tensor]:
        zeros = torch.zeros(length)
        sums = UpdateAccumulator({"shard": zeros})
        for payload in versions:
            weight = _weight(payload)
            if weight:
                sums.add({"shard": self.wire.decode(payload[_HEADER:], length)}, weight=weight)
        return sums.weight, sums.mean()["shard"] if sums.updates else zeros

    def _messages(self, received: dict[int, Tensor], sent: dict[int, Tensor], number: int) -> list[dist.Work]:
        tag = number % _TAGS
        works = [self.group.recv([buffer], worker, tag) for worker, buffer in received.items()]
        return works + [self.group.send([payload], worker, tag) for worker, payload in sent.items()]

    def _shards(self, size: int) -> dict[int, tuple[int, int]]:
        """Whose shard is where; workers without any are left out."""
        workers = self.group.size()
        shards = {worker: shard_of(size, worker, workers) for worker in range(workers)}
        return {worker: shard for worker, shard in shards.items() if _length(shard)}

    def _others(self) -> list[int]:
        """The other workers, beginning with the next: no two send to the same one first."""
        workers, rank = self.group.size(), self.group.rank()
        return [(rank + distance) % workers for distance in range(1, workers)]

    def _buffer(self, length: int) -> Tensor:
        return torch.empty(_HEADER + self.wire.payload_bytes(length), dtype=torch.uint8)

    def _pack(self, weight: int, values: Tensor, number: int) -> Tensor:
        header = torch.tensor([weight]).view(torch.uint8)
        seed = number * self.group.size() + self.group.rank()
        return torch.cat([header, self.wire.encode(values, seed=seed)])

    def _place(self, result: Tensor, shard: tuple[int, int], payload: Tensor) -> None:
        self.total = _weight(payload)
        result[slice(*shard)] = self.wire.decode(payload[_HEADER:], _length(shard))


def _length(shard: tuple[int, int]) -> int:
    return shard[1] - shard[0]


def _weight(payload: Tensor) -> int:
    return int(payload[:_HEADER].clone().view(torch.int64))
