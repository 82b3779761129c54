"""A process group that replaces DDP's, and gives its collectives their place in the one launch order.

NCCL needs the same order of launches over all communicators of a device, on every rank. Gradients travel in rank 0's
order; collectives of DDP, Lightning and the model (buffers, barriers, metrics, statistics of a SyncBatchNorm) come in
program order. So if gradients travel on NCCL, all of them use the gradients' communicator, in one order. During a fit
this group is the default group: DDP takes it when it wraps the model, and ``torch.distributed`` uses it where no group
is named. Precedent for giving DDP a group written in Python: torchft.

There are two states, which all ranks change at the same point of their programs:

* *direct*: only the program launches, immediately (before the first step, and in steps taken as DDP takes them).
* *in order*: see :class:`~lightning_bytescheduler.collectives.routing_group.ForeignCollectives`.

A thread that calls a collective, also with ``async_op=True``, waits on the host until it is launched here, and gets the
backend's own work. So two ranks may wait for each other forever if one calls a collective before a ``send`` that the
other waits for first. The thread must never wait for a gradient of the step whose backward pass it is in
(``launch_order.py``). When a rank goes from in order to direct, all that it has submitted is launched, so its direct
launches come after all of that on each rank. On the way back, rank 0's decisions are launched when the collectives have
been submitted, which is after the direct launches.

Messages between two ranks (``send``, ``recv``) are not ordered, as not all ranks know of them; they go to the replaced
group. Collectives on other groups of the user are not ordered either.

*The order of foreign collectives* (DDP's, Lightning's, a model's). Each is a task without credit, named by its number
alone: the number of collectives that its process group has launched in order. Rank 0 puts it into its sequence and
sends it like any decision; the others launch the k-th when their own thread has submitted it.
:class:`~lightning_bytescheduler.scheduler.MixedOrder` says when rank 0 may, and ``launch_order.py`` why no rank waits
forever.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from lightning_bytescheduler.collectives.completion import wait_in_slices
from lightning_bytescheduler.collectives.launch_order import DecidingOrder
from lightning_bytescheduler.failures.standstill import break_connections
from lightning_bytescheduler.scheduler.core import ByteCore
from lightning_bytescheduler.scheduler.task import CommTask, SubCommTask, TaskKey
from lightning_bytescheduler.scheduler.threads import WorkThread

__all__ = ["KINDS", "ROUTED_BACKENDS", "ForeignCollectives", "RoutingGroup", "is_routed"]

log = logging.getLogger(__name__)

_FOREIGN = -1  # in place of a step
KINDS = (
    "allreduce",
    "allreduce_coalesced",
    "broadcast",
    "reduce",
    "allgather",
    "allgather_coalesced",
    "_allgather_base",
    "allgather_into_tensor_coalesced",
    "all_gather_single",
    "all_gather_single_coalesced",
    "gather",
    "scatter",
    "reduce_scatter",
    "_reduce_scatter_base",
    "reduce_scatter_tensor_coalesced",
    "reduce_scatter_single",
    "reduce_scatter_single_coalesced",
    "alltoall",
    "alltoall_base",
    "all_to_all_single",
    "barrier",
)
"""Ordered collectives; a decision carries the index in this tuple, so that differences between ranks are found."""


class ForeignCollectives:
    """One rank's foreign collectives, in the order in which they are submitted.

    Args:
        report: Called after each submission with their number here, as rank 0 has to learn what all have submitted.

    Attributes:
        launched: Number of collectives that are launched here.
    """

    def __init__(self, core: ByteCore, report: Callable[[int], None]) -> None:
        self._core = core
        self._report = report
        self._lock = threading.Lock()
        self._submitted = self.launched = 0

    @property
    def submitted(self) -> int:
        """Number of submitted collectives."""
        return self._submitted

    def submit(self, kind: str, launch: Callable[[], None]) -> CommTask:
        """Call ``launch`` when its turn comes, on the launching thread.

        Args:
            kind: One of :data:`KINDS`.
            launch: Starts the collective; must not raise or wait for the network.

        Returns:
            The task, which ends when the collective is launched.

        Raises:
            BaseException: Why the core was stopped.
        """

        def start(sub_task: SubCommTask) -> None:
            launch()
            self.launched += 1
            sub_task.notify_finish()

        with self._lock:  # numbers are in the order of admission
            number = self._submitted + 1
            # The size stands for the kind, as orders compare sizes; from 1, as sizes are positive.
            task = CommTask(
                f"{kind} {number}",
                1 + KINDS.index(kind),
                launch=start,
                key=TaskKey(_FOREIGN, bucket=number),
                takes_credit=False,
            )
            self._core.enqueue(task)
            self._submitted = number
            self._report(number)
        task.notify_ready()
        self._core.launch_allowed()
        return task


ROUTED_BACKENDS = {"nccl"}
"""Backends that need one order; tests add gloo."""

_LOOK_S = 0.01

Start = Callable[[dist.ProcessGroup], dist.Work]


def is_routed(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether collectives of ``group`` on ``device`` need one order with gradients."""
    return group._get_backend(device).name() in ROUTED_BACKENDS


