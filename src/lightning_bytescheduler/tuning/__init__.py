"""Choosing credit and partition size. Pure: imports neither Lightning nor torch.distributed."""

from lightning_bytescheduler.tuning.link import LinkEstimate, SchedulerSizes, default_sizes

__all__ = ["LinkEstimate", "SchedulerSizes", "default_sizes"]
