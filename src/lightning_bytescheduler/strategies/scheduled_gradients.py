"""ByteScheduler's communication in a strategy whose ranks train together with DDP: from the wrap of the model on.

The strategy calls it at the places of a step that Lightning hands to strategies, and whenever weights have to be final.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_bytescheduler.collectives.faults import FaultBoard
from lightning_bytescheduler.collectives.groups import SchedulerGroups
from lightning_bytescheduler.exceptions import SchedulerClosedError
from lightning_bytescheduler.gradients.comm_hook import schedule_bucket
from lightning_bytescheduler.gradients.eligibility import unseen_parameters
from lightning_bytescheduler.gradients.mode_trial import ModeTrial
from lightning_bytescheduler.gradients.runtime import SchedulerRuntime, agree_on_sizes
from lightning_bytescheduler.gradients.statistics import SchedulerStatistics
from lightning_bytescheduler.scheduler.options import SchedulerOptions
from lightning_bytescheduler.strategies.announcement import announce, announce_mode, say_unseen
from lightning_bytescheduler.strategies.ddp_options import check_module
from lightning_bytescheduler.strategies.early_reads import EarlyReads
from lightning_bytescheduler.strategies.plan import OverlapPlan
from lightning_bytescheduler.strategies.planning import make_plan, norm_needed_by
from lightning_bytescheduler.strategies.step_deferral import deferring, then
from lightning_bytescheduler.strategies.tuned_fit import FitTuning
from lightning_bytescheduler.tuning.point import TuningPoint

__all__ = ["ScheduledGradients"]


class ScheduledGradients:
    """One strategy's scheduler, fit after fit.

    Args:
        strategy: Its default process group has the ranks that train together.
        options: This rank's.
        timeout: Longest wait for one bucket.
        own_buckets: Whether the user chose the sizes of DDP's buckets.
        tuning: What finds sizes while training, if anything does.
    """

    def __init__(
        self,
        strategy: DDPStrategy,
        options: SchedulerOptions,
        *,
        timeout: timedelta | None,
        own_buckets: bool,
        tuning: FitTuning | None = None,
    ) -> None:
        self.runtime: SchedulerRuntime | None = None
        self.statistics: SchedulerStatistics | None = None
        self._strategy = strategy
        self._options = options
        self._timeout = timeout
        self._own_buckets = own_buckets
        self._tuning = tuning
        self._plan: OverlapPlan | None = None
        self._early_reads: EarlyReads | None = None
        self._read_unseen: dict[str, int] = {}
        self._opened_for: Mapping[str, int] = {}
        self._optimizer_handles: list[Any] = []
        self._lost_weights: SchedulerClosedError | None = None

    @property
    def plan(self) -> OverlapPlan | None:
        """What overlaps in the current fit, or did in the last one, and why not; ``None`` before the first."""
        if self._plan is None or self._early_reads is None:
            return self._plan
        return replace(
            self._plan,
            early_readers=self._early_reads.steps,
            read_unseen=dict(self._read_unseen),
            opened_for=dict(self._opened_for),
        )

    # ------------------------------------------------------------------ life cycle

    def prepare(self, board: FaultBoard) -> None:
        """Agree on sizes with the other ranks, before the model is wrapped."""
        module, device = self._strategy.lightning_module, self._strategy.root_device
        if module is None:
            return
        check_module(module)
        self._lost_weights = None
        parameters = [p for p in module.parameters() if p.requires_grad]
        if not parameters:
            return  # DDP has an error for it
        groups = SchedulerGroups.create(timeout=self._timeout)
        in_shards = bool(norm_needed_by(module, self._strategy.precision_plugin))
        agreed = agree_on_sizes(groups, self._options, parameters, device, in_shards=in_shards)
        options = self._strategy._ddp_kwargs
        if not self._own_buckets:
            options["bucket_cap_mb"] = agreed.sizes.bucket_bytes / 2**20
        elif options.get("bucket_cap_mb") is not None:
            chosen = max(int(options["bucket_cap_mb"] * 2**20), 1)
            agreed = replace(agreed, sizes=replace(agreed.sizes, bucket_bytes=chosen))
        self.runtime = SchedulerRuntime(
            groups=groups,
            board=board,
            agreed=agreed,
            options=self._options,
            parameters=parameters,
            device=device,
            timeout=self._timeout,
        )
        self.runtime.engine.merges = not self._own_buckets
        self.statistics = self.runtime.statistics
        announce(self._options, agreed, groups.world_size)

    def take_over(self, model: object) -> None:
        """Take the place of the communication of ``model``, once it is wrapped."""
        if self.runtime is not None and isinstance(model, DistributedDataParallel):
            model.register_comm_hook(self.runtime.engine, schedule_bucket)
            # Dynamo cuts compiled graphs at DDP's bucket size, which it wants no smaller than DDP's first bucket.
            model.bucket_bytes_cap = max(model.bucket_bytes_cap, dist._DEFAULT_FIRST_BUCKET_BYTES)

    def decide(self) -> None:
        """Decide with the other ranks what overlaps, once everything is set up."""
        module, runtime = self._strategy.lightning_module, self.runtime
        if module is None or runtime is None:
            return
        engine = runtime.engine
        engine.gated_at_forward_start = unseen_parameters(module)
        plan = make_plan(
            module,
            self._strategy.optimizers,
            self._strategy.precision_plugin,
            cross_barrier=self._options.cross_barrier,
            bucket_views=self._strategy._ddp_kwargs.get("gradient_as_bucket_view", True),
            group=runtime.group,
            device=self._strategy.root_device,
            unseen=engine.gated_at_forward_start,
        )
        agree = self._strategy.reduce_boolean_decision
        # Both decide what is sent, so all ranks have to do the same, even if a setting differs between them.
        if not agree(plan.overlapped, all=True) and plan.overlapped:
            plan = OverlapPlan(steps="synchronised", reasons=("another rank cannot let its steps overlap",))
        engine.sharded = agree(plan.gradients == "reduce-scatter", all=False)
        engine.cross_barrier = plan.overlapped
        self._plan, self._early_reads = plan, None
        if plan.overlapped:
            self._early_reads = EarlyReads(module.trainer)
            engine.on_early_wait = self._early_reads.note
            self._read_unseen = {}
            engine.on_unseen_read = partial(self._note_unseen_read, {id(p): n for n, p in module.named_parameters()})
            self._opened_for = engine.opened_for
            tuned = self._tuning is not None and self._tuning.begin(
                module, runtime, self._strategy.root_device, self._note_point
            )
            if not tuned:
                engine.mode = ModeTrial() if self._options.mode == "auto" else self._options.mode == "ddp"
                engine.on_mode = self._note_mode
                self._plan = replace(plan, as_ddp=engine.mode is True)
            optimizer = self._strategy.optimizers[0]
            # The optimizer's state is read without touching a parameter.
            self._optimizer_handles = [
                optimizer.register_state_dict_pre_hook(lambda _: self.flush()),
                optimizer.register_load_state_dict_pre_hook(lambda *_: self.flush()),
            ]
        else:
            engine.mode = self._options.mode == "ddp"
            self._plan = replace(plan, as_ddp=engine.mode is True)
            if self._tuning is not None:
                self._tuning.say_untuned("steps cannot overlap")
        rank_zero_info(f"bytescheduler: {self._plan.summary()}")

    def release(self, *, failed: bool) -> None:
        """Stop every thread, and make every parameter plain again; bounded, idempotent."""
        for handle in self._optimizer_handles:
            handle.remove()
        self._optimizer_handles = []
        runtime, self.runtime = self.runtime, None
        if runtime is not None:
            runtime.close(failed=failed)
            self._lost_weights = runtime.lost_weights

    def check_weights(self) -> None:
        """Make sure that the weights are those of a whole number of steps; they may not be after a failed fit.

        Raises:
            SchedulerClosedError: If they are not.
        """
        lost = self._lost_weights if self.runtime is None else self.runtime.lost_weights
        if lost is not None:
            raise lost

    def weights_replaced(self) -> None:
        """Whatever a failed fit has left behind is gone."""
        self._lost_weights = None

    # ------------------------------------------------------------------ one step

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Around a forward pass that trains."""
        if self.runtime is not None:
            self.runtime.engine.begin_forward()
        yield
        if self.runtime is not None:
            self.runtime.engine.end_forward()

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Around a backward pass."""
        if self.runtime is not None:
            self.runtime.engine.before_backward()
        yield
        if self.runtime is not None:
            self.runtime.engine.after_backward()

    def step(
        self, take: Callable[..., Any], optimizer: Optimizer, closure: Callable[[], Any], *, deferrable: bool
    ) -> Any:
        """Run the closure; defer the step where its gradients are still on their way.

        Args:
            take: The strategy's own step, given the closure to run.
            optimizer: Whose step it is.
            closure: Computes loss and gradients.
            deferrable: Whether nothing asks for the step to be taken at once.
        """
        runtime = self.runtime
        if runtime is None:
            return take(closure)
        engine = runtime.engine
        if not engine.cross_barrier or not deferrable:
            output = take(closure if deferrable else then(closure, engine.flush))
            engine.count_synchronised_step(optimizer)
            return output
        with deferring(optimizer, engine, self._strategy.precision_plugin):
            return take(closure)

    def flush(self) -> None:
        """Wait for all gradients and apply every pending update; the weights are final afterwards."""
        if self.runtime is not None:
            self.runtime.engine.flush()

    def _note_unseen_read(
        self, names: Mapping[int, str], parameters: Sequence[nn.Parameter], step: int, certain: bool
    ) -> None:
        found = [names[id(p)] for p in parameters]
        self._read_unseen.update(dict.fromkeys(found, step))
        say_unseen(found, step, certain=certain, rank=self._strategy.global_rank)

    def _note_point(self, point: TuningPoint) -> None:
        if self._plan is not None:
            self._plan = replace(self._plan, as_ddp=point.is_plain_ddp)

    def _note_mode(self, as_ddp: bool, overlapped_s: float, as_ddp_s: float) -> None:
        if self._plan is not None:
            self._plan = replace(self._plan, as_ddp=as_ddp)
        announce_mode(as_ddp, overlapped_s, as_ddp_s)
