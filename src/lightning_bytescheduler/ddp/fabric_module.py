"""ByteScheduler's communication for one module that Fabric has set up: from its wrap to the last step.

A loop of the user's own has none of the Trainer's hooks. What takes their places:

- *the forward pass*: that of the wrapped module, while gradients are enabled (:class:`ScheduledDataParallel`);
- *the backward pass*: ``fabric.backward``, which the strategy sees, and tells to every module that was set up, as a
  loss may reach several of them;
- *the optimizer's step*: ``optimizer.step()`` of what ``fabric.setup`` returned, which comes to the strategy;
- *decisions*: at the end of the first optimizer step. It is synchronised in any case, every rank comes there after the
  same backward pass, and by then all optimizers of the module are known, set up together with it or later;
- *the end*: there is none. Whoever reads a weight, a gradient or the optimizer's state meets a gate and waits, and what
  nobody has read when the process ends is waited for then.
"""

from __future__ import annotations

import inspect
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_bytescheduler.collectives.groups import SchedulerGroups
from lightning_bytescheduler.ddp import compiled_calls
from lightning_bytescheduler.ddp.agreed_sizes import agree_on_sizes
from lightning_bytescheduler.ddp.ddp_arguments import check_hooks, check_module
from lightning_bytescheduler.ddp.deferred_optimizer import deferred_step, is_enabled
from lightning_bytescheduler.ddp.engine import EngineOptions
from lightning_bytescheduler.ddp.fit_report import DecidedSteps, SeenReads, agreed_plan, announce, say_start
from lightning_bytescheduler.ddp.gates import is_of_libraries
from lightning_bytescheduler.ddp.merged_buckets import merged_bytes
from lightning_bytescheduler.ddp.partial_step import wants_whole_steps
from lightning_bytescheduler.ddp.plan import (
    OverlapPlan,
    model_reasons,
    names_of,
    optimizer_reasons,
    unseen_parameters,
)
from lightning_bytescheduler.ddp.runtime import SchedulerRuntime
from lightning_bytescheduler.ddp.scheduled_gradients import own_processors
from lightning_bytescheduler.ddp.sparse_gradients import sparse_layers
from lightning_bytescheduler.ddp.statistics import SchedulerStatistics
from lightning_bytescheduler.ddp.uneven_data import DrawnBatches
from lightning_bytescheduler.failures.board import FaultBoard
from lightning_bytescheduler.lightning_api import FabricMixedPrecision, FabricPrecision
from lightning_bytescheduler.scheduler.options import SchedulerOptions

__all__ = ["FabricModuleGradients", "LoopReads", "ScheduledDataParallel", "SetUpOptions"]

_FABRIC = str(Path(inspect.getfile(FabricPrecision)).parents[2])  # all of Fabric's files


@dataclass(frozen=True, slots=True, kw_only=True)
class SetUpOptions:
    """What all modules of a strategy are set up with.

    Attributes:
        scheduler: This rank's options.
        timeout: Longest wait for one bucket.
        ddp: Options of DistributedDataParallel.
        own_buckets: Whether the user chose the sizes of its buckets.
        ranks_on_host: Ranks that share this machine's processors.
        agree: Says whether all ranks say so.
        batches: What is trained on, where ranks count by their samples.
    """

    scheduler: SchedulerOptions
    timeout: timedelta | None
    ddp: Mapping[str, Any]
    own_buckets: bool
    ranks_on_host: int
    agree: Callable[[bool], bool]
    batches: DrawnBatches | None = None


class ScheduledDataParallel(DistributedDataParallel):
    """DDP's wrapper, whose forward passes the scheduler sees while gradients are enabled.

    Args:
        gradients: Of this module.
        module: See DistributedDataParallel.
        **options: See DistributedDataParallel.
    """

    def __init__(self, gradients: FabricModuleGradients, *, module: nn.Module, **options: Any) -> None:
        super().__init__(module=module, **options)
        self._bytescheduler = gradients

    def __getstate__(self) -> Any:
        state = super().__getstate__()  # type: ignore[no-untyped-call]
        state.pop("_bytescheduler", None)
        return state

    @torch.compiler.disable(recursive=False)  # type: ignore[untyped-decorator]
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """See DistributedDataParallel."""
        gradients = self.__dict__.get("_bytescheduler")
        if gradients is None or not torch.is_grad_enabled():
            return super().forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]
        with gradients.forward():
            return super().forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]


class LoopReads(SeenReads):
    """See :class:`SeenReads`: by the line that reads."""

    def waited_early(self) -> None:
        """See :class:`StepListener`."""
        if reader := _reader(sys._getframe(1)):
            self.read_early(reader)


