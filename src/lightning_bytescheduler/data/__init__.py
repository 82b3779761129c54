"""Data in slices: handed out as they are needed, to workers of any speed, and never lost. Does not import Lightning."""

from lightning_bytescheduler.data.catalogue import SliceCatalogue
from lightning_bytescheduler.data.local_tracker import LocalTracker
from lightning_bytescheduler.data.lock_step import LockStepEpoch, SampleRun, Stage
from lightning_bytescheduler.data.slice import Slice
from lightning_bytescheduler.data.slice_state import SliceState
from lightning_bytescheduler.data.tracker import SliceTracker
from lightning_bytescheduler.data.tracker_client import TrackerClient
from lightning_bytescheduler.data.tracker_options import TrackerOptions
from lightning_bytescheduler.data.tracker_report import TrackerReport

__all__ = [
    "LocalTracker",
    "LockStepEpoch",
    "SampleRun",
    "Slice",
    "SliceCatalogue",
    "SliceState",
    "SliceTracker",
    "Stage",
    "TrackerClient",
    "TrackerOptions",
    "TrackerReport",
]
