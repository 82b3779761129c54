"""Data in slices: handed out as they are needed, to workers of any speed, and never lost.

- A slice and its bytes: ``slice``, ``checksums``, ``catalogue``, ``formats``, ``shuffle``.
- Where slices come from, and where they are kept: ``urls``, ``source``, ``fetch``, ``prefetch``, ``cache``,
  ``store``.
- Batches: ``open_slice``, ``batches``, ``tracked_batches`` (workers that take slices as they need them), ``loader``,
  ``dataset``.
- Ranks that step together: ``epoch_plan``, ``lock_step`` (each with batches of its own size),
  ``shared_plan`` (with their share of the batches of all).
- The tracker, which hands slices out: ``messages``, ``tracker_client``, ``tracker``, ``tracker_state``.
- Lightning: ``options``, ``training``, ``slice_coordinator``, ``data_module``.
- ``lightning-bytescheduler slices``: ``command``, ``make``, ``index``, ``serve``.
"""

from lightning_bytescheduler.slices.batches import SampleRun
from lightning_bytescheduler.slices.catalogue import SliceCatalogue
from lightning_bytescheduler.slices.epoch_plan import Stage
from lightning_bytescheduler.slices.lock_step import LockStepEpoch
from lightning_bytescheduler.slices.make import make_slices
from lightning_bytescheduler.slices.options import FetchOptions, StoreOptions, TrackerOptions
from lightning_bytescheduler.slices.slice import Slice, SliceState, SliceStream
from lightning_bytescheduler.slices.source import SliceSource, open_source
from lightning_bytescheduler.slices.tracker import SliceTracker, TrackerReport
from lightning_bytescheduler.slices.tracker_client import LocalTracker, TrackerClient
from lightning_bytescheduler.slices.training import TrackerHost

__all__ = [
    "FetchOptions",
    "LocalTracker",
    "LockStepEpoch",
    "SampleRun",
    "Slice",
    "SliceCatalogue",
    "SliceSource",
    "SliceState",
    "SliceStream",
    "SliceTracker",
    "Stage",
    "StoreOptions",
    "TrackerClient",
    "TrackerHost",
    "TrackerOptions",
    "TrackerReport",
    "make_slices",
    "open_source",
]
