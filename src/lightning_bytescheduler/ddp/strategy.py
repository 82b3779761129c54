"""``Trainer(strategy="bytescheduler")``: DDP's training, with ByteScheduler's communication; and its own callback.

``on_exception`` and ``on_train_end`` of callbacks run before the strategy's; being the first callback, the strategy's
publishes a failure before anyone else may block on it, and lands what is pending before anyone else looks.
"""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist

from lightning_bytescheduler.checks import require_bool, require_known
from lightning_bytescheduler.ddp.compression_rules import CompressionRules
from lightning_bytescheduler.ddp.ddp_arguments import (
    ELSEWHERE,
    SAID_BY_THE_STRATEGY,
    check_ddp_options,
    check_ddp_values,
    known_ddp_options,
)
from lightning_bytescheduler.ddp.fit_position import (
    FitPosition,
    introduce,
    optimizer_facts,
    parameter_facts,
    shape_facts,
)
from lightning_bytescheduler.ddp.own_names import OwnNames
from lightning_bytescheduler.ddp.parameter_servers import ServerOptions
from lightning_bytescheduler.ddp.plan import OverlapPlan
from lightning_bytescheduler.ddp.rank_strategy import OUTER_STATE, RankStrategy, callbacks_of
from lightning_bytescheduler.ddp.runtime import SchedulerRuntime
from lightning_bytescheduler.ddp.scheduled_gradients import ScheduledGradients
from lightning_bytescheduler.ddp.statistics import SchedulerStatistics
from lightning_bytescheduler.ddp.tuned_fit import FitTuning
from lightning_bytescheduler.exceptions import RanksDifferError, RanksDivergedError
from lightning_bytescheduler.failures.board import FaultBoard
from lightning_bytescheduler.failures.startup_check import Introduction
from lightning_bytescheduler.lightning_api import (
    CheckpointIO,
    ClusterEnvironment,
    Precision,
    TrainerFn,
    default_pg_timeout,
    pl,
    rank_zero_info,
)
from lightning_bytescheduler.scheduler.options import SchedulerOptions

__all__ = ["ByteSchedulerStrategy", "SchedulerHooks"]

log = logging.getLogger(__name__)

_TINY = 1024  # parameters
_COMPRESSION = "lightning_bytescheduler.compression"  # in a checkpoint

_ELSEWHERE = {
    **ELSEWHERE,
    **{
        name: f"It is an option of the other strategy: DiLoCoStrategy({name}=...)."
        for name in ("batch_size", "inner_steps", "outer_lr", "outer_optimizer", "samples_per_round", "wire_dtype")
    },
}


