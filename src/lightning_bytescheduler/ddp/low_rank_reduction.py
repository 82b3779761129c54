"""Gradients that travel as products of two thin matrices: PowerSGD, by priority and under the credit window.

With x_i what rank i has of a matrix (its gradient times what the rank counts, and its residual r_i), Q of the last step
made orthonormal::

    left     P = sum of x_i Q, over all ranks; then each makes it orthonormal
    right    Q = sum of x_i^T P, over all ranks: P Q^T is the mean gradient, and Q is what the next step begins with
    then     r_i = x_i - P Q^T / n, so that what was applied and all ranks' residuals add up to the gradients

These are the products of torch's ``powerSGD_hook``, with its warm start and error feedback. Both sums are tasks of the
bucket's priority, which the scheduler cuts and orders as it does any other, so that the factors of the layers that are
needed first pass those of others, and the second sum travels under the next forward pass. What of a bucket is no matrix
that shrinks (biases, small or flat parameters, and what other rules say) is reduced beside that, as one buffer.

Why the ranks agree: as in ``reduction.py``. A right task waits on its rank for the left one and for the rest of the
bucket; rank 0 decides on it after these have ended there, so they come first in the one order of all ranks.

P is made orthonormal and multiplied on each rank: the same bits on all, as long as their processors are of one kind and
torch uses them in one way, which is compared at the start (``CompressionRules.facts``).
On a GPU that is done where gradients are, and factors alone are copied to host memory and back, see
``host_copies.py``; what is no matrix is reduced in whatever way it would be if it was all of the bucket.

Source: Vogels et al., "PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization", algorithms 1
and 2.

Threads: :meth:`LowRankBucket.left` and :meth:`LowRankBucket.right` run on the codec thread, :meth:`LowRankBucket.place`
on the one that has seen the last part of the right task arrive, before that is told: what fails there fails the task.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_bytescheduler.collectives.host_copies import PayloadCopies
from lightning_bytescheduler.collectives.operations import (
    StartedOperation,
    all_gather,
    all_reduce_direct,
    reduce_scatter,
    shard_of,
)
from lightning_bytescheduler.ddp.encoded_pieces import is_finite
from lightning_bytescheduler.ddp.reduction import GradientBucket, Phase, StepTasks
from lightning_bytescheduler.ddp.sample_weights import StepWeight
from lightning_bytescheduler.scheduler.task import CommTask, SubCommTask

__all__ = ["LowRankBucket", "LowRankReduction", "Matrix", "WorkObserver", "first_right", "matrix_shape"]

_GATHERS = 1 << 30  # added to an operation's number: tells the second half of a sum from the first
_DIRECT = 1 << 15  # bytes more that a rank sends, at most, to save a round of messages: that takes a rank 1 to 2 ms
_LEAST_SAVED = 2  # times fewer numbers, as torch's hook wants by default


def matrix_shape(parameter: nn.Parameter, rank: int) -> tuple[int, int] | None:
    """Rows and columns of a gradient as it lies in its bucket; ``None`` if two factors are not half its size.

    The first dimension in memory counts as the rows, as with torch's hook.
    """
    with torch._C.DisableTorchFunctionSubclass():
        if parameter.dim() < 2 or not parameter.numel() or not parameter.dtype.is_floating_point:
            return None
        first = max(range(parameter.dim()), key=parameter.stride)
        rows = parameter.shape[first]
        columns = parameter.numel() // rows
    return (rows, columns) if (rows + columns) * rank * _LEAST_SAVED < rows * columns else None


def first_right(name: str, columns: int, rank: int) -> Tensor:
    """What the power iteration begins with, for a parameter of that name: the same on all ranks."""
    seed = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=7).digest(), "little")
    return torch.randn(columns, rank, dtype=torch.float32, device="cpu", generator=torch.Generator().manual_seed(seed))


class WorkObserver(Protocol):
    """Takes down what codecs do."""

    def working(self, what: str, sub_task: SubCommTask) -> AbstractContextManager[list[float]]:
        """Around work for a part; collects squares of norms of residuals."""


@dataclass(slots=True)
class Matrix:
    """One parameter's gradient in a bucket.

    Attributes:
        first: Position in the bucket.
        shape: Rows and columns.
        residual: Flat, in fp32.
        right: Q of the last step, ``(columns, rank)``; is filled with that of this step.
        later: The parameter's own residual, where it has got no gradient on this rank: if it has on none, nothing is
            stepped, so it does not travel now. What ``residual``, zeros then, is left with is added to it.
    """

    first: int
    shape: tuple[int, int]
    residual: Tensor
    right: Tensor
    later: Tensor | None = None
    _added: float = 0.0

    @property
    def end(self) -> int:
        """Position after the last."""
        return self.first + self.shape[0] * self.shape[1]

    def begin(self, buffer: Tensor, factor: float, left: Tensor) -> None:
        """Fill ``left`` with this rank's part of P, column by column; what is kept becomes x."""
        gradient = self._gradient(buffer)
        if not factor or is_finite(gradient):  # what counts nothing may be anything
            self._added = factor
            whole = self._kept.add_(gradient, alpha=factor) if factor else self._kept
            torch.mm(_orthonormal(self.right).t(), whole.t(), out=self._factor(left))
        else:
            left.fill_(torch.nan)

    def go_on(self, left: Tensor, right: Tensor) -> None:
        """Make P orthonormal, and fill ``right`` with this rank's part of Q, column by column."""
        factor = self._factor(left)
        if is_finite(left):
            factor.copy_(_orthonormal(factor.t()).t())
            torch.mm(factor, self._kept, out=self._factor(right))
        else:  # on one rank, so on all: the sum is the same
            right.fill_(torch.nan)

    def end_with(self, buffer: Tensor, ranks: int, left: Tensor, right: Tensor) -> float:
        """Put P Q^T in its place, and keep what it leaves out; returns the square of the norm of that."""
        gradient = self._gradient(buffer)
        if not is_finite(right):  # what overflows is lost; the residual is what it was but for rounding, and Q is
            if self._added:
                self._kept.sub_(gradient, alpha=self._added)
            gradient.fill_(torch.nan)
            return 0.0
        rows, columns = self._factor(left).t(), self._factor(right).mul_(ranks)  # was averaged on the way
        if bool(columns.any()):  # else no rank has a gradient, and the next step begins with what there was
            self.right.copy_(columns.t())
        # Multiplied once: what is taken from the residual is what is applied, however a processor rounds products.
        product = torch.mm(rows, columns, out=gradient) if gradient.dtype is torch.float32 else rows @ columns
        self._kept.sub_(product, alpha=1.0 / ranks)
        if product is not gradient:
            gradient.copy_(product)
        if self.later is not None:
            self.later.add_(self.residual)
        return float(torch.dot(self.residual, self.residual))

    @property
    def _kept(self) -> Tensor:
        return self.residual.view(self.shape)

    def _gradient(self, buffer: Tensor) -> Tensor:
        return buffer[self.first : self.end].view(self.shape)

    def _factor(self, flat: Tensor) -> Tensor:
        return flat.view(self.right.shape[1], -1)


