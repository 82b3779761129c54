"""The scheduler core: tasks, partitions, priority, credit. Imports neither Lightning nor torch.distributed."""

from lightning_bytescheduler.scheduler.core import ByteCore
from lightning_bytescheduler.scheduler.order import AnnouncedOrder, Decision, LaunchOrder, MixedOrder, PriorityOrder
from lightning_bytescheduler.scheduler.task import CommTask, SubCommTask, TaskKey, TaskState

__all__ = [
    "AnnouncedOrder",
    "ByteCore",
    "CommTask",
    "Decision",
    "LaunchOrder",
    "MixedOrder",
    "PriorityOrder",
    "SubCommTask",
    "TaskKey",
    "TaskState",
]
