"""Reduces gradients as products of two thin matrices P and Q (``compression/powersgd.py``), by priority and credit.

Both sums are tasks with the bucket's priority. The scheduler cuts and orders them like others, so urgent layers'
factors pass those of others, and the second sum travels during the next forward pass. The rest of a bucket (biases,
small or flat parameters, parameters under other rules) is reduced as one more buffer.

Why the ranks agree: as in ``reduction.py``. A rank's right task (Q) waits for its left task (P) and for the rest of the
bucket. Rank 0 launches it after these have ended there, so they come first in the order of all ranks. Each rank
orthonormalises and multiplies P itself. The bits are equal as long as processors are of one kind and torch uses them
alike, which is checked at the start (``CompressionRules.facts``).

On a GPU the arithmetic runs where gradients are, and only factors are copied to host memory and back
(``host_copies.py``). The rest is reduced as if it were a whole bucket.

Threads: :meth:`LowRankBucket.left` and :meth:`LowRankBucket.right` run on the codec thread. :meth:`LowRankBucket.place`
runs on the thread that sees the last part of the right task arrive, before the task ends, so an error in it fails the
task.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_bytescheduler.collectives.host_copies import HostPayloads
from lightning_bytescheduler.collectives.operations import (
    StartedOperation,
    all_reduce_direct,
    all_reduce_in_shards,
    shard_of,
)
from lightning_bytescheduler.collectives.transport import EncodedStart
from lightning_bytescheduler.compression.powersgd import Matrix
from lightning_bytescheduler.ddp.compressed_bucket import WorkObserver
from lightning_bytescheduler.ddp.reduction import GradientBucket, Phase, StepTasks
from lightning_bytescheduler.ddp.sample_weights import StepWeight
from lightning_bytescheduler.scheduler.task import CommTask, SubCommTask

__all__ = ["LowRankBucket", "Rest", "reduce_in_factors"]

_DIRECT = 1 << 15  # bytes that a rank may send in addition to save a round of messages of 1 to 2 ms


class LowRankBucket:
    """The matrices of one bucket in one step.

    Args:
        buffer: The flat gradient; the matrices' places are filled with the mean.
        weight: This rank's weight, known before anything is sent.
        copies: Copies factors between ``buffer``'s device and host memory.
    """

    def __init__(
        self,
        buffer: Tensor,
        matrices: Sequence[Matrix],
        ranks: int,
        observer: WorkObserver,
        weight: StepWeight,
        copies: HostPayloads,
    ) -> None:
        self._buffer = buffer
        self._copies = copies
        self._weight = weight
        self._matrices = matrices
        self._ranks = ranks
        self._observer = observer
        sizes = [
            (matrix.shape[0] * matrix.right.shape[1], matrix.shape[1] * matrix.right.shape[1]) for matrix in matrices
        ]
        self.lefts = torch.empty(sum(rows for rows, _ in sizes), dtype=torch.float32, device=buffer.device)
        self.rights = torch.empty(sum(columns for _, columns in sizes), dtype=torch.float32, device=buffer.device)
        self._sent_lefts, self._sent_rights = self.lefts, self.rights  # or copies in host memory
        self._factors = list(
            zip(
                matrices,
                self.lefts.split([rows for rows, _ in sizes]),
                self.rights.split([columns for _, columns in sizes]),
                strict=True,
            )
        )
        self._have_left = self._have_right = False

    @property
    def elements(self) -> int:
        """Number of elements of all matrices."""
        return sum(matrix.end - matrix.first for matrix in self._matrices)

    def left(self, group: dist.ProcessGroup, sub_task: SubCommTask, number: int) -> StartedOperation:
        """Sum a part of all P over the ranks; an ``EncodedStart``."""
        if not self._have_left:
            self._have_left = True
            with self._observer.working("encode", sub_task), self._copies.working():
                for matrix, left, _ in self._factors:
                    matrix.begin(self._buffer, self._weight.factor, left)
                self._sent_lefts = self._copies.to_host(self.lefts)
        return _mean(group, self._sent_lefts, sub_task, number)

    def right(self, group: dist.ProcessGroup, sub_task: SubCommTask, number: int) -> StartedOperation:
        """Sum a part of all Q over the ranks; an ``EncodedStart``, after all of :meth:`left`."""
        if not self._have_right:
            self._have_right = True
            with self._observer.working("reduce", sub_task), self._copies.working():
                self._copies.bring_back(self._sent_lefts, self.lefts)
                for matrix, left, right in self._factors:
                    matrix.go_on(left, right)
                self._sent_rights = self._copies.to_host(self.rights)
        return _mean(group, self._sent_rights, sub_task, number)

    def place(self, last: SubCommTask, rest: Rest) -> None:
        """Write the means of matrices and rest into the buffer; after all of :meth:`right`."""
        with self._observer.working("decode", last) as squares, self._copies.working():
            rest.put_back()
            self._copies.bring_back(self._sent_rights, self.rights)
            for matrix, left, right in self._factors:
                squares.append(matrix.end_with(self._buffer, self._ranks, left, right))


def reduce_in_factors(
    tasks: StepTasks,
    bucket: GradientBucket,
    matrices: LowRankBucket,
    rest: Rest,
    reduce_rest: Callable[[GradientBucket, Callable[[CommTask], None] | None], CommTask],
    on_end: Callable[[CommTask], None] | None,
) -> CommTask:
    """Average the buffer of a bucket that has matrices; see ``Reduction.reduce``."""
    ready, share = tasks.mark(bucket), (tasks.world_size - 1) / tasks.world_size
    awaited, arriving = _Countdown(2 if rest.buffer.numel() else 1), _Countdown(matrices.rights.numel())

    def enqueue(
        name: str,
        phase: Phase,
        factors: Tensor,
        start: EncodedStart,
        on_end: Callable[[CommTask], None] | None,
        on_part: Callable[[SubCommTask], None] | None = None,
    ) -> CommTask:
        return tasks.enqueue(
            f"bucket {bucket.index} {name}",
            factors,
            tasks.encoded(start, on_part),
            phase=phase,
            index=bucket.index,
            priority=bucket.priority,
            # Unencoded matrices would travel once to their owners and once to all.
            wire_share=share * matrices.elements / factors.numel() * bucket.buffer.element_size() / 4,
            on_end=on_end,
        )

    def ended(task: CommTask) -> None:
        # If it failed, the core stops, and all waits end.
        if task.error is None and awaited.less(1):
            right.notify_ready()

    def place(part: SubCommTask) -> None:
        if arriving.less(part.size):
            matrices.place(part, rest)

    left = enqueue("left", Phase.LEFT, matrices.lefts, matrices.left, ended)
    right = enqueue("right", Phase.RIGHT, matrices.rights, matrices.right, on_end, place)
    if rest.buffer.numel():
        reduce_rest(GradientBucket(bucket.index, rest.parameters, rest.buffer, bucket.priority), ended)
    tasks.notify_ready(left, ready)
    return right


class Rest:
    """The part of a bucket that is reduced beside its matrices, in its own buffer."""

    def __init__(self, buffer: Tensor, pieces: Sequence[tuple[nn.Parameter, int, int]]) -> None:
        self.parameters = [parameter for parameter, _, _ in pieces]
        self._places = [buffer[first:end] for _, first, end in pieces]
        self.buffer = torch.cat(self._places) if pieces else buffer[:0]

    def put_back(self) -> None:
        """Copy the result into the bucket."""
        parts = self.buffer.split([len(place) for place in self._places])
        for place, part in zip(self._places, parts, strict=True):
            place.copy_(part)


class _Countdown:
    def __init__(self, count: int) -> None:
        self._count = count
        self._lock = threading.Lock()

    def less(self, count: int) -> bool:
        with self._lock:
            self._count -= count
            return not self._count


def _mean(group: dist.ProcessGroup, factors: Tensor, sub_task: SubCommTask, number: int) -> StartedOperation:
    """Average a part over all ranks by messages that are matched by their number.

    It takes two rounds, or one if that sends hardly more, as on two ranks. The sizes that decide are known to all
    ranks.
    """
    part = factors[sub_task.offset : sub_task.offset + sub_task.size]
    width, others = factors.element_size(), group.size() - 1
    first, end = shard_of(sub_task.size, group.rank(), group.size())
    in_shards = (sub_task.size - (end - first) + others * (end - first)) * width
    direct = others * sub_task.size * width
    if direct * (1 - 2 / group.size()) <= _DIRECT:
        sub_task.encoded_bytes = direct
        return all_reduce_direct(group, part, number, 1.0 / group.size())
    sub_task.encoded_bytes = in_shards
    return all_reduce_in_shards(group, part, number, 1.0 / group.size())