class LowRankBucket:
    """The matrices of one bucket in one step.

    Args:
        buffer: The flat gradient; their places are filled with the mean.
        matrices: In order; one at least.
        ranks: That are averaged over.
        observer: Told of work and of residuals.
        weight: What this rank counts; as much as any other when left out. Known before anything is sent.
        copies: Where ``buffer`` is on a device, whose factors travel from host memory: of these.

    Attributes:
        lefts: All P, flat, column by column.
        rights: All Q, flat, column by column.
    """

    def __init__(
        self,
        buffer: Tensor,
        matrices: Sequence[Matrix],
        ranks: int,
        observer: WorkObserver,
        weight: StepWeight | None = None,
        copies: PayloadCopies | None = None,
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
        """Of all matrices."""
        return sum(matrix.end - matrix.first for matrix in self._matrices)

    def left(self, group: dist.ProcessGroup, sub_task: SubCommTask, number: int) -> StartedOperation:
        """Add up a part of all P; an ``EncodedStart``."""
        if not self._have_left:
            self._have_left = True
            factor = 1.0 / self._ranks if self._weight is None else self._weight.factor
            with self._observer.working("encode", sub_task), self._on_device():
                for matrix, left, _ in self._factors:
                    matrix.begin(self._buffer, factor, left)
                if self._copies is not None:
                    self._sent_lefts = self._copies.to_host(self.lefts)
        return _mean(group, self._sent_lefts, sub_task, number)

    def right(self, group: dist.ProcessGroup, sub_task: SubCommTask, number: int) -> StartedOperation:
        """Add up a part of all Q; an ``EncodedStart``, after all of :meth:`left`."""
        if not self._have_right:
            self._have_right = True
            with self._observer.working("reduce", sub_task), self._on_device():
                if self._copies is not None:
                    self.lefts.copy_(self._copies.to_device(self._sent_lefts))
                for matrix, left, right in self._factors:
                    matrix.go_on(left, right)
                if self._copies is not None:
                    self._sent_rights = self._copies.to_host(self.rights)
        return _mean(group, self._sent_rights, sub_task, number)

    def place(self, last: SubCommTask, rest: Rest) -> None:
        """Put the mean into the buffer, and that of the rest; after all of :meth:`right`."""
        with self._observer.working("decode", last) as squares, self._on_device():
            rest.put_back()
            if self._copies is not None:
                self.rights.copy_(self._copies.to_device(self._sent_rights))
            for matrix, left, right in self._factors:
                squares.append(matrix.end_with(self._buffer, self._ranks, left, right))

    def _on_device(self) -> AbstractContextManager[None]:
        """Around arithmetic: done when it is left."""
        return nullcontext() if self._copies is None else self._copies.working()


class LowRankReduction:
    """Turns buckets with matrices into tasks.

    Args:
        tasks: Of the step.
        reduce_rest: Reduces what is left of a bucket, as one of its own; see ``Reduction.reduce``.
    """

    def __init__(
        self,
        tasks: StepTasks,
        reduce_rest: Callable[[GradientBucket, Callable[[CommTask], None] | None], CommTask],
    ) -> None:
        self._tasks = tasks
        self._reduce_rest = reduce_rest

    def reduce(
        self, bucket: GradientBucket, matrices: LowRankBucket, rest: Rest, on_end: Callable[[CommTask], None] | None
    ) -> CommTask:
        """Average the buffer of ``bucket``; see ``Reduction.reduce``.

        Args:
            bucket: The next one.
            matrices: Of it.
            rest: All else of it.
            on_end: See ``Reduction.reduce``.
        """
        ready = self._tasks.mark(bucket)
        awaited, arriving = _Countdown(2 if rest.buffer.numel() else 1), _Countdown(matrices.rights.numel())

        def ended(task: CommTask) -> None:
            # If it failed, the core stops, and with it whoever waits.
            if task.error is None and awaited.less(1):
                right.notify_ready()

        def place(part: SubCommTask) -> None:
            if arriving.less(part.size):
                matrices.place(part, rest)

        left = self._enqueue("left", bucket, matrices.lefts, matrices.left, Phase.LEFT, matrices.elements, ended)
        right = self._enqueue(
            "right", bucket, matrices.rights, matrices.right, Phase.RIGHT, matrices.elements, on_end, place
        )
        if rest.buffer.numel():
            self._reduce_rest(GradientBucket(bucket.index, rest.parameters, rest.buffer, bucket.priority), ended)
        self._tasks.notify_ready(left, ready)
        return right

    def _enqueue(
        self,
        name: str,
        bucket: GradientBucket,
        factors: Tensor,
        encoded: Callable[[dist.ProcessGroup, SubCommTask, int], StartedOperation],
        phase: Phase,
        elements: int,
        on_end: Callable[[CommTask], None] | None,
        on_part: Callable[[SubCommTask], None] | None = None,
    ) -> CommTask:
        size = self._tasks.world_size
        return self._tasks.enqueue(
            f"bucket {bucket.index} {name}",
            factors,
            partial(_never, name),
            encoded=encoded,
            phase=phase,
            index=bucket.index,
            priority=bucket.priority,
            # As they are, matrices would travel once to their owners and once to all.
            wire_share=(size - 1) / size * elements / factors.numel() * bucket.buffer.element_size() / 4,
            on_end=on_end,
            on_part=on_part,
        )


class Rest:
    """What of a bucket is reduced beside its matrices, in a buffer of its own.

    Args:
        buffer: The bucket's.
        pieces: Parameters with their positions in it, as (parameter, first, end).
    """

    def __init__(self, buffer: Tensor, pieces: Sequence[tuple[nn.Parameter, int, int]]) -> None:
        self.parameters = [parameter for parameter, _, _ in pieces]
        self._places = [buffer[first:end] for _, first, end in pieces]
        self.buffer = torch.cat(self._places) if pieces else buffer[:0]

    def put_back(self) -> None:
        """Copy what it was reduced to into the bucket."""
        parts = self.buffer.split([len(place) for place in self._places])
        for place, part in zip(self._places, parts, strict=True):
            place.copy_(part)


class _Countdown:
    """Of what several threads end."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._lock = threading.Lock()

    def less(self, count: int) -> bool:
        """So many have ended; returns whether these were the last."""
        with self._lock:
            self._count -= count
            return not self._count


def _mean(group: dist.ProcessGroup, factors: Tensor, sub_task: SubCommTask, number: int) -> StartedOperation:
    """Average a part over all ranks by messages, whose order among ranks does not matter.

    Two rounds of them, or one where that sends hardly more: on two ranks it sends as much, and factors are small. All
    ranks know the sizes that decide.
    """
    part = factors[sub_task.offset : sub_task.offset + sub_task.size]
    width, others = factors.element_size(), group.size() - 1
    first, end = shard_of(sub_task.size, group.rank(), group.size())
    in_shards = (sub_task.size - (end - first) + others * (end - first)) * width
    direct = others * sub_task.size * width
    if direct * (1 - 2 / group.size()) <= _DIRECT:
        sub_task.encoded_bytes = direct
        return all_reduce_direct(group, part, number)
    sub_task.encoded_bytes = in_shards
    to_owners = reduce_scatter(group, part, number)

    def to_all() -> StartedOperation:
        if to_owners.finish is not None:
            to_owners.finish()
        return replace(all_gather(group, part, _GATHERS + number), closing=True)

    return StartedOperation(to_owners.works, to_all, messages=True)


def _never(name: str, group: dist.ProcessGroup, part: Tensor, number: int) -> StartedOperation:
    raise RuntimeError(f"The {name} factors of a bucket were to travel as they are.")


def _orthonormal(matrix: Tensor) -> Tensor:
    found: Tensor = torch.linalg.qr(matrix).Q
    return found
