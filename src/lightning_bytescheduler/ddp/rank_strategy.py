"""DDP's strategy on ranks that report failures to each other, with or without ByteScheduler's communication.

Before a training the ranks compare versions, strategy, options and models (:func:`introduce`). While it
runs, each knows how far the others are (:class:`FitPosition`): hooks count, any thread may read. A rank publishes its
failure first. Errors that follow on other ranks then name that rank. Trainer's and Fabric's strategies share this
(:class:`JoinedRanks`).

Some of Lightning's launchers start processes and join them in the main process (spawn, fork). With these, Lightning
calls ``on_exception`` and tears down in the main process after the workers have ended. So a worker publishes its
failure itself, before it ends.
"""

from __future__ import annotations

import atexit
import hashlib
import os
import platform
import re
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import fields
from datetime import timedelta
from typing import Any, ClassVar, TypeVar, cast

import fsspec
import torch
import torch.distributed as dist
from msgspec.structs import replace
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_bytescheduler.checks import unknown_variables
from lightning_bytescheduler.collectives.groups import VARIABLE, choose_interface
from lightning_bytescheduler.ddp.ddp_arguments import require_timeout
from lightning_bytescheduler.ddp.decided_fit import DecidedFit, FitOptions, FitTuning
from lightning_bytescheduler.ddp.fit_report import OverlapPlan, SchedulerStatistics
from lightning_bytescheduler.ddp.sigterm import SigtermForAll, ends_by_sigterm
from lightning_bytescheduler.ddp.trainer_fit import TrainerFit
from lightning_bytescheduler.exceptions import RankFailedError, RanksDivergedError, SchedulerClosedError
from lightning_bytescheduler.failures.board import FaultBoard, connected, say_later
from lightning_bytescheduler.failures.messages import is_communication_error, phrase
from lightning_bytescheduler.failures.rendezvous import Introduction, Meeting, require_alike
from lightning_bytescheduler.failures.standstill import Standing, waiting
from lightning_bytescheduler.lightning_api import (
    PACKAGE,
    ClusterEnvironment,
    DDPStrategy,
    SIGTERMException,
    _init_dist_connection,
    _MultiProcessingLauncher,
    pl,
    rank_zero_info,
    rank_zero_warn,
)
from lightning_bytescheduler.registration import __version__
from lightning_bytescheduler.scheduler.options import SchedulerOptions

_T = TypeVar("_T")
_TIMEOUT_S = 1800.0
_NEXT = "what comes next"
_OF_ONE_RANK = ("timeline", "debug", "ignored_variables")
_ALL_CALL = "All ranks have to call it, outside of fit, too: trainer.save_checkpoint, for example, waits for all."
_NOTHING: Mapping[str, str] = {}
_ONE_CHECKPOINT = (
    "Have each rank resume from the same file: copy it to every machine, or use a folder that all of them share."
)

OUTER_STATE = "lightning_bytescheduler.diloco"
"""Checkpoint key of ``diloco``'s state, which ``bytescheduler`` ignores."""

_OUTCOME = "lightning_bytescheduler"


_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")  # of an object, which differs between processes
# Set for one rank by design, compared under another name, ignored, or secret.
_NOT_TOLD = [
    f"BYTESCHEDULER_{name}" for name in ("LIGHTNING", "ROOT_IP", "ROOT_PORT", "COORDINATOR_TOKEN", "SLICES_TOKEN")
]
_OF_TRAINER = (
    *("max_steps", "max_epochs", "precision"),
    *("accumulate_grad_batches", "gradient_clip_val", "gradient_clip_algorithm"),
)


def introduce(
    rank: int, strategy: str, options: Mapping[str, object], trainer: pl.Trainer | None = None
) -> Introduction:
    """Make this rank's introduction.

    Args:
        rank: This rank.
        strategy: Name of the strategy.
        options: Options that must be the same on all ranks, by name.
        trainer: The Trainer, whose own options must be the same too; may be ``None``.
    """
    facts = {"strategy": strategy, "version of lightning-bytescheduler": __version__, **options}
    if trainer is not None:
        facts["what the Trainer does"] = getattr(trainer.state.fn, "value", trainer.state.fn)
        facts.update({option: getattr(trainer, option, None) for option in _OF_TRAINER})
    ours = [name for name in sorted(os.environ) if name.startswith("BYTESCHEDULER_") and name not in _NOT_TOLD]
    return Introduction(
        rank=rank,
        facts={name: _text(value) for name, value in facts.items()},
        noted={
            "torch": torch.__version__,
            PACKAGE: pl.__version__,
            "Python": ".".join(platform.python_version_tuple()[:2]),
            **{name: os.environ[name] for name in ours},
        },
    )


