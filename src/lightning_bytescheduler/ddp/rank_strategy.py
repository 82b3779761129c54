"""DDP's strategy on ranks that learn of each other's failures, and may leave their gradients to ByteScheduler.

With Lightning's launchers for processes that the main process starts and joins (spawn, fork), Lightning calls
``on_exception`` and tears down in the main process, when the workers are gone: the other ranks have to hear of a
failure from the worker it happens in, before it dies.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_bytescheduler.checks import unknown_variables
from lightning_bytescheduler.ddp.ddp_arguments import check_launch_options
from lightning_bytescheduler.ddp.fit_position import FitPosition
from lightning_bytescheduler.ddp.joined_ranks import JoinedRanks
from lightning_bytescheduler.ddp.runtime import SchedulerRuntime
from lightning_bytescheduler.ddp.scheduled_gradients import ScheduledGradients
from lightning_bytescheduler.ddp.sigterm import ends_by_sigterm, sigterm_ends_at_once
from lightning_bytescheduler.ddp.whole_file import written_whole
from lightning_bytescheduler.exceptions import RanksDivergedError
from lightning_bytescheduler.lightning_api import (
    PACKAGE,
    CheckpointIO,
    ClusterEnvironment,
    DDPStrategy,
    Precision,
    SIGTERMException,
    _MultiProcessingLauncher,
    pl,
    rank_zero_warn,
)

__all__ = ["COMPRESSION", "OUTER_STATE", "PublishingLauncher", "RankStrategy", "callbacks_of"]


COMPRESSION = "lightning_bytescheduler.compression"
"""Where a checkpoint has what error feedback has left to be sent."""
OUTER_STATE = "lightning_bytescheduler.diloco"
"""Where a checkpoint of ``diloco`` has what ``bytescheduler`` has no use for."""

_OUTCOME = "lightning_bytescheduler"


class _Outcome:
    """Nothing that Lightning looks into for tensors to move: it would change what cannot be changed.

    Args:
        of_fit: What the strategy has to tell.
    """

    def __init__(self, of_fit: Any) -> None:
        self.of_fit = of_fit


class PublishingLauncher(_MultiProcessingLauncher):
    """See Lightning's launcher.

    Args:
        strategy: Told about failures in each worker; pickled into it with the Trainer.
        start_method: See Lightning's launcher.
    """

    _strategy: RankStrategy

    def _wrapping_function(
        self, process_idx: int, trainer: Any, function: Callable[..., Any], *arguments: Any, **keywords: Any
    ) -> None:
        try:
            super()._wrapping_function(process_idx, trainer, function, *arguments, **keywords)
        except BaseException as error:
            self._strategy.publish_failure(error)
            raise

    def get_extra_results(self, trainer: pl.Trainer) -> dict[str, Any]:
        """In rank 0: what the main process is told of the fit."""
        return {**super().get_extra_results(trainer), _OUTCOME: _Outcome(self._strategy.outcome())}

    def update_main_process_results(self, trainer: pl.Trainer, extra: dict[str, Any]) -> None:
        """In the main process, which took no step itself."""
        super().update_main_process_results(trainer, extra)
        self._strategy.remember(extra[_OUTCOME].of_fit)


_said: set[str] = set()  # of the environment, once in a process


class RankStrategy(JoinedRanks, DDPStrategy):
    """What both strategies of this package do in a step, and with a failure.

    Args:
        **options: See DDPStrategy.
    """

    example_option: ClassVar[str] = ""
    """An option of the strategy, with a value, as messages show it."""

    def __init__(self, **options: Any) -> None:
        self._position: FitPosition | None = None  # where all ranks train together
        self._gradients: ScheduledGradients | None = None  # where ByteScheduler carries them
        self._checkpoint: tuple[Any, str] | None = None  # a checkpoint's path, and where it was written
        check_launch_options(
            options,
            {
                "cluster_environment": ClusterEnvironment,
                "checkpoint_io": CheckpointIO,
                "precision_plugin": Precision,
            },
            accelerator=pl.accelerators.Accelerator,
            strategy=type(self).__name__,
            example=self.example_option,
        )
        for sentence in unknown_variables(os.environ):
            if sentence not in _said:
                _said.add(sentence)
                rank_zero_warn(sentence)
        super().__init__(**options)

    def __repr__(self) -> str:
        # The other package's Trainer takes it for a wrong name, and says no more than this.
        return f"<{type(self).__name__} of {PACKAGE!r}>"

    def _configure_launcher(self) -> None:
        super()._configure_launcher()
        if isinstance(self._launcher, _MultiProcessingLauncher):
            self._launcher = PublishingLauncher(self, start_method=self._start_method)  # type: ignore[arg-type]

    def outcome(self) -> Any:
        """What is known of a fit when it is over, for a main process that starts ranks and is none itself."""
        return None

    def remember(self, outcome: Any) -> None:
        """Know in the main process what rank 0 found."""

    def _know_ranks(self) -> None:
        self.set_world_ranks()

    def setup_environment(self) -> None:
        """See DDPStrategy."""
        self._checkpoint = None  # a fit that failed may have loaded it
        super().setup_environment()

    def setup(self, trainer: pl.Trainer) -> None:
        """See DDPStrategy."""
        with sigterm_ends_at_once(self.cluster_environment):
            super().setup(trainer)

    # ------------------------------------------------------------------ one step

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """See DDPStrategy."""
        batch = args[0] if args else next(iter(kwargs.values()), None)
        with self._explained(), nullcontext() if self._gradients is None else self._gradients.forward(batch):
            return super().training_step(*args, **kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """See DDPStrategy."""
        if self._gradients is not None:
            self._gradients.validate()
        with self._explained():
            return super().validation_step(*args, **kwargs)

    def count_epoch(self) -> None:
        """An epoch begins."""
        if self._position is not None:
            self._position.begin_epoch()
        if self._gradients is not None:
            self._gradients.begin_epoch()

    def count_batch(self) -> None:
        """A batch begins, unless the ranks have been found to wait for each other."""
        if self._board is not None and isinstance(self._board.fault, RanksDivergedError):
            raise self._board.fault  # what came back from a collective that was called off is not to be trained on
        if self._position is not None:
            self._position.begin_batch()

    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """See DDPStrategy."""
        if self._gradients is not None and self._gradients.leaves_out():
            return closure_loss
        with self._explained(), nullcontext() if self._gradients is None else self._gradients.backward(closure_loss):
            return super().backward(closure_loss, optimizer, *args, **kwargs)

    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: pl.LightningModule | nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run the closure; defer the step where its gradients are still on their way. See DDPStrategy."""
        step = super().optimizer_step
        if self._gradients is None:
            return step(optimizer, closure, model, **kwargs)
        with self._explained():
            return self._gradients.step(
                lambda closure: step(optimizer, closure, model, **kwargs), optimizer, closure, deferrable=not kwargs
            )

    def _register_ddp_hooks(self) -> None:
        if self._gradients is None:
            super()._register_ddp_hooks()
        else:
            self._gradients.take_over(self.model)

    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """See DDPStrategy."""
        checkpoint: dict[str, Any] = super().load_checkpoint(checkpoint_path, *args, **kwargs)
        self._checkpoint = checkpoint_path, f" of epoch {checkpoint.get('epoch')}, step {checkpoint.get('global_step')}"
        return checkpoint

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """See DDPStrategy. What was there before is replaced by a whole file."""
        if not self.is_global_zero:
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        with written_whole(self.checkpoint_io, filepath) as path:
            super().save_checkpoint(checkpoint, path, storage_options)

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """See DDPStrategy. Ranks that have restored compare checkpoints, before any of them validates or trains."""
        # Lightning comes here whether it had a checkpoint or not.
        if args[:1] == ("_CheckpointConnector.resume_end",) and not self._failed:
            (path, written), self._checkpoint = self._checkpoint or (None, ""), None
            self._compare_checkpoints(path, written, **({} if self._position is None else self._position.reached))
        super().barrier(*args, **kwargs)

    # ------------------------------------------------------------------ failures

    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: Any = "mean") -> Any:
        """See DDPStrategy."""
        with self._explained():
            return super().reduce(tensor, group, reduce_op)

    def on_exception(self, exception: BaseException) -> None:
        """See DDPStrategy."""
        self.publish_failure(exception)

    def publish_failure(self, exception: BaseException) -> None:
        """See JoinedRanks; with Lightning's hint, which the other ranks show, too."""
        super(JoinedRanks, self).on_exception(exception)
        if isinstance(exception, SIGTERMException) and exception.code is None:
            ends_by_sigterm(exception, self.global_rank)
        super().publish_failure(exception)

    def _runtimes(self) -> Iterable[SchedulerRuntime]:
        runtime = None if self._gradients is None else self._gradients.runtime
        return () if runtime is None else (runtime,)


def callbacks_of(trainer: pl.Trainer) -> list[pl.Callback]:
    """The Trainer's callbacks, to be looked at and changed."""
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]  # set by a connector
    return callbacks
