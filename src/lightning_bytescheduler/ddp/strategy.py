"""``Trainer(strategy="bytescheduler")``: DDP's training, with ByteScheduler's communication."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch

from lightning_bytescheduler.checks import require_bool
from lightning_bytescheduler.ddp.batches import BatchSharing, loader_resumes
from lightning_bytescheduler.ddp.compression_rules import CompressionRules
from lightning_bytescheduler.ddp.ddp_arguments import SCHEDULED, options_of
from lightning_bytescheduler.ddp.fit_report import ONE_RANK, OverlapPlan, SchedulerStatistics
from lightning_bytescheduler.ddp.rank_strategy import (
    FitPosition,
    RankStrategy,
    callbacks_of,
    model_facts,
)
from lightning_bytescheduler.ddp.sample_weights import SampleCounter, Weighting
from lightning_bytescheduler.ddp.sigterm import RequeueForAll, SigtermForAll, requeues
from lightning_bytescheduler.ddp.wire import ServerOptions
from lightning_bytescheduler.exceptions import RanksDivergedError
from lightning_bytescheduler.lightning_api import (
    DDPStrategy,
    RunningStage,
    TrainerFn,
    pl,
    rank_zero_info,
)
from lightning_bytescheduler.scheduler.options import SchedulerOptions

log = logging.getLogger(__name__)


class ByteSchedulerStrategy(RankStrategy):
    """Distributed data parallel training with partitioned, prioritised gradient communication.

    Gradients are cut into partitions and sent in the order in which the forward pass needs them, under a credit window.
    Communication crosses the step boundary: each layer's update is applied when the next forward pass reaches it. The
    weights are DDP's: bit for bit at two ranks; with more ranks and with clipping, equal to rounding.

    Args:
        partition_size: Largest piece of gradient sent at once, in parameters. Chosen from model and link when left out;
            ``BYTESCHEDULER_PARTITION`` is used if set.
        credit: Most that may be in flight at once, in parameters. Chosen from model and link when left out;
            ``BYTESCHEDULER_CREDIT`` is used if set, as the start of tuning unless that is off.
        cross_barrier: Carry communication into the next forward pass. ``False`` keeps partitions and priorities but
            waits for the gradients at the end of each backward pass.
        mode: ``"overlapped"``; ``"ddp"`` takes steps as DDP does, with buckets merged to its sizes; ``"auto"`` begins
            as DDP, unless the link is slow, and overlaps where measurements show a gain. The weights are the same.
        tuning: What to find during training, see :class:`~lightning_bytescheduler.CreditTuner`: ``"credit"``,
            ``"partition"``, ``"both"``, or ``False``. ``BYTESCHEDULER_CREDIT_TUNING`` and
            ``BYTESCHEDULER_PARTITION_TUNING`` are used if left out. Without them, the credit is tuned if it was left
            out, the mode is ``"auto"`` and steps overlap.
        timeline: Write a Chrome-trace timeline to this file (``<stem>.rank<k>`` beside it for rank k > 0);
            ``BYTESCHEDULER_TIMELINE`` is used if left out.
        log_metrics: Log the scheduler's metrics through ``self.log``.
        debug: Log each scheduling decision; ``BYTESCHEDULER_DEBUG`` is used if left out.
        policy: The order and the pieces in which gradients travel: ``"bytescheduler"``; for comparison, ``"fifo"``
            (whole buckets in order of arrival) and ``"p3"`` (slices of 50,000 parameters by first use, one at a time).
        compression: Codec of gradients, with error feedback, such as ``"int8"``; see the documentation's page on fewer
            bytes. Or a dict of patterns of parameter names and codecs, of which the first match counts: ``{"head.*":
            None, "*": "int8"}``. The weights then differ from DDP's. Nothing is compressed when left
            out.
        compression_min_size: Gradients with fewer elements travel uncompressed; 1024 when left out.
        weighting: ``"ranks"``: the gradient is the mean of the ranks', as in DDP. ``"samples"``: each rank's gradient
            is weighted by its samples of the step, as if one process had all samples. The samples of a batch are the
            length of its tensors, or the result of a function of the batch that is given instead of the word.
        batch_size: ``"balanced"``: a batch of all ranks together has the loader's batch size times the ranks, and each
            rank's share follows its pace. ``{"balanced": most}`` limits the samples of a rank, with one number or a
            list with one for each rank. ``"global"``: the loader's batch size is that of all ranks together, and shares
            are equal. Needs ``weighting="samples"``. Also for a :class:`SliceDataModule`.
        servers: Parameter servers average gradients, see the documentation's page on them; the weights are as with
            all-reduce. The value is the number of servers on separate machines, each started by
            ``lightning-bytescheduler server``. With 0, each rank is also a server; with fewer than ranks, both kinds
            exist. A mapping has this number as ``"spare"``; ``"placement"``, which assigns parts of gradients to
            servers: ``"balanced"`` (by bytes, so that all links are equally busy) or ``"mixed"`` (as BytePS, also set
            by ``BYTEPS_ENABLE_MIXED_MODE=1``); and ``"group": "node"`` if the ranks of a node sum gradients before one
            pushes the sum. All-reduce when left out.
        bucket_cap_mb: Size at which DDP closes a bucket, in MiB. A bucket's arrival opens its layers' gates. Chosen
            from model and link when left out.
        gradient_as_bucket_view: See DistributedDataParallel. ``False`` is honoured, but keeps steps from overlapping.
        **kwargs: For :class:`~lightning.pytorch.strategies.DDPStrategy`, whose ``timeout`` also bounds every wait for
            gradients, and for :class:`~torch.nn.parallel.DistributedDataParallel`; see the documentation's page on
            options.

    Raises:
        OptionError: If an option or environment variable has a value that is not allowed.
        UnsupportedError: If a DDP option cannot be honoured.
    """

    has_sizes_to_tune = True

    def __init__(
        self,
        *,
        partition_size: int | None = None,
        credit: int | None = None,
        cross_barrier: bool = True,
        mode: Literal["auto", "overlapped", "ddp"] = "auto",
        tuning: Literal["credit", "partition", "both"] | bool | None = None,
        timeline: str | os.PathLike[str] | None = None,
        log_metrics: bool = True,
        debug: bool | None = None,
        policy: str = "bytescheduler",
        compression: str | Mapping[str, str | None] | None = None,
        compression_min_size: int | None = None,
        weighting: Literal["ranks", "samples"] | Callable[[Any], Any] = "ranks",
        batch_size: Literal["balanced", "global"] | Mapping[str, int | list[int]] | None = None,
        servers: int | Mapping[str, int | str] | None = None,
        bucket_cap_mb: float | None = None,
        gradient_as_bucket_view: bool = True,
        **kwargs: Any,
    ) -> None:
        arguments = locals()
        require_bool("log_metrics", log_metrics)
        buckets: dict[str, Any] = {"bucket_cap_mb": bucket_cap_mb, "gradient_as_bucket_view": gradient_as_bucket_view}
        kwargs = options_of(ByteSchedulerStrategy, DDPStrategy, kwargs, **buckets)
        self._options = SchedulerOptions.resolve(**{name: arguments[name] for name in SCHEDULED}, tuning=tuning)
        self._rules = CompressionRules.resolve(compression, compression_min_size)
        self._weighting = Weighting(weighting, batch_size)
        self._sharing = BatchSharing(self._weighting)
        self._servers = ServerOptions.resolve(servers, self._rules)
        self._log_metrics = log_metrics
        self._during_fit = ExitStack()  # contexts that last as long as a fit
        super().__init__(**kwargs)
        self._fit_options = self._options_of_fits(
            self._options,
            rules=self._rules,
            counter=partial(SampleCounter, self._weighting.samples) if self._weighting.by_samples else None,
            servers=self._servers,
        )
        self._tuning = self._fit_options.tuning

    @property
    def statistics(self) -> SchedulerStatistics | None:
        """Counters of the current or last fit; ``None`` before the first and on one process."""
        return self._counters()

    @property
    def plan(self) -> OverlapPlan | None:
        """What overlaps in the current or last fit, or why nothing does; ``None`` before the first."""
        return self._so_far()[0]

    def _so_far(self) -> tuple[OverlapPlan | None, SchedulerStatistics | None]:
        (plan, statistics), shares = super()._so_far(), self._sharing.balance
        return plan if plan is None or shares is None else replace(plan, batch_shares=shares.present), statistics

    def metrics(self, new: SchedulerStatistics) -> dict[str, float]:
        """Return the values to log.

        Args:
            new: Counters since the last time.
        """
        found = {
            "bytescheduler/exposed_communication_ms": new.exposed_ms,
            "bytescheduler/gate_wait_ms": 1e3 * new.gate_wait_s / new.steps,
            "bytescheduler/megabytes_sent": new.bytes_sent / new.steps / 1e6,
            "bytescheduler/deferred_share": new.deferred_share,
        }
        if self._rules is not None:
            found["bytescheduler/compression_ratio"] = new.compression_ratio
            found["bytescheduler/codec_ms"] = 1e3 * new.codec_s / new.steps
        return found if self._sharing.balance is None else {**found, **self._sharing.balance.metrics()}

    def batch_of_all(self, size: int) -> int | None:
        """Return the samples of a batch of all ranks if they share batches, otherwise ``None``.

        :class:`SliceDataModule` calls this.

        Args:
            size: The loader's batch size.
        """
        return self._weighting.batch_of_all(size, self.world_size)

    # ------------------------------------------------------------------ life cycle

    def setup_environment(self) -> None:
        """Join the other ranks, and learn of their failures from here on; see DDPStrategy."""
        super().setup_environment()
        self._release()  # what is left of a failed fit whose teardown was skipped
        self._failed = False
        trainer = self._trainer
        if trainer is None:
            return
        fits = trainer.state.fn == TrainerFn.FITTING
        if fits:
            self._sharing = BatchSharing(self._weighting)
        if fits and self._weighting.batch_size is not None:
            self._during_fit.enter_context(loader_resumes())
        if self.world_size > 1:
            self._board = self._join("bytescheduler", self._common_options(), trainer)
            self._position = FitPosition(trainer)
            self._board.stands(self._position.standing)
            self._sigterm = SigtermForAll(trainer, self._board)
            hooks = SchedulerHooks(self, self._sigterm)
            callbacks_of(trainer).insert(0, hooks)
            self._during_fit.callback(_forget, hooks, trainer)
            self._tuning.bring_tuner(callbacks_of(trainer))
            self._during_fit.enter_context(self._sigterm.handled())
        if fits and requeues(self.cluster_environment):
            self._during_fit.enter_context(RequeueForAll(self._sigterm).handled(trainer))

    def setup_distributed(self) -> None:
        """Meet the other ranks; see DDPStrategy."""
        self._connect(super().setup_distributed)

    def process_dataloader(self, dataloader: object) -> object:
        """Share training data out, if the user asked for that; see DDPStrategy."""
        trainer = self._trainer
        if self._weighting.batch_size is None or trainer is None or trainer.state.stage != RunningStage.TRAINING:
            return dataloader
        with self._explained():
            return self._sharing.share_out(dataloader, trainer, self.fit, self._meet)

    def backward(self, closure_loss: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """See RankStrategy."""
        if self._board is None and self._trainer is not None:
            self._sharing.weigh(closure_loss, self._trainer)
        return super().backward(closure_loss, *args, **kwargs)

    def _common_options(self) -> dict[str, object]:
        return {
            **self._facts_of(self._options),
            **({"compression": None} if self._rules is None else self._rules.facts(self.root_device)),
            **self._weighting.facts,
            **self._servers.facts,
        }

    def setup(self, trainer: pl.Trainer) -> None:
        """Wrap the model with DDP and the scheduler; see DDPStrategy."""
        super().setup(trainer)
        if self.world_size == 1 and trainer.state.fn == TrainerFn.FITTING:
            alone = OverlapPlan(steps="synchronised", as_ddp=True, reasons=(ONE_RANK,))
            self._outcome = alone, None
            rank_zero_info(f"bytescheduler: {alone.summary()}")
        if self.fit is not None:
            self.fit.decide()

    def configure_ddp(self) -> None:
        """Agree on sizes with the other ranks, then wrap the model."""
        module = self.lightning_module
        if self._board is not None and module is not None:
            self.barrier("model")  # the barrier detects a rank that has died; the store does not
            self._meet("the model", model_facts(module.parameters()))
            self.begin_fit()
        super().configure_ddp()

    def teardown(self) -> None:
        """Land pending updates, stop every thread, unwrap the model; see DDPStrategy."""
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
            self._failed = False  # later collectives are the user's own, as with DDP
        if board is not None and not had_failed and isinstance(board.fault, RanksDivergedError):
            raise board.fault  # this rank has finished, but others never will

    def _release(self) -> None:
        self._during_fit.close()
        self._sigterm = None
        if self._position is not None:
            self._position.end()
        self.end_fit()
        board, self._board = self._board, None
        if board is not None:
            board.close()
        self._position = None
        self._tuning.end([] if self._trainer is None else callbacks_of(self._trainer))

    # ------------------------------------------------------------------ failures

    def _end_with(self, cause: BaseException) -> None:
        self._tuning.end([])
        if self._sigterm is not None:
            self._sigterm.call_off()

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """See DDPStrategy. Raises rather than save a checkpoint that lacks updates."""
        self._require_whole_weights()
        return super().lightning_module_state_dict()

    def load_model_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """See DDPStrategy."""
        super().load_model_state_dict(*args, **kwargs)
        self._lost_weights = None

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """See DDPStrategy."""
        checkpoint = super().load_checkpoint(*args, **kwargs)
        self._sharing.load(checkpoint)
        if self.fit is not None:
            self.flush()
            self.fit.codec.residuals.clear()  # of other weights than those that were loaded
        return checkpoint

    def save_checkpoint(self, checkpoint: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """See DDPStrategy. Another rank's failure does not end this process while it saves."""
        if self.lightning_module is not None:
            self._sharing.note(checkpoint, self.lightning_module)  # it has no trainer after a fit elsewhere
        with self._patient():
            super().save_checkpoint(checkpoint, *args, **kwargs)


