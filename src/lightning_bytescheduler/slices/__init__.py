"""Data in slices: handed out as they are needed, to workers of any speed, and never lost. Does not import Lightning."""

from lightning_bytescheduler.slices.catalogue import SliceCatalogue
from lightning_bytescheduler.slices.lock_step import LockStepEpoch, SampleRun, Stage
from lightning_bytescheduler.slices.slice import Slice, SliceState
from lightning_bytescheduler.slices.tracker import SliceTracker, TrackerReport
from lightning_bytescheduler.slices.tracker_client import LocalTracker, TrackerClient
from lightning_bytescheduler.slices.tracker_state import TrackerOptions

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
