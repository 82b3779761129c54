"""DiLoCo with performance-aware scheduling (seed 004). Pure: no Lightning, no torch.distributed, no sockets."""

from lightning_bytescheduler.diloco.accumulation import UpdateAccumulator, update_weight, weight_shares
from lightning_bytescheduler.diloco.batch_scheduler import BatchScheduler
from lightning_bytescheduler.diloco.batch_size import find_batch_size, resolve_batch_size
from lightning_bytescheduler.diloco.fragments import FragmentOptions, FragmentSchedule, mix, split_fragments
from lightning_bytescheduler.diloco.outer_optimizer import OuterOptimizer, pseudo_gradient
from lightning_bytescheduler.diloco.picture import draw_rounds
from lightning_bytescheduler.diloco.round_counter import RoundCounter
from lightning_bytescheduler.diloco.round_options import RoundOptions
from lightning_bytescheduler.diloco.round_record import RoundRecord, read_rounds, waiting_share, write_round
from lightning_bytescheduler.diloco.round_target import (
    FastestSteps,
    FixedSteps,
    Pace,
    Projection,
    RoundTarget,
    SampleTarget,
    project,
)
from lightning_bytescheduler.diloco.wire import WireFormat

__all__ = [
    "BatchScheduler",
    "FastestSteps",
    "FixedSteps",
    "FragmentOptions",
    "FragmentSchedule",
    "OuterOptimizer",
    "Pace",
    "Projection",
    "RoundCounter",
    "RoundOptions",
    "RoundRecord",
    "RoundTarget",
    "SampleTarget",
    "UpdateAccumulator",
    "WireFormat",
    "draw_rounds",
    "find_batch_size",
    "mix",
    "project",
    "pseudo_gradient",
    "read_rounds",
    "resolve_batch_size",
    "split_fragments",
    "update_weight",
    "waiting_share",
    "weight_shares",
    "write_round",
]
