"""DiLoCo with workers of unequal speed: rounds that end for all together, and a mean weighted by samples.

What can be used without a Trainer: the logic of rounds, the mean of pseudo-gradients, and the record of a training. Who
has a network of his own carries the messages of :class:`BatchScheduler` and :class:`RoundCounter` over it: ``encode``
writes one as a line of JSON, and ``decode`` reads it.
Imported at the first use, so that a record can be read without torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_bytescheduler.compression.wire_format import Rounding, WireDtype, WireFormat
    from lightning_bytescheduler.diloco.batch_scheduler import BatchScheduler, BatchSchedulerState
    from lightning_bytescheduler.diloco.batch_size import find_batch_size, resolve_batch_size
    from lightning_bytescheduler.diloco.fragments import FragmentOptions, mix, split_fragments
    from lightning_bytescheduler.diloco.messages import (
        PARAMETER_SERVER,
        Acknowledge,
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
        LateUpdate,
        RoundRecord,
        WorkerRound,
        read_rounds,
        waiting_share,
        write_round,
    )
    from lightning_bytescheduler.diloco.weighted_mean import WeightedMean, Weighting, pseudo_gradient_weight

__all__ = [
    "PARAMETER_SERVER",
    "Acknowledge",
    "Activity",
    "BatchScheduler",
    "BatchSchedulerState",
    "EndRound",
    "Envelope",
    "FastestSteps",
    "FixedSteps",
    "FragmentOptions",
    "JoinRounds",
    "LateUpdate",
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

_PLACES = {
    "Acknowledge": "messages",
    "Activity": "round_record",
    "BatchScheduler": "batch_scheduler",
    "BatchSchedulerState": "batch_scheduler",
    "EndRound": "messages",
    "Envelope": "messages",
    "FastestSteps": "round_end",
    "FixedSteps": "round_end",
    "FragmentOptions": "fragments",
    "JoinRounds": "messages",
    "LateUpdate": "round_record",
    "LeaveRounds": "messages",
    "MergePseudoGradients": "messages",
    "Message": "messages",
    "OuterOptimizer": "outer_optimizer",
    "PARAMETER_SERVER": "messages",
    "Pace": "round_end",
    "PassedRoundEnd": "messages",
    "Projection": "round_end",
    "PseudoGradientArrived": "messages",
    "RoundCounter": "round_counter",
    "RoundEnded": "messages",
    "RoundOptions": "round_end",
    "RoundRecord": "round_record",
    "RoundStarted": "messages",
    "RoundStatus": "messages",
    "RoundTarget": "round_end",
    "Rounding": ".compression.wire_format",
    "SampleTarget": "round_end",
    "SchedulerMessage": "messages",
    "SendAfter": "messages",
    "SendNow": "messages",
    "SendingPseudoGradient": "messages",
    "StartRound": "messages",
    "StepMetrics": "messages",
    "StepReport": "messages",
    "TrainingOver": "messages",
    "WaitForRound": "messages",
    "WeightedMean": "weighted_mean",
    "Weighting": "weighted_mean",
    "WireDtype": ".compression.wire_format",
    "WireFormat": ".compression.wire_format",
    "WorkerMessage": "messages",
    "WorkerRound": "round_record",
    "decode": "messages",
    "draw_rounds": "picture",
    "encode": "messages",
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
    value = getattr(importlib.import_module(f".{_PLACES[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_PLACES})
