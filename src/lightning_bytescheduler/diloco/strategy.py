"""``Trainer(strategy="diloco")``: workers of unequal speed train on their own, and average now and then.

A checkpoint has global weights, the outer state, and what each worker alone has.

Where several ranks form one worker, Lightning must not use its collectives for a SIGTERM. In Lightning, a rank that
gets the signal broadcasts on the default group from inside the signal handler, wherever its training thread is. All
ranks also join a broadcast before each batch. Among a step's collectives, these would come in another order on each
rank. Here the rank that got the signal ends by itself after its batch, and the fault board tells all others, those of
other workers too.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from torchmetrics import Metric
from torchmetrics.utilities.distributed import gather_all_tensors

from lightning_bytescheduler.checks import options_by_name
from lightning_bytescheduler.ddp.batches import loader_resumes
from lightning_bytescheduler.ddp.rank_strategy import OUTER_STATE, RankStrategy, callbacks_of, introduce, model_facts
from lightning_bytescheduler.ddp.sigterm import worker_signals
from lightning_bytescheduler.diloco.coordinator_client import resolve_coordinator
from lightning_bytescheduler.diloco.coordinator_protocol import RunOptions, wire_named
from lightning_bytescheduler.diloco.fragments import TrainedWeights
from lightning_bytescheduler.diloco.loaders import share_of, shared_loader
from lightning_bytescheduler.diloco.options import (
    OPTIONS_ELSEWHERE,
    DiLoCoOptions,
    RoundsPlan,
    common_options,
    ddp_options,
    inner_of,
    scheduler_options,
)
from lightning_bytescheduler.diloco.performance_monitor import PerformanceMonitor
from lightning_bytescheduler.diloco.process_groups import JointCollectives, WorkerGroup, WorkerWorld, worker_name
from lightning_bytescheduler.diloco.round_record import RECORD_NAME, RoundFile
from lightning_bytescheduler.diloco.runtime import CoordinatedRuntime, LeadingRuntime, Runtime
from lightning_bytescheduler.diloco.session import Session, SessionStatistics
from lightning_bytescheduler.diloco.training_loop import (
    CoordinatedBoundaries,
    LoopBoundaries,
    RoundBoundaries,
    for_leader_only,
    refuse_plateaus,
    seed_sampler,
)
from lightning_bytescheduler.diloco.worker_restart import Resumed
from lightning_bytescheduler.exceptions import UnsupportedError
from lightning_bytescheduler.failures.board import FaultBoard
from lightning_bytescheduler.failures.rendezvous import hold_roll_call, require_alike
from lightning_bytescheduler.lightning_api import (
    CheckpointIO,
    ClusterEnvironment,
    Precision,
    RunningStage,
    TrainerFn,
    default_pg_timeout,
    pl,
    rank_zero_info,
    rank_zero_warn,
    reset_seed,
)

if TYPE_CHECKING:
    import torch.distributed as dist

    from lightning_bytescheduler.diloco.worker_slices import WorkerSlices

log = logging.getLogger(__name__)

_T = TypeVar("_T")


@contextmanager
def shared_metrics(module: nn.Module, together: Callable[[], JointCollectives | None]) -> Iterator[None]:
    """Have the metrics in ``module`` gather from all ranks while these do the same, unless told how to gather."""

    def gather(tensor: Tensor, group: Any = None) -> list[Tensor]:
        joint = together()
        return gather_all_tensors(tensor, group) if joint is None else joint.gather_uneven(tensor)

    metrics = [m for m in module.modules() if isinstance(m, Metric) and m.dist_sync_fn is m.process_group is None]
    for metric in metrics:
        metric.dist_sync_fn = gather
    try:
        yield
    finally:
        for metric in metrics:
            metric.dist_sync_fn = None


def open_rounds_file(trainer: pl.Trainer, *, append: bool) -> RoundFile:
    """Return the file in the run's folder where this rank records the rounds. Trial runs record none.

    Args:
        trainer: The Trainer of the fit. All ranks ask for its folder, which is broadcast within a worker.
        append: Whether to go on with a file that is there.
    """
    path = None
    if not trainer.fast_dev_run and not trainer.barebones:  # type: ignore[attr-defined]
        folder = trainer.log_dir or trainer.default_root_dir
        if trainer.is_global_zero:
            path = Path(folder) / RECORD_NAME
    return RoundFile(path, append=append, option="")


@contextmanager
def with_callbacks(trainer: pl.Trainer, added: list[pl.Callback]) -> Iterator[None]:
    """Have the trainer call these callbacks before all others in this context."""
    callbacks_of(trainer)[:0] = added
    try:
        yield
    finally:
        callbacks_of(trainer)[:] = [callback for callback in callbacks_of(trainer) if callback not in added]


def refuse_searches(callbacks: Sequence[pl.Callback]) -> None:
    """Refuse Lightning's search for a learning rate, which has all ranks read one checkpoint and go back to it.

    Raises:
        UnsupportedError: Names the way out.
    """
    if any(isinstance(callback, pl.callbacks.LearningRateFinder) for callback in callbacks):
        raise UnsupportedError(
            "Strategy 'diloco' cannot look for a learning rate (Tuner.lr_find, LearningRateFinder), as its workers "
            "train on their own. Find it before, with Trainer(devices=1)."
        )


@options_by_name
class DiLoCoStrategy(RankStrategy):
    """Low-communication training of workers that need not be equally fast (DiLoCo, Douillard et al.).

    Each worker trains by itself, with the user's optimizer, schedule, precision, clipping and accumulation. In rounds,
    all workers' pseudo-gradients (what they have changed in the weights) are averaged, by samples processed, and an
    outer optimizer steps the *global* weights along the mean. A scheduler that knows each worker's pace tells each
    after how many steps to send its pseudo-gradient, so that all end a round together.

    What Lightning's terms mean here:

    * A worker is one process, or the processes that ``inner`` puts together, and a Lightning world of its own:
      ``trainer.world_size`` is its number of processes, those of the default process group.
      ``trainer.global_rank`` counts all processes; rank 0 writes logs and checkpoints. Distributed samplers split the
      data among all processes, and ``batch_size`` is each process's.
    * The ranks of a worker take every step together; its samples are those of all of them. One rank, the leader, talks
      to the other workers: it sends the worker's pseudo-gradient, and hands the mean on to its ranks, so that all have
      the same weights, bit for bit. If a rank stops or has used up its share of the data, so does its worker.
    * ``max_steps``, ``max_epochs``, ``max_time`` and a callback that stops training hold for the worker that gets there
      first: the round ends, its pseudo-gradient is merged, and training is over for all. No worker takes more than
      ``max_steps`` steps, so that no schedule runs beyond its end; slower ones take fewer, but with ``equal_steps`` go
      on until they have taken as many. ``min_steps`` and ``min_epochs`` bind the worker that wants to stop.
    * An epoch ends for all, and ends a round, when the first worker has gone through its share of the data. The rest of
      the others' shares is not used in that epoch, except for the steps they are behind with ``equal_steps``; the log
      and :attr:`plan` say how many batches that is.
    * A :class:`SliceDataModule` has no shares: a tracker at worker 0 hands its slices out to workers as needed, and an
      epoch ends for all when each of its samples was trained on. Until then a worker that finds no slice left takes
      part in rounds without a step, or has an epoch without a batch. A checkpoint that is written while all stand still
      (at an epoch's end or after a validation) has exactly what its weights were trained on; one in the middle of a
      round also counts what was trained on since the round began. Each worker's batch size is an option of the module.
      Such workers have one process each.
    * ``val_check_interval`` counts worker 0's batches; the validation happens at the end of the round, on all ranks
      together, each with its share of the data. Metrics logged with ``sync_dist=True``, and torchmetrics in attributes
      of the module, are over all ranks then, as with DDP. Everything logged while training is the worker's own.
    * Validation, checkpoints and the end of ``fit`` have the global weights. A checkpoint that is written in the middle
      of a round has the state at the round's beginning, and a fit that fails writes none. It is a plain Lightning
      checkpoint of worker 0's leader. One more key has the outer state and each other worker's own state, so that as
      many workers go on exactly. Another number of workers, of any number of ranks, can go on from it, too: new ones
      with worker 0's optimizer.
    * Buffers, such as running statistics, stay each worker's own; within a worker they are DDP's.
    * A SIGTERM on one process, an error or a death ends all with an error that names the rank.

    With a ``coordinator``, workers are independent Trainers, which join and leave its run at any time. Then,

    * all processes of a Trainer are one worker (``inner``), whose rounds, options and global weights are the
      coordinator's. Options of the run that are given must be the coordinator's. The first weights that come are the
      first global ones; a worker that joins later, or was away for long, fetches the state.
    * A worker that misses the end of a round gives up what it has not sent, and catches up; slices of it are trained on
      again. Training goes on without the coordinator.
    * An epoch ends for its worker alone. ``max_steps``, ``max_epochs``, ``max_time``, a callback that stops and a
      SIGTERM end that worker: it sends what it has of the round's fragment, and ends with the global weights.
      ``outer_steps`` end all, and a round without a step follows for each other fragment.
    * One worker, the leader, validates the global weights, saves checkpoints and logs; if it goes, another one does.
      Its ``EarlyStopping`` ends all. ``ReduceLROnPlateau`` is refused.
    * A :class:`SliceDataModule` takes slices from the coordinator; the ranks of a worker share its batches. Data
      loaders are each worker's own: shuffled ones are seeded by its name, unless ``seed_everything`` was called.

    Args:
        accelerator: As for :class:`~lightning.pytorch.strategies.DDPStrategy`.
        parallel_devices: See DDPStrategy.
        cluster_environment: See DDPStrategy.
        checkpoint_io: See DDPStrategy.
        precision_plugin: See DDPStrategy.
        process_group_backend: Backend of each worker's default group; between workers it is always gloo.
        timeout: Longest wait for other workers.
        start_method: See DDPStrategy.
        samples_per_round: A round is over when all workers together have processed this many samples.
        inner_steps: A round is over when the fastest worker has taken this many steps; slower ones take fewer, by their
            speed. 100 unless one of the two is given.
        equal_steps: All workers take ``inner_steps`` steps, however long the slowest takes (published DiLoCo).
        outer_steps: Rounds after which training is over, if nothing else has ended it.
        outer_lr: Learning rate of the outer Nesterov SGD; 0.7 if left out.
        outer_momentum: Its momentum; 0.9 if left out.
        fragments: Number of parts that the model is cut into; each round synchronises one, in turn.
        overlap_steps: Steps that a worker takes while its pseudo-gradient travels; 0: it waits. Half of a round's steps
            hide a slow link, and leave as many on top of each merge.
        wire_dtype: ``"fp32"``, ``"bf16"``, ``"int8"`` or ``"int4"`` on the network; or ``"sparse"``, the largest
            changes alone: 2% of them, or ``"sparse:0.01"``. What int8, int4 and sparse lose in a round is sent in a
            later one. What sparse does not send acts as momentum, so ``outer_lr`` is 1 then, and ``outer_momentum``
            0.5, if left out.
        inner: How the ranks of one worker train together: with ``"ddp"`` or ``"bytescheduler"``, or a dict with that
            as ``strategy``; with a ``size``, how many ranks that follow one another form a worker, or ``"node"`` for
            those of a machine; and with options for :class:`~torch.nn.parallel.DistributedDataParallel`, or with
            ``"bytescheduler"`` also ``partition_size``, ``credit``, ``cross_barrier``, ``mode``, ``timeline`` and
            ``debug`` of :class:`ByteSchedulerStrategy`, whose sizes are not tuned here. Each process is a worker if
            left out.
        coordinator: ``https://HOST:PORT``, or a dict with that as ``url``; with ``token_file``, the file with its
            token; ``authority``, the file of the certificates that sign the coordinator's, if the machine does not
            trust them; and ``name``, that of this worker in the run, the same after a restart.
            ``BYTESCHEDULER_COORDINATOR`` and ``BYTESCHEDULER_COORDINATOR_TOKEN`` if url and token are left out.
        worker_states: Whether a checkpoint has the state of each worker's optimizer, so that a restart goes on exactly.
            Each worker keeps a copy of it in host memory then, and the file is the larger the more workers there are.

    Raises:
        OptionError: If an option or environment variable has a value that is not allowed.
        CoordinatorError: In ``fit``: if the coordinator refuses this worker.
    """

    _options_elsewhere = OPTIONS_ELSEWHERE

    def __init__(
        self,
        *,
        accelerator: pl.accelerators.Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
        samples_per_round: int | None = None,
        inner_steps: int | None = None,
        equal_steps: bool | None = None,
        outer_steps: int | None = None,
        outer_lr: float | None = None,
        outer_momentum: float | None = None,
        fragments: int | None = None,
        overlap_steps: int | None = None,
        wire_dtype: str | None = None,
        inner: str | Mapping[str, Any] | None = None,
        coordinator: str | Mapping[str, str] | None = None,
        worker_states: bool = True,
    ) -> None:
        arguments = locals()
        common = {name: arguments[name] for name in RunOptions.__struct_fields__}
        if wire_dtype is not None:
            common["wire_dtype"] = wire_named("wire_dtype", wire_dtype).name
        address = resolve_coordinator(coordinator)
        self._options = DiLoCoOptions(
            given=common,
            coordinated=address is not None,
            **inner_of(inner),
            worker_states=worker_states,
        )
        if torch.distributed.is_torchelastic_launched():  # Lightning's own error would not name inner
            self._options.require_alone("processes of torchrun", int(os.environ.get("WORLD_SIZE", "1")))
        self._address = address
        self._world: WorkerWorld | None = None
        self._joint: JointCollectives | None = None
        self._runtime: Runtime | None = None
        self._resumed: Resumed | None = None
        self._last_state: dict[str, Any] | None = None  # of the last fit, once it is over
        self._last_whole: object = None  # path of the last checkpoint that was written in this fit
        self._open = ExitStack()
        self._statistics: SessionStatistics | None = None
        self._idle = True  # nothing is under way in the groups
        self._slices: WorkerSlices | None = None
        self._plan: RoundsPlan | None = None
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
            process_group_backend=process_group_backend,
            timeout=timeout,
            start_method=start_method,
            **ddp_options(self._options.inner, self._options.inner_options),
        )
        if self._options.inner == "bytescheduler":
            self._fit_options = self._options_of_fits(scheduler_options(self._options.inner_options))

    @property
    def world_size(self) -> int:
        """Ranks that train together as one worker."""
        return self._options.ranks_per_worker(on_node=self.num_processes, ranks=self.ranks)

    @property
    def ranks(self) -> int:
        """How many ranks there are in all."""
        return self.num_nodes * self.num_processes

    @property
    def workers(self) -> int:
        """How many workers there are."""
        return self.ranks // self.world_size

    @property
    def worker(self) -> int:
        """Number of this rank's worker, from 0."""
        return self.global_rank // self.world_size

    @property
    def statistics(self) -> SessionStatistics | None:
        """Counters of the current fit, or of the last one; ``None`` before the first."""
        return self._statistics

    @property
    def plan(self) -> RoundsPlan | None:
        """How the current fit, or the last one, trains in rounds; ``None`` before the first, and with a coordinator.

        Its ``summary()`` is the line of the log. Its ``left_out`` has, for each epoch that has ended, how many batches
        of its share each worker has not trained on.
        """
        return self._plan

    # ------------------------------------------------------------------ life cycle

    def setup_environment(self) -> None:
        """Join the other ranks, and know of their failures from here on; see DDPStrategy."""
        self._release()  # what is left of a failed fit whose teardown was skipped
        self._failed, self._last_whole = False, None
        super().setup_environment()
        trainer = None if self.lightning_module is None else self.lightning_module._trainer
        if trainer is not None and trainer.state.fn == TrainerFn.FITTING:
            self._last_state = None
            refuse_searches(callbacks_of(trainer))
            added: list[pl.Callback] = [RoundHooks(self)]
            if not any(isinstance(callback, PerformanceMonitor) for callback in callbacks_of(trainer)):
                added.append(PerformanceMonitor())
            self._open.enter_context(with_callbacks(trainer, added))
            self._open.enter_context(worker_signals(trainer, self.cluster_environment, together=self.world_size > 1))
            self._share(trainer)

    def _share(self, trainer: pl.Trainer) -> None:
        """Prepare for the coordinator, and have workers share the slices of their data, if it is in slices."""
        world, board, timeout = self._world, self._board, self._longest_wait_s
        if world is None or board is None:
            return
        coordinated = None
        if self._address is not None:
            self._runtime = coordinated = CoordinatedRuntime(
                self._address,
                trainer.lightning_module,
                given={name: value for name, value in self._options.given.items() if value is not None},
                group=WorkerGroup(world.inside, timeout=timeout, no_hope=board.no_hope),
                board=board,
                flush=self.flush,
                timeout=timeout,
                begin=self.begin_rounds,
            )
            self._open.callback(self._stop, coordinated)
        if trainer.datamodule is not None:  # type: ignore[attr-defined]  # a connector's
            from lightning_bytescheduler.diloco.worker_slices import worker_slices  # takes time

            self._slices = slices = worker_slices(
                trainer, world, coordinated, timeout=timeout, check=self._check_others
            )
            if slices is not None:
                self._open.callback(lambda: slices.close(failed=self._failed))

    def setup_distributed(self) -> None:
        """Make this worker's process groups, and those between workers."""
        reset_seed()
        self.set_world_ranks()
        self._process_group_backend = self._get_process_group_backend()
        self._options.check_ranks(
            ranks=self.ranks, on_node=self.num_processes, rank=self.global_rank, node=self.node_rank
        )
        device = self.root_device
        if self.cluster_environment is not None:
            os.environ["MASTER_ADDR"] = self.cluster_environment.main_address
            os.environ["MASTER_PORT"] = str(self.cluster_environment.main_port)
        with self._rendezvous("diloco", self.ranks) as store:
            self._world = WorkerWorld.join(
                rank=self.global_rank,
                size=self.ranks,
                inner_size=self.world_size,
                backend=self._process_group_backend,
                timeout=self._timeout,
                meet=self._meet_all,
                store=store,
                device_id=device if device.type != "cpu" else None,
            )
        self._idle = True
        self._open.callback(self._leave, self._world)
        self._joint = JointCollectives(self._world.everyone)
        self._board = FaultBoard.open(rank=self.global_rank, world_size=self.ranks, store=self._world.store)
        self._open.callback(self._board.close)
        self._open.callback(self.end_fit)

    def _meet_all(self, store: dist.Store) -> None:
        """Check, before there are groups, that all ranks are in the same training."""
        met = hold_roll_call(
            store,
            introduce(self.global_rank, "diloco", common_options(self._options)),
            world_size=self.ranks,
            timeout=self._longest_wait_s,
            failure=self._no_hope,
        )
        require_alike(met, warn=rank_zero_warn)

    def setup(self, trainer: pl.Trainer) -> None:
        """See DDPStrategy."""
        super().setup(trainer)
        if self.fit is not None:
            self.fit.decide()
        if self._address is not None:
            refuse_plateaus(self.lr_scheduler_configs)
        if trainer.state.fn != TrainerFn.FITTING:
            self._open.enter_context(shared_metrics(trainer.lightning_module, lambda: self._together))

    def configure_ddp(self) -> None:
        """Give all ranks the same weights; the model is wrapped where several ranks train together."""
        module, joint = self.lightning_module, self._joint
        if module is None or joint is None:
            raise UnsupportedError("Strategy 'diloco' trains LightningModules, through a Trainer.")
        with self._explained():
            self._meet("the model", model_facts(module.parameters()))
            joint.broadcast([*module.parameters(), *module.buffers()])
            runtime = self._runtime
            if isinstance(runtime, CoordinatedRuntime):
                runtime.connect()
                runtime.prepare()
                leads_only = for_leader_only(module.trainer, lambda: runtime.leads, runtime.end_all)
                self._open.enter_context(leads_only)
            if self.world_size == 1:
                return
            self.begin_fit()
            super().configure_ddp()

    def process_dataloader(self, dataloader: object) -> object:
        """See DDPStrategy."""
        module = self.lightning_module
        if module is None or module.trainer.state.stage != RunningStage.TRAINING:
            return dataloader
        if isinstance(self._runtime, CoordinatedRuntime):
            seed_sampler(dataloader, self._runtime.worker)
            return dataloader
        return shared_loader(dataloader)

    def teardown(self) -> None:
        """Stop every thread, leave all groups; see DDPStrategy."""
        try:
            self._release()
        finally:
            super().teardown()
            self._failed = False

    def _release(self) -> None:
        """End what this fit has begun, in reverse order."""
        try:
            if self._boundaries is not None and self._runtime is not None and not self._failed:
                self._last_state = self._runtime.state_dict()
            self._open.close()
        finally:
            self._runtime = self._slices = self._board = self._world = None
            self._joint = self._resumed = None

    def _stop(self, runtime: Runtime) -> None:
        idle, self._idle = self._idle, False
        with self._explained():
            self._idle = runtime.stop(failed=self._failed) and idle
            if not self._failed:
                self._check_others()

    def _leave(self, world: WorkerWorld) -> None:
        world.leave(idle=self._idle and not self._failed)

    def flush(self) -> None:
        """Bring the weights up to date, where the updates of their last step may still be on their way."""
        if self.fit is not None and not self._failed:
            with self._explained():
                self.fit.flush()

    # ------------------------------------------------------------------ what all workers do together

    @property
    def _together(self) -> JointCollectives | None:
        """The collectives of all ranks while all of them do the same, as in a validation; else ``None``."""
        module, runtime = self.lightning_module, self._runtime
        if module is None or self._failed:
            return None
        if module.trainer.state.fn != TrainerFn.FITTING:
            return self._joint
        halted = self._boundaries is not None and runtime is not None and runtime.session.halted
        return self._joint if halted and module.trainer.validating else None

    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: Any = "mean") -> Any:
        """See DDPStrategy; over all workers where they validate together."""
        together = self._together
        if together is None or not isinstance(tensor, Tensor):
            return super().reduce(tensor, group, reduce_op)
        with self._explained():
            return together.reduce(tensor, reduce_op)

    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        """See DDPStrategy; over all workers where they validate together."""
        together = self._together
        if together is None:
            return super().all_gather(tensor, group, sync_grads)
        with self._explained():
            return together.gather(tensor)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """See DDPStrategy; over all workers where they validate together."""
        together = self._together
        if together is None:
            return super().reduce_boolean_decision(decision, all)
        with self._explained():
            return bool(together.reduce(torch.tensor(int(decision)), "min" if all else "max"))

    def _check_others(self) -> None:
        """Raise what another rank has failed with, if it is known."""
        if self._board is not None and self._board.fault is not None:
            raise self._board.fault

    # ------------------------------------------------------------------ checkpoints

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """See DDPStrategy; during a fit, with the global weights."""
        state = None if self._runtime is None or not self.is_global_zero else self._runtime.state
        if state is None:
            return super().lightning_module_state_dict()
        self.flush()
        with state.shown():
            weights: dict[str, Any] = super().lightning_module_state_dict()
            return {name: value.clone() if isinstance(value, Tensor) else value for name, value in weights.items()}

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """See DDPStrategy. Another rank's failure does not end this process while it saves, however long that takes.

        A fit that fails writes none: in mid-round, weights are those of its start, and the optimizer is steps ahead.
        """
        if self._failed:
            self._say_not_written()
            return
        with self._patient():
            outer = self._last_state if self._runtime is None else self._runtime.state_dict()
            if outer is not None and "optimizer_states" in checkpoint:
                checkpoint[OUTER_STATE] = outer = {**outer, "inner_size": self.world_size}
                if self._runtime is not None and self._runtime.states is not None:
                    self._runtime.states.complete(checkpoint, outer)
            if self._runtime is None or self._runtime.leads:
                super().save_checkpoint(checkpoint, filepath, storage_options)
                self._last_whole = filepath

    def _say_not_written(self, *_: object) -> None:
        last = f" The last whole one is {self._last_whole}." if self._last_whole else ""
        rank_zero_warn(f"diloco: a fit that fails writes no checkpoint, as it would be of different moments.{last}")

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """See DDPStrategy; also takes the state of this rank's worker from the checkpoint."""
        checkpoint = super().load_checkpoint(*args, **kwargs)
        module = self.lightning_module
        if module is not None and module.trainer.state.fn == TrainerFn.FITTING:
            workers = 0 if self._address is not None else self.workers  # a coordinator's are trainings of their own
            self._resumed = Resumed.from_checkpoint(checkpoint, self.worker, workers, self.world_size)
        return checkpoint

    # ------------------------------------------------------------------ rounds (called by callbacks)

    def begin_rounds(self) -> None:
        """Wait for the other workers, and begin the first round."""
        module, world, board, runtime = self.lightning_module, self._world, self._board, self._runtime
        if module is None or world is None or board is None or self._boundaries is not None:
            return
        trainer, resumed = module.trainer, self._resumed
        group = WorkerGroup(world.inside, timeout=self._longest_wait_s, no_hope=board.no_hope)
        boundaries: LoopBoundaries
        if isinstance(runtime, CoordinatedRuntime):
            data = None if self._slices is None else self._slices.training
            if runtime.group.leads:
                runtime.session.unmerged.data = data
            boundaries = CoordinatedBoundaries(
                trainer, runtime.session, group=runtime.group, leads=runtime.leads, data=data
            )
        else:
            self._runtime = runtime = self._runtime_of(trainer, world, group, board, append=resumed is not None)
            self._open.callback(self._stop, runtime)
            self._open.enter_context(shared_metrics(module, lambda: self._together))
            boundaries = RoundBoundaries(
                trainer,
                runtime.session,
                group=group,
                explained=self._explained,
                shared_data=None if self._slices is None else self._slices.training,
                joint=JointCollectives(world.everyone),
            )
            self._plan = RoundsPlan(
                workers=world.workers,
                run=self._options.run,
                slices=self._slices is not None,
                left_out=boundaries.left_out,
            )
            rank_zero_info(f"diloco: {self._plan.summary()}")
        self._statistics = runtime.session.statistics
        self._open.callback(boundaries.detach)
        with self._explained():
            runtime.begin(boundaries, resumed)
        if resumed is not None and share_of(trainer) is not None:
            self._open.enter_context(loader_resumes())

    def _runtime_of(
        self, trainer: pl.Trainer, world: WorkerWorld, group: WorkerGroup, board: FaultBoard, *, append: bool
    ) -> Runtime:
        """Return the runtime of a worker that was launched with others."""
        options, run = self._options, self._options.run
        file = open_rounds_file(trainer, append=append)
        self._open.callback(file.close)
        trained = TrainedWeights(trainer.lightning_module, fragments=run.fragments, overlaps=bool(run.overlap_steps))
        timeout = self._longest_wait_s
        session = partial(
            Session,
            worker=worker_name(world.worker),
            group=group,
            trained=trained,
            overlap_steps=run.overlap_steps,
            flush=self.flush,
            timeout=timeout,
        )
        if not group.leads:
            return Runtime(session(), board)
        return LeadingRuntime(
            trainer,
            trained,
            session,
            world=world,
            board=board,
            options=options,
            timeout=timeout,
            on_round=file.write,
        )

    @property
    def _boundaries(self) -> LoopBoundaries | None:
        return None if self._runtime is None else self._runtime.boundaries

    def at_boundary(self, work: Callable[[LoopBoundaries], _T]) -> _T | None:
        """Call ``work`` with the boundaries between the training loop and the rounds, once rounds have begun."""
        if self._boundaries is None:
            return None
        with self._explained():
            return work(self._boundaries)

    def on_validation_end(self) -> None:
        """See DDPStrategy."""
        super().on_validation_end()
        self.at_boundary(lambda boundaries: boundaries.after_validation())

    def end_rounds(self) -> None:
        """End the training for all workers, with the global weights on each."""
        if self._runtime is not None:
            with self._explained():
                if self._boundaries is not None:
                    self._boundaries.before_end()
                if not isinstance(self._runtime, CoordinatedRuntime):
                    if self._slices is not None:
                        self._slices.finish()  # worker 0 answers until all have passed the end of the last round
                    self._runtime.session.pass_on(stop=True)
                    if self._runtime.states is not None:
                        self._runtime.states.over()
                    known = self._runtime.session.statistics
                    rank_zero_info(
                        f"diloco: {known.rounds} rounds with {known.merged_samples} samples of all workers. Worker 0 "
                        f"took {known.steps} steps, and waited {known.start_s:.3g} s for rounds to begin and "
                        f"{known.exchange_s:.3g} s for means."
                    )

    def report_batch(self, *, samples: int, loss: float | None) -> None:
        """Take note of a batch; reported to the scheduler with the step that it is part of."""
        if self._boundaries is not None:
            self._boundaries.report_batch(samples=samples, loss=loss)

    def progress(self) -> dict[str, float]:
        """How the rounds go, by name; what is not known is left out."""
        return {} if self._boundaries is None or self._runtime is None else self._runtime.session.progress()

    def _end_with(self, cause: BaseException) -> None:
        module = self.lightning_module
        for callback in () if module is None else module.trainer.checkpoint_callbacks:
            if getattr(callback, "save_on_exception", True):
                # The callback would count a file that is not written, and remove or link others because of it.
                vars(callback)["on_exception"] = self._say_not_written
                self._open.callback(vars(callback).pop, "on_exception", None)
        if self._slices is not None:
            self._slices.close(failed=True)
        if self._runtime is not None:
            self._runtime.fail(cause)


