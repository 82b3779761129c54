"""Sends pseudo-gradients through the priority and credit scheduler, beside the training, and receives their mean.

Each part of a pseudo-gradient is cut into one shard per worker. A worker receives all workers' versions of its shard,
adds them up exactly, and sends the weighted mean to all, in the wire's dtype. Every worker uses the values as
they were sent, for its own shard too, so all of them hold the same bits. They send as little as a ring all-reduce does:
``2 (n - 1) / n`` times the pseudo-gradient.

Means of sparse pseudo-gradients travel with twice their density, as workers' largest changes are not the same ones.

What int8, int4 and sparse lose is kept and sent with the next pseudo-gradient of the same name (error feedback): by the
worker whose pseudo-gradient it is, and by the owner of a shard for the mean. It is lost for good only if a training
goes on from a checkpoint without it: see :meth:`PseudoGradientExchange.load_state_dict`.

Two ranks' messages are told apart by their number and not by their order. Still, every worker has to start the parts in
one order: with a limited number in flight, each could otherwise wait for what the other has not started.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_bytescheduler.collectives.completion import CompletionThread
from lightning_bytescheduler.collectives.operations import StartedOperation, others_of, shard_of
from lightning_bytescheduler.compression.wire_format import WireFormat
from lightning_bytescheduler.diloco.outer_optimizer import Contribution, Mean, Upload
from lightning_bytescheduler.diloco.weighted_mean import WeightedMean
from lightning_bytescheduler.exceptions import SchedulerTimeoutError
from lightning_bytescheduler.scheduler.core import ByteCore
from lightning_bytescheduler.scheduler.task import CommTask, SubCommTask, TaskKey

_LARGEST = 2_000_000  # parameters


def size_of_parts(parameters: int) -> int:
    """Parameters of the parts of a pseudo-gradient: of the same size, of two million at most.

    Its parts need no order and do not overtake each other, unlike gradients, of which the first layers' come first. So
    parts are large, as each costs some milliseconds to start. They are small enough that most of a worker's encoding,
    adding up and decoding is hidden under another part that travels.

    Args:
        parameters: Of the largest pseudo-gradient that is sent.
    """
    return math.ceil(parameters / math.ceil(parameters / _LARGEST))


_HEADER = 8  # bytes of the weight before each payload
_TAGS = 2**29
_NUMBERS_PER_PART = 2  # one for what goes to a shard's owner, one for what comes back: seeds differ


class PseudoGradientExchange:
    """One worker's end of the exchange; every worker starts the same exchanges in the same order.

    Threads: a dispatcher and a completion thread, both ended by :meth:`stop` within a bound.

    Args:
        group: The group of all workers; gloo, used by this object alone.
        wire: Format of what travels.
        partition_size: Largest part that is sent at once, in parameters.
        credit: What may be in flight at once, in parameters.
        on_error: Called with what a message failed with, on the completion thread; returns the error to raise.
        arrived: Called on another thread with each update of a round when its mean is there, before that is handed out.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        *,
        wire: WireFormat,
        partition_size: int,
        credit: int,
        on_error: Callable[[BaseException], BaseException],
        arrived: Callable[[Contribution], object] = lambda _: None,
    ) -> None:
        self._group = group
        self._wire = wire
        self._core = ByteCore(partition_size=partition_size, credit=credit, name="bytescheduler-outer")
        self._completion = CompletionThread(on_error, group)
        self._started = 0
        self._numbers = 0
        self._residuals: dict[str, _Residuals] = {}  # by name of the pseudo-gradient
        self._arrived = arrived
        self._means: dict[int, Future[Mean | None]] = {}  # not asked for yet, by round

    @property
    def abort_cause(self) -> BaseException | None:
        """Why nothing is exchanged any more, or ``None``."""
        return self._core.abort_cause

    @property
    def source(self) -> None:
        """See ``Exchange``."""
        return None

    def start(self, contribution: Contribution) -> Upload:
        """Begin to exchange a fragment; returns at once. For one thread.

        Args:
            contribution: The update. The next one of its fragment may come only when this one's mean is there.

        Returns:
            Its receipt is the mean.
        """
        upload, pseudo_gradient = Upload(fragment=contribution.fragment), contribution.pseudo_gradient
        name = f"fragment {contribution.fragment}"
        swap = _Swap(
            group=self._group,
            own=pseudo_gradient,
            result=torch.empty_like(pseudo_gradient),
            weight=contribution.samples,
            wire=self._wire,
            residuals=self._residuals_of(name, pseudo_gradient) if self._wire.keeps_residuals else None,
        )
        self._started += 1
        first = self._numbers

        def launch(sub: SubCommTask) -> None:
            number = first + _NUMBERS_PER_PART * sub.index
            self._completion.watch(swap.start(sub.offset, sub.size, number), sub)

        def end(task: CommTask) -> None:
            if task.error is not None:
                upload.receipt.set_exception(task.error)
                return
            if contribution.round:
                self._arrived(contribution)
            upload.receipt.set_result(Mean(values=swap.result, total=swap.total))

        task = CommTask(
            name,
            pseudo_gradient.numel(),
            launch=launch,
            key=TaskKey(self._started),
            wire_bytes=self._wire.payload_bytes(pseudo_gradient.numel()) / pseudo_gradient.numel(),
            on_end=end,
        )
        if contribution.round:
            self._means[contribution.round] = upload.receipt
        upload.receipt.set_running_or_notify_cancel()  # an exchange that all have begun is not called off
        self._core.enqueue(task)
        self._numbers += _NUMBERS_PER_PART * len(task.sub_tasks)
        task.notify_ready()
        return upload

    def settle(self, upload: Upload, *, total: int) -> None:
        """See ``Exchange``. Does nothing, as residuals are kept when parts are encoded."""

    def fetch_mean(self, round: int, chain: str) -> Future[Mean | None]:
        """See ``Exchange``; it comes by itself."""
        return self._means.pop(round, None) or Future()

    def state_dict(self) -> dict[str, Any]:
        """This worker's residuals, and the number that seeds of rounding follow from: tensors and primitives only."""
        own = {name: residuals.own.clone() for name, residuals in self._residuals.items()}
        mean = {name: residuals.mean.clone() for name, residuals in self._residuals.items()}
        ranks = {"workers": self._group.size(), "rank": self._group.rank()}
        return {**ranks, "numbers": self._numbers, "own": own, "mean": mean}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Carry on from a state, on all workers, before anything was started.

        The residuals go to the worker of the same rank. All others begin without any, and what they had not sent is
        lost. With another number of workers the shards differ, and what their owners had not sent is lost, too.
        """
        self._numbers = state.get("numbers", 0)  # the same in the states of all workers
        if state["rank"] != self._group.rank():
            return
        same = state["workers"] == self._group.size()
        for name, own in state["own"].items():
            mean = state["mean"][name]
            self._residuals[name] = _Residuals(own.clone(), mean.clone() if same else torch.zeros_like(mean))

    def _residuals_of(self, name: str, like: Tensor) -> _Residuals:
        known = self._residuals.get(name)
        if known is None or known.own.shape != like.shape:
            known = self._residuals[name] = _Residuals(torch.zeros_like(like), torch.zeros_like(like))
        return known

    def abort(self, cause: BaseException) -> None:
        """Fail everything that is under way, and whatever is started later."""
        self._core.abort(cause)

    def stop(self, timeout: float) -> bool:
        """End both threads; returns whether nothing was under way and they ended within ``timeout`` seconds."""
        deadline = time.monotonic() + timeout
        idle = not self._core.in_flight
        try:
            self._core.shutdown(timeout=timeout, drain=False)
        except (SchedulerTimeoutError, RuntimeError):
            idle = False
        return self._completion.stop(max(0.1, deadline - time.monotonic())) and idle


@dataclass(frozen=True, slots=True)
class _Residuals:
    """What was not sent: of this worker's pseudo-gradient, and of the mean of its shards. Flat, in fp32."""

    own: Tensor
    mean: Tensor


