"""Data in slices: handed out as they are needed, to workers of any speed, and never lost.

- A slice, its bytes and its samples: ``slice``, ``catalogue``, ``formats``, ``samples``.
- Where slices come from, and where they are kept: ``urls``, ``source``, ``fetch``, ``cache``, ``store``.
- Batches: ``batches``; ``epoch_plan`` of ranks that step together; ``training`` of workers that take slices as they
  need them; ``loader``.
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
