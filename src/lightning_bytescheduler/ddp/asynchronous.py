"""``staleness``: workers step on their own, and push what their steps changed to parameter servers. Not exact.

The model is not wrapped with DDP: gradients stay where they are. After each optimizer step the worker pushes its delta
and pulls the weights, see ``collectives/delta_server.py``; optimizers' states stay its own. So the training thread
waits for its own two transfers, and for others where it would be too far ahead.

All ranks have the same weights, and wait for each other, where they do something together: when the training begins and
ends, at the end of an epoch, before a validation, and when a checkpoint is made. Buffers are the first rank's there, as
with DDP. In between nothing of Lightning waits for other ranks: its broadcast before each batch is left out. Where the
user's own step calls a collective, such as ``self.log(sync_dist=True, on_step=True)``, it waits as it always does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import nn

from lightning_bytescheduler.collectives.delta_server import DeltaExchange
from lightning_bytescheduler.collectives.groups import SchedulerGroups
from lightning_bytescheduler.collectives.server_meeting import ServersFound, meet_servers
from lightning_bytescheduler.collectives.summing_server import DTYPES
from lightning_bytescheduler.ddp.parameter_servers import ServerOptions, explain_timeout
from lightning_bytescheduler.ddp.plan import OverlapPlan
from lightning_bytescheduler.exceptions import UnsupportedError
from lightning_bytescheduler.failures.board import FaultBoard
from lightning_bytescheduler.failures.messages import is_communication_error

__all__ = ["AsynchronousTraining"]

_TIMEOUT = timedelta(minutes=30)
_Result = TypeVar("_Result")


class AsynchronousTraining:
    """One rank's part in it, for one fit; every rank makes it at the same point.

    Args:
        module: Whose parameters that require gradients are trained, on a CPU; filled with the first rank's.
        options: With a staleness.
        board: Asked whether waiting is in vain.
        timeout: Of the wait for servers, and of each exchange; half an hour if ``None``.
        say: Told what the user should know, on rank 0.

    Raises:
        UnsupportedError: If servers cannot keep such weights.
        SchedulerTimeoutError: If too few servers have come in time.
        RanksDifferError: If a server has another version.
        ServerFailedError: If one has died.
    """

    def __init__(
        self,
        module: nn.Module,
        options: ServerOptions,
        board: FaultBoard,
        *,
        timeout: timedelta | None,
        say: Callable[[str], object],
    ) -> None:
        parameters = [p for p in module.parameters() if p.requires_grad]
        for one in parameters:
            if one.device.type != "cpu" or one.dtype not in DTYPES:
                raise UnsupportedError(
                    f"Parameter servers keep weights on a CPU, of {', '.join(map(str, DTYPES))}, and one of "
                    f"{type(module).__name__}'s is of {one.dtype} on {one.device.type}. Leave staleness and "
                    "architecture out."
                )
        if not parameters:
            raise UnsupportedError(f"No parameter of {type(module).__name__} requires gradients: nothing is to train.")
        by_type = {dtype: [p for p in parameters if p.dtype == dtype] for dtype in DTYPES}
        self._parameters = [members for members in by_type.values() if members]
        self._module = module
        self._groups = groups = SchedulerGroups.create(timeout=timeout)
        self._staleness = options.staleness or 0
        servers, timeout = min(options.servers, groups.world_size), timeout or _TIMEOUT

        def failure() -> BaseException | None:
            return board.diagnose(RuntimeError("c10d: the store is gone")) if board.hopeless else None

        self._idle = True
        self._found: ServersFound
        self._found, group, _ = meet_servers(
            groups, servers, timeout=timeout, failure=failure, say=say, staleness=self._staleness
        )
        self._exchange = self._explained(
            lambda: DeltaExchange(
                group, workers=groups.world_size, servers=servers, weights=self._flat(), timeout=timeout
            )
        )
        self._put(self._exchange.weights)
        self._frozen = {name: p for name, p in module.named_parameters() if not p.requires_grad}
        for parameter in self._frozen.values():
            dist.broadcast(parameter.detach(), src=0)  # as DDP does when it wraps a model
        self._share_buffers()

    @property
    def plan(self) -> OverlapPlan:
        """What is said of it."""
        return OverlapPlan(steps="asynchronous", staleness=self._staleness)

    def step_taken(self) -> None:
        """An optimizer has stepped: push what that changed, and pull.

        Raises:
            RankFailedError: If a server or a rank has died, or stands still beyond the timeout.
            UnsupportedError: If a parameter is trained that servers do not keep.
        """
        for name, parameter in self._frozen.items():
            if parameter.requires_grad:
                raise UnsupportedError(
                    f"Parameter {name!r} requires gradients now, and did not when training began, so that servers do "
                    "not keep it, and each rank would train its own. Freeze it in on_fit_start, not before, or leave "
                    "staleness out."
                )
        weights = self._flat()
        self._explained(lambda: self._exchange.push_pull(weights))
        self._put(weights)

    def meet(self) -> None:
        """Wait for all ranks, and have the same weights and buffers as they; all call it at the same point.

        Raises:
            RankFailedError: As of :meth:`step_taken`.
        """
        self._explained(self._exchange.meet)
        self._put(self._exchange.weights)
        self._share_buffers()

    def close(self, *, failed: bool) -> None:
        """Leave the servers; bounded."""
        idle = self._idle and not failed
        try:
            self._exchange.close(idle=idle)
        finally:
            self._found.close()
            self._groups.destroy(data_idle=idle, control_idle=idle)

    def _explained(self, work: Callable[[], _Result]) -> _Result:
        """Do it; an error names the server that has died, has refused it, or stands still."""
        try:
            return work()
        except RuntimeError as error:
            self._idle = False
            cause: BaseException | None = self._found.find_gone() if is_communication_error(error) else None
            cause = cause or explain_timeout(error, self._found)
            if cause is error:
                raise
            raise cause from error

    def _flat(self) -> list[torch.Tensor]:
        with torch.no_grad():
            return [torch.cat([p.detach().reshape(-1) for p in members]) for members in self._parameters]

    def _put(self, weights: Sequence[torch.Tensor]) -> None:
        with torch.no_grad():
            for members, flat in zip(self._parameters, weights, strict=True):
                for parameter, part in zip(members, flat.split([p.numel() for p in members]), strict=True):
                    parameter.copy_(part.view_as(parameter))

    def _share_buffers(self) -> None:
        for buffer in self._module.buffers():
            dist.broadcast(buffer, src=0)
