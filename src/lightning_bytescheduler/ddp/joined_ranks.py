"""A DDP strategy whose ranks learn of each other's failures: what Trainer's and Fabric's have in common.

A failure is published before anything else is done about it, and what others break off because of it names the rank.
"""

from __future__ import annotations

import atexit
import os
import socket
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch
import torch.distributed as dist
from msgspec.structs import replace
from torch import Tensor
from torch.distributed.rendezvous import rendezvous

from lightning_bytescheduler.collectives.interface import VARIABLE, choose_interface
from lightning_bytescheduler.ddp.runtime import SchedulerRuntime
from lightning_bytescheduler.ddp.whole_file import digest_of
from lightning_bytescheduler.exceptions import RankFailedError
from lightning_bytescheduler.failures.board import FaultBoard
from lightning_bytescheduler.failures.messages import phrase
from lightning_bytescheduler.failures.startup_check import Introduction, RendezvousWatch, hold_roll_call, require_alike
from lightning_bytescheduler.failures.store import agent_keeps_store, name_incarnation
from lightning_bytescheduler.lightning_api import (
    SIGTERMException,
    _init_dist_connection,
    rank_zero_info,
    rank_zero_warn,
)
from lightning_bytescheduler.scheduler.options import SchedulerOptions

if TYPE_CHECKING:
    from lightning_bytescheduler.lightning_api import ClusterEnvironment

__all__ = ["JoinedRanks"]

_T = TypeVar("_T")
_TIMEOUT_S = 1800.0
_NEXT = "what comes next"
_ONE_CHECKPOINT = (
    "Have each rank resume from the same file: copy it to every machine, or use a folder that all of them share. In "
    "Fabric, what one rank alone looks at is read with fabric.load_raw or torch.load."
)