class RoutingGroup(dist.ProcessGroup):
    """Replaces the default group; see the module.

    Args:
        core: Its abort ends all waits for a turn.
        order: The core's order; rank 0's is a :class:`DecidingOrder`.
        timeout: Longest wait for a turn, in seconds.

    Attributes:
        in_order: Whether collectives wait for their turn in rank 0's order; changed on all ranks at the same point of
            their programs, as for a step taken as DDP's.
    """

    def __init__(
        self,
        default: dist.ProcessGroup,
        carrier: dist.ProcessGroup,
        reports: dist.ProcessGroup,
        *,
        core: ByteCore,
        order: object,
        device: torch.device,
        on_error: Callable[[BaseException], object],
        timeout: float,
        cuda: Any = torch.cuda,
    ) -> None:
        super().__init__(default.rank(), default.size())  # type: ignore[call-arg]
        self.default = default
        self.carrier = carrier
        self._timeout = timeout
        self._on_error = on_error
        self._device = device
        self._cuda = cuda
        self._stream = cuda.Stream(device, priority=-1) if device.type == "cuda" else None
        self._reports = reports
        self._foreign = ForeignCollectives(core, self._report)
        self._core = core
        self._order = order
        self.in_order = False
        self._calls = 0
        self._lock = threading.Lock()  # guards works under way, which any thread may begin
        self._under_way: deque[dist.Work] = deque()
        self._said_sent: deque[dist.Work] = deque()
        self._heard = 0
        self._stopping = threading.Event()
        self._listener = WorkThread("reports")  # on rank 0
        # Methods that are not overridden, as those for messages, find the backends of the replaced group.
        for kind in default._device_types:
            backend = default._get_backend(kind)
            self._register_backend(kind, _type_of(backend), backend)
        self._set_default_backend(_type_of(default._get_backend(device)))
        if default.bound_device_id is not None:
            self.bound_device_id = default.bound_device_id

    # ------------------------------------------------------------------ state

    def install(self) -> None:
        """Become the default group, on all ranks at the same point."""
        world, default = distributed_c10d._world, self.default
        for facts in _facts(world):
            if default in facts:
                facts[self] = facts[default]
        self._set_group_name(default.group_name)
        self._set_group_desc(default.group_desc)
        _rename(default.group_name, self)
        distributed_c10d._update_default_pg(self)
        self._mention_other_groups()

    def uninstall(self, *, failed: bool, timeout: float) -> None:
        """Restore the default group once all that was submitted has ended; bounded, idempotent.

        Args:
            failed: Whether to skip all waits.
            timeout: Longest wait, in seconds.
        """
        if dist.group.WORLD is self:
            distributed_c10d._update_default_pg(self.default)
            _rename(self.default.group_name, self.default)
            for facts in _facts(distributed_c10d._world):
                facts.pop(self, None)
        deadline = time.monotonic() + timeout
        while not failed and not self.idle and time.monotonic() < deadline:
            time.sleep(_LOOK_S)
        self.in_order = False
        self._stopping.set()
        self._listener.stop(max(0.1, deadline - time.monotonic()), drop=True)
        self.carrier = self.default  # for code that has kept this group

    @property
    def idle(self) -> bool:
        """Whether nothing is in flight, and all that was submitted has been launched here; for any thread."""
        submitted = self._foreign.submitted
        heard = not isinstance(self._order, DecidingOrder) or self._heard == submitted
        return heard and self._foreign.launched == submitted and self._have_ended(self._under_way, self._said_sent)

    def _have_ended(self, *of: deque[dist.Work]) -> bool:
        with self._lock:
            return all(work.is_completed() for works in of for work in works)

    def _keep(self, works: deque[dist.Work], work: dist.Work) -> dist.Work:
        """Keep ``work`` until it has ended, and from before its caller waits: see :meth:`call_off`."""
        with self._lock:
            while works and works[0].is_completed():
                works.popleft()
            if work is not None:  # nothing was started
                works.append(work)
        return work

    def call_off(self) -> None:
        """End all waits for operations in flight, as another rank has failed; for any thread."""
        if not self._have_ended(self._under_way):
            break_connections(self.carrier)

    # ------------------------------------------------------------------ called by torch

    def getBackendName(self) -> str:
        """Return the name of the replaced group's backend."""
        name: str = self.default._get_backend(self._device).name()
        return name

    name = _get_backend_name = getBackendName

    def _get_sequence_number_for_group(self) -> int:
        """Return the number of collectives that this rank has begun; compared when ranks wait for each other."""
        return self._calls

    def _collective(self, kind: str, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> dist.Work:
        for options in (*arguments, *keywords.values()):
            if hasattr(options, "asyncOp"):
                options.asyncOp = True  # use the communicator's own stream

        def start(group: dist.ProcessGroup) -> dist.Work:
            work: dist.Work = getattr(group, kind)(*arguments, **keywords)
            return work

        return self._route(kind, start)

    def _route(self, kind: str, start: Start) -> dist.Work:
        self._calls += 1
        if not self.in_order:
            return self._keep(self._under_way, start(self.carrier))
        event = None
        if self._stream is not None:
            event = self._cuda.Event()
            event.record(self._cuda.current_stream(self._device))
        outcome: list[dist.Work | BaseException] = []

        def launch() -> None:
            """On any thread; the collective's input is complete on the device after ``event``."""
            try:
                with nullcontext() if self._stream is None else self._cuda.stream(self._stream):
                    if self._stream is not None:
                        self._stream.wait_event(event)
                    outcome.append(self._keep(self._under_way, start(self.carrier)))
            except BaseException as error:  # for the caller alone
                outcome.append(error)

        self._foreign.submit(kind, launch).wait(self._timeout)
        (found,) = outcome
        if isinstance(found, BaseException):
            raise found
        return found

    # ------------------------------------------------------------------ reports

    def _report(self, count: int) -> None:
        """Report to rank 0 that this rank has submitted ``count``: an asynchronous barrier ends when all ranks have."""
        work = self._reports.barrier()
        if isinstance(self._order, DecidingOrder):
            self._listener.put(partial(self._hear, self._order, work, count), self._deaf)
            return
        self._keep(self._said_sent, work)

    def _hear(self, order: DecidingOrder, work: dist.Work, count: int) -> None:
        if wait_in_slices(work, self._stopping):
            self._heard = count
            self._core.update_order(partial(order.submitted_everywhere, count))

    def _deaf(self, error: BaseException) -> None:
        if not self._stopping.is_set():
            self._on_error(error)

    def _mention_other_groups(self) -> None:
        """Warn of other NCCL groups. NCCL's implicit order is recommended but not relied on: ranks may differ in it."""
        own = {id(self), id(self.default), id(self.carrier), id(self._reports)}
        groups = [group for group in distributed_c10d._world.pg_map if id(group) not in own and group.size() > 1]
        groups = [group for group in groups if self._device.type in {device.type for device in group._device_types}]
        others = [group for group in groups if group._get_backend(self._device).name() == "nccl"]
        if others and self.rank() == 0:
            log.warning(
                "There are %d more process groups on %s. Gradients and the default group's collectives have one order "
                "on all ranks, but collectives of these groups have not, so a training can come to a standstill: call "
                "them while no gradients travel, after trainer.strategy.flush(), or use the default group. "
                "NCCL_LAUNCH_ORDER_IMPLICIT=1 (NCCL 2.26) makes that less likely.",
                len(others),
                self.getBackendName(),
            )


def _routed(kind: str) -> Callable[..., dist.Work]:
    def collective(self: RoutingGroup, *arguments: Any, **keywords: Any) -> dist.Work:
        return self._collective(kind, arguments, keywords)

    collective.__name__ = kind
    collective.__doc__ = "See torch."
    return collective


for _kind in KINDS:
    if hasattr(dist.ProcessGroup, _kind):
        setattr(RoutingGroup, _kind, _routed(_kind))


def _facts(world: Any) -> Iterator[dict[Any, Any]]:
    yield from (world.pg_map, world.pg_names, world.pg_group_ranks, world.pg_backend_config, world.pg_to_tag)


def _rename(name: str, group: dist.ProcessGroup) -> None:
    """Make compiled collectives, which name their group, use ``group``."""
    known: Any = torch._C._distributed_c10d
    known._unregister_process_group(name)
    known._register_process_group(name, group)


def _type_of(backend: Any) -> Any:
    kinds = dist.ProcessGroup.BackendType
    return {"nccl": kinds.NCCL, "gloo": kinds.GLOO}.get(backend.name(), kinds.CUSTOM)
