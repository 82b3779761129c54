"""Data in slices: handed out on demand to workers of any speed, without loss.

- A slice, its bytes and its samples: ``slice``, ``catalogue``, ``formats``.
- Sources and storage: ``urls``, ``source``, ``fetch``, ``cache``, ``store``.
- Batches: ``epoch_plan`` for ranks that step together; ``training`` for workers that take slices as needed; ``loader``.
- The tracker, which hands slices out, and its messages: ``tracker``.
- Lightning: ``options``, ``data_module``.
- ``lightning-bytescheduler slices``: ``command``, ``make``, ``serve``.
"""
