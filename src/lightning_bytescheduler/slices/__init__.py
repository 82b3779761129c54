"""Data in slices: handed out as they are needed, to workers of any speed, and never lost.

- A slice and its bytes: ``slice``, ``checksums``, ``catalogue``, ``formats``, ``shuffle``.
- Where slices come from, and where they are kept: ``urls``, ``source``, ``fetch``, ``prefetch``, ``cache``, ``store``.
- Batches: ``open_slice``, ``batches``, ``lock_step`` (ranks that step together), ``tracked_batches`` (workers that take
  slices as they need them), ``loader``, ``dataset``.
- The tracker, which hands slices out: ``messages``, ``tracker_client``, ``tracker``, ``tracked_workers``,
  ``tracker_state``.
- Lightning: ``options``, ``training``, ``slice_coordinator``, ``data_module``.
- ``lightning-bytescheduler slices``: ``command``, ``make``, ``index``, ``serve``.
"""

from lightning_bytescheduler.slices.batches import SampleRun
from lightning_bytescheduler.slices.catalogue import SliceCatalogue
from lightning_bytescheduler.slices.lock_step import LockStepEpoch, Stage
from lightning_bytescheduler.slices.options import TrackerOptions
from lightning_bytescheduler.slices.slice import Slice, SliceState
from lightning_bytescheduler.slices.tracker import SliceTracker, TrackerReport
from lightning_bytescheduler.slices.tracker_client import LocalTracker, TrackerClient

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
