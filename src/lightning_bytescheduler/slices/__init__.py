"""Data in slices: handed out on demand to workers of any speed, without loss.

- A slice, its bytes and its samples: ``slice``, ``catalogue``, ``formats``.
- Sources and storage: ``urls``, ``source``, ``fetch``, ``cache``, ``store``.
- Batches: ``batches``; ``epoch_plan`` for ranks that step together; ``training`` for workers that take slices as
  needed; ``loader``.
- The tracker, which hands slices out: ``messages``, ``tracker``.
- Lightning: ``options``, ``data_module``.
- ``lightning-bytescheduler slices``: ``command``, ``make``, ``serve``.
"""

from lightning_bytescheduler.slices.catalogue import SliceCatalogue
from lightning_bytescheduler.slices.make import make_slices
from lightning_bytescheduler.slices.messages import TrackerClient
from lightning_bytescheduler.slices.options import TrackerOptions
from lightning_bytescheduler.slices.slice import Slice, SliceStream
from lightning_bytescheduler.slices.source import SliceSource, open_source
from lightning_bytescheduler.slices.tracker import SliceTracker, TrackerReport
from lightning_bytescheduler.slices.training import TrackerHost

__all__ = [
    "Slice",
    "SliceCatalogue",
    "SliceSource",
    "SliceStream",
    "SliceTracker",
    "TrackerClient",
    "TrackerHost",
    "TrackerOptions",
    "TrackerReport",
    "make_slices",
    "open_source",
]
