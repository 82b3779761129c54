"""The function DDP calls with each bucket.

In a module of its own because DDP inspects the annotations as objects: postponed evaluation would turn them to text.
"""

import torch
import torch.distributed as dist

from lightning_bytescheduler.gradients.engine import GradientEngine

__all__ = ["schedule_bucket"]


def schedule_bucket(engine: GradientEngine, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Hand ``bucket`` to ``engine``; see ``DistributedDataParallel.register_comm_hook``."""
    return engine.hook(bucket)