@dataclass(slots=True, kw_only=True)
class _Swap:
    """One worker's side of the exchange of one pseudo-gradient, which is on its way.

    Attributes:
        group: Over all workers; gloo.
        own: This worker's version, in fp32, flat, on the CPU.
        result: Is filled with the mean; like ``own``.
        weight: Weight of this worker's version, a whole number; 0 if it does not count.
        wire: What travels.
        residuals: What was not sent before, where the wire keeps that.
        total: Sum of all weights, once a part is there. If it is 0, the mean is all zeros.
    """

    group: dist.ProcessGroup
    own: Tensor
    result: Tensor
    weight: int
    wire: WireFormat
    residuals: _Residuals | None = None
    total: int = 0

    def start(self, offset: int, size: int, number: int) -> StartedOperation:
        """Exchange one part of the pseudo-gradient.

        Args:
            offset: Where the part begins.
            size: Length of the part.
            number: Number of this exchange, the same on all workers and used once.

        Raises:
            ValueError: If the part holds infinities or NaN.
        """
        span = slice(offset, offset + size)
        part, result = self.own[span], self.result[span]
        unsent = None if self.residuals is None or not self.weight else self.residuals.own[span]
        payloads = {
            worker: self._pack(part[slice(*shard)], number, _part(unsent, shard))
            for worker, shard in self._shards(size).items()
        }
        own = payloads.pop(self.group.rank(), None)
        shard = shard_of(size, self.group.rank(), self.group.size())
        others = others_of(self.group)
        received = {} if own is None else {w: self._buffer(_length(shard), self.wire) for w in others}

        def merge() -> StartedOperation:
            mean = None if self.residuals is None else _part(self.residuals.mean[span], shard)
            return self._share(result, number, [] if own is None else [own, *received.values()], mean)

        return StartedOperation(self._messages(received, payloads, 2 * number), merge, messages=True)

    def _share(self, result: Tensor, number: int, versions: list[Tensor], unsent: Tensor | None) -> StartedOperation:
        """Send the mean of this worker's shard to all, and receive theirs."""
        shards, rank, others = self._shards(result.numel()), self.group.rank(), others_of(self.group)
        payloads: dict[int, Tensor] = {}
        if versions:
            payload = self._merged(versions, _length(shards[rank]), number + 1, unsent)
            self._place(result, shards[rank], payload)
            payloads = dict.fromkeys(others, payload)
        means = self.wire.of_means
        received = {w: self._buffer(_length(shards[w]), means) for w in others if w in shards}

        def place() -> None:
            for worker, payload in received.items():
                self._place(result, shards[worker], payload)

        return StartedOperation(self._messages(received, payloads, 2 * number + 1), place, messages=True)

    def _merged(self, versions: list[Tensor], length: int, number: int, unsent: Tensor | None) -> Tensor:
        """The message with the mean of this worker's shard."""
        sums = WeightedMean(length)
        for version in versions:
            weight = _weight(version)
            if weight:
                sums.add(version[_HEADER:], self.wire, weight=weight)
        means, seed = self.wire.of_means, self._seed(number)
        message = self._buffer(length, means, sums.weight)
        if sums.added:
            sums.encode_mean(means, seed=seed, out=message[_HEADER:], residual=unsent)
        else:
            means.encode(torch.zeros(length, dtype=torch.float32), seed=seed, out=message[_HEADER:])
        return message

    def _messages(self, received: dict[int, Tensor], sent: dict[int, Tensor], number: int) -> list[dist.Work]:
        tag = number % _TAGS
        works = [self.group.recv([buffer], worker, tag) for worker, buffer in received.items()]
        return works + [self.group.send([payload], worker, tag) for worker, payload in sent.items()]

    def _shards(self, size: int) -> dict[int, tuple[int, int]]:
        """Whose shard is where; workers without any are left out."""
        workers = self.group.size()
        shards = {worker: shard_of(size, worker, workers) for worker in range(workers)}
        return {worker: shard for worker, shard in shards.items() if _length(shard)}

    def _buffer(self, length: int, wire: WireFormat, weight: int = 0) -> Tensor:
        message = torch.empty(_HEADER + wire.payload_bytes(length), dtype=torch.uint8)
        message[:_HEADER] = torch.tensor([weight]).view(torch.uint8)
        return message

    def _pack(self, values: Tensor, number: int, unsent: Tensor | None) -> Tensor:
        message = self._buffer(values.numel(), self.wire, self.weight)
        self.wire.encode(values, seed=self._seed(number), out=message[_HEADER:], residual=unsent)
        return message

    def _seed(self, number: int) -> int:
        return number * self.group.size() + self.group.rank()

    def _place(self, result: Tensor, shard: tuple[int, int], payload: Tensor) -> None:
        self.total = _weight(payload)
        self.wire.of_means.decode(payload[_HEADER:], _length(shard), out=result[slice(*shard)])


def _length(shard: tuple[int, int]) -> int:
    return shard[1] - shard[0]


def _part(tensor: Tensor | None, shard: tuple[int, int]) -> Tensor | None:
    return None if tensor is None else tensor[slice(*shard)]


def _weight(payload: Tensor) -> int:
    return int(payload[:_HEADER].clone().view(torch.int64))
