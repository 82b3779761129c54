"""Compressed gradients: ranks send encoded shards to their owners, and owners send encoded sums to all.

Every rank owns a shard of each part of a bucket, as in the sharded reduction (``reduction.py``)::

    scatter   each rank encodes its values of the others' shards, sends them to their owners, and keeps its values of
              its own shard; the owner decodes what it receives and sums in fp32
    gather    the owner encodes the sum once and sends it to all; every rank, the owner too, takes the decoded bytes

So all ranks have the same bits, and any norm is that of the gradient that the optimizer gets.

*Error feedback*: what encoding leaves out is added to the same elements in the next step. With g the gradient times
this rank's weight (1 / ranks if weights are equal), C a codec and r this rank's residual::

    x = g + r,  C(x) travels,  r = x - C(x)                      others' shards
    s = g + r + sum of all C(x),  C(s) travels,  r = s - C(s)    the own shard

One residual per element is enough for both directions, as a rank either owns an element or not. Ownership may change
when buckets are rebuilt or partitions are cut differently. The residual of a sum is then added to the gradient on the
rank that holds it, and the mean is the same whether that is sent or summed. At any time all ranks' residuals and the
applied values add up to the gradients. A parameter that no rank used in a step is not updated, so a rank that did not
use it keeps its residual.

Source: error feedback in both directions: Tang et al., "DoubleSqueeze", ICML 2019. Reduce-scatter and all-gather of
compressed shards: BytePS, and Zhong et al., "Compressed Communication for Distributed Training".

Threads: ``CompressedBucket.scatter`` and ``.gather`` run on the codec thread. What follows them runs on the completion
thread, once everything sent in the same part is encoded. Residuals are created on the codec thread; those of matrices,
and of buckets that travel exact, by the training thread before a bucket is sent, on a GPU before the event that marks
the gradient as complete. Parts do not overlap, so threads share only counters, which have their own lock.

On a GPU all arithmetic runs where gradients are, and only payloads are copied (``host_copies.py``). Decoding uses only
operations with one correct result, so that different processors get the same bits; matrix products of factors are the
exception.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_bytescheduler.collectives.host_copies import HostPayloads, PayloadCopies
from lightning_bytescheduler.collectives.operations import profiled
from lightning_bytescheduler.compression.powersgd import Matrix, PowerSGD
from lightning_bytescheduler.ddp.compressed_bucket import CompressedBucket, Piece
from lightning_bytescheduler.ddp.compressed_layers import CompressedLayers
from lightning_bytescheduler.ddp.compression_rules import AUTO, CompressionRules
from lightning_bytescheduler.ddp.low_rank_reduction import LowRankBucket, Rest, reduce_in_factors
from lightning_bytescheduler.ddp.reduction import AllReduction, GradientBucket, StepTasks
from lightning_bytescheduler.ddp.residuals import Layout, Residuals
from lightning_bytescheduler.ddp.sample_weights import StepWeight
from lightning_bytescheduler.ddp.statistics import SchedulerStatistics
from lightning_bytescheduler.scheduler.task import CommTask, SubCommTask
from lightning_bytescheduler.timeline.timeline import CODEC, Timeline

__all__ = ["CompressedReduction", "GradientCompression", "has_no_gradient"]

_SEEN_STEPS = 30
_FOLD = 4  # times as large parts where bytes shrink eightfold, as each part has a fixed cost of codecs and threads
_FIRST = 1024  # elements of a gradient that are looked at first to see that it is not zero


class GradientCompression:
    """The compression of one fit's gradients on this rank, with their residuals.

    Args:
        timeline: Takes spans; ``None`` for none.
        loss_scale: Returns the current factor of losses, which residuals also contain; ``None`` if it never changes.
        layers: Decides how many layers are compressed; ``None`` for all.
        failure: Returns the reason why nothing will come, if so.
        idle: Whether a parameter has got no gradient in this step on this rank; asked when its bucket is ready.
        may_drop: Whether mean gradients may be dropped without an optimizer step, as with two losses and optimizers.
            The residuals are then restored.

    Attributes:
        ratio: How many times fewer bytes travel for all gradients together, as far as that does not depend on their
            values.
        copies: Copies payloads between the device where gradients are encoded and host memory.
        left_out: Names of parameters with residuals in the checkpoint that are not compressed now.
    """

    def __init__(
        self,
        rules: CompressionRules,
        parameters: Mapping[str, nn.Parameter],
        residuals: Residuals,
        *,
        statistics: SchedulerStatistics,
        timeline: Timeline | None = None,
        loss_scale: Callable[[], float | None] = lambda: None,
        layers: CompressedLayers | None = None,
        failure: Callable[[], BaseException | None] = lambda: None,
        idle: Callable[[nn.Parameter], bool] = lambda parameter: False,
        may_drop: bool = False,
        seen: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.clock = clock
        self._idle = idle
        self._seen = seen
        self.layers = layers
        self.failure = failure
        self._residuals = residuals
        self._statistics = statistics
        self._timeline = timeline
        self._loss_scale = loss_scale
        self.copies = HostPayloads()
        self._lock = threading.Lock()  # guards the counters, which two threads update
        codecs = {name: rules.codec_for(name, parameter) for name, parameter in parameters.items()}
        self._codecs = {id(parameters[name]): (name, codec) for name, codec in codecs.items() if codec is not None}
        self.compressed = {name: AUTO if rules.auto else codec.spec for name, codec in self._codecs.values()}
        self.ratio = 1.0 if rules.auto else rules.ratio(parameters)
        self._parameters = {name: parameters[name] for name in self.compressed}
        residuals.may_be_dropped = may_drop
        self.left_out = residuals.are_of({name: Layout.of(parameters[name]) for name in self.compressed})
        self._stepped: set[int] = set()  # ids of parameters stepped since the last reduced backward pass
        self._versions: dict[str, int] = {}  # of parameters, when that pass began
        self._dropped: set[str] = set()  # gradients dropped since then

    def stepped(self, optimizer: Optimizer) -> None:
        """Record that an optimizer has stepped with the present mean gradients."""
        if self._residuals.may_be_dropped:
            with torch._C.DisableTorchFunctionSubclass():
                self._stepped.update(
                    id(parameter)
                    for group in optimizer.param_groups
                    for parameter in group["params"]
                    if parameter.grad is not None
                )

    def before_backward(self) -> None:
        """Record which mean gradients were dropped; nothing may be in flight."""
        with torch._C.DisableTorchFunctionSubclass():
            self._dropped.update(name for name in self.not_applied() if _is_dropped(self._parameters[name].grad))

    def not_applied(self) -> set[str]:
        """Return the parameters whose last mean gradient may still be dropped unused; nothing may be in flight.

        A step that bypasses the strategy, such as that of a separate optimizer, shows as a write to the parameter.
        """
        if not self._residuals.may_be_dropped:
            return set()
        with torch._C.DisableTorchFunctionSubclass():
            return {
                name
                for name in self._residuals.changed
                if id(self._parameters[name]) not in self._stepped
                and self._parameters[name]._version == self._versions.get(name)
            }

    def work_on(self, device: torch.device) -> PayloadCopies:
        """Encode on ``device``, where gradients are; nothing may be in flight.

        Returns:
            Copies payloads to and from host memory.
        """
        self.copies = copies = PayloadCopies(device)
        self._residuals.live_on(copies.device)
        return copies

    def leave_device(self) -> None:
        """Move residuals to host memory at the end of a fit; nothing may be in flight."""
        self._residuals.live_on(torch.device("cpu"))

    def begin_step(self, *, as_ddp: bool = False) -> None:
        """Begin the step at the first bucket of a backward pass; nothing of the last one may be in flight.

        Args:
            as_ddp: Whether the step is taken as DDP's: exact, if only some layers are compressed.
        """
        if self.layers is not None:
            self.layers.begin_backward(exact=as_ddp)
        if self._statistics.steps >= _SEEN_STEPS:
            self._seen()
            self._seen = lambda: None
        self._residuals.begin_step(self._loss_scale(), self._dropped, self.not_applied())
        self._stepped.clear()
        self._dropped.clear()
        if self._residuals.may_be_dropped:
            with torch._C.DisableTorchFunctionSubclass():
                self._versions = {name: parameter._version for name, parameter in self._parameters.items()}

    def encoded(self, bucket: GradientBucket, weight: StepWeight) -> CompressedBucket | None:
        """Return the encoded form of a bucket in a step with this rank's ``weight``; ``None`` if it travels exact."""
        codecs = (self._codecs.get(id(parameter), ("", None))[1] for parameter in bucket.parameters)
        buffer, layers = bucket.buffer, self.layers
        nbytes = buffer.numel() * buffer.element_size()
        exact = layers is not None and not layers.include(bucket.index, nbytes)
        if buffer.is_complex() or all(codec is None or isinstance(codec, PowerSGD) for codec in codecs):
            return None
        pieces = list(self._pieces(bucket.parameters))
        fold = 1 if layers is None else _FOLD
        encoded = CompressedBucket(buffer, pieces, self, weight, self.copies, fold)
        if exact:
            encoded.add_left()
            return None
        return encoded

    def stays_on_device(self, bucket: GradientBucket) -> bool:
        """Whether a bucket is encoded on its device, so that it need not be copied to host memory."""
        if not isinstance(self.copies, PayloadCopies) or bucket.buffer.is_complex():
            return False
        return any(id(parameter) in self._codecs for parameter in bucket.parameters)

    def with_residual(self, piece: Piece, *, make: bool = True) -> Piece:
        """Return the piece of a whole parameter with its residual; called on the thread that sends it.

        Args:
            piece: Piece of the parameter.
            make: Create a residual if there is none.
        """
        size = piece.end - piece.first
        if piece.codec is None or not (make or self._residuals.knows(piece.name)):
            return piece
        residual, before = self._residuals.to_change(piece.name, size)
        return replace(piece, residual=residual, before=before)

    def forget_not_applied(self) -> None:
        """Restore residuals of gradients that were never applied, as a fit ends; nothing may be in flight."""
        self._residuals.take_back(self.not_applied())

    def in_factors(self, bucket: GradientBucket, ranks: int, weight: StepWeight) -> tuple[LowRankBucket, Rest] | None:
        """Split a bucket into matrices that travel as factors and the rest; ``None`` if it has no such matrix."""
        matrices, others = [], []
        at = 0
        for parameter in bucket.parameters:
            with torch._C.DisableTorchFunctionSubclass():
                size = parameter.numel()
            name, codec = self._codecs.get(id(parameter), ("", None))
            shape = codec.shape_of(parameter) if isinstance(codec, PowerSGD) else None
            if shape is None or not isinstance(codec, PowerSGD):
                others.append((parameter, at, at + size))
            else:
                right = self._residuals.right_of(name, shape[1], codec)
                residual, before = self._residuals.to_change(name, size)
                if before is not None:
                    before.copy_(residual)
                if self._idle(parameter):
                    matrices.append(Matrix(at, shape, torch.zeros_like(residual), right, later=residual))
                else:
                    matrices.append(Matrix(at, shape, residual, right))
            at += size
        if not matrices:
            return None
        made = LowRankBucket(bucket.buffer, matrices, ranks, self, weight, self.copies)
        return made, Rest(bucket.buffer, others)

    def _pieces(self, parameters: Iterable[nn.Parameter]) -> Iterator[Piece]:
        at = 0
        for parameter in parameters:
            with torch._C.DisableTorchFunctionSubclass():
                size = parameter.numel()
            name, codec = self._codecs.get(id(parameter), ("", None))
            codec = None if isinstance(codec, PowerSGD) else codec  # a part of a matrix travels uncompressed
            yield Piece(at, at + size, codec, name=name, idle=codec is not None and self._idle(parameter))
            at += size

    @contextmanager
    def working(self, what: str, sub_task: SubCommTask) -> Iterator[list[float]]:
        """Time a codec's work for a part; the list collects squared norms of residuals."""
        name, statistics = f"{what} {sub_task.name}", self._statistics
        squares: list[float] = []
        with profiled(f"bytescheduler::{name}"):
            start = self.clock()
            try:
                yield squares
            finally:
                now = self.clock()
                with self._lock:
                    statistics.codec_s += now - start
                    statistics.residual_squares += sum(squares)
                if self._timeline is not None:
                    lane, step = threading.current_thread().name, sub_task.parent.key.step
                    self._timeline.span(name, CODEC, start, now, lane=lane, args={"step": step})


