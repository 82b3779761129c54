"""Options of what the ranks of a DiLoCo worker train together with: some are for the scheduler, others for DDP."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_bytescheduler.exceptions import OptionError
from lightning_bytescheduler.scheduler.options import SchedulerOptions
from lightning_bytescheduler.strategies.ddp_options import (
    check_bucket_cap,
    check_ddp_options,
    known_ddp_options,
    require_known,
)

__all__ = ["ddp_options", "scheduler_options"]

_SCHEDULED = ("partition_size", "credit", "cross_barrier", "mode", "timeline", "debug")
_REFUSED = ("credit_tuning", "partition_tuning", "log_metrics")


def scheduler_options(given: Mapping[str, Any]) -> SchedulerOptions:
    """The scheduler's options among those that were given.

    Raises:
        OptionError: If one has a value that is not allowed, or has no meaning inside a worker.
    """
    for option in _REFUSED:
        if given.get(option):
            raise OptionError(
                "inner_options", dict(given), f"without {option}, which is for strategy 'bytescheduler' alone"
            )
    own = {name: given[name] for name in _SCHEDULED if name in given}
    return SchedulerOptions.resolve(**own, credit_tuning=False, partition_tuning=False)


def ddp_options(inner: str | None, given: Mapping[str, Any]) -> dict[str, Any]:
    """The options of DistributedDataParallel among those that were given.

    Raises:
        OptionError: If there is no such option.
        UnsupportedError: If the scheduler cannot honour one.
    """
    scheduled = inner == "bytescheduler"
    if scheduled:
        check_ddp_options(given)
        given = {name: value for name, value in given.items() if name not in (*_SCHEDULED, *_REFUSED)}
    check_bucket_cap(given.get("bucket_cap_mb"))
    require_known(given, [*_SCHEDULED * scheduled, *known_ddp_options()], where="inner_options")
    return {"bucket_cap_mb": None, "gradient_as_bucket_view": True, **given} if scheduled else dict(given)
