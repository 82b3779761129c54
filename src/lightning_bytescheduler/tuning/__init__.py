"""Choosing credit and partition size. Pure: imports neither Lightning nor torch.distributed."""

from lightning_bytescheduler.tuning.decisions import CreditTuning
from lightning_bytescheduler.tuning.record import TrialEntry, TuningIdentity, append_entries, read_record
from lightning_bytescheduler.tuning.search import TuningOptions, first_guesses, prepare
from lightning_bytescheduler.tuning.sizes import (
    PLAIN_DDP,
    LinkEstimate,
    SchedulerSizes,
    SearchSpace,
    TuningPoint,
    default_sizes,
)

__all__ = [
    "PLAIN_DDP",
    "CreditTuning",
    "LinkEstimate",
    "SchedulerSizes",
    "SearchSpace",
    "TrialEntry",
    "TuningIdentity",
    "TuningOptions",
    "TuningPoint",
    "append_entries",
    "default_sizes",
    "first_guesses",
    "prepare",
    "read_record",
]
