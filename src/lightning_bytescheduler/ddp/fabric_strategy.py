"""``Fabric(strategy="bytescheduler")``: DDP in a user's own training loop, with ByteScheduler's communication.

A loop in Fabric lacks the Trainer's hooks. These take their place:

- *forward pass*: that of the wrapped module, while gradients are enabled (:class:`ScheduledDataParallel`);
- *backward pass*: ``fabric.backward``, which calls the strategy;
- *optimizer step*: ``optimizer.step()`` of the optimizer returned by ``fabric.setup``, which calls the strategy;
- *decisions*: at the end of the first optimizer step, which is always synchronised and which every rank reaches after
  the same backward pass;
- *end*: there is none. Reads of weights, gradients or optimizer state wait at a gate, and the process waits for all
  pending updates when it exits.

Only the first module that is set up has its gradients scheduled; DDP reduces those of others.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import traceback
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_bytescheduler.ddp.ddp_arguments import SCHEDULED, check_module, options_of
from lightning_bytescheduler.ddp.decided_fit import DecidedFit, open_wire, optimizer_reasons, precision_reasons
from lightning_bytescheduler.ddp.fit_report import OverlapPlan, SchedulerStatistics
from lightning_bytescheduler.ddp.rank_strategy import JoinedRanks, PublishesFailures, launched, model_facts
from lightning_bytescheduler.exceptions import RanksDivergedError
from lightning_bytescheduler.failures.board import FaultBoard
from lightning_bytescheduler.failures.standstill import Standing
from lightning_bytescheduler.lightning_api import (
    FabricDDPStrategy,
    _FabricLauncher,
    rank_zero_info,
    rank_zero_warn,
)
from lightning_bytescheduler.scheduler.options import SchedulerOptions

_END_S = 10.0  # seconds to wait for the other ranks to end, too

_ELSEWHERE = dict.fromkeys(
    ("tuning", "log_metrics", "compression", "compression_min_size", "weighting", "batch_size", "servers"),
    "It is an option of ByteSchedulerStrategy, for Trainer.",
)


class ScheduledDataParallel(DistributedDataParallel):
    """DDP's wrapper; its fit observes its forward passes while gradients are enabled."""

    @torch.compiler.disable(recursive=False)  # type: ignore[untyped-decorator]
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """See DistributedDataParallel."""
        fit = _fits.get(self)  # not an attribute, which copies of the module would have
        with nullcontext() if fit is None or not torch.is_grad_enabled() else fit.forward():
            return super().forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]


_fits: weakref.WeakKeyDictionary[ScheduledDataParallel, FabricFit] = weakref.WeakKeyDictionary()  # until they close