def _is_dropped(gradient: Tensor | None) -> bool:
    """Whether ``zero_grad`` was called, with or without ``set_to_none``."""
    if gradient is None:
        return True
    flat = gradient.detach().reshape(-1)
    return not flat[:_FIRST].any() and not flat.any()


class CompressedReduction:
    """Encoded reduce-scatter and all-gather by priority; an all-reduce for buckets that travel uncompressed.

    See :class:`~lightning_bytescheduler.ddp.reduction.Reduction`.

    Args:
        on_host: Copies a bucket on a device to the host, so that it can travel uncompressed.
    """

    def __init__(
        self,
        tasks: StepTasks,
        compression: GradientCompression,
        on_host: Callable[[GradientBucket], GradientBucket] = lambda bucket: bucket,
    ) -> None:
        self._on_host = on_host
        self._tasks = tasks
        self._as_it_is = AllReduction(tasks)
        self._compression = compression

    def reduce(self, bucket: GradientBucket, on_end: Callable[[CommTask], None] | None = None) -> CommTask:
        """See ``Reduction``."""
        tasks, buffer = self._tasks, bucket.buffer
        in_factors = self._compression.in_factors(bucket, tasks.world_size, tasks.weight)
        if in_factors is not None:
            return reduce_in_factors(tasks, bucket, *in_factors, self.reduce, on_end)
        encoded = self._compression.encoded(bucket, tasks.weight)
        if encoded is None:
            return self._as_it_is.reduce(self._on_host(bucket) if bucket.exists is None else bucket, on_end)
        return tasks.enqueue_halves(bucket, buffer, encoded, scatter_priority=bucket.priority, on_end=on_end)

    def close(self) -> None:
        """See ``Reduction``."""


def has_no_gradient(parameter: nn.Parameter) -> bool:
    """Whether a parameter was not used in the forward passes of this step on this rank."""
    with torch._C.DisableTorchFunctionSubclass():
        return parameter.grad is None
