"""``PushPullStore``: init, push and pull of named tensors, through parameter servers and the scheduler.

What ScheduledKVStore of ByteScheduler (Peng et al., SOSP 2019) did for MXNet: a push is only noted, and the pull of the
same key makes one task of both, which is cut into parts, sent by priority under the credit, and added up by the servers
of ``push_pull.py``. Rank 0 decides what is sent next, as in a training, so ranks may pull in different orders.
"""

from __future__ import annotations

import atexit
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from types import TracebackType
from typing import Literal

import torch
import torch.distributed as dist

from lightning_bytescheduler.checks import closest, is_whole, options_by_name, require_size, require_text, require_whole
from lightning_bytescheduler.collectives.groups import SchedulerGroups
from lightning_bytescheduler.collectives.launch_order import DecidingOrder, FollowingOrder
from lightning_bytescheduler.collectives.node_push_pull import each_alone
from lightning_bytescheduler.collectives.operations import broadcast_from_first, reduce_with
from lightning_bytescheduler.collectives.server_meeting import join_servers
from lightning_bytescheduler.collectives.summing_server import DTYPES
from lightning_bytescheduler.collectives.transport import GradientTransport
from lightning_bytescheduler.exceptions import (
    OptionError,
    RankFailedError,
    RanksDifferError,
    SchedulerClosedError,
    TaskStateError,
    UnsupportedError,
)
from lightning_bytescheduler.failures.messages import brief, is_communication_error
from lightning_bytescheduler.scheduler.core import ByteCore
from lightning_bytescheduler.scheduler.placement import Placement, chosen_placement
from lightning_bytescheduler.scheduler.task import CommTask, SubCommTask, TaskKey

__all__ = ["PulledTensor", "PushPullStore"]

_STOP_S = 5.0


@dataclass(slots=True)
class _Key:
    """What is known of a key."""

    number: int  # in the order of initialisation
    value: torch.Tensor  # what a pull without a push brings
    pushed: tuple[torch.Tensor, int] | None = None  # and its priority
    round: int = 0  # how often it was pushed and pulled
    kept: int = 0  # the round that ``value`` is of: rounds that are under way together may end in any order
    last: CommTask | None = None


class PulledTensor:
    """What a pull brings, once it is there."""

    def __init__(self, out: torch.Tensor, task: CommTask | None, timeout: float) -> None:
        self._out = out
        self._task = task
        self._timeout = timeout

    def wait(self) -> torch.Tensor:
        """Wait for it, no longer than the store's timeout.

        Returns:
            The tensor that was given as ``out``, or a new one.

        Raises:
            SchedulerTimeoutError: If it did not come in time.
            ServerFailedError: If a server has died.
            RankFailedError: If another rank has.
        """
        if self._task is not None:
            self._task.wait(self._timeout)
        return self._out