def model_facts(parameters: Iterable[nn.Parameter]) -> dict[str, str]:
    """Return the number, shapes and types of trained parameters, as facts to compare."""
    trained = [p for p in parameters if p.requires_grad]
    shapes = [(tuple(p.shape), str(p.dtype)) for p in trained]
    digest = hashlib.sha256(repr(shapes).encode()).hexdigest()[:8]
    values, types = sum(p.numel() for p in trained), ", ".join(sorted({kind for _, kind in shapes}))
    tensors = f"{len(shapes)} tensors of {values:,} values, of type {types}"
    return {"trained model": f"{tensors} (digest of shapes and types {digest})"}


def _text(value: object) -> str:
    return repr(value) if isinstance(value, str) else _ADDRESS.sub("", str(value))


class FitPosition:
    """One rank's place in one run of the Trainer."""

    def __init__(self, trainer: pl.Trainer) -> None:
        self._trainer = trainer
        self._last: Standing | None = None
        self._batches = 0

    def begin_batch(self) -> None:
        """Record that a batch begins."""
        self._batches += 1

    def end(self) -> None:
        """Record that the run is over; this rank takes no further step."""
        self._last = self.standing(ended=True)

    @property
    def reached(self) -> dict[str, str]:
        """The facts that have to be the same on all ranks when a fit begins."""
        trainer = self._trainer
        batch = trainer.fit_loop.epoch_loop.batch_progress.current.ready
        return {"progress": f"epoch {trainer.current_epoch}, batch {batch}, step {trainer.global_step}"}

    def standing(self, *, ended: bool = False) -> Standing:
        """Return this rank's standing for the other ranks."""
        if self._last is not None:
            return self._last
        fit: DecidedFit | None = cast(Any, self._trainer.strategy).fit
        expected = self._trainer.fit_loop.max_batches
        return Standing(
            place=place_of(self._trainer),
            steps=0 if fit is None else fit.progress.offered,
            awaited_step=0 if fit is None else fit.awaited_step,
            launched=launched(),
            ended=ended,
            batches=self._batches,
            expected=int(expected) if expected != float("inf") else 0,
        )


def place_of(trainer: pl.Trainer) -> str:
    """Return the stage, the batch and the hook that a Trainer is in, in words."""
    module = trainer.lightning_module
    hook = getattr(module, "_current_fx_name", None)
    where = f" ({hook})" if hook else ""
    loop = trainer.fit_loop.epoch_loop
    if trainer.sanity_checking:
        return f"in the sanity check{where}"
    if trainer.validating and trainer.state.fn == "fit":
        batch = loop.val_loop.batch_progress.current.ready
        return f"in batch {batch} of the validation after step {loop.global_step}{where}"
    if trainer.training:
        return f"in epoch {trainer.current_epoch}, batch {loop.batch_progress.current.ready}{where}"
    return f"in {trainer.state.fn}{where}"


def launched() -> int:
    """Return the number of collectives begun on the default group; 0 if the backend does not count."""
    group: Any = dist.group.WORLD
    try:
        return int(group._get_sequence_number_for_group())
    except (AttributeError, RuntimeError):  # there is no group, or its backend does not count
        return 0


