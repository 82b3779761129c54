"""DiLoCo with workers of unequal speed: rounds that end for all together, and a mean weighted by samples.

What can be used without a Trainer: the logic of rounds, the mean of pseudo-gradients, and the record of a training.
Imported at the first use, so that a record can be read without torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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

_PLACES = {
    "BatchScheduler": "batch_scheduler",
    "FastestSteps": "round_end",
    "FixedSteps": "round_end",
    "FragmentOptions": "fragments",
    "OuterOptimizer": "outer_optimizer",
    "Pace": "round_end",
    "Projection": "round_end",
    "RoundCounter": "round_counter",
    "RoundOptions": "round_end",
    "RoundRecord": "round_record",
    "RoundTarget": "round_end",
    "SampleTarget": "round_end",
    "WeightedMean": "weighted_mean",
    "WireFormat": "wire_dtype",
    "draw_rounds": "picture",
    "find_batch_size": "batch_size",
    "mix": "fragments",
    "project": "round_end",
    "pseudo_gradient": "outer_optimizer",
    "pseudo_gradient_weight": "weighted_mean",
    "read_rounds": "round_record",
    "resolve_batch_size": "batch_size",
    "split_fragments": "fragments",
    "waiting_share": "round_record",
    "write_round": "round_record",
}


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_PLACES[name]}"), name)
    globals()[name] = value
    return value
