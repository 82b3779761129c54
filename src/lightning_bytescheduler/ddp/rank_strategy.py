"""DDP's strategy on ranks that learn of each other's failures, and may leave their gradients to ByteScheduler.

With Lightning's launchers for processes that the main process starts and joins (spawn, fork), Lightning calls
``on_exception`` and tears down in the main process, when the workers are gone: the other ranks have to hear of a
failure from the worker it happens in, before it dies.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Any, ClassVar, TypeVar

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.rendezvous import rendezvous
from torch.optim import Optimizer

from lightning_bytescheduler.checks import unknown_variables
from lightning_bytescheduler.collectives.interface import VARIABLE, choose_interface
from lightning_bytescheduler.ddp.ddp_arguments import check_launch_options
from lightning_bytescheduler.ddp.fit_position import FitPosition
from lightning_bytescheduler.ddp.own_names import OwnNames
from lightning_bytescheduler.ddp.scheduled_gradients import ScheduledGradients
from lightning_bytescheduler.exceptions import RankFailedError, RanksDivergedError
from lightning_bytescheduler.failures.board import FaultBoard
from lightning_bytescheduler.failures.incarnation import agent_keeps_store, name_incarnation
from lightning_bytescheduler.failures.startup_check import Introduction, RendezvousWatch, hold_roll_call, require_alike
from lightning_bytescheduler.lightning_api import (
    PACKAGE,
    CheckpointIO,
    ClusterEnvironment,
    DDPStrategy,
    Precision,
    SIGTERMException,
    _MultiProcessingLauncher,
    pl,
    rank_zero_info,
    rank_zero_warn,
)

__all__ = ["OUTER_STATE", "PublishingLauncher", "RankStrategy", "callbacks_of"]


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

    def launch(self, *args: Any, **keywords: Any) -> Any:
        """See Lightning's launcher."""
        try:
            return super().launch(*args, **keywords)
        except Exception as error:
            self._strategy.own_names.put_into(error)
            raise

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


_T = TypeVar("_T")
_TIMEOUT_S = 1800.0
_said: set[str] = set()  # of the environment, once in a process


