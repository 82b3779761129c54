"""DDP's strategy on ranks that learn of each other's failures, and may leave their gradients to ByteScheduler.

A failure is published before anything else is done about it, and what others break off because of it names the rank.
That is what Trainer's and Fabric's strategies have in common (:class:`JoinedRanks`).

With Lightning's launchers for processes that the main process starts and joins (spawn, fork), Lightning calls
``on_exception`` and tears down in the main process, when the workers are gone: the other ranks have to hear of a
failure from the worker it happens in, before it dies.

Checkpoints are whole or not there, whenever the process that writes them is killed. Lightning writes to the system's
folder for temporary files and moves the file from there. Where that is on another disk than the checkpoints, as it is
where several machines share those, moving is copying: a kill meanwhile leaves half a checkpoint in the place of the
last one. So it is moved to a name of its own beside it, and renamed.
"""

from __future__ import annotations

import atexit
import os
import socket
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import fsspec
import torch
import torch.distributed as dist
from msgspec.structs import replace
from torch import Tensor, nn
from torch.distributed.rendezvous import rendezvous
from torch.optim import Optimizer

from lightning_bytescheduler.checks import unknown_variables
from lightning_bytescheduler.collectives.groups import VARIABLE, choose_interface
from lightning_bytescheduler.ddp.ddp_arguments import check_launch_options
from lightning_bytescheduler.ddp.fit_position import FitPosition
from lightning_bytescheduler.ddp.runtime import SchedulerRuntime
from lightning_bytescheduler.ddp.scheduled_gradients import ScheduledGradients
from lightning_bytescheduler.ddp.sigterm import ends_by_sigterm, sigterm_ends_at_once
from lightning_bytescheduler.exceptions import RankFailedError, RanksDivergedError
from lightning_bytescheduler.failures.board import FaultBoard
from lightning_bytescheduler.failures.messages import phrase
from lightning_bytescheduler.failures.startup_check import Introduction, RendezvousWatch, hold_roll_call, require_alike
from lightning_bytescheduler.failures.store import agent_keeps_store, name_incarnation
from lightning_bytescheduler.lightning_api import (
    PACKAGE,
    ClusterEnvironment,
    DDPStrategy,
    SIGTERMException,
    TorchCheckpointIO,
    _init_dist_connection,
    _MultiProcessingLauncher,
    pl,
    rank_zero_info,
    rank_zero_warn,
)
from lightning_bytescheduler.scheduler.options import SchedulerOptions

__all__ = [
    "COMPRESSION",
    "OUTER_STATE",
    "JoinedRanks",
    "PublishesFailures",
    "PublishingLauncher",
    "RankStrategy",
    "callbacks_of",
    "digest_of",
    "written_whole",
]

_T = TypeVar("_T")
_TIMEOUT_S = 1800.0
_NEXT = "what comes next"
_ONE_CHECKPOINT = (
    "Have each rank resume from the same file: copy it to every machine, or use a folder that all of them share. In "
    "Fabric, what one rank alone looks at is read with fabric.load_raw or torch.load."
)

COMPRESSION = "lightning_bytescheduler.compression"
"""Where a checkpoint has what error feedback has left to be sent."""
OUTER_STATE = "lightning_bytescheduler.diloco"
"""Where a checkpoint of ``diloco`` has what ``bytescheduler`` has no use for."""

_OUTCOME = "lightning_bytescheduler"


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

    def end_of_worker(self) -> None:
        """What a process that a launcher has started was to do is done."""

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


class _Outcome:
    """Nothing that Lightning looks into for tensors to move: it would change what cannot be changed.

    Args:
        of_fit: What the strategy has to tell.
    """

    def __init__(self, of_fit: Any) -> None:
        self.of_fit = of_fit


class PublishesFailures:
    """Mixed into a launcher, before it: what a function fails with is told to the other ranks."""

    _strategy: Any

    def _wrapping_function(self, *args: Any, **kwargs: Any) -> None:
        try:
            super()._wrapping_function(*args, **kwargs)  # type: ignore[misc]
            self._strategy.end_of_worker()
        except BaseException as error:
            self._strategy.publish_failure(error)
            raise


