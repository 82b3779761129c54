"""A Trainer's fit, in a strategy whose ranks train together with DDP.

The strategy calls the fit at each point of a step, and whenever weights have to be final.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_bytescheduler.checks import some_of
from lightning_bytescheduler.collectives.operations import shards_over
from lightning_bytescheduler.ddp.compressed_reduction import GradientCompression, has_no_gradient
from lightning_bytescheduler.ddp.compression_rules import names_that_count
from lightning_bytescheduler.ddp.ddp_arguments import check_module
from lightning_bytescheduler.ddp.decided_fit import (
    DecidedFit,
    FitOptions,
    norm_needed_by,
    open_wire,
    optimizer_reasons,
    precision_reasons,
    trained,
)
from lightning_bytescheduler.ddp.deferred_optimizer import loss_scale_of
from lightning_bytescheduler.ddp.fit_report import summary_of
from lightning_bytescheduler.ddp.wire import Wire
from lightning_bytescheduler.failures.board import FaultBoard
from lightning_bytescheduler.lightning_api import DDPStrategy, pl, rank_zero_info, rank_zero_warn

__all__ = ["TrainerFit"]


class TrainerFit(DecidedFit):
    """One fit of a Trainer; use :meth:`begin`."""

    def __init__(
        self, strategy: DDPStrategy, options: FitOptions, wire: Wire, parameters: list[nn.Parameter], **more: Any
    ) -> None:
        super().__init__(strategy, options, wire, parameters, **more)
        self._known = set(map(id, parameters))  # which DDP averages, and those warned of
        self._epoch_begins = False

    @classmethod
    def begin(cls, strategy: DDPStrategy, options: FitOptions, board: FaultBoard) -> TrainerFit:
        """Begin a fit with the other ranks, before the model is wrapped.

        Args:
            strategy: The strategy, which has its module.
            options: See the class.
            board: Reports failures to the other ranks.

        Raises:
            UnsupportedError: If a part of the model cannot be trained so.
            OptionError: If an option does not fit the model.
        """
        module = strategy.lightning_module
        assert module is not None
        check_module(module)
        rules = options.rules
        if rules is not None:
            rules.check_training(strategy.root_device, automatic=module.automatic_optimization)
            rules.check_patterns(names_that_count(module))
        parameters = [p for p in module.parameters() if p.requires_grad]
        in_shards = bool(norm_needed_by(module))
        wire = open_wire(module, strategy, options, board, routed=True, in_shards=in_shards)
        try:
            codec = None
            if rules is not None:
                codec = GradientCompression(
                    rules,
                    trained(module),
                    record=wire.record,
                    loss_scale=partial(loss_scale_of, strategy),
                    idle=has_no_gradient,
                )
                if not codec.compressed:
                    rank_zero_warn(f"bytescheduler: compression={rules.spec!r} makes none of the gradients smaller.")
                if wire.route.copies is not None:
                    codec.work_on(wire.route.copies)
            counter = None if options.counter is None else options.counter(wire.groups.rank)
            fit = cls(strategy, options, wire, parameters, codec=codec, counter=counter)
        except BaseException:
            wire.close(failed=True)
            raise
        strategy._ddp_kwargs.update(fit.bucket_cap_mb)
        fit.start()
        return fit

    def module(self) -> nn.Module | None:
        """See :class:`DecidedFit`."""
        module: nn.Module | None = self._strategy.lightning_module
        return module

    def decide(self) -> None:
        """Decide with the other ranks what overlaps, once everything is set up."""
        module = self._strategy.lightning_module
        needed_by = norm_needed_by(module)
        self.begin_steps(module, [*self._reasons(module), *self._norm_reasons(needed_by)], norm_needed_by=needed_by)

    def _reasons(self, module: pl.LightningModule) -> Iterator[str]:
        strategy = self._strategy
        if module.automatic_optimization:
            yield from optimizer_reasons(strategy.optimizers)
        else:
            yield "optimization is manual (automatic optimization keeps the overlap)"
        yield from precision_reasons(strategy.precision_plugin)

    def _norm_reasons(self, needed_by: tuple[str, ...]) -> Iterator[str]:
        if not needed_by:
            return
        what, wire, group = " and ".join(needed_by), self.wire.route.wire_device, self.wire.groups.data
        before = f"{what} needs all gradients before a step, and"
        if not shards_over(group, wire):
            yield (
                f"{what} on {wire.type} needs all gradients before a step, and {dist.get_backend(group)} cannot reduce "
                "in shards there (process_group_backend='nccl' keeps the overlap)"
            )
        if self.wire.servers is not None:
            yield f"{before} parameter servers tell no norms before (leaving servers out keeps the overlap)"
        if self._options.rules is not None and self._options.rules.whole_matrices:
            yield f"{before} compression='powersgd' cannot reduce in shards (another compression keeps the overlap)"

    def say_end(self) -> None:
        """Report the end of a fit."""
        line = summary_of(self.record.statistics, self._options.tuning.standing)
        if line is not None:
            rank_zero_info(f"bytescheduler: {line}")

    # ------------------------------------------------------------------ one step

    def begin_epoch(self) -> None:
        """Begin an epoch: callbacks may unfreeze more layers until its first step."""
        self._epoch_begins = True
        if self._strategy.lightning_module.automatic_optimization:
            self.weights.begin_epoch()

    def _warn_of_drift(self) -> None:
        """Warn of gradients that DDP does not average."""
        known = self._known if self.step.number else set()  # of none if no backward pass has communicated
        with torch._C.DisableTorchFunctionSubclass():  # opens no gate
            named = self._strategy.lightning_module.named_parameters()
            new = {n: p for n, p in named if p.requires_grad and id(p) not in known}
            found = [name for name, parameter in new.items() if not has_no_gradient(parameter)]
        if found:
            self._known.update(map(id, new.values()))
            rank_zero_warn(
                f"bytescheduler: the gradients of {some_of(found, 2)} are not averaged over ranks, so ranks drift "
                "apart, as with strategy='ddp'. Call self.manual_backward(loss) in place of loss.backward(). If they "
                "did not require gradients, or did not exist, when DDP wrapped the model, freeze them in on_fit_start, "
                "not before, and use find_unused_parameters=True."
            )

    @contextmanager
    def forward(self, batch: Any = None) -> Iterator[None]:
        """Wrap a forward pass that trains on ``batch``."""
        model = self._strategy.model
        if isinstance(model, DistributedDataParallel) and model.will_sync_module_buffers():
            self._strategy.await_batch()  # DDP waits for the first rank here
        self.begin_forward(batch)
        yield
        self.end_forward()

    @contextmanager
    def backward_of(self, loss: torch.Tensor) -> Iterator[None]:
        """Wrap a backward pass of ``loss``."""
        self._strategy.await_batch()  # hand over gradients only of batches that all ranks have begun
        with self.backward(), self.weights.backward(loss):
            yield

    def step_with(self, take: Callable[..., Any], optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        """See :class:`DecidedFit`; also warns of gradients that are not averaged."""
        output = super().step_with(take, optimizer, *args, **kwargs)
        if self._epoch_begins:  # a callback or the first training_step may have added layers, or unfrozen some
            self._epoch_begins = False
            self._warn_of_drift()
        return output