class SchedulerHooks(pl.Callback):
    """Publishes failures, flushes at the end of training, logs the scheduler's metrics.

    Logged at Lightning's ``log_every_n_steps``, as means per step since the last time:
    ``bytescheduler/exposed_communication_ms`` (time the training thread waited for gradients),
    ``bytescheduler/gate_wait_ms`` (the part of it spent at gates in the forward pass),
    ``bytescheduler/megabytes_sent`` and ``bytescheduler/deferred_share`` (the mode: 1 when every update crossed the
    step boundary, 0 when the steps were synchronised). Where gradients are compressed, also
    ``bytescheduler/compression_ratio`` (how many times fewer bytes were sent), ``bytescheduler/codec_ms``,
    ``bytescheduler/residual_norm`` (of what was left out of a step, to be sent in the next) and
    ``bytescheduler/compressed_share`` (of the gradients' bytes, those that travelled compressed).

    Args:
        strategy: Whose hooks these are.
        log_metrics: Whether to log.
    """

    def __init__(self, strategy: ByteSchedulerStrategy, *, log_metrics: bool) -> None:
        self._strategy = strategy
        self._log_metrics = log_metrics
        self._logged = SchedulerStatistics()

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Count batches anew."""
        self._strategy.count_epoch()

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Count the batch."""
        self._strategy.count_batch()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log what happened since the last time, when Lightning logs too."""
        statistics = self._strategy.statistics
        every: int = trainer.log_every_n_steps  # type: ignore[attr-defined]  # set by a connector
        if (
            not self._log_metrics
            or statistics is None
            or trainer.barebones
            or not every
            or trainer.global_step % every
            or statistics.steps == self._logged.steps
        ):
            return
        now = statistics.copy()
        new = now.since(self._logged)
        self._logged = now
        compressed = {
            "bytescheduler/compression_ratio": new.compression_ratio,
            "bytescheduler/codec_ms": 1e3 * new.codec_s / new.steps,
            "bytescheduler/residual_norm": new.residual_norm,
            "bytescheduler/compressed_share": new.compressed_share,
        }
        pl_module.log_dict(
            {
                "bytescheduler/exposed_communication_ms": 1e3 * new.exposed_s / new.steps,
                "bytescheduler/gate_wait_ms": 1e3 * new.gate_wait_s / new.steps,
                "bytescheduler/megabytes_sent": new.bytes_sent / new.steps / 1e6,
                "bytescheduler/deferred_share": new.deferred_share,
                **(compressed if self._strategy.compresses else {}),
            },
            on_step=True,
            on_epoch=False,
        )

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Land everything before other callbacks look at the trained weights."""
        self._strategy.flush()
        self._strategy.say_end()

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Add what error feedback has left to be sent; on all ranks at once."""
        state = self._strategy.compression_state()
        if state is not None:
            checkpoint[_COMPRESSION] = state

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Go on with what error feedback had left to be sent; say what of the checkpoint is left out."""
        self._strategy.load_compression_state(checkpoint.get(_COMPRESSION))
        if OUTER_STATE in checkpoint:
            rank_zero_info(
                "bytescheduler: the checkpoint is of strategy 'diloco': weights, optimizers and progress go on, and "
                "its outer optimizer is left out."
            )

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Publish the failure before other callbacks or the teardown can block."""
        try:
            self._strategy.publish_failure(exception)
        except Exception:  # Lightning would skip the teardown, and hide what training failed with
            log.exception("The failure could not be published.")


class ByteSchedulerStrategy(RankStrategy):
    """Distributed data parallel training with partitioned, prioritised gradient communication.

    Gradients are cut into partitions, sent in the order in which the forward pass needs them, under a credit window,
    and carried across the step boundary: each layer's update is applied when the next forward pass reaches it.
    The weights are DDP's: bit for bit at two ranks; with more ranks and with clipping, equal to rounding.

    Args:
        accelerator: As for :class:`~lightning.pytorch.strategies.DDPStrategy`, like all positional arguments.
        parallel_devices: See DDPStrategy.
        cluster_environment: See DDPStrategy.
        checkpoint_io: See DDPStrategy.
        precision_plugin: See DDPStrategy.
        ddp_comm_state: Must be left out: the scheduler is the comm hook.
        ddp_comm_hook: Must be left out: the scheduler is the comm hook.
        ddp_comm_wrapper: Must be left out: the scheduler is the comm hook.
        model_averaging_period: Must be left out: post-local SGD needs a comm hook of its own.
        process_group_backend: See DDPStrategy.
        timeout: Also bounds every wait for gradients.
        start_method: See DDPStrategy.
        partition_size: Largest piece of gradient sent at once, in parameters. Follows model and link when left out;
            ``BYTESCHEDULER_PARTITION`` is used if set.
        credit: What may be in flight at once, in parameters. Follows model and link when left out;
            ``BYTESCHEDULER_CREDIT`` is used if set, as the start of tuning unless that is off.
        cross_barrier: Carry communication into the next forward pass. ``False`` keeps partitions and priorities but
            waits for the gradients at the end of each backward pass.
        mode: ``"overlapped"``; ``"ddp"`` takes steps as DDP does, with buckets merged to its sizes; ``"auto"`` begins
            as DDP, unless the link is slow, and overlaps where that is seen to pay. The weights are the same.
        credit_tuning: Find the credit while training, see :class:`~lightning_bytescheduler.CreditTuner`.
            ``BYTESCHEDULER_CREDIT_TUNING`` is used if left out, and without that a credit is tuned that was not given,
            where the mode is ``"auto"`` and steps overlap.
        partition_tuning: Find the partition size too; ``BYTESCHEDULER_PARTITION_TUNING`` is used if left out, and
            ``False`` without that.
        timeline: Write a Chrome-trace timeline to this file (``<stem>.rank<k>`` beside it for rank k > 0);
            ``BYTESCHEDULER_TIMELINE`` is used if left out.
        log_metrics: Log the scheduler's metrics through ``self.log``.
        debug: Log each scheduling decision; ``BYTESCHEDULER_DEBUG`` is used if left out.
        compression: What gradients travel in, with error feedback: ``"int8"``, ``"int4"``, ``"bf16"`` or
            ``"powersgd"``; or a dict of patterns of parameter names and such; the first that fits counts:
            ``{"head.*": None, "*": "int8"}``. The weights are not DDP's then. ``"auto"`` compresses, step by step, only
            what would come too late as it is. Nothing is compressed when left out.
        compression_min_size: Elements below which a parameter's gradient travels as it is; 1024 when left out.
        max_error: For ``compression="auto"``: the most that compressing may leave out of a part, in norm, relative to
            its gradient; 0.2 when left out.
        architecture: ``"allreduce"``: ranks average gradients among themselves. ``"ps"``: parameter servers do, see the
            documentation's page on them; the weights are as with all-reduce.
        servers: For ``architecture="ps"``: how many servers run on machines of their own, each started by
            ``lightning-bytescheduler server``. With 0, each rank is a server besides; with fewer than ranks, both.
        bucket_cap_mb: Size at which DDP closes a bucket, in MiB: the unit whose arrival opens a layer's gate. Follows
            model and link when left out.
        gradient_as_bucket_view: See DistributedDataParallel. ``False`` is honoured, but keeps steps from overlapping.
        **kwargs: For :class:`~torch.nn.parallel.DistributedDataParallel`, see the documentation's page on options.

    Raises:
        OptionError: If an option or environment variable has a value that is not allowed.
        UnsupportedError: If a DDP option cannot be honoured.
    """

    # Lightning stops all ranks at a SIGTERM that rank 0 or every rank has got: that is no failure.
    sigterm_patience_s = 10.0
    own_names = OwnNames("bytescheduler", with_option="ByteSchedulerStrategy({option}=True)")
    example_option = "partition_size=131_072"
    _gradients: ScheduledGradients

    def __init__(
        self,
        accelerator: pl.accelerators.Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        ddp_comm_state: object | None = None,
        ddp_comm_hook: Callable[..., Any] | None = None,
        ddp_comm_wrapper: Callable[..., Any] | None = None,
        model_averaging_period: int | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
        *,
        partition_size: int | None = None,
        credit: int | None = None,
        cross_barrier: bool = True,
        mode: Literal["auto", "overlapped", "ddp"] = "auto",
        credit_tuning: bool | None = None,
        partition_tuning: bool | None = None,
        timeline: str | os.PathLike[str] | None = None,
        log_metrics: bool = True,
        debug: bool | None = None,
        compression: str | Mapping[str, str | None] | None = None,
        compression_min_size: int | None = None,
        max_error: float | None = None,
        architecture: Literal["allreduce", "ps"] = "allreduce",
        servers: int = 0,
        bucket_cap_mb: float | None = None,
        gradient_as_bucket_view: bool = True,
        **kwargs: Any,
    ) -> None:
        require_bool("log_metrics", log_metrics)
        own = [name for name in inspect.signature(ByteSchedulerStrategy).parameters if name != "kwargs"]
        named = {name: value for name, value in kwargs.items() if name not in SAID_BY_THE_STRATEGY}  # LightningCLI's
        require_known(named, [*own, *known_ddp_options()], of="ByteSchedulerStrategy", elsewhere=_ELSEWHERE)
        check_ddp_options(
            {
                **kwargs,
                "ddp_comm_state": ddp_comm_state,
                "ddp_comm_hook": ddp_comm_hook,
                "ddp_comm_wrapper": ddp_comm_wrapper,
                "model_averaging_period": model_averaging_period,
            }
        )
        check_ddp_values({**kwargs, "bucket_cap_mb": bucket_cap_mb, "gradient_as_bucket_view": gradient_as_bucket_view})
        self._options = SchedulerOptions.resolve(
            partition_size=partition_size,
            credit=credit,
            cross_barrier=cross_barrier,
            mode=mode,
            credit_tuning=credit_tuning,
            partition_tuning=partition_tuning,
            timeline=timeline,
            debug=debug,
        )
        _say_if_tiny("partition_size", self._options.partition_size)
        _say_if_tiny("credit", self._options.credit)
        self._rules = CompressionRules.resolve(compression, compression_min_size, max_error)
        self._servers = ServerOptions.resolve(architecture, servers, compression=compression)
        self._log_metrics = log_metrics
        self._hooks: SchedulerHooks | None = None
        self._tuning = FitTuning(self._options, log_metrics=log_metrics, timeout=timeout)
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
            process_group_backend=process_group_backend,
            timeout=timeout,
            start_method=start_method,
            **kwargs,
        )
        self._gradients = ScheduledGradients(
            self,
            self._options,
            timeout=timeout,
            own_buckets=bucket_cap_mb is not None or kwargs.get("bucket_cap_mb_list") is not None,
            tuning=self._tuning,
            rules=self._rules,
            servers=self._servers,
        )
        self._ddp_kwargs.update(bucket_cap_mb=bucket_cap_mb, gradient_as_bucket_view=gradient_as_bucket_view)
        for name in SAID_BY_THE_STRATEGY:
            self._ddp_kwargs.pop(name, None)

    @property
    def statistics(self) -> SchedulerStatistics | None:
        """Counters of the current fit, or of the last one; ``None`` before the first and on one process."""
        return self._gradients.statistics

    @property
    def plan(self) -> OverlapPlan | None:
        """What overlaps in the current fit, or did in the last one, and why not; ``None`` before the first."""
        return self._gradients.plan

    def outcome(self) -> tuple[OverlapPlan | None, SchedulerStatistics | None]:
        """See RankStrategy."""
        return self.plan, self.statistics

    def remember(self, outcome: tuple[OverlapPlan | None, SchedulerStatistics | None]) -> None:
        """See RankStrategy."""
        self._gradients.remember(*outcome)

    @property
    def compresses(self) -> bool:
        """Whether gradients are compressed, or may be."""
        return self._rules is not None

    @property
    def runtime(self) -> SchedulerRuntime | None:
        """The scheduler during ``fit``."""
        return self._gradients.runtime

    # ------------------------------------------------------------------ life cycle

    def setup_environment(self) -> None:
        """Join the other ranks, and know of their failures from here on; see DDPStrategy."""
        super().setup_environment()
        self._release()  # a failed fit whose teardown was skipped
        self._failed = False
        trainer = None if self.lightning_module is None else self.lightning_module._trainer
        if trainer is not None and trainer.state.fn == TrainerFn.FITTING:
            self._gradients.begin_anew()
        if trainer is not None and self.world_size > 1:
            self._board = FaultBoard.open(rank=self.global_rank, world_size=self.world_size)
            self._meet("options", introduce(self.global_rank, "bytescheduler", self._common_options(), trainer))
            self._position = FitPosition(trainer)
            self._board.stands(self._position.standing)
            self._hooks = SchedulerHooks(self, log_metrics=self._log_metrics)
            callbacks_of(trainer).insert(0, self._hooks)
            self._tuning.bring_tuner(callbacks_of(trainer))

    def setup_distributed(self) -> None:
        """Meet the other ranks; see DDPStrategy."""
        with self._watched_rendezvous("bytescheduler", self.num_nodes * self.num_processes):
            super().setup_distributed()

    def _common_options(self) -> dict[str, object]:
        """What has to be the same on all ranks."""
        options = self._options
        return {
            "number of processes": self.world_size,
            "process_group_backend": self._process_group_backend,
            "partition_size": options.partition_size,
            "credit": options.credit,
            "cross_barrier": options.cross_barrier,
            "mode": options.mode,
            "credit_tuning": options.tunes_credit,
            "partition_tuning": options.tunes_partition,
            "compression": None if self._rules is None else self._rules.spec,
            "architecture": self._servers.architecture,
            "servers": self._servers.servers,
            **self._ddp_kwargs,
        }

    def setup(self, trainer: pl.Trainer) -> None:
        """Wrap the model with DDP and the scheduler; see DDPStrategy."""
        super().setup(trainer)
        if self.world_size == 1 and trainer.state.fn == TrainerFn.FITTING:
            self._gradients.train_alone()
        self._gradients.decide()

    def configure_ddp(self) -> None:
        """Agree on sizes with the other ranks, then wrap the model."""
        module = self.lightning_module
        if self._board is not None:
            if module is not None:
                self.barrier("model")  # notices a rank that died on the way here, which the store does not
                self._require_same_model(module)
            self._gradients.prepare(self._board)
        if self._position is not None:
            self._position.begin(self.runtime)
        super().configure_ddp()

    def _require_same_model(self, module: pl.LightningModule) -> None:
        try:
            self._meet("model", Introduction(rank=self.global_rank, facts=parameter_facts(module.parameters())))
        except RanksDifferError:  # on every rank alike, so that all come here, too
            self._meet("shapes", Introduction(rank=self.global_rank, facts=shape_facts(module.named_parameters())))
            raise

    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        """Make them, and see that they are the same on all ranks; see DDPStrategy."""
        super().setup_optimizers(trainer)
        if self._board is not None and trainer.state.fn == TrainerFn.FITTING:
            facts, noted = optimizer_facts(self.optimizers)
            self._meet("optimizers", Introduction(rank=self.global_rank, facts=facts, noted=noted))

    def teardown(self) -> None:
        """Land what is pending, stop every thread, unwrap the model; see DDPStrategy."""
        try:
            if not self._failed:
                self.flush()
        except BaseException as error:
            self.publish_failure(error)
            raise
        finally:
            board, had_failed = self._board, self._failed
            self._release()
            super().teardown()
            self._failed = False  # what is asked of the ranks from here on is the user's affair, as with DDP
        if board is not None and not had_failed and isinstance(board.fault, RanksDivergedError):
            raise board.fault  # this rank is done, but others will never be

    def _release(self) -> None:
        if self._position is not None:
            self._position.end()
        self._gradients.release(failed=self._failed)
        board, self._board = self._board, None
        if board is not None:
            board.close()
        self._position = None
        trainer = None if self.lightning_module is None else self.lightning_module._trainer
        if trainer is not None and self._hooks in callbacks_of(trainer):
            callbacks_of(trainer).remove(self._hooks)
        self._tuning.end([] if trainer is None else callbacks_of(trainer))
        self._hooks = None

    def flush(self) -> None:
        """Wait for all gradients and apply every pending update; the weights are final afterwards."""
        with self._explained():
            self._gradients.flush()

    def say_end(self) -> None:
        """Say what came of this fit, where something was scheduled."""
        self._gradients.say_end()

    def compression_state(self) -> dict[str, Any] | None:
        """For a checkpoint: what error feedback has left to be sent; on all ranks at once."""
        residuals = self._gradients.residuals
        if self._rules is None or self._failed or not dist.is_initialized():
            return None
        self.flush()
        with self._explained():
            return residuals.total(partial(dist.reduce, dst=0), keep=self.is_global_zero)

    def load_compression_state(self, state: Mapping[str, Any] | None) -> None:
        """Go on from what :meth:`compression_state` returned, perhaps on another number of ranks."""
        if state is not None and self._rules is not None:
            self._gradients.residuals.load(state, self.world_size)
        elif state is not None:
            rank_zero_info(
                "bytescheduler: the checkpoint is of a training with compressed gradients. What was left to be sent is "
                "left out, as compression is off."
            )

    # ------------------------------------------------------------------ failures

    def _end_with(self, cause: BaseException) -> None:
        self._tuning.end([])

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """See DDPStrategy. No checkpoint on exception is better than one that lacks updates."""
        self._gradients.check_weights()
        return super().lightning_module_state_dict()

    def load_model_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """See DDPStrategy."""
        super().load_model_state_dict(*args, **kwargs)
        self._gradients.weights_replaced()

    def save_checkpoint(self, checkpoint: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """See DDPStrategy. However long it takes, another rank's failure does not end this process meanwhile."""
        if self._hooks is None and "optimizer_states" in checkpoint:  # after the fit, whose callback is gone
            state = self.compression_state()
            if state is not None:
                checkpoint[_COMPRESSION] = state
        with nullcontext() if self._board is None else self._board.patient():
            super().save_checkpoint(checkpoint, *args, **kwargs)


def _say_if_tiny(option: str, size: int | None) -> None:
    """Somebody may have meant megabytes."""
    if size is not None and size < _TINY:
        rank_zero_info(
            f"bytescheduler: {option}={size} is in parameters: {4 * size:,} bytes of fp32 at a time, which is slow. "
            f"{size} MB of fp32 = {size * 250_000:,} parameters."
        )
