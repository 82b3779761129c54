"""``Fabric(strategy="bytescheduler")``: DDP's training in a loop of one's own, with ByteScheduler's communication."""

from __future__ import annotations

import atexit
import inspect
import logging
import os
import sys
import traceback
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, nullcontext, suppress
from datetime import timedelta
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_bytescheduler.checks import require_known
from lightning_bytescheduler.ddp.ddp_arguments import (
    SAID_BY_THE_STRATEGY,
    check_ddp_options,
    check_ddp_values,
    check_launch_options,
    known_ddp_options,
)
from lightning_bytescheduler.ddp.fabric_module import FabricModuleGradients, SetUpOptions, take_final
from lightning_bytescheduler.ddp.fit_position import introduce, parameter_facts
from lightning_bytescheduler.ddp.plan import OverlapPlan
from lightning_bytescheduler.ddp.rank_strategy import JoinedRanks
from lightning_bytescheduler.ddp.runtime import SchedulerRuntime
from lightning_bytescheduler.ddp.sample_weights import Weighting
from lightning_bytescheduler.ddp.statistics import SchedulerStatistics
from lightning_bytescheduler.ddp.uneven_data import DrawnBatches, DrawnLoader, gather_lengths
from lightning_bytescheduler.exceptions import UnsupportedError
from lightning_bytescheduler.failures.board import FaultBoard
from lightning_bytescheduler.failures.startup_check import Introduction, hold_roll_call
from lightning_bytescheduler.lightning_api import (
    PACKAGE,
    CheckpointIO,
    ClusterEnvironment,
    FabricDDPStrategy,
    FabricPrecision,
    _FabricLauncher,
    default_pg_timeout,
    pl,
    rank_zero_info,
)
from lightning_bytescheduler.scheduler.options import SchedulerOptions

__all__ = ["ByteSchedulerFabricStrategy"]

_END_S = 10.0  # for the other ranks to end, too

_OF_THE_TRAINER = (
    *("tuning", "log_metrics", "compression", "compression_min_size"),
    *("batch_size", "servers"),
)


class _PublishingLauncher(_FabricLauncher):
    """See Fabric's launcher: what a function fails with is told to the other ranks, and its end is an orderly one."""

    _strategy: ByteSchedulerFabricStrategy

    def _wrapping_function(self, *args: Any, **kwargs: Any) -> None:
        try:
            super()._wrapping_function(*args, **kwargs)
            self._strategy.end()
        except BaseException as error:
            self._strategy.publish_failure(error)
            raise