class JoinedRanks:
    """Mixed into a DDP strategy of Lightning, before it."""

    sigterm_patience_s: ClassVar[float] = 0.0
    """How long other ranks may go on when this one ends by a SIGTERM, in seconds."""
    # Of Lightning's strategy.
    cluster_environment: ClusterEnvironment | None
    num_nodes: int
    num_processes: int
    global_rank: int
    root_device: torch.device
    _process_group_backend: str | None
    _get_process_group_backend: Callable[[], str]
    _ddp_kwargs: dict[str, Any]
    _timeout: timedelta | None

    _board: FaultBoard | None = None
    _failed: bool = False
    _just_connected: bool = False

    def _runtimes(self) -> Iterable[SchedulerRuntime]:
        """The schedulers that are at work."""
        return ()

    # ------------------------------------------------------------------ who takes part

    def _know_ranks(self) -> None:
        """Have the cluster environment know this rank, and how many there are."""
        raise NotImplementedError

    @contextmanager
    def _watched_rendezvous(self, strategy: str, ranks: int) -> Iterator[RendezvousWatch | None]:
        """Around the wait for the other ranks: who is missing is said, and that one of them failed."""
        environment = self.cluster_environment
        self._just_connected = False
        if environment is None or ranks == 1 or dist.is_initialized():
            yield None
            return
        self._know_ranks()
        if self.num_nodes > 1:
            interface = choose_interface(environment.main_address)
            if interface is not None:
                rank_zero_info(
                    f"bytescheduler: ranks connect through {interface}, which leads to {environment.main_address}, as "
                    f"this machine's name does not ({VARIABLE} chooses another one)."
                )
        # The processes that this one has launched would look for a store for half an hour that it could not open.
        orphans = list(getattr(getattr(self, "_launcher", None), "procs", ()))
        for process in orphans:
            atexit.register(process.kill)
        with RendezvousWatch(
            environment.main_address, environment.main_port, rank=self.global_rank, world_size=ranks, strategy=strategy
        ) as watch:
            yield watch
        for process in orphans:
            atexit.unregister(process.kill)
        # Each rank of gloo has connected to each other one; others may connect at the first collective.
        self._just_connected |= dist.is_initialized() and dist.get_backend() == "gloo"

    def _connect(self, as_lightning: Callable[[], object]) -> None:
        """Meet the other ranks: by a store of this start's own where there is one, else as Lightning does."""
        ranks = self.num_nodes * self.num_processes
        with self._watched_rendezvous("bytescheduler", ranks) as watch:
            store, environment = self._own_store(ranks, watch), self.cluster_environment
            if store is not None and environment is not None:  # else Lightning's part, which then sees that it is done
                backend = self._get_process_group_backend()
                device = self.root_device if self.root_device.type != "cpu" else None
                _init_dist_connection(environment, backend, timeout=self._timeout, device_id=device, store=store)
            as_lightning()

    def _facts_of(self, options: SchedulerOptions) -> dict[str, object]:
        """What has to be the same on all ranks."""
        return {
            "number of processes": dist.get_world_size(),
            "process_group_backend": self._process_group_backend,
            "partition_size": options.partition_size,
            "credit": options.credit,
            "cross_barrier": options.cross_barrier,
            "mode": options.mode,
            "policy": options.policy.name,
            **self._ddp_kwargs,
        }

    def _own_store(self, ranks: int, watch: RendezvousWatch | None) -> dist.Store | None:
        """A part of the store of torchrun's agent that no earlier start has written to; ``None`` without that agent.

        Args:
            ranks: How many there are.
            watch: Is told what the part is called.
        """
        environment = self.cluster_environment
        if environment is None or dist.is_initialized() or not agent_keeps_store():
            return None
        self._know_ranks()
        os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = environment.main_address, str(environment.main_port)
        timeout = timedelta(seconds=self._longest_wait_s)
        store = next(rendezvous("env://", rank=self.global_rank, world_size=ranks, timeout=timeout))[0]
        name = name_incarnation(
            store,
            rank=self.global_rank,
            world_size=ranks,
            timeout=self._longest_wait_s,
            failure=lambda: None if watch is None else watch.difference,
        )
        if watch is not None:
            watch.meet_as(name)
        self._just_connected = True
        return dist.PrefixStore(name, store)

    def _meet(self, what: str, own: Introduction, *, connected: bool = False, **way_out: str) -> None:
        """Make sure with all other ranks that they are in the same training.

        Args:
            what: Is compared.
            own: What this rank has to say of it.
            connected: Whether they come from connecting to each other, and from nowhere else.
            **way_out: See :func:`require_alike`.
        """
        board = self._board
        if board is None:
            return

        with self._explained():
            ranks = hold_roll_call(
                board.next_meeting(),
                replace(own, facts={_NEXT: what, **own.facts}),
                world_size=board.world_size,
                timeout=self._longest_wait_s,
                failure=self._no_hope,
                connected=connected,
            )
            require_alike([replace(one, facts={_NEXT: one.facts[_NEXT]}, noted={}) for one in ranks])
            require_alike(ranks, warn=rank_zero_warn, **way_out)

    def _compare_checkpoints(self, path: str | Path | None, written: str = "", **facts: str) -> None:
        """Make sure with all other ranks that they go on from the same checkpoint.

        Args:
            path: This rank's; ``None`` if it has none.
            written: When that was written.
            **facts: What has to be the same besides.
        """
        if self._board is not None:
            host, found = socket.gethostname(), "none"
            if path is not None:
                host, found = f"{host}: {path}", f"one with digest {digest_of(path)}{written}"
            own = Introduction(rank=self.global_rank, facts={"checkpoint": found, **facts}, host=host)
            self._meet("the checkpoint", own, way_out=_ONE_CHECKPOINT)

    @property
    def _longest_wait_s(self) -> float:
        return _TIMEOUT_S if self._timeout is None else self._timeout.total_seconds()

    def _no_hope(self) -> BaseException | None:
        """Why nothing is to be expected of the other ranks any more, if so."""
        board = self._board
        if board is None or not board.hopeless:
            return None
        return board.diagnose(RuntimeError("c10d: the store is gone"))

    # ------------------------------------------------------------------ failures

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """See DDPStrategy. After a failure nobody is waited for: a checkpoint on exception must not hang."""
        if not self._failed:
            with self._explained():
                super().barrier(*args, **kwargs)  # type: ignore[misc]

    def broadcast(self, obj: _T, src: int = 0) -> _T:
        """See DDPStrategy. After a failure this rank's own ``obj`` has to do."""
        if self._failed:
            return obj
        with self._explained():
            sent: _T = super().broadcast(obj, src)  # type: ignore[misc]
        return sent

    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        """See DDPStrategy."""
        with self._explained():
            gathered: Tensor = super().all_gather(tensor, group, sync_grads)  # type: ignore[misc]
        return gathered

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """See DDPStrategy."""
        with self._explained():
            agreed: bool = super().reduce_boolean_decision(decision, all)  # type: ignore[misc]
        return agreed

    def publish_failure(self, exception: BaseException) -> None:
        """Tell the other ranks why this one fails, or say here which other rank is at fault; once."""
        if self._failed:
            return
        self._failed = True
        board = self._board
        if board is None:
            return
        board.take_over()
        cause = self._explain(exception)
        if not isinstance(cause, RankFailedError):
            board.publish(cause, patience=self.sigterm_patience_s if isinstance(cause, SIGTERMException) else 0.0)
        if cause is not exception and hasattr(exception, "add_note"):
            exception.add_note(str(cause))
        for runtime in self._runtimes():
            runtime.fail(cause)
        self._end_with(cause)
        board.close()  # here, as teardown is skipped when another callback's on_exception raises

    def _end_with(self, cause: BaseException) -> None:
        """End what else this rank does with the others, because of ``cause``."""

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Turn the consequence of another rank's failure into an error that names the rank."""
        try:
            yield
        except Exception as error:
            cause = self._explain(error)
            if cause is error:
                raise
            # DDP's reducer passes what its hook raised on as words of its own.
            raise cause from (None if str(cause) in str(error) else error)

    def _explain(self, error: BaseException) -> BaseException:
        runtimes = list(self._runtimes())
        for runtime in runtimes:
            explained = runtime.explain(error)
            if explained is not error:
                return self._ending(explained)
        return self._ending(error if runtimes or self._board is None else self._board.explain(error))

    def _ending(self, error: BaseException) -> BaseException:
        """``error``; or this rank's own end, where it has got a SIGTERM like the rank that ``error`` names."""
        elsewhere = isinstance(error, RankFailedError) and error.cause == phrase(SIGTERMException())
        return SIGTERMException() if elsewhere and self._got_sigterm() else error

    def _got_sigterm(self) -> bool:
        """Whether Lightning is to end this rank, once it comes to it."""
        module = getattr(self, "lightning_module", None)
        trainer = None if module is None else module._trainer
        return trainer is not None and bool(trainer.received_sigterm)
