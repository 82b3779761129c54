"""ByteScheduler's communication in a strategy whose ranks train together with DDP.

The strategy calls it at each point of a step, and whenever weights have to be final. ``fit_report.py`` has the messages
to the user.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_bytescheduler.checks import some_of
from lightning_bytescheduler.collectives.groups import SchedulerGroups
from lightning_bytescheduler.collectives.host_copies import travel_by_host
from lightning_bytescheduler.collectives.number_exchange import AgreedValues
from lightning_bytescheduler.collectives.operations import shards_over
from lightning_bytescheduler.collectives.push_pull import PlacedParts
from lightning_bytescheduler.ddp.agreed_sizes import agree_on_sizes
from lightning_bytescheduler.ddp.buffers import BufferBroadcast
from lightning_bytescheduler.ddp.compressed_layers import CompressedLayers
from lightning_bytescheduler.ddp.compressed_reduction import GradientCompression, has_no_gradient
from lightning_bytescheduler.ddp.compression_rules import CompressionRules, names_that_count
from lightning_bytescheduler.ddp.ddp_arguments import check_hooks, check_module
from lightning_bytescheduler.ddp.deferred_optimizer import deferring, followed_by, loss_scale_of
from lightning_bytescheduler.ddp.fit_report import (
    DecidedSteps,
    codec_cost,
    summary_of,
)
from lightning_bytescheduler.ddp.parameter_servers import ServerOptions
from lightning_bytescheduler.ddp.partial_step import wants_whole_steps
from lightning_bytescheduler.ddp.plan import (
    OverlapPlan,
    may_drop_gradients,
    model_reasons,
    norm_needed_by,
    optimizer_reasons,
    option_reasons,
    plan_of,
    precision_reasons,
    unseen_parameters,
)
from lightning_bytescheduler.ddp.residuals import Residuals
from lightning_bytescheduler.ddp.sample_weights import NOTHING, SampleCounter
from lightning_bytescheduler.ddp.sparse_gradients import sparse_layers
from lightning_bytescheduler.ddp.statistics import SchedulerStatistics
from lightning_bytescheduler.ddp.tuned_fit import FitTuning
from lightning_bytescheduler.ddp.uneven_data import log_nothing, loss_of_nothing
from lightning_bytescheduler.exceptions import SchedulerClosedError, UnsupportedError
from lightning_bytescheduler.failures.board import FaultBoard
from lightning_bytescheduler.lightning_api import DDPStrategy, pl, rank_zero_info, rank_zero_warn
from lightning_bytescheduler.scheduler.options import SchedulerOptions
from lightning_bytescheduler.timeline.timeline import Timeline

__all__ = ["ScheduledGradients"]


def warn_unaveraged(names: Sequence[str]) -> None:
    """Warn that DDP does not average some parameters, as they did not require gradients when it wrapped the model."""
    rank_zero_warn(
        f"bytescheduler: the gradients of {some_of(names, 2)} are not averaged over ranks: they require gradients now, "
        "and did not when DDP wrapped the model. As with strategy='ddp', each rank trains them on its own batches, and "
        "the ranks' weights differ. To have them averaged, freeze them in on_fit_start, not before, and use "
        "find_unused_parameters=True."
    )


class ScheduledGradients(DecidedSteps):
    """One strategy's scheduler, for all its fits.

    Args:
        tuning: Decides how steps are taken; one that searches no sizes if ``None``.
        rules: Which gradients travel compressed, if any.
        counter: Makes the counter of a rank's samples, if gradients are weighted by them.
        await_batch: Waits until the other ranks have begun the present batch, too.
    """

    def __init__(
        self,
        strategy: DDPStrategy,
        options: SchedulerOptions,
        *,
        timeout: timedelta | None,
        own_buckets: bool,
        tuning: FitTuning | None = None,
        rules: CompressionRules | None = None,
        counter: Callable[[int], SampleCounter] | None = None,
        servers: ServerOptions | None = None,
        await_batch: Callable[[], None] = lambda: None,
    ) -> None:
        tuning = FitTuning(options, timeout=timeout) if tuning is None else tuning
        super().__init__(strategy, options, own_buckets=own_buckets, tuning=tuning)
        self.residuals = Residuals()
        self._buffers: BufferBroadcast | None = None
        self._await_batch = await_batch
        self._rules = rules
        self._counter = counter
        self._servers = ServerOptions() if servers is None else servers
        self._placed: PlacedParts | None = None
        self._timeout = timeout
        self._lost_weights: SchedulerClosedError | None = None
        self._known: set[int] = set()  # ids of parameters that DDP averages, and of those warned of
        self._epoch_begins = False

    @property
    def plan(self) -> OverlapPlan | None:
        """What overlaps in the current or last fit, and why not; ``None`` before the first."""
        facts: dict[str, Any] = {} if self._placed is None else {"placement": self._placed.so_far}
        return self._so_far(self._strategy.lightning_module, **facts)

    def remember(self, plan: OverlapPlan | None, statistics: SchedulerStatistics | None) -> None:
        """Take over another process's outcome as that of the last fit."""
        self._plan, self.statistics, self._reads, self._placed = plan, statistics, None, None

    # ------------------------------------------------------------------ life cycle

    def prepare(self, board: FaultBoard) -> None:
        """Agree on sizes with the other ranks, before the model is wrapped."""
        module, device = self._strategy.lightning_module, self._strategy.root_device
        if module is None:
            return
        check_module(module)
        if self._rules is not None:
            self._rules.check_device(device)
        self._lost_weights = None
        parameters = [p for p in module.parameters() if p.requires_grad]
        if not parameters:
            raise UnsupportedError(
                f"No parameter of {type(module).__name__} requires gradients, so that there is nothing to train. Let "
                "some layers learn (requires_grad_(True)) before fit, or call trainer.validate or trainer.test."
            )
        if self._rules is not None:
            self._rules.check_patterns(names_that_count(module))
        self._known = set(map(id, parameters))
        counts, sparse = self._counter is not None, bool(sparse_layers(module))
        by_host = travel_by_host(device, compressed=self._rules is not None, served=self._servers.used)
        groups = SchedulerGroups.create(
            timeout=self._timeout, counts=counts, routed_on=device, sparse=sparse, by_host=by_host
        )
        # with "auto" it is not certain that anything is compressed
        rules = None if self._rules is None or self._rules.auto else self._rules
        in_shards = bool(norm_needed_by(module, self._strategy.precision_plugin)) or rules is not None
        ratio = 1.0 if rules is None else rules.ratio(_trained(module))
        agreed = agree_on_sizes(
            groups,
            self._options,
            parameters,
            device,
            in_shards=in_shards,
            ratio=ratio,
            architecture="ps" if self._servers.used else "allreduce",
        )
        options = self._strategy._ddp_kwargs
        if not self._own_buckets:
            options["bucket_cap_mb"] = agreed.sizes.bucket_bytes / 2**20
        elif options.get("bucket_cap_mb") is not None:
            chosen = max(int(options["bucket_cap_mb"] * 2**20), 1)
            agreed = replace(agreed, sizes=replace(agreed.sizes, bucket_bytes=chosen))
        joined = self._servers.join(groups, board, self._strategy, timeout=self._timeout, say=rank_zero_info)
        self._placed = None if joined is None else joined.push_pull.shares
        self._open(
            groups,
            board,
            agreed,
            parameters,
            timeout=self._timeout,
            compression=None if self._rules is None else partial(self._compress, self._rules, module),
            counter=None if self._counter is None else self._counter(groups.rank),
            servers=joined,
        )

    def _compress(
        self,
        rules: CompressionRules,
        module: pl.LightningModule,
        statistics: SchedulerStatistics,
        timeline: Timeline | None,
    ) -> GradientCompression:
        layers = None
        if rules.auto:
            layers = CompressedLayers(
                rules.ratio(_trained(module)),
                AgreedValues(1, timeout=self._timeout, failure=self._failure),
                decides=dist.get_rank() == 0,
                statistics=statistics,
            )
        self._compression = GradientCompression(
            rules,
            _trained(module),
            self.residuals,
            statistics=statistics,
            timeline=timeline,
            loss_scale=partial(loss_scale_of, self._strategy),
            layers=layers,
            failure=self._failure,
            idle=has_no_gradient,
            may_drop=may_drop_gradients(module),
            seen=self._say_cost,
        )
        return self._compression

    def _failure(self) -> BaseException | None:
        return None if self.runtime is None else self.runtime.failure()

    def _say_cost(self) -> None:
        statistics, runtime = self.statistics, self.runtime
        if statistics is not None and runtime is not None:
            line = codec_cost(statistics, runtime.agreed.link, runtime.group.size())
            if line:
                rank_zero_info(f"bytescheduler: {line}")

    def take_over(self, model: object) -> None:
        """Replace the communication of ``model``, once it is wrapped."""
        if self.runtime is not None and isinstance(model, DistributedDataParallel):
            self.runtime.engine.take_over(model)
            agree = partial(self._strategy.reduce_boolean_decision, all=True)
            self._buffers = BufferBroadcast.of(
                model,
                agree,
                await_batch=self._await_batch,
                failure=self.runtime.failure,
                timeout=self._timeout,
            )

    def decide(self) -> None:
        """Decide with the other ranks what overlaps, once everything is set up."""
        module, runtime = self._strategy.lightning_module, self.runtime
        if module is None or runtime is None:
            return
        check_hooks(module)
        strategy, wire, unseen = self._strategy, runtime.wire_device, unseen_parameters(module)
        plugin = strategy.precision_plugin
        reasons = ["optimization is manual (automatic optimization keeps the overlap)"]
        if module.automatic_optimization:
            reasons = optimizer_reasons(strategy.optimizers)
        bucket_views = strategy._ddp_kwargs.get("gradient_as_bucket_view", True)
        reasons += option_reasons(cross_barrier=self._options.cross_barrier, bucket_views=bucket_views)
        reasons += [*precision_reasons(plugin, strategy.optimizers), *model_reasons(module)]
        needed_by = norm_needed_by(module, plugin)
        before = f"{' and '.join(needed_by)} needs all gradients before a step, and"
        on_wire = f"{' and '.join(needed_by)} on {wire.type} needs all gradients before a step, and"
        if needed_by and not shards_over(runtime.group, wire):
            reasons.append(
                f"{on_wire} {dist.get_backend(runtime.group)} cannot reduce in shards there "
                "(process_group_backend='nccl' keeps the overlap)"
            )
        if needed_by and self._servers.used:
            reasons.append(f"{before} parameter servers tell no norms before (leaving servers out keeps the overlap)")
        if needed_by and self._rules is not None and self._rules.whole_matrices:
            reasons.append(
                f"{before} compression='powersgd' cannot reduce in shards (another compression keeps the overlap)"
            )
        held = runtime.engine.context.find_held()
        plan = plan_of(module, reasons, unseen=unseen, held=held, norm_needed_by=needed_by)
        self._begin_steps(module, plan, runtime, unseen)

    def train_alone(self, plan: OverlapPlan) -> None:
        """Begin a fit on one rank, with ``plan``; nothing is sent."""
        self._plan = plan
        rank_zero_info(f"bytescheduler: {plan.summary()}")

    def say_end(self) -> None:
        """Report the end of a fit, if anything was scheduled."""
        if self.statistics is not None and self.runtime is not None:
            line = summary_of(self.statistics, self._tuning.standing)
            if line is not None:
                rank_zero_info(f"bytescheduler: {line}")

    def all_left(self, add_up: Callable[[torch.Tensor], object], *, keep: bool) -> dict[str, Any] | None:
        """See :meth:`Residuals.total`."""
        self.disturb()
        given = () if self._compression is None else self._compression.not_applied()
        return self.residuals.total(add_up, keep=keep, loss_scale=loss_scale_of(self._strategy), not_applied=given)

    def begin_anew(self) -> None:
        """Begin another fit; until now residuals were kept for checkpoints of the last one."""
        self.residuals = Residuals()

    def release(self, *, failed: bool) -> None:
        """Stop every thread and make every parameter plain again; bounded, idempotent."""
        plan = self.plan  # while the engine still knows the names
        compression, self._compression = self._compression, None
        if failed:  # ranks may have residuals of different steps
            self.residuals = Residuals()
        buffers, self._buffers = self._buffers, None
        if buffers is not None:
            buffers.close(failed=failed)
        runtime = self._close(plan, failed=failed)
        if runtime is not None:
            self._lost_weights = runtime.lost_weights
        if compression is not None and not failed:
            compression.forget_not_applied()

    def check_weights(self) -> None:
        """Check that the weights are those of a whole number of steps; after a failed fit they may not be.

        Raises:
            SchedulerClosedError: If they are not.
        """
        lost = self._lost_weights if self.runtime is None else self.runtime.lost_weights
        if lost is not None:
            raise lost

    def weights_replaced(self) -> None:
        """Record that other weights were loaded, so that a failed fit has no effect left."""
        self._lost_weights = None

    # ------------------------------------------------------------------ one step

    def begin_epoch(self) -> None:
        """Begin an epoch: callbacks may unfreeze more layers until its first step."""
        self._epoch_begins = True
        self.validate()
        weights, module = (
            None if self.runtime is None else self.runtime.weights,
            self._strategy.lightning_module,
        )
        if weights is not None and module is not None and module.automatic_optimization:
            weights.begin_epoch()

    def validate(self) -> None:
        """Record that a validation or similar code runs before the next training batch."""
        self.disturb()
        if self._buffers is not None:
            self._buffers.look_closely()

    def disturb(self) -> None:
        """Ignore the time of the present step, as something unusual is in it."""
        layers = None if self._compression is None else self._compression.layers
        if layers is not None:
            layers.disturb()

    def _find_unaveraged(self) -> None:
        module = self._strategy.lightning_module
        if module is None:
            return
        with torch._C.DisableTorchFunctionSubclass():  # opens no gate
            found = {n: id(p) for n, p in module.named_parameters() if p.requires_grad and id(p) not in self._known}
        if found:
            self._known.update(found.values())
            warn_unaveraged(list(found))

    @contextmanager
    def forward(self, batch: Any = None) -> Iterator[None]:
        """Wrap a forward pass that trains on ``batch``."""
        model = self._strategy.model
        if self._buffers is None and isinstance(model, DistributedDataParallel) and model.will_sync_module_buffers():
            self._await_batch()  # DDP waits for the first rank here
        if self.runtime is not None:
            self.runtime.engine.begin_forward(batch)
        yield
        if self.runtime is not None:
            self.runtime.engine.end_forward()
        if self._buffers is not None:
            self._buffers.after_forward()

    def step_without_batch(self) -> torch.Tensor:
        """Replace ``training_step`` on a rank that has no batch."""
        model, module = self._strategy.model, self._strategy.lightning_module
        if not isinstance(model, DistributedDataParallel) or module is None:
            raise RuntimeError("The model is not wrapped.")
        with self.forward(NOTHING):
            loss: torch.Tensor = loss_of_nothing(model, module, may_be_unused=model.find_unused_parameters)
            log_nothing(module.trainer)
        return loss

    def leaves_out(self) -> bool:
        """Whether to skip a backward pass, as the batch has no sample."""
        weights = None if self.runtime is None else self.runtime.weights
        sends = getattr(self._strategy.model, "require_backward_grad_sync", True)
        return weights is not None and weights.leaves_out(communicates=sends)

    @contextmanager
    def backward(self, loss: torch.Tensor | None = None) -> Iterator[None]:
        """Wrap a backward pass of ``loss``."""
        self._await_batch()  # hand over gradients only of batches that all ranks have begun
        engine = None if self.runtime is None else self.runtime.engine
        weights = None if self.runtime is None else self.runtime.weights
        with (
            nullcontext() if engine is None else engine.backward(),
            nullcontext() if weights is None or loss is None else weights.backward(loss),
        ):
            yield

    def step(
        self, take: Callable[..., Any], optimizer: Optimizer, closure: Callable[[], Any], *, deferrable: bool
    ) -> Any:
        """Run the closure; defer the step if its gradients are in flight."""
        runtime = self.runtime
        if runtime is None:
            return take(closure)
        if self._epoch_begins:
            self._epoch_begins = False
            self._find_unaveraged()
        engine = runtime.engine
        overlapped = engine.options.overlapped
        # checked each time, as the optimizer may have been replaced
        why_whole = wants_whole_steps(optimizer) if overlapped else None
        if not overlapped or not deferrable or why_whole:
            if why_whole and self._reads is not None:
                self._reads.stepped_whole(why_whole)
            output = take(closure if deferrable and not why_whole else followed_by(engine.flush, closure))
            engine.count_whole_step(optimizer)
            return output
        with deferring(optimizer, engine, self._strategy.precision_plugin):
            return take(closure)


def _trained(module: pl.LightningModule) -> dict[str, nn.Parameter]:
    # these are not reduced in buckets
    sparse = {id(module.get_submodule(name).weight) for name in sparse_layers(module)}
    return {name: p for name, p in module.named_parameters() if p.requires_grad and id(p) not in sparse}
