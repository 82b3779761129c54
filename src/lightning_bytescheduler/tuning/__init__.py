"""Choosing credit and partition size. Pure: imports neither Lightning nor torch.distributed."""

from lightning_bytescheduler.tuning.decisions import CreditTuning
from lightning_bytescheduler.tuning.default_sizes import LinkEstimate, SchedulerSizes, default_sizes
from lightning_bytescheduler.tuning.record import TrialEntry, TuningIdentity, append_entries, read_record
from lightning_bytescheduler.tuning.search import TuningOptions, first_guesses, prepare
from lightning_bytescheduler.tuning.search_space import PLAIN_DDP, SearchSpace, TuningPoint

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
