"""Buffers of the first rank travel under the backward pass, in place of DDP's broadcast before each forward pass.

DDP fills all ranks' buffers (running statistics, counters, queues) with the first rank's when a forward pass begins,
and its training thread waits for them: a round trip of each step, or more behind gradients. What they will be is known
at the end of the forward pass before. So they are sent then, are there when the next one begins, and take the place of
what a rank has at the very moment at which DDP would: all values are DDP's.

Unless they change in between: in a hook, a callback, the second forward pass of activation checkpointing. The first
rank compares them to what it has sent, byte by byte (no version counter sees ``buffer.data``), says when the forward
pass begins whether they did, and if so sends them again. Whoever saw its own buffers change waits for that word, as
what changes on one rank changes on all where they run one program; and everyone does in the first forward passes, and
in the first after a validation or the beginning of an epoch. A rank that had not waited, and hears that they did
change, says so once and waits from then on: one forward pass of it had buffers that were one step old.

Why the ranks agree: only the training thread sends here, on a group of its own, and in one order on all ranks: after a
forward pass what it left (:meth:`BufferBroadcast.after_forward`); as the next one begins, the word; what is sent again
if the word says so. A rank that does not wait for the word looks at it, and takes what follows, before it sends
anything else. No rank waits for a later one of these than it has begun, and the first rank begins each without waiting
for others further behind than its gradients keep them.
"""

from __future__ import annotations

import logging
import operator
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _BufferCommHookLocation

from lightning_bytescheduler.collectives.groups import leave
from lightning_bytescheduler.collectives.operations import broadcast_from_first, wait_unless
from lightning_bytescheduler.exceptions import UnsupportedError
from lightning_bytescheduler.failures.standstill import waiting_for_a_batch
from lightning_bytescheduler.scheduler.short_turns import short_turns

__all__ = ["BufferBroadcast"]

log = logging.getLogger(__name__)

_LOOK_EVERY = timedelta(seconds=0.5)
_STOP_S = 5.0
_WATCHED_CLOSELY = 8  # forward passes at the start of a fit
_ALIGNED = 16  # bytes: any type's


def _can_travel(buffers: Sequence[torch.Tensor]) -> bool:
    """Whether all are plain memory of the host."""
    return all(b.device.type == "cpu" and b.layout == torch.strided and not b.is_quantized for b in buffers)


