"""Makes what a rank needs for the rounds of one fit: more if it leads its worker than if it follows."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from lightning_bytescheduler.collectives.faults import FaultBoard
from lightning_bytescheduler.diloco import RoundRecord
from lightning_bytescheduler.outer_loop.following_runtime import FollowingRuntime
from lightning_bytescheduler.outer_loop.outer_state import OuterState
from lightning_bytescheduler.outer_loop.runtime import OuterOptions, OuterRuntime
from lightning_bytescheduler.outer_loop.trained_weights import TrainedWeights
from lightning_bytescheduler.outer_loop.worker_group import WorkerGroup
from lightning_bytescheduler.outer_loop.world import WorkerWorld
from lightning_bytescheduler.strategies.diloco_options import DiLoCoOptions

__all__ = ["make_runtime"]


def make_runtime(
    module: nn.Module,
    *,
    options: DiLoCoOptions,
    outer: OuterOptions,
    world: WorkerWorld,
    group: WorkerGroup,
    board: FaultBoard,
    flush: Callable[[], None],
    on_round: Callable[[RoundRecord], object],
) -> OuterRuntime | FollowingRuntime:
    """Start what runs beside the training.

    Args:
        module: What is trained.
        options: The user's.
        outer: The same, as the rooms below understand them.
        world: Where this rank is.
        group: The ranks of its worker.
        board: Where failures are published.
        flush: Brings the weights up to date.
        on_round: Called with each round that has ended, on worker 0's leader.
    """
    trained = TrainedWeights(module, options.fragment_options)
    if not group.leads:
        return FollowingRuntime(
            world=world, group=group, board=board, trained=trained, overlap_steps=outer.overlap_steps, flush=flush
        )
    state = OuterState(
        trained,
        weighting=options.weighting,
        lr=options.outer_lr,
        momentum=options.outer_momentum,
        factory=options.outer_optimizer,
    )
    return OuterRuntime(
        world=world, group=group, board=board, state=state, options=outer, flush=flush, on_round=on_round
    )