class JoinedRanks:
    """Mixed into a DDP strategy of Lightning, before it in the order of bases."""

    # Attributes of Lightning's strategy.
    cluster_environment: ClusterEnvironment | None
    num_nodes: int
    num_processes: int
    global_rank: int
    root_device: torch.device
    _process_group_backend: str | None
    _get_process_group_backend: Callable[[], str]
    _ddp_kwargs: dict[str, Any]
    _timeout: timedelta | None

    fit: DecidedFit | None = None
    """What carries the gradients, while a fit runs and several ranks train together."""
    _board: FaultBoard | None = None
    _failed: bool = False
    _sigterm: SigtermForAll | None = None  # if ranks end together after a SIGTERM
    _lost_weights: SchedulerClosedError | None = None  # in the last fit
    _outcome: tuple[OverlapPlan | None, SchedulerStatistics | None] = None, None  # of the last fit
    _launchers: ClassVar[tuple[type, Any]]  # Lightning's, and the class that replaces it
    _know_ranks: Callable[[], None]  # Lightning's

    def __repr__(self) -> str:
        # The Trainer of the other Lightning package takes this object for a wrong name, and shows only this text.
        return f"<{type(self).__name__} of {PACKAGE!r}>"

    def flush(self) -> None:
        """Wait for all gradients and apply every pending update; the weights are final afterwards."""
        with self._explained():
            if self.fit is not None:
                self.fit.flush()

    def end_of_worker(self) -> None:
        """Called when a process that a launcher started has finished its function."""

    def _configure_launcher(self) -> None:
        super()._configure_launcher()  # type: ignore[misc]
        (lightnings, ours), of = self._launchers, cast(Any, self)
        if isinstance(of._launcher, lightnings):
            of._launcher = ours(self, start_method=of._start_method)

    def _so_far(self) -> tuple[OverlapPlan | None, SchedulerStatistics | None]:
        """Return plan and statistics of the current fit, or of the last one."""
        return self._outcome if self.fit is None else (self.fit.so_far(), self._counters())

    def _counters(self) -> SchedulerStatistics | None:
        """Return the statistics alone, which are read in every step: making the plan walks the whole model."""
        return self._outcome[1] if self.fit is None else self.fit.record.statistics

    def end_fit(self, *, failed: bool | None = None) -> None:
        """Stop every thread and make every parameter plain again; bounded, idempotent.

        Args:
            failed: Whether not to wait for other ranks; if left out, whether this rank has failed.
        """
        fit = self.fit
        if fit is not None:
            self._outcome = self._so_far()
            self.fit = None
            fit.close(failed=self._failed if failed is None else failed)
            self._lost_weights = fit.lost_weights

    def _require_whole_weights(self) -> None:
        """Raise rather than save a checkpoint that lacks updates."""
        lost = self._lost_weights if self.fit is None else self.fit.lost_weights
        if lost is not None:
            raise lost

    def _patient(self) -> AbstractContextManager[None]:
        """Return a context in which another rank's failure does not end this process, as it saves."""
        return nullcontext() if self._board is None else self._board.patient()

    # ------------------------------------------------------------------ ranks

    @contextmanager
    def _rendezvous(self, strategy: str, ranks: int) -> Iterator[dist.Store | None]:
        """Meet the other ranks. The caller connects to them in the context; if a rank cannot, all ranks end, naming it.

        Args:
            strategy: Name of the strategy, which all ranks must share.
            ranks: Number of ranks.

        Yields:
            A part of the job's store that no earlier start has written to; ``None`` if there is no rank to meet.
        """
        environment = self.cluster_environment
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
        # If this process could not open its store, processes that it launched would look for it for half an hour.
        orphans = list(getattr(getattr(self, "_launcher", None), "procs", ()))
        for process in orphans:
            atexit.register(process.kill)
        store = self._meet_ranks(strategy, ranks)
        place = environment.main_address, environment.main_port
        with connected(store, *place, rank=self.global_rank, world_size=ranks) as self._board:
            try:
                yield store
            finally:
                self._board = None
        for process in orphans:
            atexit.unregister(process.kill)

    def _meet_ranks(self, strategy: str, ranks: int) -> dist.Store:
        environment = self.cluster_environment
        assert environment is not None
        meeting = Meeting(rank=self.global_rank, world_size=ranks, strategy=strategy, timeout=self._longest_wait_s)
        return meeting.at(environment.main_address, environment.main_port)

    def _connect(self, as_lightning: Callable[[], object]) -> None:
        """Meet the other ranks, and connect to them as Lightning does, in a store of this start's own."""
        with self._rendezvous("bytescheduler", self.num_nodes * self.num_processes) as store:
            environment = self.cluster_environment
            if store is not None and environment is not None:  # otherwise Lightning connects
                backend = self._get_process_group_backend()
                device = self.root_device if self.root_device.type != "cpu" else None
                _init_dist_connection(environment, backend, timeout=self._timeout, device_id=device, store=store)
            as_lightning()

    def _options_of_fits(self, scheduler: SchedulerOptions, **more: Any) -> FitOptions:
        own_buckets = any(self._ddp_kwargs.get(name) is not None for name in ("bucket_cap_mb", "bucket_cap_mb_list"))
        tuning = FitTuning(scheduler, timeout=self._timeout)
        return FitOptions(scheduler=scheduler, timeout=self._timeout, own_buckets=own_buckets, tuning=tuning, **more)

    def _facts_of(self, options: SchedulerOptions) -> dict[str, object]:
        return {
            "number of processes": dist.get_world_size(),
            "process_group_backend": self._process_group_backend,
            **{f.name: getattr(options, f.name) for f in fields(options) if f.name not in _OF_ONE_RANK},
            "policy": options.policy.name,
            **self._ddp_kwargs,
        }

    def _join(self, strategy: str, facts: Mapping[str, object], trainer: pl.Trainer | None = None) -> FaultBoard:
        """Open the board of a training, and check that all ranks have the same options."""
        self._board = board = FaultBoard.open(rank=self.global_rank, world_size=dist.get_world_size())
        own = introduce(self.global_rank, strategy, facts, trainer)
        self._meet("options", own.facts, own.noted)
        return board

    def _meet(self, what: str, facts: Mapping[str, str], noted: Mapping[str, str] = _NOTHING, **more: str) -> None:
        board = self._board
        if board is None:
            return
        own = Introduction(rank=self.global_rank, facts={_NEXT: what, **facts}, noted=noted)
        with self._explained():
            ranks = board.roll_call(own, self._longest_wait_s)
            require_alike([replace(one, facts={_NEXT: one.facts[_NEXT]}, noted={}) for one in ranks])
            require_alike(ranks, warn=rank_zero_warn, **more)

    @property
    def _longest_wait_s(self) -> float:
        return _TIMEOUT_S if self._timeout is None else self._timeout.total_seconds()

    def _no_hope(self) -> BaseException | None:
        return None if self._board is None else self._board.no_hope()

    # ------------------------------------------------------------------ failures

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """See DDPStrategy. After a failure it does not wait: saving a checkpoint on exception must not hang."""
        if not self._failed:
            with self._explained(waits_in=" ".join(("barrier", *map(str, args[:1])))):
                super().barrier(*args, **kwargs)  # type: ignore[misc]

    def broadcast(self, obj: _T, src: int = 0) -> _T:
        """See DDPStrategy. After a failure it returns this rank's own ``obj``."""
        if self._failed:
            return obj
        with self._explained(waits_in="broadcast"):
            sent: _T = super().broadcast(obj, src)  # type: ignore[misc]
        return sent

    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        """See DDPStrategy."""
        with self._explained(waits_in="all_gather" if group in (None, dist.group.WORLD) else ""):
            return super().all_gather(tensor, group, sync_grads)  # type: ignore[misc, no-any-return]

    def publish_failure(self, exception: BaseException) -> None:
        """Tell the other ranks once why this rank fails, or report here which other rank has failed."""
        if self._failed:
            return
        self._failed = True
        board = self._board
        if board is None:
            return
        board.take_over()
        cause, sigterm = self._explain(exception), self._sigterm
        orderly = isinstance(exception, SIGTERMException) and sigterm is not None and sigterm.agreed
        if isinstance(cause, SIGTERMException) and not orderly:
            board.diagnose(cause, silence=1.5)  # launchers end all ranks if one has died, which is then named
        if not isinstance(cause, RankFailedError):
            board.publish(cause, orderly=orderly)
        if cause is not exception and hasattr(exception, "add_note"):
            exception.add_note(str(cause))
        if self.fit is not None:
            self.fit.fail(cause)
        self._end_with(cause)
        board.close()  # here, as teardown is skipped if another callback's on_exception raises

    def _end_with(self, cause: BaseException) -> None:
        """End this rank's other communication because of ``cause``."""

    @contextmanager
    def _explained(self, *, waits_in: str = "") -> Iterator[None]:
        """Turn an error that follows from another rank's failure into one that names the rank.

        Args:
            waits_in: The collective of the default group in the context; other ranks are told of it.
        """
        alone = bool(waits_in) and self._board is None and dist.is_initialized()  # outside of a fit
        late = say_later(f"rank {self.global_rank} waits in {waits_in}. {_ALL_CALL}") if alone else None
        try:
            with waiting(waits_in) if waits_in else nullcontext():
                yield
        except Exception as error:
            cause = self._explain(error)
            if alone and is_communication_error(error):
                cause = RankFailedError(None, f"it has not come to {waits_in}. {_ALL_CALL} This broke here: {error}")
            if cause is error:
                raise
            # DDP's reducer repeats its hook's error in its own message.
            raise cause from (None if str(cause) in str(error) else error)
        finally:
            if late is not None:
                late.cancel()

    def _explain(self, error: BaseException) -> BaseException:
        if self.fit is not None:
            return self._ending(self.fit.wire.explain(error))
        return self._ending(error if self._board is None else self._board.explain(error))

    def _ending(self, error: BaseException) -> BaseException:
        """Return ``error``, or this rank's own SIGTERM if it has got one like the rank that ``error`` names."""
        elsewhere = isinstance(error, RankFailedError) and error.cause == phrase(SIGTERMException())
        trainer = self._trainer if elsewhere else None
        return SIGTERMException() if trainer is not None and trainer.received_sigterm else error

    @property
    def _trainer(self) -> pl.Trainer | None:
        """The Trainer that runs; ``None`` in Fabric."""
        module = getattr(self, "lightning_module", None)
        return None if module is None else module._trainer


