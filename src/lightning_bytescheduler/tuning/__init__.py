"""Choosing credit and partition size. Pure: imports neither Lightning nor torch.distributed."""

from lightning_bytescheduler.tuning.credit_tuning import CreditTuning, Decision
from lightning_bytescheduler.tuning.first_guesses import first_guesses
from lightning_bytescheduler.tuning.identity import TuningIdentity
from lightning_bytescheduler.tuning.link import LinkEstimate, SchedulerSizes, default_sizes
from lightning_bytescheduler.tuning.options import TuningOptions
from lightning_bytescheduler.tuning.point import PLAIN_DDP, TuningPoint
from lightning_bytescheduler.tuning.record import TrialEntry, append_entries, read_record
from lightning_bytescheduler.tuning.search import prepare
from lightning_bytescheduler.tuning.search_space import SearchSpace

__all__ = [
    "PLAIN_DDP",
    "CreditTuning",
    "Decision",
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