class RankStrategy(DDPStrategy):
    """What both strategies of this package do in a step, and with a failure.

    Args:
        **options: See DDPStrategy.
    """

    sigterm_patience_s: ClassVar[float] = 0.0
    """How long other ranks may go on when this one ends by a SIGTERM, in seconds."""
    own_names: ClassVar[OwnNames]
    """What it is called in hints."""
    example_option: ClassVar[str] = ""
    """An option of the strategy, with a value, as messages show it."""

    def __init__(self, **options: Any) -> None:
        self._board: FaultBoard | None = None
        self._failed = False
        self._position: FitPosition | None = None  # where all ranks train together
        self._gradients: ScheduledGradients | None = None  # where ByteScheduler carries them
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
        self.own_names.require_for_notebook(self._launcher)

    def outcome(self) -> Any:
        """What is known of a fit when it is over, for a main process that starts ranks and is none itself."""
        return None

    def remember(self, outcome: Any) -> None:
        """Know in the main process what rank 0 found."""

    # ------------------------------------------------------------------ who takes part

    def _watched_rendezvous(self, strategy: str, ranks: int) -> AbstractContextManager[RendezvousWatch | None]:
        """Around the wait for the other ranks: who is missing is said, and that one of them failed."""
        environment = self.cluster_environment
        if environment is None or ranks == 1 or dist.is_initialized():
            return nullcontext()
        self.set_world_ranks()
        if self.num_nodes > 1:
            interface = choose_interface(environment.main_address)
            if interface is not None:
                rank_zero_info(
                    f"bytescheduler: ranks connect through {interface}, which leads to {environment.main_address}, as "
                    f"this machine's name does not ({VARIABLE} chooses another one)."
                )
        return RendezvousWatch(
            environment.main_address,
            environment.main_port,
            rank=self.global_rank,
            world_size=ranks,
            strategy=strategy,
        )

    def _own_store(self, ranks: int, watch: RendezvousWatch | None) -> dist.Store | None:
        """A part of the store of torchrun's agent that no earlier start has written to; ``None`` without that agent.

        Args:
            ranks: How many there are.
            watch: Is told what the part is called.
        """
        environment = self.cluster_environment
        if environment is None or dist.is_initialized() or not agent_keeps_store():
            return None
        self.set_world_ranks()
        os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = environment.main_address, str(environment.main_port)
        timeout = timedelta(seconds=self._longest_wait_s)
        store = next(rendezvous("env://", rank=self.global_rank, world_size=ranks, timeout=timeout))[0]
        name = name_incarnation(
            store,
            rank=self.global_rank,
            world_size=ranks,
            timeout=self._longest_wait_s,
            failure=lambda: None if watch is None else watch.difference,
        )
        if watch is not None:
            watch.meet_as(name)
        return dist.PrefixStore(name, store)

    def _meet(self, what: str, own: Introduction) -> None:
        """Make sure with all other ranks that they are in the same training.

        Args:
            what: Is compared.
            own: What this rank has to say of it.
        """
        board = self._board
        if board is None:
            return

        with self._explained():
            place, seconds = board.meeting_place(what), self._longest_wait_s
            ranks = hold_roll_call(place, own, world_size=board.world_size, timeout=seconds, failure=self._no_hope)
            require_alike(ranks, warn=rank_zero_warn)

    @property
    def _longest_wait_s(self) -> float:
        return _TIMEOUT_S if self._timeout is None else self._timeout.total_seconds()

    def _no_hope(self) -> BaseException | None:
        """Why nothing is to be expected of the other ranks any more, if so."""
        board = self._board
        if board is None or not board.hopeless:
            return None
        return board.diagnose(RuntimeError("c10d: the store is gone"))

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

    # ------------------------------------------------------------------ failures

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """See DDPStrategy. After a failure nobody is waited for: a checkpoint on exception must not hang."""
        if not self._failed:
            with self._explained():
                super().barrier(*args, **kwargs)

    def broadcast(self, obj: _T, src: int = 0) -> _T:
        """See DDPStrategy. After a failure this rank's own ``obj`` has to do."""
        if self._failed:
            return obj
        with self._explained():
            return super().broadcast(obj, src)

    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: Any = "mean") -> Any:
        """See DDPStrategy."""
        with self._explained():
            return super().reduce(tensor, group, reduce_op)

    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        """See DDPStrategy."""
        with self._explained():
            return super().all_gather(tensor, group, sync_grads)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """See DDPStrategy."""
        with self._explained():
            return super().reduce_boolean_decision(decision, all)

    def publish_failure(self, exception: BaseException) -> None:
        """Tell the other ranks why this one fails, or say here which other rank is at fault; once."""
        if self._failed:
            return
        self._failed = True
        self._hint(exception)
        board = self._board
        if board is None:
            return
        board.take_over()
        cause = self._explain(exception)
        if not isinstance(cause, RankFailedError):
            board.publish(cause, patience=self.sigterm_patience_s if isinstance(cause, SIGTERMException) else 0.0)
        if cause is not exception and hasattr(exception, "add_note"):
            exception.add_note(str(cause))
        if self._gradients is not None and self._gradients.runtime is not None:
            self._gradients.runtime.fail(cause)
        self._end_with(cause)
        board.close()  # here, as teardown is skipped when another callback's on_exception raises

    def _end_with(self, cause: BaseException) -> None:
        """End what else this rank does with the others, because of ``cause``."""

    def on_exception(self, exception: BaseException) -> None:
        """See DDPStrategy."""
        self.publish_failure(exception)
        self._hint(exception)

    def _hint(self, exception: BaseException) -> None:
        """Add Lightning's hints to ``exception``, in this package's names."""
        super().on_exception(exception)
        self.own_names.put_into(exception)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Turn the consequence of another rank's failure into an error that names the rank."""
        try:
            yield
        except Exception as error:
            cause = self._explain(error)
            if cause is error:
                raise
            # DDP's reducer passes what its hook raised on as words of its own.
            raise cause from (None if str(cause) in str(error) else error)

    def _explain(self, error: BaseException) -> BaseException:
        if self._gradients is not None and self._gradients.runtime is not None:
            return self._gradients.runtime.explain(error)
        return error if self._board is None else self._board.explain(error)


def callbacks_of(trainer: pl.Trainer) -> list[pl.Callback]:
    """The Trainer's callbacks, to be looked at and changed."""
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]  # set by a connector
    return callbacks