class SchedulerHooks(pl.Callback):
    """Publishes failures, flushes at the end of training, logs the scheduler's metrics.

    ``on_exception`` and ``on_train_end`` of callbacks run before the strategy's. As the first callback, this one
    publishes a failure before another callback may block on it, and lands pending updates before other callbacks read
    weights.

    Metrics are logged at Lightning's ``log_every_n_steps``, as means per step since the last time:
    ``bytescheduler/exposed_communication_ms`` (time the training waited for gradients), ``bytescheduler/gate_wait_ms``
    (the part of it spent at gates in the forward pass), ``bytescheduler/megabytes_sent`` and
    ``bytescheduler/deferred_share`` (1 if every update crossed the step boundary, 0 if the steps were synchronised).
    With compression also ``bytescheduler/compression_ratio`` (how many times fewer bytes were sent) and
    ``bytescheduler/codec_ms``. With balanced batches also ``bytescheduler/share_of_rank_<k>`` (samples).

    Args:
        strategy: The strategy.
        sigterm: Checked before batches that are not trained on, and at the end.
    """

    def __init__(self, strategy: ByteSchedulerStrategy, sigterm: SigtermForAll) -> None:
        self._strategy = strategy
        self._sigterm = sigterm
        self._logged = SchedulerStatistics()

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Refuse several loaders whose batches are shared out."""
        self._strategy._sharing.require_one_loader(trainer)

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Count the epoch."""
        self._strategy.count_epoch()

    def on_validation_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """End here with another rank that has failed, or without training after a SIGTERM."""
        self._sigterm.begin_evaluated_batch()

    on_test_batch_start = on_predict_batch_start = on_validation_batch_start

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log metrics since the last time, when Lightning logs too."""
        statistics = self._strategy.statistics
        every: int = trainer.log_every_n_steps  # type: ignore[attr-defined]  # set by a connector
        if (
            not self._strategy._log_metrics
            or statistics is None
            or not every
            or trainer.global_step % every
            or statistics.steps == self._logged.steps
        ):
            return
        now = statistics.copy()
        new = now.since(self._logged)
        self._logged = now
        pl_module.log_dict(self._strategy.metrics(new), on_step=True, on_epoch=False)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Land pending updates before other callbacks read the trained weights."""
        self._strategy.flush()
        self._sigterm.end_training()
        if self._strategy.fit is not None:
            self._strategy.fit.say_end()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Publish the failure before other callbacks or the teardown can block."""
        try:
            self._strategy.publish_failure(exception)
        except Exception:  # Lightning would skip the teardown and hide the training's error
            log.exception("The failure could not be published.")


def _forget(hooks: SchedulerHooks, trainer: pl.Trainer) -> None:
    if hooks in callbacks_of(trainer):  # not within a search of Lightning's, which has callbacks of its own
        callbacks_of(trainer).remove(hooks)