class PublishingLauncher(PublishesFailures, _MultiProcessingLauncher):
    """See Lightning's launcher.

    Args:
        strategy: Told about failures in each worker; pickled into it with the Trainer.
        start_method: See Lightning's launcher.
    """

    def get_extra_results(self, trainer: pl.Trainer) -> dict[str, Any]:
        """In rank 0: what the main process is told of the fit."""
        return {**super().get_extra_results(trainer), _OUTCOME: _Outcome(self._strategy.outcome())}

    def update_main_process_results(self, trainer: pl.Trainer, extra: dict[str, Any]) -> None:
        """In the main process, which took no step itself."""
        super().update_main_process_results(trainer, extra)
        self._strategy.remember(extra[_OUTCOME].of_fit)


_said: set[str] = set()  # of the environment, once in a process


class RankStrategy(JoinedRanks, DDPStrategy):
    """What both strategies of this package do in a step, and with a failure.

    Args:
        **options: See DDPStrategy.
    """

    example_option: ClassVar[str] = ""
    """An option of the strategy, with a value, as messages show it."""

    def __init__(self, **options: Any) -> None:
        self._position: FitPosition | None = None  # where all ranks train together
        self._gradients: ScheduledGradients | None = None  # where ByteScheduler carries them
        self._checkpoint: tuple[Any, str] | None = None  # a checkpoint's path, and where it was written
        check_launch_options(options, strategy=type(self).__name__, example=self.example_option)
        for sentence in unknown_variables(os.environ):
            if sentence not in _said:
                _said.add(sentence)
                rank_zero_warn(sentence)
        super().__init__(**options)

    def __repr__(self) -> str:
        # The other package's Trainer takes it for a wrong name, and says no more than this.
        return f"<{type(self).__name__} of {PACKAGE!r}>"

    def _configure_launcher(self) -> None:
        super()._configure_launcher()
        if isinstance(self._launcher, _MultiProcessingLauncher):
            self._launcher = PublishingLauncher(self, start_method=self._start_method)  # type: ignore[arg-type]

    def outcome(self) -> Any:
        """What is known of a fit when it is over, for a main process that starts ranks and is none itself."""
        return None

    def remember(self, outcome: Any) -> None:
        """Know in the main process what rank 0 found."""

    def _know_ranks(self) -> None:
        self.set_world_ranks()

    def setup_environment(self) -> None:
        """See DDPStrategy."""
        self._checkpoint = None  # a fit that failed may have loaded it
        super().setup_environment()

    def setup(self, trainer: pl.Trainer) -> None:
        """See DDPStrategy."""
        with sigterm_ends_at_once(self.cluster_environment):
            super().setup(trainer)

    # ------------------------------------------------------------------ one step

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """See DDPStrategy."""
        batch = args[0] if args else next(iter(kwargs.values()), None)
        with self._explained(), nullcontext() if self._gradients is None else self._gradients.forward(batch):
            return super().training_step(*args, **kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """See DDPStrategy."""
        if self._gradients is not None:
            self._gradients.validate()
        with self._explained():
            return super().validation_step(*args, **kwargs)

    def count_epoch(self) -> None:
        """An epoch begins."""
        if self._position is not None:
            self._position.begin_epoch()
        if self._gradients is not None:
            self._gradients.begin_epoch()

    def count_batch(self) -> None:
        """A batch begins, unless the ranks have been found to wait for each other."""
        if self._board is not None and isinstance(self._board.fault, RanksDivergedError):
            raise self._board.fault  # what came back from a collective that was called off is not to be trained on
        if self._position is not None:
            self._position.begin_batch()

    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """See DDPStrategy."""
        if self._gradients is not None and self._gradients.leaves_out():
            return closure_loss
        with self._explained(), nullcontext() if self._gradients is None else self._gradients.backward(closure_loss):
            return super().backward(closure_loss, optimizer, *args, **kwargs)

    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: pl.LightningModule | nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run the closure; defer the step where its gradients are still on their way. See DDPStrategy."""
        step = super().optimizer_step
        if self._gradients is None:
            return step(optimizer, closure, model, **kwargs)
        with self._explained():
            return self._gradients.step(
                lambda closure: step(optimizer, closure, model, **kwargs), optimizer, closure, deferrable=not kwargs
            )

    def _register_ddp_hooks(self) -> None:
        if self._gradients is None:
            super()._register_ddp_hooks()
        else:
            self._gradients.take_over(self.model)

    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """See DDPStrategy."""
        checkpoint: dict[str, Any] = super().load_checkpoint(checkpoint_path, *args, **kwargs)
        self._checkpoint = checkpoint_path, f" of epoch {checkpoint.get('epoch')}, step {checkpoint.get('global_step')}"
        return checkpoint

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """See DDPStrategy. What was there before is replaced by a whole file."""
        if not self.is_global_zero:
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        with written_whole(self.checkpoint_io, filepath) as path:
            super().save_checkpoint(checkpoint, path, storage_options)

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """See DDPStrategy. Ranks that have restored compare checkpoints, before any of them validates or trains."""
        # Lightning comes here whether it had a checkpoint or not.
        if args[:1] == ("_CheckpointConnector.resume_end",) and not self._failed:
            (path, written), self._checkpoint = self._checkpoint or (None, ""), None
            self._compare_checkpoints(path, written, **({} if self._position is None else self._position.reached))
        super().barrier(*args, **kwargs)

    # ------------------------------------------------------------------ failures

    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: Any = "mean") -> Any:
        """See DDPStrategy."""
        with self._explained():
            return super().reduce(tensor, group, reduce_op)

    def on_exception(self, exception: BaseException) -> None:
        """See DDPStrategy."""
        self.publish_failure(exception)

    def publish_failure(self, exception: BaseException) -> None:
        """See JoinedRanks; with Lightning's hint, which the other ranks show, too."""
        super(JoinedRanks, self).on_exception(exception)
        if isinstance(exception, SIGTERMException) and exception.code is None:
            ends_by_sigterm(exception, self.global_rank)
        super().publish_failure(exception)

    def _runtimes(self) -> Iterable[SchedulerRuntime]:
        runtime = None if self._gradients is None else self._gradients.runtime
        return () if runtime is None else (runtime,)


def callbacks_of(trainer: pl.Trainer) -> list[pl.Callback]:
    """The Trainer's callbacks, to be looked at and changed."""
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]  # set by a connector
    return callbacks