class FabricFit(DecidedFit):
    """The fit of one module, from its wrapping to the last step; every rank begins it at the same point."""

    def __init__(self, module: nn.Module, strategy: ByteSchedulerFabricStrategy, board: FaultBoard) -> None:
        check_module(module)
        wire = open_wire(module, strategy, strategy._fit_options, board, routed=False)
        parameters = [p for p in module.parameters() if p.requires_grad]
        super().__init__(strategy, strategy._fit_options, wire, parameters)
        self._wrapper: Callable[[], ScheduledDataParallel | None] = lambda: None
        self._ids = set(map(id, module.parameters()))
        self.ended = False
        self._has_run = False  # whether a forward pass ran since the last backward pass
        self.start()
        board.stands(self._stands)

    def _stands(self) -> Standing:
        n, place, awaited = self.progress.offered, self.progress.phase, self.awaited_step
        return Standing(place=place, steps=n, batches=n, awaited_step=awaited, launched=launched(), ended=self.ended)

    def wrap(self, module: nn.Module, device_ids: list[int] | None) -> ScheduledDataParallel:
        """Wrap the module with DDP, and hand its gradients to the scheduler."""
        ddp = {**self._strategy._ddp_kwargs, **self.bucket_cap_mb}
        model = ScheduledDataParallel(module=module, device_ids=device_ids, **ddp)
        self.take_over(model)
        self._wrapper, _fits[model] = weakref.ref(model), self
        return model

    def close(self, *, failed: bool) -> None:
        """See :class:`Fit`; the wrapped module goes on as a plain one."""
        super().close(failed=failed)
        wrapper = self._wrapper()
        if wrapper is not None:
            _fits.pop(wrapper, None)

    def module(self) -> nn.Module | None:
        """See :class:`DecidedFit`."""
        wrapper = self._wrapper()
        return None if wrapper is None else wrapper.module

    def _has(self, optimizer: Optimizer) -> set[bool]:
        return {id(p) in self._ids for group in optimizer.param_groups for p in group["params"]}

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Wrap a forward pass that a backward pass may follow; one rank may run it alone."""
        self._has_run = True
        self.begin_forward(looks=False)
        yield
        self.end_forward()

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Wrap a backward pass of this module or another; all ranks begin it."""
        has_run, self._has_run = self._has_run, False
        if has_run:
            self.look()
        with super().backward():
            yield

    def step_with(self, take: Callable[..., Any], optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        """See :class:`DecidedFit`; decides after the first step."""
        has = self._has(optimizer)
        if True not in has:
            return take(*args)
        mixed = "the optimizer has parameters of something else, too" if False in has else None
        output = super().step_with(take, optimizer, *args, why_whole=mixed, **kwargs)
        module = self.module()
        if self.plan is None and module is not None:
            self.begin_steps(module, [*optimizer_reasons([optimizer]), *precision_reasons(self._strategy.precision)])
        return output

    def clip_value(self, optimizer: Optimizer, limit: float) -> bool:
        """Clip gradients by value when they have arrived; return ``False`` if the caller has to clip now."""
        return False not in self._has(optimizer) and self.step.transforms.clip_value(optimizer, limit)


class _PublishingLauncher(PublishesFailures, _FabricLauncher):
    """See Fabric's launcher."""


class ByteSchedulerFabricStrategy(JoinedRanks, FabricDDPStrategy):
    """DDP in Fabric, with partitioned, prioritised gradient communication; see :class:`ByteSchedulerStrategy`.

    Each layer's update is applied when the next forward pass reaches the layer, or when other code reads its weights.
    The weights are DDP's, bit for bit at two ranks. Only the first module that ``fabric.setup`` wraps has its gradients
    scheduled; DDP reduces those of others.

    Args:
        partition_size: Largest piece of gradient sent at once, in parameters. Chosen from model and link when left out;
            ``BYTESCHEDULER_PARTITION`` is used if set.
        credit: Most that may be in flight at once, in parameters. Chosen from model and link when left out;
            ``BYTESCHEDULER_CREDIT`` is used if set.
        cross_barrier: Carry communication into the next forward pass. ``False`` keeps partitions and priorities but
            waits for the gradients at the end of each backward pass.
        mode: ``"overlapped"``; ``"ddp"`` takes steps as DDP does; ``"auto"`` begins as DDP, unless the link is slow,
            and overlaps where that is seen to pay. The weights are the same.
        timeline: Write a Chrome-trace timeline to this file (``<stem>.rank<k>`` beside it for rank k > 0);
            ``BYTESCHEDULER_TIMELINE`` is used if left out.
        debug: Log each scheduling decision; ``BYTESCHEDULER_DEBUG`` is used if left out.
        policy: The order and the pieces in which gradients travel, see :class:`ByteSchedulerStrategy`.
        bucket_cap_mb: Size at which DDP closes a bucket, in MiB. Chosen from model and link when left out.
        gradient_as_bucket_view: See DistributedDataParallel. ``False`` is honoured, but keeps steps from overlapping.
        **kwargs: For Fabric's DDPStrategy, whose ``timeout`` also bounds every wait for gradients, and for
            :class:`~torch.nn.parallel.DistributedDataParallel`.

    Raises:
        OptionError: If an option or environment variable has a value that is not allowed.
        UnsupportedError: If an option cannot be honoured in Fabric.
    """

    _launchers = _FabricLauncher, _PublishingLauncher
    _know_ranks = FabricDDPStrategy._set_world_ranks

    def __init__(
        self,
        *,
        partition_size: int | None = None,
        credit: int | None = None,
        cross_barrier: bool = True,
        mode: Literal["auto", "overlapped", "ddp"] = "auto",
        timeline: str | os.PathLike[str] | None = None,
        debug: bool | None = None,
        policy: str = "bytescheduler",
        bucket_cap_mb: float | None = None,
        gradient_as_bucket_view: bool = True,
        **kwargs: Any,
    ) -> None:
        arguments = locals()
        buckets: dict[str, Any] = {"bucket_cap_mb": bucket_cap_mb, "gradient_as_bucket_view": gradient_as_bucket_view}
        kwargs = options_of(ByteSchedulerFabricStrategy, FabricDDPStrategy, kwargs, elsewhere=_ELSEWHERE, **buckets)
        options = SchedulerOptions.resolve(**{name: arguments[name] for name in SCHEDULED}, tuning=False)
        self.fit: FabricFit | None = None
        super().__init__(**kwargs)
        self._fit_options = self._options_of_fits(options)

    @property
    def statistics(self) -> SchedulerStatistics | None:
        """Counters of the scheduled module; ``None`` before one is set up, and on one process."""
        return self._counters()

    @property
    def plan(self) -> OverlapPlan | None:
        """What overlaps in the scheduled module, what does not, and why; ``None`` before its first step."""
        return self._so_far()[0]

    # ------------------------------------------------------------------ life cycle

    def _setup_distributed(self) -> None:
        self._know_ranks()
        self._connect(super()._setup_distributed)
        if self.world_size == 1 or self._board is not None:
            return
        self._failed = False
        facts = {**self._facts_of(self._fit_options.scheduler), "precision": type(self.precision).__name__}
        self._board = self._join("bytescheduler in Fabric", facts)
        self._end_before_exit()

    def setup_module(self, module: nn.Module) -> DistributedDataParallel:
        """Wrap ``module`` with DDP and the scheduler; every rank does so at the same point. See DDPStrategy."""
        board = self._board
        if board is None or not any(p.requires_grad for p in module.parameters()):
            return super().setup_module(module)
        self.barrier()  # the barrier detects a rank that has died; the store does not
        self._meet("a model", model_facts(module.parameters()))
        if self.fit is not None:
            if not self.reduce_boolean_decision(self.fit.module() is None):  # on all ranks it was garbage-collected
                rank_zero_info(
                    "bytescheduler: only the gradients of the first module that was set up are scheduled; DDP itself "
                    f"reduces those of {type(module).__name__}. To have them scheduled too, set up one module with "
                    "both inside."
                )
                return super().setup_module(module)
            self.fit.flush()
            self.end_fit(failed=False)
        device_ids = self._determine_ddp_device_ids()
        with self._explained():
            self.fit = FabricFit(module, self, board)
            self._end_before_exit()
            with nullcontext() if device_ids is None else torch.cuda.stream(torch.cuda.Stream()):
                return self.fit.wrap(module, device_ids)

    # ------------------------------------------------------------------ one step

    def backward(self, tensor: Tensor, module: nn.Module | None, *args: Any, **kwargs: Any) -> None:
        """See DDPStrategy."""
        if self._board is not None and self._board.fault is not None:
            raise self._board.fault
        if self._board is not None and self.fit is None:
            rank_zero_warn(
                "bytescheduler: no module is set up, so gradients are not averaged over ranks, which drift apart: "
                "train the module that fabric.setup(model, optimizer) returns."
            )
        with self._explained(), nullcontext() if self.fit is None else self.fit.backward():
            super().backward(tensor, module, *args, **kwargs)

    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        """Take the step, or defer it if its gradients are in flight. See DDPStrategy."""
        own_step, closure = super().optimizer_step, kwargs.pop("closure", None)

        def take(closure: Callable[[], Any] | None) -> Any:
            return own_step(optimizer, **kwargs, **({} if closure is None else {"closure": closure}))

        if self.fit is None:
            return take(closure)
        with self._explained():
            return self.fit.step_with(take, optimizer, closure, deferrable=not kwargs)

    def clip_gradients_value(self, module: nn.Module, optimizer: Optimizer, clip_val: float | int) -> None:
        """Clip gradients now, or when they have arrived. See DDPStrategy."""
        with self._explained():
            if self.fit is None or not self.fit.clip_value(optimizer, float(clip_val)):
                super().clip_gradients_value(module, optimizer, clip_val)

    def all_reduce(self, tensor: Tensor, group: Any = None, reduce_op: Any = "mean") -> Tensor:
        """See DDPStrategy."""
        with self._explained(waits_in="all_reduce" if group in (None, torch.distributed.group.WORLD) else ""):
            return super().all_reduce(tensor, group, reduce_op)

    # ------------------------------------------------------------------ checkpoints

    def save_checkpoint(self, path: Any, state: Mapping[str, Any], *args: Any, **kwargs: Any) -> None:
        """See DDPStrategy. Another rank's failure does not end this process while it saves."""
        self.flush()
        if self.fit is not None:
            self._require_whole_weights()
        with self._patient():
            super().save_checkpoint(path, dict(state), *args, **kwargs)

    # ------------------------------------------------------------------ end

    def end(self, patience: float = _END_S) -> None:
        """Apply pending updates and stop every thread; every rank calls this. Modules go on as plain ones.

        Args:
            patience: Longest wait for the other ranks, in seconds.

        Raises:
            RankFailedError: If another rank has failed, so that the last step is incomplete.
            RanksDivergedError: If another rank takes more steps.
        """
        board, in_order = self._board, False
        if board is None:
            return
        try:
            if not self._failed:
                self.flush()
                if self.fit is not None:  # wait for the other ranks, which end here, too
                    self.fit.ended = True
                    in_order = board.all_reach("end", patience)
                if isinstance(board.fault, RanksDivergedError):
                    raise board.fault
        except BaseException as error:
            self.publish_failure(error)
            raise
        finally:
            atexit.unregister(self._end_at_exit)
            self._board = None
            try:
                self.end_fit(failed=not in_order)
            finally:
                board.close()

    end_of_worker = end

    def _end_before_exit(self) -> None:
        """Make the end run first at exit: other handlers stop threads, and pending updates would be lost."""
        atexit.unregister(self._end_at_exit)
        atexit.register(self._end_at_exit)

    def _end_at_exit(self) -> None:
        uncaught = getattr(sys, "last_value", None)  # what has ended the script
        try:
            if uncaught is not None:
                self.publish_failure(uncaught)
            self.end()
        except Exception as error:  # the script has ended without its last step
            _lost_at_exit.append(error)
            traceback.print_exception(error)


_lost_at_exit: list[Exception] = []


@atexit.register  # registered before a script's handlers, so it runs after them
def _exit_with_failure() -> None:
    """Exit with status 1 after a failure at exit, which Python's own status ignores."""
    if _lost_at_exit:
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)