@options_by_name
class PushPullStore:
    """Named tensors that all ranks of the default process group push to, and pull sums from.

    A collective in the sense of torch.distributed: all ranks make it at the same point, initialise the same keys in the
    same order, and push each key as often as the others do. Between that, each goes at its own pace. Tensors are in CPU
    memory. One thread at a time calls it.

    Args:
        servers: How many servers run on machines of their own, each started by ``lightning-bytescheduler server``; with
            0 each rank is a server besides.
        placement: Which server has which part: one of ``scheduler.placement.PLACEMENTS``; by bytes when left out.
        partition_size: Largest part, in elements; rank 0's counts.
        credit: What may be under way at once, in elements; rank 0's counts.
        timeout: Longest wait for servers and for one tensor.
        say: Told on rank 0 that servers are waited for.

    Raises:
        OptionError: If an option has a value that is not allowed.
        UnsupportedError: If there is no default process group.
        SchedulerTimeoutError: If too few servers have come in time.
        RanksDifferError: If a server has another version.
    """

    def __init__(
        self,
        *,
        servers: int = 0,
        placement: Literal["balanced", "mixed"] | None = None,
        partition_size: int = 1_000_000,
        credit: int = 4_000_000,
        timeout: timedelta = timedelta(minutes=30),
        say: Callable[[str], object] = print,
    ) -> None:
        require_whole("servers", servers, 0)
        require_size("partition_size", partition_size)
        require_size("credit", credit)
        how = chosen_placement(placement, {})
        if not dist.is_initialized():
            raise UnsupportedError(
                "PushPullStore needs the default process group. Call torch.distributed.init_process_group first."
            )
        self._timeout = timeout.total_seconds()
        self._keys: dict[str, _Key] = {}
        self._closed = self._failed = self._order_is_closed = False
        # The servers' group carries what is pushed, so that of gradients is for what all ranks do at one point.
        self._groups = groups = SchedulerGroups.create(timeout=timeout, by_host=True)
        self._servers = join_servers(groups, servers, each_alone(groups), placement=how, timeout=timeout, say=say)
        self._push_pull = self._servers.push_pull
        make: type[DecidingOrder | FollowingOrder] = DecidingOrder if groups.rank == 0 else FollowingOrder
        self._order = make(groups.control, self._on_error, direct=True)
        self._core = ByteCore(partition_size=partition_size, credit=credit, order=self._order)
        self._transport = GradientTransport(groups.data, self._on_error, None, self._push_pull)
        if isinstance(self._order, FollowingOrder):
            self._order.start(self._core.update_order)
        # A thread inside torch while the interpreter ends would abort the process.
        atexit.register(self._stop, failed=True)

    @property
    def placement(self) -> Placement:
        """Bytes that this rank has pushed to each server so far."""
        return self._push_pull.shares.so_far

    def init(self, key: str, value: torch.Tensor) -> None:
        """Give a key its value on all ranks: rank 0's. At once, whatever else is queued or under way.

        Args:
            key: New.
            value: On a CPU; filled with rank 0's, in place, on the others.

        Raises:
            OptionError: If there is such a key.
            UnsupportedError: If servers cannot add up such tensors.
            RanksDifferError: If another rank gives another key, shape or dtype; nothing has changed then.
        """
        self._check_open()
        require_text("key", key)
        if key in self._keys:
            raise OptionError("key", key, "one that was not initialised before")
        if not isinstance(value, torch.Tensor):
            raise OptionError("value", value, "a torch.Tensor")
        if value.dtype not in DTYPES or value.device.type != "cpu" or not value.numel():
            raise UnsupportedError(
                f"The value of {key!r} has {value.numel()} elements of {value.dtype} on {value.device}. Parameter "
                f"servers add up tensors on a CPU, of at least one element, of {', '.join(map(str, DTYPES))}."
            )
        group = self._groups.data
        own = zlib.crc32(f"{key} {_facts(value)}".encode())
        ends = torch.tensor([own, -own], device="cpu")
        try:
            reduce_with(group, ends, dist.ReduceOp.MAX).wait()
            alike = bool(ends[0] == -ends[1])
            kept = value.detach().clone(memory_format=torch.contiguous_format)
            if alike:
                broadcast_from_first(group, torch.view_as_real(kept) if kept.is_complex() else kept).wait()
        except RuntimeError as error:
            raise self._on_error(error) from error
        if not alike:
            raise RanksDifferError(
                f"Ranks initialise different tensors: here {key!r}, {_facts(value)}. All ranks initialise the same "
                "keys, shapes and dtypes in the same order."
            )
        with torch.no_grad():
            value.copy_(kept)
        self._keys[key] = _Key(len(self._keys), kept)

    def push(self, key: str, value: torch.Tensor, priority: int = 0) -> None:
        """Note what this rank adds to a key; it is sent with the next pull of that key, as one task.

        Args:
            key: Initialised.
            value: Of the key's shape and dtype. Leave it as it is until the pull.
            priority: A lower number travels first.

        Raises:
            OptionError: If there is no such key, or it has another shape or dtype.
            TaskStateError: If it was pushed, and not pulled since.
        """
        known = self._known(key, value)
        if known.pushed is not None:
            raise TaskStateError(f"{key!r} was pushed and not pulled since. Pull it first.")
        known.pushed = value, _whole(priority)

    def pull(self, key: str, out: torch.Tensor | None = None, priority: int | None = None) -> PulledTensor:
        """Begin to take the sum of all ranks' pushes; without a push here, the key's last value.

        Without a push it waits for what was pulled of the key before; else it returns at once.

        Args:
            key: Initialised.
            out: Where it goes: contiguous, of the key's shape and dtype. A new tensor when left out. It must not be
                used before ``wait`` of what is returned has ended.
            priority: In place of the push's.

        Raises:
            OptionError: If there is no such key, or ``out`` does not fit it.
            BaseException: What the store has failed with.
        """
        known = self._known(key, *(() if out is None else (out,)))
        if out is None:
            out = torch.empty_like(known.value)
        if not out.is_contiguous():
            raise OptionError(f"out of {key!r}", tuple(out.stride()), "a contiguous tensor")
        if known.pushed is None:
            if known.last is not None:
                known.last.wait(self._timeout)
            with torch.no_grad():
                out.copy_(known.value)
            return PulledTensor(out, None, self._timeout)
        value, urgency = known.pushed
        if priority is not None:
            urgency = _whole(priority)
        with torch.no_grad():
            out.copy_(value)
        return PulledTensor(out, self._enqueue(key, known, out, urgency), self._timeout)

    def push_pull(
        self, key: str, value: torch.Tensor, out: torch.Tensor | None = None, priority: int = 0
    ) -> PulledTensor:
        """:meth:`push`, and :meth:`pull`."""
        self._known(key, *(() if out is None else (out,)))
        self.push(key, value, priority)
        return self.pull(key, out)

    def close(self) -> None:
        """Wait for what is under way on any rank, then leave the servers and end all threads.

        All ranks call it; bounded, idempotent.
        """
        try:
            if not self._closed and not self._failed:
                self._core.drain(self._timeout)
                self._meet()
        except BaseException:
            self._failed = True
            raise
        finally:
            self._stop(failed=self._failed)

    def __enter__(self) -> PushPullStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self._stop(failed=True)

    # ------------------------------------------------------------------

    def _enqueue(self, key: str, known: _Key, out: torch.Tensor, priority: int) -> CommTask:
        buffer = out.detach().view(-1)
        operation = partial(self._push_pull.reduce, factor=1.0)

        def send(sub_task: SubCommTask) -> None:
            self._transport.send(buffer[sub_task.offset : sub_task.offset + sub_task.size], sub_task, operation)

        def keep(task: CommTask) -> None:
            if task.error is None and task.key.step > known.kept:
                known.kept = task.key.step
                known.value.view(-1).copy_(buffer)

        task = CommTask(
            f"{key}, round {known.round + 1}",
            buffer.numel(),
            launch=send,
            priority=priority,
            key=TaskKey(known.round + 1, 0, known.number),
            wire_bytes=self._push_pull.wire_share * buffer.element_size(),
            on_end=keep,
        )
        self._core.enqueue(task)
        known.round += 1
        known.pushed = None
        known.last = task
        task.notify_ready()
        return task

    def _known(self, key: str, *tensors: torch.Tensor) -> _Key:
        """What is known of ``key``, whose shape and dtype ``tensors`` have."""
        self._check_open()
        known = self._keys.get(key)
        if known is None:
            near = closest(key, self._keys)
            hint = "" if near is None else f"Did you mean {near!r}?"
            raise OptionError("key", key, "one that was initialised", hint)
        for value in tensors:
            given, wanted = _facts(value), _facts(known.value)
            if given != wanted:
                raise OptionError(f"tensor for {key!r}", given, f"of {wanted}, as it was initialised")
        return known

    def _check_open(self) -> None:
        cause = self._core.abort_cause
        if cause is not None:
            raise cause
        if self._closed:
            raise SchedulerClosedError("The PushPullStore has been closed.")

    def _on_error(self, error: BaseException) -> BaseException:
        """Something failed, on one of the store's threads: find out why, and fail all that waits."""
        self._failed = True
        cause = self._core.abort_cause or self._servers.find_gone() or self._servers.explain_timeout(error)
        if is_communication_error(cause):
            cause = RankFailedError(None, f"it could not be told which; here that broke: {brief(error)}")
        if cause is not error:
            cause.__cause__ = error
        self._core.abort(cause)
        return cause

    def _stop(self, *, failed: bool) -> None:
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self._stop)
        steps: list[Callable[[], object]] = [
            lambda: self._core.shutdown(timeout=_STOP_S, drain=False),
            lambda: self._close_order(failed),
            lambda: self._servers.leave(idle=not failed and not self._core.in_flight),
            lambda: self._groups.destroy(data_idle=not failed, control_idle=self._order_is_closed),
            lambda: self._transport.stop(_STOP_S),
        ]
        for step in steps:
            try:
                step()
            except Exception:
                if not failed:
                    raise

    def _meet(self) -> None:
        """Wait for the other ranks: those that are servers besides serve until all are done."""
        try:
            work = reduce_with(self._groups.data, torch.zeros(1, dtype=torch.float32, device="cpu"), dist.ReduceOp.SUM)
            work.wait()
        except RuntimeError as error:
            raise self._on_error(error) from error

    def _close_order(self, failed: bool) -> None:
        order = self._order
        if isinstance(order, DecidingOrder):
            order.close()
            self._order_is_closed = order.wait_sent(0.5 if failed else _STOP_S)
            return
        order.wait_closed(0.5 if failed else self._timeout)
        self._order_is_closed = order.closed
        order.stop(_STOP_S)


def _whole(priority: int) -> int:
    if not is_whole(priority):
        raise OptionError("priority", priority, "a whole number")
    return priority


def _facts(tensor: object) -> str:
    if not isinstance(tensor, torch.Tensor):
        return f"a {type(tensor).__name__}"
    return f"shape {tuple(tensor.shape)}, {tensor.dtype}, on {tensor.device.type}"
