"""DiLoCo with workers of unequal speed: rounds that end for all together, and a mean weighted by samples.

What can be used without a Trainer: the logic of rounds, the mean of pseudo-gradients, and the record of a training.
"""

from lightning_bytescheduler.diloco.batch_scheduler import BatchScheduler
from lightning_bytescheduler.diloco.batch_size import find_batch_size, resolve_batch_size
from lightning_bytescheduler.diloco.fragments import FragmentOptions, mix, split_fragments
from lightning_bytescheduler.diloco.outer_optimizer import OuterOptimizer, pseudo_gradient
from lightning_bytescheduler.diloco.picture import draw_rounds
from lightning_bytescheduler.diloco.round_counter import RoundCounter
from lightning_bytescheduler.diloco.round_end import (
    FastestSteps,
    FixedSteps,
    Pace,
    Projection,
    RoundOptions,
    RoundTarget,
    SampleTarget,
    project,
)
from lightning_bytescheduler.diloco.round_record import RoundRecord, read_rounds, waiting_share, write_round
from lightning_bytescheduler.diloco.weighted_mean import WeightedMean, pseudo_gradient_weight
from lightning_bytescheduler.diloco.wire_dtype import WireFormat

__all__ = [
    "BatchScheduler",
    "FastestSteps",
    "FixedSteps",
    "FragmentOptions",
    "OuterOptimizer",
    "Pace",
    "Projection",
    "RoundCounter",
    "RoundOptions",
    "RoundRecord",
    "RoundTarget",
    "SampleTarget",
    "WeightedMean",
    "WireFormat",
    "draw_rounds",
    "find_batch_size",
    "mix",
    "project",
    "pseudo_gradient",
    "pseudo_gradient_weight",
    "read_rounds",
    "resolve_batch_size",
    "split_fragments",
    "waiting_share",
    "write_round",
]
