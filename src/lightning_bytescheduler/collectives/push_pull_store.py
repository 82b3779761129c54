"""``PushPullStore``: init, push and pull of named tensors, through parameter servers and the scheduler.

ByteScheduler's ScheduledKVStore (Peng et al., SOSP 2019) does this for MXNet. A push is only recorded. The pull of the
same key makes one task of both. It is cut into parts, which are sent by priority under the credit and summed by servers
(``push_pull.py``). Rank 0 decides what is sent next, as in a training, so ranks may pull in different orders.
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

from lightning_bytescheduler.checks import did_you_mean, options_by_name, require_size, require_text, require_whole
from lightning_bytescheduler.collectives.groups import SchedulerGroups
from lightning_bytescheduler.collectives.launch_order import order_of
from lightning_bytescheduler.collectives.operations import broadcast_from_first, reduce_with
from lightning_bytescheduler.collectives.push_pull import Placement, chosen_placement
from lightning_bytescheduler.collectives.route import Served
from lightning_bytescheduler.collectives.server_meeting import join_servers
from lightning_bytescheduler.collectives.summing_server import DTYPES
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
from lightning_bytescheduler.scheduler.task import CommTask, TaskKey

__all__ = ["PulledTensor", "PushPullStore"]

_STOP_S = 5.0
_MOMENT_S = 0.5


@dataclass(slots=True)
class _Key:
    number: int  # in the order of initialisation
    value: torch.Tensor  # result of a pull without a push
    pushed: tuple[torch.Tensor, int] | None = None  # and its priority
    round: int = 0  # number of pushes that were pulled
    kept: int = 0  # the round of ``value``: concurrent rounds may end in any order
    last: CommTask | None = None


class PulledTensor:
    """The result of a pull, once it has arrived."""

    def __init__(self, out: torch.Tensor, task: CommTask | None, timeout: float) -> None:
        self._out = out
        self._task = task
        self._timeout = timeout

    def wait(self) -> torch.Tensor:
        """Wait for the result, at most for the store's timeout.

        Returns:
            The tensor that was given as ``out``, or a new one.

        Raises:
            SchedulerTimeoutError: If it did not come in time.
            ServerFailedError: If a server has died.
            RankFailedError: If another rank has died.
        """
        if self._task is not None:
            self._task.wait(self._timeout)
        return self._out


@options_by_name
class PushPullStore:
    """Named tensors that all ranks of the default process group push to, and pull sums from.

    It is a collective in the sense of torch.distributed: all ranks make it at the same point, initialise the same keys
    in the same order, and push each key equally often. Otherwise each rank goes at its own pace. Tensors are in CPU
    memory. One thread at a time calls it.

    Args:
        servers: Number of servers on separate machines, each started by ``lightning-bytescheduler server``; with 0 each
            rank is also a server.
        placement: Assigns parts to servers: ``"balanced"``, by bytes, also when left out; or ``"mixed"``, as BytePS.
        partition_size: Largest part, in elements; rank 0's counts.
        credit: Most that may be in flight, in elements; rank 0's counts.
        timeout: Longest wait for servers and for one tensor.
        say: Called on rank 0 with a message when servers are missing.

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
        self._closed = self._failed = False
        # Pushes travel on the servers' group; the data group is for collectives of all ranks.
        self._groups = groups = SchedulerGroups.create(timeout=timeout, by_host=True)
        self._servers = join_servers(groups, servers, placement=how, timeout=timeout, say=say)
        self._push_pull = self._servers.push_pull
        self._order = order_of(groups.control, self._on_error, direct=True)
        self._core = ByteCore(partition_size=partition_size, credit=credit, order=self._order)
        self._route = Served(groups.data, self._on_error, self._push_pull)
        self._order.start(self._core.update_order)
        # A thread inside torch would abort the process when the interpreter ends.
        atexit.register(self._stop, failed=True)

    @property
    def placement(self) -> Placement:
        """Bytes that this rank has pushed to each server so far."""
        return self._push_pull.shares.so_far

    def init(self, key: str, value: torch.Tensor) -> None:
        """Set a key's value on all ranks to rank 0's, at once, whatever is queued or in flight.

        Args:
            key: A new key.
            value: CPU tensor; on other ranks it is filled with rank 0's, in place.

        Raises:
            OptionError: If the key exists.
            UnsupportedError: If servers cannot sum such tensors.
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
        """Record what this rank adds to a key; it is sent with the next pull of that key, as one task.

        Args:
            key: An initialised key.
            value: Tensor of the key's shape and dtype. Do not change it until the pull.
            priority: A lower number travels first.

        Raises:
            OptionError: If the key does not exist, or has another shape or dtype.
            TaskStateError: If it was pushed, and not pulled since.
        """
        known = self._known(key, value)
        if known.pushed is not None:
            raise TaskStateError(f"{key!r} was pushed and not pulled since. Pull it first.")
        known.pushed = value, require_whole("priority", priority, 0)

    def pull(self, key: str, out: torch.Tensor | None = None, priority: int | None = None) -> PulledTensor:
        """Begin to pull the sum of all ranks' pushes; without a push here, the key's last value.

        Without a push this waits for earlier pulls of the key; otherwise it returns at once.

        Args:
            key: An initialised key.
            out: Receives the result: contiguous, of the key's shape and dtype; a new tensor when left out. Do not use
                it before ``wait`` of the result has returned.
            priority: Replaces the push's priority.

        Raises:
            OptionError: If the key does not exist, or ``out`` does not fit it.
            BaseException: The store's error, if it has failed.
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
            urgency = require_whole("priority", priority, 0)
        with torch.no_grad():
            out.copy_(value)
        return PulledTensor(out, self._enqueue(key, known, out, urgency), self._timeout)

    def push_pull(
        self, key: str, value: torch.Tensor, out: torch.Tensor | None = None, priority: int = 0
    ) -> PulledTensor:
        """:meth:`push`, then :meth:`pull`."""
        self._known(key, *(() if out is None else (out,)))
        self.push(key, value, priority)
        return self.pull(key, out)

    def close(self) -> None:
        """Wait for what is in flight on any rank, then leave the servers and end all threads.

        All ranks call it; bounded, idempotent.
        """
        try:
            if not self._closed and not self._failed:
                self._core.drain(self._timeout)
                try:  # ranks that are servers serve until all are done
                    dist.barrier(self._groups.data)
                except RuntimeError as error:
                    raise self._on_error(error) from error
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

        def keep(task: CommTask) -> None:
            if task.error is None and task.key.step > known.kept:
                known.kept = task.key.step
                known.value.view(-1).copy_(buffer)

        task = CommTask(
            f"{key}, round {known.round + 1}",
            buffer.numel(),
            launch=partial(self._route.launch, buffer, operation, None),
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
        """Return the state of ``key``; checks that ``tensors`` have its shape and dtype."""
        self._check_open()
        known = self._keys.get(key)
        if known is None:
            raise OptionError("key", key, "one that was initialised", did_you_mean(key, self._keys))
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
        self._failed = True
        cause = self._core.abort_cause or self._servers.find_gone() or error
        if is_communication_error(cause):
            cause = RankFailedError(None, f"which one is not known; this broke here: {brief(error)}")
        if cause is not error:
            cause.__cause__ = error
        self._core.abort(cause)
        return cause

    def _stop(self, *, failed: bool) -> None:
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self._stop)
        in_order: list[bool] = []  # whether no rank waits for another decision
        steps: list[Callable[[], object]] = [
            lambda: self._core.shutdown(timeout=_STOP_S, drain=False),
            lambda: in_order.append(self._order.end(_MOMENT_S if failed else self._timeout)),
            lambda: self._servers.leave(idle=not failed and not self._core.in_flight),
            lambda: self._groups.destroy(data_idle=not failed, control_idle=any(in_order)),
            lambda: self._route.stop(_STOP_S),
        ]
        for step in steps:
            try:
                step()
            except Exception:
                if not failed:
                    raise


def _facts(tensor: object) -> str:
    if not isinstance(tensor, torch.Tensor):
        return f"a {type(tensor).__name__}"
    return f"shape {tuple(tensor.shape)}, {tensor.dtype}, on {tensor.device.type}"
