"""What a fit of ``diloco`` begins with: who is in it, what is refused at once, and where its rounds are recorded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_bytescheduler.ddp.fit_position import introduce
from lightning_bytescheduler.diloco.coordination import Coordination
from lightning_bytescheduler.diloco.options import DiLoCoOptions, common_options
from lightning_bytescheduler.diloco.process_groups import WorkerWorld
from lightning_bytescheduler.diloco.round_record import RECORD_NAME, RoundFile
from lightning_bytescheduler.exceptions import UnsupportedError
from lightning_bytescheduler.failures.startup_check import RendezvousWatch, hold_roll_call, require_alike
from lightning_bytescheduler.lightning_api import pl, rank_zero_warn

if TYPE_CHECKING:
    import torch.distributed as dist

    from lightning_bytescheduler.diloco.coordinated_slices import CoordinatedSlices
    from lightning_bytescheduler.diloco.shared_slices import SharedSlices


def meet_all(
    options: DiLoCoOptions,
    rank: int,
    ranks: int,
    timeout: timedelta | None,
    watch: RendezvousWatch | None,
    store: dist.Store,
    connected: bool,
) -> None:
    """Make sure with the other ranks that they are in the same training; before there are groups.

    Args:
        options: This rank's.
        rank: Its number.
        ranks: How many there are.
        timeout: Longest wait for them.
        watch: Knows what has gone wrong meanwhile.
        store: That all share.
        connected: Whether all have just connected to it.

    Raises:
        RanksDifferError: If they are not.
    """
    own = introduce(rank, "diloco", common_options(options))
    met = hold_roll_call(
        store,
        own,
        world_size=ranks,
        timeout=options.outer(timeout).timeout,
        failure=lambda: None if watch is None else watch.difference,
        connected=connected,
    )
    require_alike(met, warn=rank_zero_warn)


def open_rounds_file(trainer: pl.Trainer, options: DiLoCoOptions, *, append: bool) -> RoundFile:
    """Where this rank records the rounds: as the user said, or in the run's folder. Trial runs record none.

    Args:
        trainer: Whose fit it is; asked on all ranks, as the answer travels among the ranks of a worker.
        options: This rank's.
        append: Whether to go on with a file that is there.
    """
    path = None
    if not trainer.fast_dev_run and not trainer.barebones:  # type: ignore[attr-defined]
        folder = trainer.log_dir or trainer.default_root_dir
        if trainer.is_global_zero:
            path = Path(folder) / RECORD_NAME
    return RoundFile(path, append=append, option="")


def slices_of(
    trainer: pl.Trainer,
    world: WorkerWorld,
    coordination: Coordination | None,
    *,
    timeout: float,
    check: Callable[[], None],
) -> SharedSlices | CoordinatedSlices | None:
    """Have the workers share the slices of a fit: through worker 0, or through the coordinator.

    Args:
        trainer: Before the setup of its data.
        world: Where this rank is.
        coordination: With a coordinator, if there is one.
        timeout: Longest wait for an answer, in seconds.
        check: Raises what another rank has failed with, if any.
    """
    if coordination is not None:
        return coordination.share_slices(trainer, world, timeout=timeout, check=check)
    from lightning_bytescheduler.diloco.shared_slices import share_slices  # only with data, as it takes time

    return share_slices(trainer, world, timeout=timeout, check=check)


def refuse_searches(callbacks: Sequence[pl.Callback]) -> None:
    """Refuse Lightning's search for a learning rate, which has all ranks read one checkpoint and go back to it.

    Raises:
        UnsupportedError: Names the way out.
    """
    if any(isinstance(callback, pl.callbacks.LearningRateFinder) for callback in callbacks):
        raise UnsupportedError(
            "Strategy 'diloco' cannot look for a learning rate (Tuner.lr_find, LearningRateFinder), as its workers "
            "train on their own. Find it before, with Trainer(devices=1)."
        )