class _Outcome:
    """Wraps a fit's outcome so that Lightning does not look for tensors to move in it."""

    def __init__(self, of_fit: Any) -> None:
        self.of_fit = of_fit


class PublishesFailures:
    """Mixed into a launcher, before it in the order of bases; publishes the errors of its function."""

    _strategy: Any
    _start_method: Any

    def _wrapping_function(self, *args: Any, **kwargs: Any) -> None:
        if self._start_method == "fork":
            # If the forked process has computed with several threads, this one would wait for them forever.
            os.environ["OMP_NUM_THREADS"] = "1"  # Lightning does not overwrite it
            torch.set_num_threads(1)
        try:
            super()._wrapping_function(*args, **kwargs)  # type: ignore[misc]
            self._strategy.end_of_worker()
        except BaseException as error:
            self._strategy.publish_failure(error)
            raise


class PublishingLauncher(PublishesFailures, _MultiProcessingLauncher):
    """See Lightning's launcher.

    Args:
        strategy: Publishes failures in each worker; pickled into it with the Trainer.
    """

    def get_extra_results(self, trainer: pl.Trainer) -> dict[str, Any]:
        """Return, in rank 0, the outcome for the main process."""
        return {**super().get_extra_results(trainer), _OUTCOME: _Outcome(self._strategy._so_far())}

    def update_main_process_results(self, trainer: pl.Trainer, extra: dict[str, Any]) -> None:
        """Take over rank 0's outcome in the main process."""
        super().update_main_process_results(trainer, extra)
        self._strategy._outcome = extra[_OUTCOME].of_fit