class RoundHooks(pl.Callback):
    """Starts and ends the rounds of a training, and publishes failures.

    It runs before all other callbacks. The strategy's own hooks would come too late at these moments.

    Args:
        strategy: The strategy.
    """

    def __init__(self, strategy: DiLoCoStrategy) -> None:
        self._strategy = strategy

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Wait for the other workers."""
        self._strategy.begin_rounds()

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Train on, if all ranks of the worker do.

        Raises:
            StopIteration: If another rank of it stops, and training is over.
        """
        if self._strategy.at_boundary(lambda boundaries: boundaries.before_epoch()) is False:
            raise StopIteration

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Go on after all workers stood still.

        Raises:
            StopIteration: If another worker stopped there, and training is over.
        """
        if self._strategy.at_boundary(lambda boundaries: boundaries.before_batch()) is False:
            raise StopIteration

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """See to it that the epoch ends for all."""
        self._strategy.at_boundary(lambda boundaries: boundaries.before_epoch_end())

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Bring all workers to the global weights, before other callbacks look at them."""
        self._strategy.end_rounds()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Publish the failure before other callbacks or the teardown can block."""
        try:
            self._strategy.publish_failure(exception)
        except Exception:  # Lightning would skip the teardown, and hide what training failed with
            log.exception("The failure could not be published.")