def _reader(frame: FrameType | None) -> str | None:
    """The innermost function on the stack that is none of a library's; ``None`` where compiled code is entered."""
    while frame is not None:
        file = frame.f_code.co_filename
        if file == compiled_calls.__file__:
            return None  # a forward pass, in which all gates open at its start
        if not is_of_libraries(file) and not file.startswith(_FABRIC):
            return f"{frame.f_code.co_name} ({Path(file).name}:{frame.f_lineno})"
        frame = frame.f_back
    return "unknown code"


class FabricModuleGradients(DecidedSteps):
    """The scheduler of one module; every rank makes those of its modules in the same order.

    Args:
        module: What is trained, not wrapped.
        board: Where failures are published.
        options: Those of the strategy.
        device: Where gradients live.

    Attributes:
        runtime: Until it is closed.
        statistics: Of all steps so far.
    """

    def __init__(self, module: nn.Module, *, board: FaultBoard, options: SetUpOptions, device: torch.device) -> None:
        super().__init__()
        check_module(module)
        check_hooks(module)
        self._options = options
        self._device = device
        self._module = weakref.ref(module)
        self._wrapper: weakref.ref[ScheduledDataParallel] | None = None
        parameters = [p for p in module.parameters() if p.requires_grad]
        self._nbytes = sum(p.numel() * p.element_size() for p in parameters)
        self._parameters = frozenset(map(id, parameters))
        self._has_run = False  # forward, since the last backward pass
        sparse = bool(sparse_layers(module))
        groups = SchedulerGroups.create(timeout=options.timeout, sparse=sparse, counts=options.batches is not None)
        self._agreed = agree_on_sizes(groups, options.scheduler, parameters, device)
        self.runtime: SchedulerRuntime | None = SchedulerRuntime(
            groups=groups,
            board=board,
            agreed=self._agreed,
            options=options.scheduler,
            parameters=parameters,
            device=device,
            timeout=options.timeout,
            counter=options.batches,
        )
        self.statistics: SchedulerStatistics = self.runtime.statistics
        announce(options.scheduler, self._agreed)

    def wrap(self, device_ids: list[int] | None) -> ScheduledDataParallel:
        """Wrap the module with DDP, whose gradients go to the scheduler."""
        module, runtime = self._module(), self.runtime
        if module is None or runtime is None:
            raise RuntimeError("The module is gone.")
        ddp = dict(self._options.ddp)
        if not self._options.own_buckets:
            ddp["bucket_cap_mb"] = self._agreed.sizes.bucket_bytes / 2**20
        model = ScheduledDataParallel(self, module=module, device_ids=device_ids, **ddp)
        runtime.engine.take_over(model)
        self._wrapper = weakref.ref(model)
        return model

    @property
    def is_gone(self) -> bool:
        """Whether nobody has the wrapped module any more."""
        return self._wrapper is not None and self._wrapper() is None

    @property
    def plan(self) -> OverlapPlan | None:
        """What overlaps, and why not; ``None`` before the first step."""
        return self._so_far(self._module())

    def trains(self, optimizer: Optimizer) -> bool:
        """Whether ``optimizer`` has a parameter of this module."""
        return any(id(p) in self._parameters for group in optimizer.param_groups for p in group["params"])

    # ------------------------------------------------------------------ a step

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Around a forward pass that a backward pass may follow."""
        runtime = self.runtime
        self._has_run = True
        if runtime is not None:
            if self._options.batches is not None and (module := self._module()) is not None:
                self._options.batches.begin_forward(module)
            runtime.engine.begin_forward(looks=False)  # one rank alone may be here, to look at something
        yield
        if runtime is not None:
            runtime.engine.end_forward()

    def begin_backward(self) -> bool:
        """All ranks begin a backward pass, of this module or others; whether this one has something to add."""
        runtime = self.runtime
        if runtime is None:
            return True
        if self._has_run:
            self._has_run = False
            runtime.engine.look()
        weights, wrapper = runtime.weights, None if self._wrapper is None else self._wrapper()
        if weights is None or wrapper is None:
            return True
        weights.begin_batch(None)
        return not weights.leaves_out(communicates=wrapper.require_backward_grad_sync)

    @contextmanager
    def backward(self, loss: torch.Tensor) -> Iterator[None]:
        """Around a backward pass of ``loss``."""
        if self.runtime is None:
            yield
            return
        engine, batches = self.runtime.engine, self._options.batches
        with (
            engine.backward(),
            nullcontext() if self.runtime.weights is None else self.runtime.weights.backward(loss),
        ):
            yield
        if batches is not None:
            batches.end_backward()

    def step(self, take: Callable[..., Any], optimizer: Optimizer, closure: Callable[[], Any] | None) -> Any:
        """Defer the optimizer's step where its gradients are still on their way, else take it.

        Args:
            take: The strategy's own step, given a closure, or none.
            optimizer: Whose step it is; of its parameters with a gradient, none is another scheduled module's.
            closure: Computes loss and gradients, if anything does.
        """
        runtime = self.runtime
        if runtime is None:
            return take(closure)
        engine = runtime.engine
        why_whole = wants_whole_steps(optimizer) if engine.options.overlapped else None
        if not engine.options.overlapped or why_whole:
            if why_whole and self._reads is not None:
                self._reads.stepped_whole(why_whole)
            output = take_final(take, closure, engine.flush)
            engine.count_whole_step(optimizer)
            return output
        with deferred_step(optimizer, engine):
            return take(closure)

    def flush(self) -> None:
        """Wait for all gradients and apply every update that is due."""
        if self.runtime is not None:
            self.runtime.engine.flush()

    def clip_value(self, optimizer: Optimizer, limit: float) -> bool:
        """Clip gradients by value when they have arrived; ``False`` if the caller has to, now."""
        return self.runtime is not None and self.runtime.engine.context.step.clip_value(optimizer, limit)

    # ------------------------------------------------------------------ what overlaps

    @property
    def is_decided(self) -> bool:
        """Whether it is decided what overlaps."""
        return self._plan is not None

    def decide(self, optimizers: Sequence[Optimizer], precision: FabricPrecision, rank: int) -> None:
        """Decide with the other ranks what overlaps, when the first step has been taken."""
        module, runtime = self._module(), self.runtime
        if module is None or runtime is None:
            return
        engine, scheduler = runtime.engine, self._options.scheduler
        unseen = frozenset(unseen_parameters(module))
        plan = self._make_plan(module, optimizers, precision, unseen, engine.context.find_held())
        agree, link = self._options.agree, self._agreed.link
        plan = agreed_plan(plan, agree)
        if self._options.batches is not None:
            plan = replace(plan, weighting="samples")
        if plan.overlapped:
            names = {id(p): name for name, p in module.named_parameters()}
            self._reads = LoopReads(names, rank)
        mode = self._decide_mode(plan, scheduler, agree, link=link, device=self._device, nbytes=self._nbytes)
        engine.begin_fit(
            EngineOptions(
                overlapped=plan.overlapped,
                mode=mode,
                unseen=unseen,
                merged_bytes=0 if self._options.own_buckets else merged_bytes(self._device, link),
                processors=own_processors(self._options.ranks_on_host),
            ),
            self._reads,
        )
        ranks, policy = runtime.group.size(), scheduler.policy
        plan = plan if self._plan is None else self._plan
        say_start(plan, self._agreed, world_size=ranks, nbytes=self._nbytes, tuned=False, policy=policy)

    def _make_plan(
        self,
        module: nn.Module,
        optimizers: Sequence[Optimizer],
        precision: FabricPrecision,
        unseen: frozenset[int],
        held: set[int],
    ) -> OverlapPlan:
        reasons = []
        if not self._options.scheduler.cross_barrier:
            reasons.append("cross_barrier=False (leave it out to keep the overlap)")
        for optimizer in optimizers:
            reasons += optimizer_reasons([optimizer])
        if not self._options.ddp.get("gradient_as_bucket_view", True):
            reasons.append(
                "gradient_as_bucket_view=False makes DDP copy gradients at the end of backward (leave it out to keep "
                "the overlap)"
            )
        reasons += _precision_reasons(precision)
        reasons += model_reasons(module)
        if reasons:
            return OverlapPlan(steps="synchronised", reasons=tuple(dict.fromkeys(reasons)))
        return OverlapPlan(
            steps="overlapped", gated_at_start=names_of(module, unseen), held_elsewhere=names_of(module, held)
        )

    # ------------------------------------------------------------------ the end

    def close(self, *, failed: bool) -> None:
        """Stop every thread, and make every parameter plain again; bounded, idempotent."""
        self._plan = self.plan
        runtime, self.runtime = self.runtime, None
        if runtime is not None:
            runtime.close(failed=failed)


def take_final(take: Callable[..., Any], closure: Callable[[], Any] | None, settle: Callable[[], None]) -> Any:
    """Take a step whose gradients are all final: also those that a closure has computed."""
    if closure is None:
        settle()
        return take(None)

    def computed() -> Any:
        output = closure()
        settle()
        return output

    return take(computed)


def _precision_reasons(plugin: FabricPrecision) -> list[str]:
    """Why steps cannot be deferred with this precision plugin."""
    own = type(plugin).optimizer_step
    if isinstance(plugin, FabricMixedPrecision) and own is FabricMixedPrecision.optimizer_step:
        if plugin.scaler is not None and is_enabled(plugin.scaler):
            return ["fp16 loss scaling looks at all gradients before a step (precision='bf16-mixed' keeps the overlap)"]
        return []
    if own is FabricPrecision.optimizer_step:
        return []
    return [f"{type(plugin).__name__} has an optimizer step of its own (precision='bf16-mixed' keeps the overlap)"]
