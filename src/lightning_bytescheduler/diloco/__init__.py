"""DiLoCo with workers of unequal speed: rounds that end for all together, and a mean weighted by samples.

What can be used without a Trainer: the logic of rounds, the mean of pseudo-gradients, and the record of a training. Who
has a network of his own carries the messages of :class:`BatchScheduler` and :class:`RoundCounter` over it: ``encode``
writes one as a line of JSON, and ``decode`` reads it.
"""

from lightning_bytescheduler.diloco.batch_scheduler import BatchScheduler, BatchSchedulerState
from lightning_bytescheduler.diloco.batch_size import find_batch_size, resolve_batch_size
from lightning_bytescheduler.diloco.fragments import FragmentOptions, mix, split_fragments
from lightning_bytescheduler.diloco.messages import (
    PARAMETER_SERVER,
    Acknowledge,
    CollectPseudoGradients,
    EndRound,
    Envelope,
    JoinRounds,
    LeaveRounds,
    MergePseudoGradients,
    Message,
    PassedRoundEnd,
    PseudoGradientArrived,
    RoundEnded,
    RoundStarted,
    RoundStatus,
    SchedulerMessage,
    SendAfter,
    SendingPseudoGradient,
    SendNow,
    StartRound,
    StepMetrics,
    StepReport,
    TrainingOver,
    WaitForRound,
    WorkerMessage,
    decode,
    encode,
)
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
from lightning_bytescheduler.diloco.round_record import (
    Activity,
    RoundRecord,
    WorkerRound,
    read_rounds,
    waiting_share,
    write_round,
)
from lightning_bytescheduler.diloco.weighted_mean import WeightedMean, Weighting, pseudo_gradient_weight
from lightning_bytescheduler.diloco.wire_dtype import Rounding, WireDtype, WireFormat

__all__ = [
    "PARAMETER_SERVER",
    "Acknowledge",
    "Activity",
    "BatchScheduler",
    "BatchSchedulerState",
    "CollectPseudoGradients",
    "EndRound",
    "Envelope",
    "FastestSteps",
    "FixedSteps",
    "FragmentOptions",
    "JoinRounds",
    "LeaveRounds",
    "MergePseudoGradients",
    "Message",
    "OuterOptimizer",
    "Pace",
    "PassedRoundEnd",
    "Projection",
    "PseudoGradientArrived",
    "RoundCounter",
    "RoundEnded",
    "RoundOptions",
    "RoundRecord",
    "RoundStarted",
    "RoundStatus",
    "RoundTarget",
    "Rounding",
    "SampleTarget",
    "SchedulerMessage",
    "SendAfter",
    "SendNow",
    "SendingPseudoGradient",
    "StartRound",
    "StepMetrics",
    "StepReport",
    "TrainingOver",
    "WaitForRound",
    "WeightedMean",
    "Weighting",
    "WireDtype",
    "WireFormat",
    "WorkerMessage",
    "WorkerRound",
    "decode",
    "draw_rounds",
    "encode",
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