class RankStrategy(JoinedRanks, DDPStrategy):
    """Steps and failures of both of this package's strategies for Trainer."""

    _launchers = _MultiProcessingLauncher, PublishingLauncher
    _know_ranks = DDPStrategy.set_world_ranks

    def __init__(self, **options: Any) -> None:
        self._position: FitPosition | None = None  # if all ranks train together
        self.fit: TrainerFit | None = None
        self._fit_options: FitOptions | None = None  # if ByteScheduler carries the gradients
        self._checkpoint = "none"  # what this rank resumes from, in words
        require_timeout(options)
        for sentence in unknown_variables(os.environ):
            rank_zero_warn(sentence)
        super().__init__(**options)

    def setup_environment(self) -> None:
        """See DDPStrategy."""
        self._checkpoint = "none"  # a fit that failed may have loaded one
        super().setup_environment()

    # ------------------------------------------------------------------ the fit

    def begin_fit(self) -> None:
        """Begin a fit before the model is wrapped, if ByteScheduler carries the gradients of several ranks."""
        module = self.lightning_module
        if self._fit_options is None or self._board is None or module is None:
            return
        if any(p.requires_grad for p in module.parameters()):  # otherwise DDP refuses the model
            self._lost_weights = None
            self.fit = TrainerFit.begin(self, self._fit_options, self._board)

    # ------------------------------------------------------------------ one step

    def await_batch(self) -> None:
        """Wait until the first rank has begun this batch too, if ranks begin batches together."""
        if self._sigterm is not None:
            self._sigterm.await_batch_begun()

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """See DDPStrategy."""
        batch = args[0] if args else next(iter(kwargs.values()), None)
        with self._explained(), nullcontext() if self.fit is None else self.fit.forward(batch):
            return super().training_step(*args, **kwargs)

    def count_epoch(self) -> None:
        """Record that an epoch begins."""
        if self.fit is not None:
            self.fit.begin_epoch()

    def count_batch(self) -> None:
        """Record that a batch begins; raises if ranks wait for each other in vain."""
        if self._board is not None and isinstance(self._board.fault, RanksDivergedError):
            raise self._board.fault  # results of a cancelled collective must not be trained on
        if self._position is not None:
            self._position.begin_batch()

    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """See DDPStrategy."""
        with self._explained(), nullcontext() if self.fit is None else self.fit.backward_of(closure_loss):
            return super().backward(closure_loss, optimizer, *args, **kwargs)

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """Run the closure; defer the step if its gradients are in flight. See DDPStrategy."""
        step = super().optimizer_step
        if self.fit is None:
            return step(optimizer, closure, model, **kwargs)
        with self._explained():
            return self.fit.step_with(
                lambda closure: step(optimizer, closure, model, **kwargs), optimizer, closure, deferrable=not kwargs
            )

    def _register_ddp_hooks(self) -> None:
        if self.fit is None:
            super()._register_ddp_hooks()
        elif isinstance(self.model, DistributedDataParallel):
            self.fit.take_over(self.model)

    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """See DDPStrategy."""
        checkpoint: dict[str, Any] = super().load_checkpoint(checkpoint_path, *args, **kwargs)
        written = f"of epoch {checkpoint.get('epoch')}, step {checkpoint.get('global_step')}"
        self._checkpoint = f"one with digest {digest_of(checkpoint_path)} {written}"
        return checkpoint

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """See DDPStrategy. After restoring, ranks compare checkpoints before any of them validates or trains."""
        # Lightning calls this with or without a checkpoint.
        if args[:1] == ("_CheckpointConnector.resume_end",) and not self._failed:
            reached = {} if self._position is None else self._position.reached
            found, self._checkpoint = self._checkpoint, "none"
            self._meet("the checkpoint", {"checkpoint": found, **reached}, way_out=_ONE_CHECKPOINT)
        super().barrier(*args, **kwargs)

    # ------------------------------------------------------------------ failures

    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: Any = "mean") -> Any:
        """See DDPStrategy."""
        with self._explained(waits_in="all_reduce" if group in (None, dist.group.WORLD) else ""):
            return super().reduce(tensor, group, reduce_op)

    def on_exception(self, exception: BaseException) -> None:
        """See DDPStrategy."""
        self.publish_failure(exception)

    def publish_failure(self, exception: BaseException) -> None:
        """See JoinedRanks; adds Lightning's hint, which the other ranks show, too."""
        super(JoinedRanks, self).on_exception(exception)
        if isinstance(exception, SIGTERMException) and exception.code is None:
            ends_by_sigterm(exception, self.global_rank)
        super().publish_failure(exception)


def callbacks_of(trainer: pl.Trainer) -> list[pl.Callback]:
    """Return the Trainer's list of callbacks."""
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]  # set by a connector
    return callbacks


def digest_of(path: Any) -> str:
    """Return a digest that is equal for copies of a checkpoint and differs for others.

    Torch writes an archive whose directory has a checksum of each part, so only the directory is read.

    Args:
        path: Path or URL of the checkpoint. Files of other plugins give ``"unknown"``.
    """
    try:
        with fsspec.open(str(path), "rb") as file, zipfile.ZipFile(file) as archive:
            # The parts' names begin with the name of the file that torch wrote to.
            parts = [(part.filename.partition("/")[2], part.CRC) for part in archive.infolist()]
    except Exception:  # only the plugin that wrote it can read it
        return "unknown"
    return f"{zlib.crc32(repr(parts).encode()):08x}"
