"""Gradients that travel in fewer bytes: encoded shards to their owners, and the encoded sum of each shard to all.

Of each part of a bucket, every rank owns a shard, as in the sharded reduction (``reduction.py``)::

    scatter   each rank encodes what it has of the others' shards, sends it to their owners, and keeps what it has of
              its own. The owner decodes what it gets, and adds up in fp32
    gather    the owner encodes the sum, once, and sends it to all. Everybody takes the decoded bytes that travelled,
              the owner too: the same bits on all ranks, and any norm is that of what the optimizer gets

*Error feedback*: what encoding leaves out is added to the same elements in the next step. With g the gradient times
what this rank counts (one over the number of ranks, if all count alike), C a codec and r the residual of this rank::

    x = g + r,  C(x) travels,  r = x - C(x)         of others' shards
    s = g + r + sum of all C(x),  C(s) travels,  r = s - C(s)    of the own shard

One residual for each element is enough for both directions, as a rank is either the owner of an element or not. So
ownership may change when buckets are rebuilt, or partitions cut in another way: the residual of a sum is added to the
gradient on the rank that has it, and whether that is then sent or summed makes no difference to the mean. However
things are cut, all ranks' residuals and what was applied add up to the gradients. A parameter that no rank has used in
a step is not stepped, whatever its mean gradient is: so a rank that has not used it keeps its residual.

Source: error feedback in both directions is that of Tang et al., "DoubleSqueeze", ICML 2019; reduce-scatter and
all-gather of compressed shards that of BytePS and of Zhong et al., "Compressed Communication for Distributed Training".

Threads: ``CompressedBucket.scatter``, ``CompressedBucket.gather`` and ``CompressedBucket.serve`` run on the codec
thread, what follows on the completion thread, once all that was sent in the same part has been encoded, or on those
that have a sum. Residuals are begun on the codec thread, or by the training before a bucket is sent: on a GPU before
the mark that says when it exists. Parts do not overlap, so nothing is shared between them but counters, which have a
lock that is held for nothing else.

On a GPU all arithmetic is done where gradients are, and payloads alone are copied, see ``host_copies.py``. Not so
what goes to parameter servers: there whole buckets are copied first, see ``host_copies.py``. Numbers are read from
payloads by operations that have one right result, so that ranks with processors of different kinds get the same bits;
but factors are multiplied.
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

from lightning_bytescheduler.collectives.host_copies import PayloadCopies
from lightning_bytescheduler.compression.powersgd import Matrix, PowerSGD
from lightning_bytescheduler.ddp.compressed_bucket import CompressedBucket
from lightning_bytescheduler.ddp.compressed_layers import CompressedLayers
from lightning_bytescheduler.ddp.compression_rules import AUTO, CompressionRules
from lightning_bytescheduler.ddp.encoded_pieces import Piece
from lightning_bytescheduler.ddp.low_rank_reduction import LowRankBucket, Rest, reduce_in_factors
from lightning_bytescheduler.ddp.reduction import AllReduction, GradientBucket, StepTasks
from lightning_bytescheduler.ddp.residuals import Layout, LeftElsewhere, Residuals
from lightning_bytescheduler.ddp.sample_weights import StepWeight
from lightning_bytescheduler.ddp.statistics import SchedulerStatistics, profiled
from lightning_bytescheduler.scheduler.task import CommTask, SubCommTask
from lightning_bytescheduler.timeline.timeline import CODEC, Timeline

__all__ = ["CompressedReduction", "GradientCompression", "has_no_gradient"]

_SEEN_STEPS = 30
_FOLD = 4  # of what is compressed in eight times fewer bytes; with each part codecs and threads have work besides
_FIRST = 1024  # elements of a gradient, that mostly tell that it is not zero


class GradientCompression:
    """What of one fit's gradients travels encoded on this rank, and what was left out so far.

    Args:
        rules: What is encoded, and how.
        parameters: All that DDP reduces, by name.
        residuals: What was left out so far; kept by the caller.
        statistics: Counters to keep.
        timeline: Where spans go, if anywhere.
        loss_scale: Says what losses are multiplied with at present: residuals are of such gradients. ``None`` if that
            never changes.
        ranks: How many there are.
        layers: Says how many layers are compressed, where not all are.
        failure: Why nothing is to be waited for any more, if so.
        idle: Whether a parameter has got no gradient in this step, on this rank; asked when its bucket is handed over.
        may_drop: Whether mean gradients may be dropped that nobody has stepped with, as in a training with two losses
            and optimizers: what they were made of is as it was, then.
        seen: Called once, when enough steps were counted to say what compression costs.
        clock: Seconds; the core's clock.

    Attributes:
        layers: See above.
        failure: See above.
        compressed: Names of the parameters whose gradients travel encoded, and in what.
        ratio: How many times fewer bytes that makes, of all gradients, as far as it does not depend on what they are.
        loss_scale: Of the present step; ``None`` if that never changes.
        copies: Where gradients are encoded on a device: of payloads.
        left_out: Names of parameters of which a checkpoint had something left to be sent, and that are not compressed.
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
        ranks: int = 1,
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
        self.ranks = ranks
        self.layers = layers
        self.failure = failure
        self._residuals = residuals
        self._statistics = statistics
        self._timeline = timeline
        self._loss_scale = loss_scale
        self.loss_scale: float | None = None
        self.copies: PayloadCopies | None = None
        self._lock = threading.Lock()  # of the counters, which two threads keep
        codecs = {name: rules.codec_for(name, parameter) for name, parameter in parameters.items()}
        self._codecs = {id(parameters[name]): (name, codec) for name, codec in codecs.items() if codec is not None}
        self.compressed = {name: AUTO if rules.auto else codec.spec for name, codec in self._codecs.values()}
        self.ratio = 1.0 if rules.auto else rules.ratio(parameters)
        self._parameters = {name: parameters[name] for name in self.compressed}
        residuals.may_be_dropped = may_drop
        self.left_out = residuals.are_of({name: Layout.of(parameters[name]) for name in self.compressed})
        self._stepped: set[int] = set()  # ids of parameters, since the last backward pass that was reduced
        self._versions: dict[str, int] = {}  # of parameters, when that began
        self._dropped: set[str] = set()  # since then

    def stepped(self, optimizer: Optimizer) -> None:
        """An optimizer has stepped with the mean gradients that there are."""
        if self._residuals.may_be_dropped:
            with torch._C.DisableTorchFunctionSubclass():
                self._stepped.update(
                    id(parameter)
                    for group in optimizer.param_groups
                    for parameter in group["params"]
                    if parameter.grad is not None
                )

    def before_backward(self) -> None:
        """Nothing is under way: see which mean gradients are gone."""
        with torch._C.DisableTorchFunctionSubclass():
            self._dropped.update(name for name in self.not_applied() if _is_dropped(self._parameters[name].grad))

    def not_applied(self) -> set[str]:
        """Parameters whose last mean gradient nobody has stepped with, where it may be dropped; nothing is under way.

        A step may go past the strategy, as that of an optimizer of one's own: it writes to the parameter.
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
        """Encode where gradients are, on ``device``; nothing is under way.

        Returns:
            What copies payloads.
        """
        self.copies = PayloadCopies(device)
        self._residuals.live_on(self.copies.device)
        return self.copies

    def leave_device(self) -> None:
        """Keep in host memory what is left to be sent: the fit is over, and nothing is under way."""
        self._residuals.live_on(torch.device("cpu"))

    def begin_step(self, *, as_ddp: bool = False) -> None:
        """A backward pass has its first bucket, and nothing of the last one is under way.

        Args:
            as_ddp: Whether the step is taken as DDP's: exact, where only some of the layers are compressed.
        """
        if self.layers is not None:
            self.layers.begin_backward(exact=as_ddp)
        if self._statistics.steps >= _SEEN_STEPS:
            self._seen()
            self._seen = lambda: None
        self.loss_scale = self._loss_scale()
        self._residuals.begin_step(self.loss_scale, self._dropped, self.not_applied())
        self._stepped.clear()
        self._dropped.clear()
        if self._residuals.may_be_dropped:
            with torch._C.DisableTorchFunctionSubclass():
                self._versions = {name: parameter._version for name, parameter in self._parameters.items()}

    def encoded(self, bucket: GradientBucket, weight: StepWeight | None = None) -> CompressedBucket | None:
        """See :class:`~lightning_bytescheduler.ddp.reduction.Encoder`."""
        codecs = (self._codecs.get(id(parameter), ("", None))[1] for parameter in bucket.parameters)
        buffer, layers = bucket.buffer, self.layers
        nbytes = buffer.numel() * buffer.element_size()
        exact = layers is not None and not layers.include(bucket.index, nbytes)
        if buffer.is_complex() or all(codec is None or isinstance(codec, PowerSGD) for codec in codecs):
            return None
        pieces = list(self._pieces(bucket.parameters, make=not exact))
        fold = 1 if layers is None else _FOLD
        encoded = CompressedBucket(buffer, pieces, self, weight, self.copies, fold)
        if exact:
            encoded.add_left()
            return None
        return encoded

    def stays_on_device(self, bucket: GradientBucket) -> bool:
        """Whether a bucket is encoded where it is, so that it has not to be copied to host memory."""
        if self.copies is None or bucket.buffer.is_complex():
            return False
        return any(id(parameter) in self._codecs for parameter in bucket.parameters)

    def with_residual(self, piece: Piece, *, make: bool = True) -> Piece:
        """The piece of a whole parameter, with what was left to be sent of it; on the thread that sends it.

        Args:
            piece: Of the parameter.
            make: Begin a residual if there is none yet; else nothing was ever left.
        """
        size = piece.end - piece.first
        if piece.codec is None or not (make or self._residuals.knows(piece.name)):
            return piece
        residual, before = self._residuals.to_change(piece.name, size)
        return replace(piece, residual=residual, before=before)

    def sums_elsewhere(self, left: LeftElsewhere) -> None:
        """Others than ranks encode sums of this fit, and say what they have left of them."""
        self._residuals.elsewhere = left

    def forget_not_applied(self) -> None:
        """The fit is over: whoever saves a checkpoint now has no gradient; nothing is under way."""
        self._residuals.take_back(self.not_applied())

    def end(self, *, takes_over: bool) -> None:
        """Whoever else encodes sums ends; nothing is under way where this rank takes over what they have left."""
        if takes_over:
            self._residuals.take_over()
        self._residuals.elsewhere = None

    def in_factors(
        self, bucket: GradientBucket, ranks: int, weight: StepWeight | None = None
    ) -> tuple[LowRankBucket, Rest] | None:
        """The matrices of a bucket that travel as factors, for one step, and all else of it; ``None`` without any."""
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

    def _pieces(self, parameters: Iterable[nn.Parameter], *, make: bool) -> Iterator[Piece]:
        at = 0
        for parameter in parameters:
            with torch._C.DisableTorchFunctionSubclass():
                size = parameter.numel()
            name, codec = self._codecs.get(id(parameter), ("", None))
            codec = None if isinstance(codec, PowerSGD) else codec  # a part of a matrix travels as it is
            piece = Piece(at, at + size, codec, None, name=name, idle=codec is not None and self._idle(parameter))
            # On a device its residual is begun on the stream of the thread that encodes.
            yield piece if self.copies is not None else self.with_residual(piece, make=make)
            at += size

    @contextmanager
    def working(self, what: str, sub_task: SubCommTask) -> Iterator[list[float]]:
        """Around what a codec does for a part: takes down its time; collects squares of norms of residuals."""
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
    """Whether ``zero_grad`` was called, in either of its ways."""
    if gradient is None:
        return True
    flat = gradient.detach().reshape(-1)
    return not flat[:_FIRST].any() and not flat.any()


class CompressedReduction:
    """Reduce-scatter and all-gather by priority, encoded; an all-reduce of buckets that travel as they are.

    Where there are parameter servers, push and pull take the place of all of them.

    See :class:`~lightning_bytescheduler.ddp.reduction.Reduction`.

    Args:
        tasks: Of the step.
        compression: Says what travels encoded.
        on_host: Makes a bucket one that can travel as it is, of one that stays on a device.
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
        if tasks.served:
            send = tasks.encoded_for_servers(encoded.serve, buffer.element_size())
            return tasks.enqueue_whole(bucket, send, tasks.mark(bucket), on_end)
        return tasks.enqueue_halves(bucket, buffer, encoded, scatter_priority=bucket.priority, on_end=on_end)

    def close(self) -> None:
        """See ``Reduction``."""


def has_no_gradient(parameter: nn.Parameter) -> bool:
    """Whether a parameter was not used in the forward passes of this step, on this rank."""
    with torch._C.DisableTorchFunctionSubclass():
        return parameter.grad is None
