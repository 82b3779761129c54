"""``compression="auto"``: rank 0 chooses, for each part that is about to be sent, whether it travels in fewer bytes.

Whether a part has to: ``scheduler/lateness.py``, of what rank 0 measures here: when gradients exist, when gates are
reached, how long training waits, how fast the link is. In what: the strongest codec whose error on a sample of this
very part is within ``max_error``, so that as few parts as possible are touched; none, if all of them are beyond.

Why the ranks agree: nothing is agreed on. The choice travels with the decision to launch the part
(``collectives/launch_order.py``), and a rank that follows encodes what it is told to. What is measured differs from
rank to rank and counts on rank 0 alone.

Threads: the training's tells of gradients and gates, whoever holds the launching lock chooses, the completion thread
tells what has arrived. One lock guards what they share; it is held for arithmetic only, and nothing is called with it.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from lightning_bytescheduler.compression.compressor import Compressor
from lightning_bytescheduler.scheduler.lateness import LateTransfers, LinkPace
from lightning_bytescheduler.scheduler.task import SubCommTask, equal_parts

__all__ = ["CompressionChoice", "Sampled", "relative_error"]

_LARGER = 4  # times the size of parts that travel as they are
_MANY = 1 << 20  # elements: at such a size headers do not matter for how much smaller something gets


class Sampled(Protocol):
    """A bucket whose numbers can be looked at."""

    def sample(self, sub_task: SubCommTask) -> tuple[Tensor, Tensor] | None:
        """(gradients, gradients and what was left to send) of some elements of a part; ``None`` if it has no such."""


def relative_error(codec: Compressor, gradient: Tensor, sent: Tensor) -> float:
    """Norm of what a codec leaves out of ``sent``, over that of the gradient; infinite where that is nothing."""
    left_out = sent - codec.decompress(codec.compress(sent), sent.numel())
    norm = float(torch.linalg.vector_norm(gradient))
    error = float(torch.linalg.vector_norm(left_out))
    if not error:
        return 0.0
    return error / norm if norm > 0 and math.isfinite(norm) else math.inf


class CompressionChoice:
    """Of one fit; on ranks that follow it only knows what a form is.

    Args:
        codecs: From the one that leaves most out to the one that leaves least out; form n is the n-th of them.
        max_error: Largest :func:`relative_error` of a part.
        decides: Whether this rank does.
        clock: Seconds; the core's clock.
    """

    def __init__(
        self,
        codecs: Sequence[Compressor],
        max_error: float,
        *,
        decides: bool = False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.codecs = tuple(codecs)
        self._max_error = max_error
        self._clock = clock
        self._lock = threading.Lock()
        self._ratios = {form: 4 * _MANY / codec.payload_bytes(_MANY) for form, codec in enumerate(self.codecs, 1)}
        self._ratios[0] = 1.0
        self._decides = decides
        self._late = LateTransfers(LinkPace(self._ratios))
        self._as_they_are: set[int] = set()  # buckets whose last part that was late could not be compressed

    def know_link(self, seconds_per_byte: float | None) -> None:
        """The link takes so long for a byte of gradient, as far as was measured before the first step."""
        with self._lock:
            self._late = LateTransfers(LinkPace(self._ratios, seconds_per_byte))

    def codec(self, form: int) -> Compressor:
        """Of a form other than 0."""
        return self.codecs[form - 1]

    # ------------------------------------------------------------------ the training thread

    def begin_step(self, kind: Hashable, *, halves: bool) -> None:
        """A backward pass has its first bucket.

        Args:
            kind: Of the step: moments of one kind say nothing about another.
            halves: See :class:`~lightning_bytescheduler.scheduler.lateness.LateTransfers`.
        """
        if self._decides:
            with self._lock:
                self._late.halves = halves
                self._late.begin((kind, halves), self._clock())

    def bucket_ready(self, bucket: int, nbytes: float, priority: int, *, last: bool) -> None:
        """A gradient is there; ``last`` of this backward pass."""
        if self._decides:
            with self._lock:
                self._late.ready(bucket, nbytes, priority, self._clock(), last=last)

    def cut(self, bucket: int, buffer: Tensor, partition_size: int) -> tuple[int, ...] | None:
        """Sizes of the parts of a bucket that has just been said to be there, if some of it is to be compressed.

        That goes first, in large parts. Codecs, messages and threads cost milliseconds for each part, whatever its
        size; and what is compressed is not long under way, so that large parts are not long in the way of what is more
        urgent.

        Args:
            bucket: Its number.
            buffer: Its gradients.
            partition_size: Of parts that travel as they are, in elements.

        Returns:
            ``None`` if none of it is. Only the rank that decides asks: others are told how a bucket is cut.
        """
        size = buffer.numel()
        if not self._decides:
            return None
        with self._lock:
            if self._late.halves or bucket in self._as_they_are:
                return None
            helps = any(self._late.pace.helps(form) for form in self._late.pace.forms)
            share = self._late.late_share(bucket, size * buffer.element_size(), self._clock()) if helps else 0.0
        smaller = round(share * size)
        parts = (*equal_parts(smaller, _LARGER * partition_size), *equal_parts(size - smaller, partition_size))
        return parts if smaller else None

    def bucket_needed(self, bucket: int) -> None:
        """Somebody has reached for what depends on a gradient."""
        if self._decides:
            with self._lock:
                self._late.times.needed(bucket, self._clock())

    def all_needed(self) -> None:
        """Training waits for all gradients from here on."""
        if self._decides:
            with self._lock:
                now = self._clock()
                for bucket in self._late.times.buckets:
                    self._late.times.needed(bucket, now)

    def waiting(self) -> None:
        """Training waits for a gradient from now on."""
        if self._decides:
            with self._lock:
                self._late.times.waiting(self._clock())

    def waiting_ends(self) -> None:
        """It has got it."""
        if self._decides:
            with self._lock:
                self._late.times.waiting_ends(self._clock())

    # ------------------------------------------------------------------ whoever launches

    def choose(self, bucket: Sampled, sub_task: SubCommTask, *, width: int, given: int | None = None) -> int:
        """The form of a part that is sent next.

        Args:
            bucket: That the part is of.
            sub_task: The part.
            width: Bytes of an element.
            given: The form, if it is settled: the second half of a part travels as the first.
        """
        key, nbytes = sub_task.parent.key, sub_task.size * width * (0.5 if self._late.halves else 1.0)
        form = self._form_of(bucket, sub_task, nbytes) if given is None else given
        with self._lock:
            self._late.sent(sub_task, key.bucket, int(given is not None), form, nbytes)
            self._late.usual = form or self._late.usual
        return form

    def _form_of(self, bucket: Sampled, sub_task: SubCommTask, nbytes: float) -> int:
        with self._lock:
            late = self._late.is_late(sub_task.parent.key.bucket, 0, nbytes, self._clock())
            helpful = [form for form in self._late.pace.forms if self._late.pace.helps(form)]
        sample = bucket.sample(sub_task) if late and helpful else None
        if sample is not None:
            found = (each for each in helpful if relative_error(self.codec(each), *sample) <= self._max_error)
            form = next(found, 0)
            with self._lock:
                (self._as_they_are.discard if form else self._as_they_are.add)(sub_task.parent.key.bucket)
            return form
        return 0

    def charge(self, sub_task: SubCommTask, form: int) -> int:
        """What a part takes of the credit: its share of the time that it would take as it is.

        By bytes alone, so many would be under way where codecs are slower than the link that what is urgent waits. But
        of parts as large as those of buckets that are compressed as a whole there are few.
        """
        size, share = sub_task.size, 1.0 / self._ratios[form]
        if self._decides:
            with self._lock:
                if self._late.is_planned(sub_task.parent.key.bucket):
                    return math.ceil(size * share)
                exact, smaller = (self._late.pace.seconds_per_byte(each) for each in (0, form))
            if exact and smaller:
                share = min(max(share, smaller / exact), 1.0)
        return math.ceil(size * share)

    def ended(self, sub_task: SubCommTask) -> None:
        """A part has arrived; on the thread that waits for that."""
        if self._decides:
            with self._lock:
                self._late.ended(sub_task, sub_task.started_at, sub_task.finished_at)