class ByteSchedulerFabricStrategy(JoinedRanks, FabricDDPStrategy):
    """DDP in Fabric, with partitioned, prioritised gradient communication; see :class:`ByteSchedulerStrategy`.

    Each layer's update is applied when the next forward pass reaches it, or whoever else reads its weights. The weights
    are DDP's, bit for bit at two ranks. Every module that ``fabric.setup`` wraps has a scheduler of its own.

    Args:
        accelerator: As for Fabric's DDPStrategy, like all positional arguments.
        parallel_devices: See DDPStrategy.
        cluster_environment: See DDPStrategy.
        checkpoint_io: See DDPStrategy.
        precision: See DDPStrategy.
        process_group_backend: See DDPStrategy.
        timeout: Also bounds every wait for gradients.
        start_method: See DDPStrategy.
        partition_size: Largest piece of gradient sent at once, in parameters. Follows model and link when left out;
            ``BYTESCHEDULER_PARTITION`` is used if set.
        credit: What may be in flight at once, in parameters. Follows model and link when left out;
            ``BYTESCHEDULER_CREDIT`` is used if set.
        cross_barrier: Carry communication into the next forward pass. ``False`` keeps partitions and priorities but
            waits for the gradients at the end of each backward pass.
        mode: ``"overlapped"``; ``"ddp"`` takes steps as DDP does; ``"auto"`` begins as DDP, unless the link is slow,
            and overlaps where that is seen to pay. The weights are the same.
        timeline: Write a Chrome-trace timeline to this file (``<stem>.rank<k>`` beside it for rank k > 0,
            ``<stem>.module<k>`` for modules set up after the first); ``BYTESCHEDULER_TIMELINE`` is used if left out.
        debug: Log each scheduling decision; ``BYTESCHEDULER_DEBUG`` is used if left out.
        policy: In which order and in what pieces gradients travel, see :class:`ByteSchedulerStrategy`.
        weighting: Whether each rank's gradient counts alike, or by its samples, see :class:`ByteSchedulerStrategy`.
            These are counted in what the loaders hand out that ``fabric.setup_dataloaders`` returns.
        bucket_cap_mb: Size at which DDP closes a bucket, in MiB. Follows model and link when left out.
        gradient_as_bucket_view: See DistributedDataParallel. ``False`` is honoured, but keeps steps from overlapping.
        **kwargs: For :class:`~torch.nn.parallel.DistributedDataParallel`.

    Raises:
        OptionError: If an option or environment variable has a value that is not allowed.
        UnsupportedError: If an option cannot be honoured in Fabric.
    """

    def __init__(
        self,
        accelerator: pl.accelerators.Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision: FabricPrecision | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
        *,
        partition_size: int | None = None,
        credit: int | None = None,
        cross_barrier: bool = True,
        mode: Literal["auto", "overlapped", "ddp"] = "auto",
        timeline: str | os.PathLike[str] | None = None,
        debug: bool | None = None,
        policy: str = "bytescheduler",
        weighting: Literal["ranks", "samples"] | Callable[[Any], Any] = "ranks",
        bucket_cap_mb: float | None = None,
        gradient_as_bucket_view: bool = True,
        **kwargs: Any,
    ) -> None:
        for option in _OF_THE_TRAINER:
            if option in kwargs:
                raise UnsupportedError(
                    f"ByteSchedulerFabricStrategy cannot honour {option}={kwargs[option]!r}: it is an option of "
                    "ByteSchedulerStrategy, for Trainer."
                )
        own = [name for name in inspect.signature(ByteSchedulerFabricStrategy).parameters if name != "kwargs"]
        require_known(kwargs, [*own, *known_ddp_options()], of="ByteSchedulerFabricStrategy")
        check_ddp_options(kwargs)
        check_ddp_values({**kwargs, "bucket_cap_mb": bucket_cap_mb, "gradient_as_bucket_view": gradient_as_bucket_view})
        launch: dict[str, Any] = {
            "accelerator": accelerator,
            "parallel_devices": parallel_devices,
            "cluster_environment": cluster_environment,
            "checkpoint_io": checkpoint_io,
            "precision": precision,
            "process_group_backend": process_group_backend,
            "timeout": timeout,
            "start_method": start_method,
        }
        check_launch_options(
            launch,
            {"cluster_environment": ClusterEnvironment, "checkpoint_io": CheckpointIO, "precision": FabricPrecision},
            accelerator=pl.accelerators.Accelerator.__mro__[1],
            strategy="ByteSchedulerFabricStrategy",
            example="partition_size=131_072",
        )
        self._options = SchedulerOptions.resolve(
            partition_size=partition_size,
            credit=credit,
            cross_barrier=cross_barrier,
            mode=mode,
            tuning=False,
            timeline=timeline,
            debug=debug,
            policy=policy,
        )
        self._weighting = Weighting(weighting)
        self._batches: DrawnBatches | None = None
        self._own_buckets = bucket_cap_mb is not None or kwargs.get("bucket_cap_mb_list") is not None
        self._gradients: list[FabricModuleGradients] = []  # in the order in which modules were set up
        self._set_up = 0
        self._optimizers: list[weakref.ref[Optimizer]] = []
        self._excepthook: Callable[..., Any] | None = None
        self._exiting = self._lost_at_exit = self._trains = False
        super().__init__(**launch, **kwargs)
        self._ddp_kwargs.update(bucket_cap_mb=bucket_cap_mb, gradient_as_bucket_view=gradient_as_bucket_view)
        for name in SAID_BY_THE_STRATEGY:
            self._ddp_kwargs.pop(name, None)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {PACKAGE!r}>"

    @property
    def statistics(self) -> tuple[SchedulerStatistics, ...]:
        """Counters of each module that was set up and is still there, in that order."""
        return tuple(gradients.statistics for gradients in self._gradients)

    @property
    def plans(self) -> tuple[OverlapPlan | None, ...]:
        """What overlaps in each module that was set up, and why not; ``None`` before its first step."""
        return tuple(gradients.plan for gradients in self._gradients)

    @property
    def has_batch(self) -> bool:
        """Whether the batch that was drawn last is a new one; with ``weighting="samples"`` it may be there again."""
        return self._batches is None or self._batches.has_batch

    # ------------------------------------------------------------------ life cycle

    def _configure_launcher(self) -> None:
        super()._configure_launcher()
        if isinstance(self._launcher, _FabricLauncher):
            self._launcher = _PublishingLauncher(self, start_method=self._start_method)  # type: ignore[arg-type]

    def _setup_distributed(self) -> None:
        self._know_ranks()
        self._connect(super()._setup_distributed)
        if self.world_size == 1 or self._board is not None:
            return
        self._failed = False
        atexit.register(self._exit_with_failure)  # so it comes after all that is registered later
        self._board = FaultBoard.open(rank=self.global_rank, world_size=self.world_size)
        own = introduce(self.global_rank, "bytescheduler in Fabric", self._common_options())
        self._meet("options", own, connected=self._just_connected)
        if self._weighting.by_samples:
            self._batches = DrawnBatches(self._weighting.samples, self.global_rank)
        self._publish_uncaught()
        self._end_before_exit()

    def _know_ranks(self) -> None:
        self._set_world_ranks()

    def _common_options(self) -> dict[str, object]:
        """What has to be the same on all ranks."""
        facts = {**self._facts_of(self._options), **self._weighting.facts}
        return {**facts, "precision": type(self.precision).__name__}

    def process_dataloader(self, dataloader: Any) -> Any:
        """Have batches counted, and go on until all ranks' are used up, with ``weighting="samples"``."""
        dataloader = super().process_dataloader(dataloader)
        if self._batches is None:
            return dataloader
        with self._explained():
            _, most, certain = gather_lengths(dataloader, self.root_device)
        return DrawnLoader(dataloader, self._batches, most if certain else None)

    def setup_module(self, module: nn.Module) -> DistributedDataParallel:
        """Wrap ``module`` with DDP and a scheduler; every rank does so at the same point. See DDPStrategy."""
        board = self._board
        if board is None or not any(p.requires_grad for p in module.parameters()):
            return super().setup_module(module)
        self.barrier()  # notices a rank that died on the way here, which the store does not
        self._set_up += 1
        self._meet("a model", Introduction(rank=self.global_rank, facts=parameter_facts(module.parameters())))
        self._close_gone()
        if self._batches is not None and self._gradients:
            raise UnsupportedError(
                f"weighting='samples' weighs gradients of one module, and {type(module).__name__} would be another. "
                "Set up one module with both inside, or drop what fabric.setup returned of the first one."
            )
        if self.root_device.type != "cpu" and self._gradients:
            rank_zero_info(
                "bytescheduler: on a GPU one module has its gradients scheduled, the first that was set up; DDP itself "
                f"reduces those of {type(module).__name__}. To have them scheduled too, set up one module with both "
                "inside."
            )
            return super().setup_module(module)
        options = SetUpOptions(
            scheduler=self._options_of(self._set_up),
            timeout=self._timeout,
            ddp=self._ddp_kwargs,
            own_buckets=self._own_buckets,
            ranks_on_host=self.num_processes,
            agree=self.reduce_boolean_decision,
            batches=self._batches,
        )
        device_ids = self._determine_ddp_device_ids()
        with self._explained():
            gradients = FabricModuleGradients(module, board=board, options=options, device=self.root_device)
            self._gradients.append(gradients)
            self._end_before_exit()
            with nullcontext() if device_ids is None else torch.cuda.stream(torch.cuda.Stream()):
                return gradients.wrap(device_ids)

    def _options_of(self, number: int) -> SchedulerOptions:
        return self._options if number == 1 else self._options.for_module(number)

    def _close_gone(self) -> None:
        """Close the schedulers of modules that nobody has any more, on all ranks."""
        for gradients in list(self._gradients):
            if self.reduce_boolean_decision(gradients.is_gone):
                gradients.flush()
                gradients.close(failed=False)
                self._gradients.remove(gradients)

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """See DDPStrategy; known from here on, whichever module's parameters it has."""
        self._optimizers = [known for known in self._optimizers if known() is not None]
        self._optimizers.append(weakref.ref(optimizer))
        return super().setup_optimizer(optimizer)

    # ------------------------------------------------------------------ one step

    def backward(self, tensor: Tensor, module: nn.Module | None, *args: Any, **kwargs: Any) -> None:
        """See DDPStrategy."""
        if self._board is not None and self._board.fault is not None:
            raise self._board.fault
        if not self._trains:  # another rank may have a checkpoint that this one does not load
            self._trains = True
            self._meet("the first backward pass", Introduction(rank=self.global_rank, facts={}))
        with self._explained(), ExitStack() as stack:
            begun = [gradients for gradients in self._gradients if gradients.begin_backward()]
            if len(begun) < len(self._gradients):  # counts nothing
                return
            for gradients in begun:
                stack.enter_context(gradients.backward(tensor))
            super().backward(tensor, module, *args, **kwargs)

    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        """Take the step, or defer it where its gradients are still on their way. See DDPStrategy."""
        own_step = super().optimizer_step
        closure = kwargs.pop("closure", None)

        def take(closure: Callable[[], Any] | None) -> Any:
            given = kwargs if closure is None else {**kwargs, "closure": closure}
            return own_step(optimizer, **given)

        trained = [gradients for gradients in self._gradients if gradients.trains(optimizer)]
        if not trained:
            return take(closure)
        with self._explained():
            if len(trained) > 1 or kwargs:  # the step of one module's buckets would be another's, too
                output = take_final(take, closure, self.flush)
            else:
                output = trained[0].step(take, optimizer, closure)
            for gradients in trained:
                if not gradients.is_decided:
                    gradients.decide(self._optimizers_of(gradients, optimizer), self.precision, self.global_rank)
        return output

    def _optimizers_of(self, gradients: FabricModuleGradients, stepping: Optimizer) -> list[Optimizer]:
        known = [optimizer for reference in self._optimizers if (optimizer := reference()) is not None]
        others = [optimizer for optimizer in known if optimizer is not stepping and gradients.trains(optimizer)]
        return [stepping, *others]

    def clip_gradients_value(self, module: nn.Module, optimizer: Optimizer, clip_val: float | int) -> None:
        """Clip when the gradients have arrived, where they are still on their way. See DDPStrategy."""
        with self._explained():
            trained = [gradients for gradients in self._gradients if gradients.trains(optimizer)]
            if len(trained) != 1 or not trained[0].clip_value(optimizer, float(clip_val)):
                super().clip_gradients_value(module, optimizer, clip_val)

    def clip_gradients_norm(self, *args: Any, **kwargs: Any) -> Tensor:
        """See DDPStrategy. The norm is returned, and told only by all gradients: they are waited for."""
        with self._explained():
            return super().clip_gradients_norm(*args, **kwargs)

    def flush(self) -> None:
        """Wait for all gradients and apply every pending update; the weights are final afterwards."""
        with self._explained():
            for gradients in self._gradients:
                gradients.flush()

    # ------------------------------------------------------------------ with the other ranks

    def all_reduce(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        """See DDPStrategy."""
        with self._explained():
            return super().all_reduce(tensor, *args, **kwargs)

    def save_checkpoint(self, path: Any, state: Mapping[str, Any], *args: Any, **kwargs: Any) -> None:
        """See DDPStrategy. However long it takes, another rank's failure does not end this process meanwhile."""
        self.flush()
        self._check_weights()
        with nullcontext() if self._board is None else self._board.patient():
            super().save_checkpoint(path, dict(state), *args, **kwargs)

    def load_checkpoint(self, path: Any, state: Any = None, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """See DDPStrategy. All ranks load the same one with ``fabric.load``; ``load_raw`` is each rank's own."""
        if not isinstance(state, (nn.Module, Optimizer)):
            self._compare_checkpoints(path)
        return super().load_checkpoint(path, state, *args, **kwargs)

    def _check_weights(self) -> None:
        for runtime in self._runtimes():
            if runtime.lost_weights is not None:
                raise runtime.lost_weights

    # ------------------------------------------------------------------ the end, and failures

    def _runtimes(self) -> Iterable[SchedulerRuntime]:
        return [gradients.runtime for gradients in self._gradients if gradients.runtime is not None]

    def end(self, patience: float = _END_S) -> None:
        """Land what is pending, and stop every thread; every rank does so. Modules go on as plain ones.

        Args:
            patience: Longest wait for the others to come here too, in seconds.

        Raises:
            RankFailedError: If another rank has failed, and with it the last step.
        """
        board = self._board
        if board is None:
            return
        in_order = False
        try:
            if not self._failed:
                self.flush()
                in_order = self._all_end(board, patience)
        except BaseException as error:
            self.publish_failure(error)
            raise
        finally:
            self._forget_exceptions()
            atexit.unregister(self._end_at_exit)
            if not self._exiting:
                atexit.unregister(self._exit_with_failure)
            self._board = None
            for gradients in self._gradients:
                gradients.close(failed=not in_order)
            board.close()

    def _all_end(self, board: FaultBoard, patience: float) -> bool:
        """Whether all ranks end now: then each can wait for the others while it stops."""
        if not self._gradients:
            return True
        place, own = board.meeting_place("end"), Introduction(rank=self.global_rank, facts={})
        with suppress(Exception):
            hold_roll_call(place, own, world_size=board.world_size, timeout=patience, failure=self._no_hope)
            return True
        return False

    def teardown(self) -> None:
        """See DDPStrategy. Fabric itself never calls this; a script may, else the process's exit does the same."""
        self.end()
        super().teardown()

    def _end_before_exit(self) -> None:
        """At exit, before anything that was registered until now: threads stop there with what is pending lost."""
        atexit.unregister(self._end_at_exit)
        atexit.register(self._end_at_exit)

    def _end_at_exit(self) -> None:
        self._exiting = True
        try:
            self.end()
        except Exception as error:  # the script has come to its end, and lacks its last step
            self._lost_at_exit = True
            traceback.print_exception(error)

    def _exit_with_failure(self) -> None:
        """Let whoever has started this process know, too: Python's exit status does not tell of what fails at exit."""
        if self._lost_at_exit:
            logging.shutdown()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)

    def _publish_uncaught(self) -> None:
        """Have the other ranks know of an exception that ends this process."""
        strategy, before = weakref.ref(self), sys.excepthook

        def publish(kind: type[BaseException], error: BaseException, trace: Any) -> None:
            ours = strategy()
            if ours is not None:
                with suppress(Exception):
                    ours.publish_failure(error)
            before(kind, error, trace)

        self._before_hook, self._excepthook = before, publish
        sys.excepthook = publish

    def _forget_exceptions(self) -> None:
        if self._excepthook is not None and sys.excepthook is self._excepthook:
            sys.excepthook = self._before_hook
        self._excepthook = None