class _Copies:
    """Room for copies of some buffers, in one piece of memory."""

    def __init__(self, buffers: Sequence[torch.Tensor]) -> None:
        self._kinds = _kinds(buffers)
        places, size = [], 0
        for buffer in buffers:
            places.append(size)
            size += -(-buffer.numel() * buffer.element_size() // _ALIGNED) * _ALIGNED
        self.memory = torch.zeros(size, dtype=torch.uint8)
        self._views = [
            self.memory[at : at + b.numel() * b.element_size()].view(b.dtype).view(b.shape)
            for at, b in zip(places, buffers, strict=True)
        ]

    def fit(self, buffers: Sequence[torch.Tensor]) -> bool:
        """Whether ``buffers`` are as many, and of the same types and shapes."""
        return self._kinds == _kinds(buffers)

    def take(self, buffers: Sequence[torch.Tensor]) -> None:
        """Copy what ``buffers`` hold."""
        torch._foreach_copy_(self._views, list(buffers))

    def give(self, buffers: Sequence[torch.Tensor]) -> None:
        """Fill ``buffers``."""
        torch._foreach_copy_(list(buffers), self._views)


def _same(some: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> bool:
    return len(some) == len(others) and all(map(operator.is_, some, others))


def _kinds(buffers: Sequence[torch.Tensor]) -> list[tuple[torch.dtype, torch.Size]]:
    return [(b.dtype, b.shape) for b in buffers]


class BufferBroadcast:
    """See the module. For the training thread.

    Args:
        model: DDP's, whose own broadcast this replaces.
        group: Its own, gloo; left by :meth:`close`.
        await_batch: Waits until the others have begun this batch. That a rank waits for a batch is told to all, that it
            waits for what is sent in one is not.
        failure: Why nothing will come any more, if another rank has failed.
    """

    def __init__(
        self,
        model: DistributedDataParallel,
        group: dist.ProcessGroup,
        *,
        await_batch: Callable[[], None] = lambda: None,
        failure: Callable[[], BaseException | None] = lambda: None,
    ) -> None:
        self._model = model
        self._group = group
        self._await_batch = await_batch
        self._failure = failure
        self._first = group.rank() == 0
        self._sent: _Copies | None = None  # of this rank's buffers after the last forward pass
        self._now: _Copies | None = None  # of this rank's, when the next one begins
        self._received: _Copies | None = None  # of the first rank's
        self._arriving: dist.Work | None = None  # what was sent after the last forward pass, if anything was
        self._under_way: list[tuple[dist.Work, torch.Tensor]] = []
        self._word: tuple[dist.Work, torch.Tensor] | None = None  # not looked at yet
        self._closely = _WATCHED_CLOSELY
        self._always_closely = False
        self._buffers: list[torch.Tensor] = []  # those that were sent
        self._places: list[tuple[dict[str, torch.Tensor | None], str, torch.Tensor]] = []  # where modules keep them
        model._register_buffer_comm_hook(None, self._before_forward, _BufferCommHookLocation.PRE_FORWARD)

    @classmethod
    def of(
        cls,
        model: DistributedDataParallel,
        agree: Callable[[bool], bool],
        *,
        await_batch: Callable[[], None],
        failure: Callable[[], BaseException | None],
        timeout: timedelta | None,
    ) -> BufferBroadcast | None:
        """Take the place of DDP's broadcast, on all ranks or on none; ``None`` where it stays, or there is none.

        Args:
            model: DDP's.
            agree: Says whether all ranks can.
            await_batch: Waits until the first rank has begun the present batch.
            failure: Why nothing will come any more, if another rank has failed.
            timeout: Longest wait for one message; the backend's default if ``None``.
        """
        buffers = list(model.named_module_buffers.values())
        can = model.will_sync_module_buffers() and model.device.type == "cpu" and _can_travel(buffers)
        if not agree(can and not hasattr(model, "buffer_hook")):
            return None
        with short_turns():  # for gloo's own threads
            group = dist.new_group(timeout=timeout, backend="gloo")
        return cls(model, group, await_batch=await_batch, failure=failure)

    def look_closely(self) -> None:
        """What runs before the next forward pass is not what runs between two batches."""
        self._closely = max(self._closely, 1)

    def after_forward(self) -> None:
        """Send what a forward pass has left, if DDP would broadcast it before the next one."""
        if not self._model.will_sync_module_buffers():
            return
        self._take_word()
        self._end_all()
        buffers = self._find()
        with torch.no_grad():
            if self._sent is None or not self._sent.fit(buffers):
                if not _can_travel(buffers):
                    raise UnsupportedError(
                        "A buffer is not in the host's memory any more, or is sparse or quantized since the fit began: "
                        "have it so from the start, or broadcast_buffers=False."
                    )
                self._sent, self._now, self._received = _Copies(buffers), _Copies(buffers), _Copies(buffers)
            self._sent.take(buffers)
        arriving = self._sent if self._first or self._received is None else self._received
        self._arriving = self._begin(arriving.memory)

    def _find(self) -> list[torch.Tensor]:
        """Those that a forward pass has left; it may have put others in their places, on this rank alone."""
        if not self._places or any(kept.get(name) is not buffer for kept, name, buffer in self._places):
            self._model._assign_modules_buffers()
        buffers = list(self._model.named_module_buffers.values())
        if not _same(buffers, self._buffers) or not self._places:
            self._buffers, travelling = buffers, set(map(id, buffers))
            self._places = [
                (module._buffers, name, buffer)
                for module in self._model.module.modules()
                for name, buffer in module._buffers.items()
                if buffer is not None and id(buffer) in travelling
            ]
        return buffers

    def _before_forward(self, _state: object, named: Mapping[str, torch.Tensor]) -> None:
        """DDP's hook: have the first rank's values in all buffers from here on."""
        buffers = list(named.values())
        arriving, self._arriving = self._arriving, None
        sent, now, received = self._sent, self._now, self._received
        if arriving is None or sent is None or now is None or received is None or not sent.fit(buffers):
            self._model._default_broadcast_coalesced()
            return
        now.take(buffers)
        changed = not torch.equal(now.memory, sent.memory)
        word = torch.tensor([changed], dtype=torch.uint8)
        told = self._begin(word)
        if self._first:
            if changed:
                self._begin(now.memory)
            return
        self._await_sent(arriving)
        self._word = (told, word)
        if changed or self._closely or self._always_closely:
            self._take_word(expected=True, changed=changed)
            self._closely = max(self._closely - 1, 0)
        received.give(buffers)

    def _take_word(self, *, expected: bool = False, changed: bool = False) -> None:
        """Hear whether the first rank's buffers had changed, and take them if so."""
        if self._word is None or self._received is None:
            return
        (told, word), self._word = self._word, None
        self._await(told)
        if not word.item():
            return
        self._await(self._begin(self._received.memory))
        if not changed:
            self._always_closely = True
        if not expected:
            log.warning(
                "[rank %d] The first rank's buffers changed between two forward passes, and this rank's did not: this "
                "rank has taken one forward pass with the buffers of one step before, where DDP has the new ones. From "
                "now on it waits for them. Change buffers on all ranks alike, or within training_step.",
                self._group.rank(),
            )

    def _begin(self, tensor: torch.Tensor) -> dist.Work:
        work = broadcast_from_first(self._group, tensor)
        self._under_way.append((work, tensor))
        return work

    def _await(self, work: dist.Work) -> None:
        """Wait for what the first rank sends as it begins this batch's forward pass."""
        if not work.is_completed():
            self._await_batch()
        wait_unless(work, self._failure, look_every=_LOOK_EVERY)

    def _await_sent(self, work: dist.Work) -> None:
        """Wait for what the first rank sent after the forward pass before.

        That rank need not have begun this batch, and begins it without this one: the values may still be on their way.
        """
        with waiting_for_a_batch(outside=True):
            wait_unless(work, self._failure, look_every=_LOOK_EVERY)

    def _end_all(self) -> None:
        """Memory that is still being sent is not to be written."""
        for work, _ in self._under_way:
            self._await(work)
        self._under_way.clear()

    def close(self, *, failed: bool) -> None:
        """Leave the group; bounded, idempotent.

        Args:
            failed: Whether nothing is to be waited for.
        """
        model, deadline = self._model, time.monotonic() + (0.0 if failed else _STOP_S)
        if hasattr(model, "buffer_hook"):
            del model.buffer_hook
        idle = False
        with suppress(Exception):
            if not failed:
                self._take_word()
            while not (idle := all(work.is_completed() for work, _ in self._under_way)):
                if time.monotonic() >= deadline:
                    break
                for work, _ in self._under_way:
                    if not work.is_completed():
                        with suppress(RuntimeError):
                            work.wait(timedelta(seconds=0.1))
        self._under_way.clear()
        leave(self._group, idle=idle)