def digest_of(path: str | Path) -> str:
    """The same for copies of a checkpoint, and another for any other.

    Torch writes an archive whose directory has a check sum of each part, so that little of a large file is read.

    Args:
        path: Of the checkpoint, or its URL. Nothing is told of what another plugin wrote.
    """
    try:
        with fsspec.open(str(path), "rb") as file, zipfile.ZipFile(file) as archive:
            # The name of the file that torch wrote to stands before each part's.
            parts = [(part.filename.partition("/")[2], part.CRC) for part in archive.infolist()]
    except Exception:  # what only the plugin that wrote it can read
        return "unknown"
    return f"{zlib.crc32(repr(parts).encode()):08x}"


@contextmanager
def written_whole(checkpoint_io: object, path: str | Path) -> Iterator[str | Path]:
    """Where to write what is to be at ``path`` afterwards; one process at a time.

    Args:
        checkpoint_io: That writes. Another one than Lightning's own is given ``path`` itself.
        path: Of the checkpoint; a local file is replaced at once, and what is somewhere else is left to Lightning.
    """
    if type(checkpoint_io) is not TorchCheckpointIO or "://" in str(path):
        yield path
        return
    whole = Path(path)
    part = whole.with_name(f".{whole.name}.part")  # of a writer that was killed, it is written over
    try:
        yield part
        with part.open("rb") as file:
            os.fsync(file.fileno())
        part.replace(whole)
    except BaseException:
        with suppress(OSError):
            part.unlink()
        raise
