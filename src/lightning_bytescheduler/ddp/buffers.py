"""Sends rank 0's buffers during the backward pass, in place of DDP's broadcast before each forward pass.

DDP copies rank 0's buffers (running statistics, counters, queues) to all ranks when a forward pass begins, and the
training thread waits for them: at least one round trip per step. Their values are known at the end of the previous
forward pass. So they are sent then, and replace a rank's own values exactly where DDP would do it. All values equal
DDP's, with one exception, of which the rank warns.

Buffers may still change in between: in a hook, a callback, or the second forward pass of activation checkpointing. Rank
0 therefore compares them byte by byte with what it sent (version counters miss ``buffer.data``). When the next forward
pass begins it sends a flag, and the buffers again if they changed. A rank whose own buffers changed waits for the flag,
as all ranks run the same program. All ranks wait for it in the first forward passes, and in the first one after a
validation or the beginning of an epoch. A rank that did not wait and learns that rank 0's buffers changed has used
buffers that were one step old for one forward pass. It warns once and waits for the flag from then on.

Why ranks agree on the order: only the training thread sends here, on its own group, in one order on all ranks. First
the buffers after a forward pass (:meth:`BufferBroadcast.after_forward`), then the flag when the next one begins, then
the buffers again if the flag says so. A rank that did not wait for the flag reads it, and receives what follows, before
it sends anything else. No rank waits for a later message than it has begun, and rank 0 begins each without waiting for
the others.
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
from lightning_bytescheduler.failures.standstill import waiting
from lightning_bytescheduler.scheduler.threads import short_turns

__all__ = ["BufferBroadcast"]

log = logging.getLogger(__name__)

_LOOK_EVERY = timedelta(seconds=0.5)
_STOP_S = 5.0
_WATCHED_CLOSELY = 8  # forward passes at the start of a fit in which ranks wait for the flag
_ALIGNED = 16  # bytes; enough for any type


def _can_travel(buffers: Sequence[torch.Tensor]) -> bool:
    """Whether all buffers are strided, unquantized host memory."""
    return all(b.device.type == "cpu" and b.layout == torch.strided and not b.is_quantized for b in buffers)


class _Copies:
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
        return self._kinds == _kinds(buffers)

    def take(self, buffers: Sequence[torch.Tensor]) -> None:
        torch._foreach_copy_(self._views, list(buffers))

    def give(self, buffers: Sequence[torch.Tensor]) -> None:
        torch._foreach_copy_(list(buffers), self._views)


def _same(some: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> bool:
    return len(some) == len(others) and all(map(operator.is_, some, others))


def _kinds(buffers: Sequence[torch.Tensor]) -> list[tuple[torch.dtype, torch.Size]]:
    return [(b.dtype, b.shape) for b in buffers]


class BufferBroadcast:
    """Broadcasts buffers; see the module. Used by the training thread.

    Args:
        await_batch: Waits until rank 0 has begun this batch. Other ranks see that a rank waits for a batch, but not
            that it waits for a message sent within a batch.
        failure: Returns the reason if another rank has failed and nothing will come.
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
        self._sent: _Copies | None = None  # this rank's buffers after the last forward pass
        self._now: _Copies | None = None  # this rank's buffers when the next one begins
        self._received: _Copies | None = None  # rank 0's buffers
        self._arriving: dist.Work | None = None  # the transfer begun after the last forward pass
        self._under_way: list[tuple[dist.Work, torch.Tensor]] = []
        self._word: tuple[dist.Work, torch.Tensor] | None = None  # the flag, not read yet
        self._closely = _WATCHED_CLOSELY
        self._always_closely = False
        self._buffers: list[torch.Tensor] = []  # the buffers that were sent
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
        """Replace DDP's broadcast on all ranks or on none; ``None`` if DDP's stays or there is none.

        Args:
            model: DDP's model.
            agree: Returns whether all ranks can.
            await_batch: Waits until rank 0 has begun the present batch.
            failure: Returns the reason if another rank has failed and nothing will come.
            timeout: Longest wait for one message; the backend's default if ``None``.
        """
        buffers = list(model.named_module_buffers.values())
        can = model.will_sync_module_buffers() and model.device.type == "cpu" and _can_travel(buffers)
        if not agree(can and not hasattr(model, "buffer_hook")):
            return None
        with short_turns():  # for gloo's threads
            group = dist.new_group(timeout=timeout, backend="gloo")
        return cls(model, group, await_batch=await_batch, failure=failure)

    def look_closely(self) -> None:
        """Wait for the flag in the next forward pass: other code than usual runs before it."""
        self._closely = max(self._closely, 1)

    def after_forward(self) -> None:
        """Send the buffers after a forward pass, if DDP would broadcast them before the next one."""
        if not self._model.will_sync_module_buffers():
            return
        self._take_word()
        self._end_all()
        buffers = self._find()
        with torch.no_grad():
            if self._sent is None or not self._sent.fit(buffers):
                if not _can_travel(buffers):
                    raise UnsupportedError(
                        "A buffer left host memory, or became sparse or quantized, after the fit began. Change it "
                        "before the fit, or use broadcast_buffers=False."
                    )
                self._sent, self._now, self._received = _Copies(buffers), _Copies(buffers), _Copies(buffers)
            self._sent.take(buffers)
        arriving = self._sent if self._first or self._received is None else self._received
        self._arriving = self._begin(arriving.memory)

    def _find(self) -> list[torch.Tensor]:
        """Return the present buffers; a forward pass may have replaced some on this rank alone."""
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
        """DDP's hook: put rank 0's values into all buffers."""
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
        """Wait for what rank 0 sends when it begins this batch's forward pass."""
        if not work.is_completed():
            self._await_batch()
        wait_unless(work, self._failure, look_every=_LOOK_EVERY)

    def _await_sent(self, work: dist.Work) -> None:
        """Wait for what rank 0 sent after the previous forward pass.

        Rank 0 may not have begun this batch, but does not wait for this rank: the values are on their way.
        """
        with waiting("broadcast", begins_batch=True, outside=True):
            wait_unless(work, self._failure, look_every=_LOOK_EVERY)

    def _end_all(self) -> None:
        """Wait for all transfers, as memory that is being sent must not be written."""
        for work, _ in self._under_way:
            self._await(work)
        self._under_way.clear()

    def close(self, *, failed: bool) -> None:
        """Leave the group; bounded, idempotent."""
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
