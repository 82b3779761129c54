"""Which strategy takes the place of the one that a script gives its Trainer."""

from __future__ import annotations

from typing import Any

from lightning_bytescheduler.checking.runs import RunSpec
from lightning_bytescheduler.ddp.strategy import ByteSchedulerStrategy
from lightning_bytescheduler.exceptions import UnsupportedError
from lightning_bytescheduler.lightning_api import DDPStrategy, SingleDeviceStrategy, Strategy, StrategyRegistry
from lightning_bytescheduler.registration import registered_class

__all__ = ["strategy_for"]

_HOOKS = ("ddp_comm_state", "ddp_comm_hook", "ddp_comm_wrapper", "model_averaging_period")

_FROM_THE_CONNECTOR = ("accelerator", "parallel_devices", "cluster_environment", "checkpoint_io", "precision_plugin")

# Every tensor in a bucket, and so behind a gate, of its own: nothing is opened by a neighbour's touch. Sizes that
# follow the measured link would be others in each run.
_STRICT: dict[str, Any] = {
    "mode": "overlapped",
    "bucket_cap_mb": 1e-5,
    "partition_size": 2**16,
    "credit": 2**18,
    "tuning": False,
}


def strategy_for(spec: RunSpec, given: str | Strategy | None, *, forked: bool = False) -> Strategy:
    """The strategy under check, with the options of DDP that ``given`` has.

    Args:
        spec: The run.
        given: What the Trainer got as ``strategy``.
        forked: Whether ranks are forked from this process, whatever ``given`` does, and the Trainer's connector gives
            the strategy its devices and plugins.

    Raises:
        UnsupportedError: If ``given`` is neither DDP nor ByteScheduler, or cannot be replaced by them.
    """
    options, own = _options_of(given)
    if forked:
        options = {name: value for name, value in options.items() if name not in _FROM_THE_CONNECTOR}
        options["start_method"] = "fork"
    if not spec.scheduled:
        if options.get("bucket_cap_mb") is None:
            options.pop("bucket_cap_mb", None)
        return DDPStrategy(**options)
    own["timeline"] = None  # the user's file is not to be written over
    if spec.strategy != "configured":
        own.update(_STRICT)
        own["cross_barrier"] = own.get("cross_barrier", True) and spec.strategy == "strict"
        options.pop("bucket_cap_mb", None)
    return ByteSchedulerStrategy(**options, **own)


def _options_of(given: str | Strategy | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """Options that both strategies understand, and those of ByteScheduler only."""
    if given is None or given == "auto" or isinstance(given, SingleDeviceStrategy):
        return {}, {}
    if isinstance(given, str):
        entry = StrategyRegistry[given.lower()]
        if registered_class(entry["strategy"]) not in (DDPStrategy, ByteSchedulerStrategy):
            raise UnsupportedError(_not_comparable(f"strategy={given!r}"))
        return dict(entry["init_params"]), {}
    if not isinstance(given, DDPStrategy) or type(given) not in (DDPStrategy, ByteSchedulerStrategy):
        raise UnsupportedError(_not_comparable(type(given).__name__))
    options = dict(given._ddp_kwargs)
    places = {
        "accelerator": given._accelerator,
        "parallel_devices": given.parallel_devices,
        "cluster_environment": given.cluster_environment,
        "checkpoint_io": given._checkpoint_io,
        "precision_plugin": given._precision_plugin,
        "process_group_backend": given._process_group_backend,
        **{name: getattr(given, f"_{name}") for name in _HOOKS},
    }
    options.update({name: value for name, value in places.items() if value is not None})
    options.update(timeout=given._timeout, start_method=given._start_method)
    if not isinstance(given, ByteSchedulerStrategy):
        return options, {}
    resolved = given._options
    own = {
        "partition_size": resolved.partition_size,
        "credit": resolved.credit,
        "cross_barrier": resolved.cross_barrier,
        "mode": resolved.mode,
        "log_metrics": given._log_metrics,
    }
    return options, own


def _not_comparable(name: str) -> str:
    return (
        f"The script's Trainer has {name}, which is not trained with DDP: there is nothing to compare with. The check "
        "is for 'ddp', 'bytescheduler', their variants and 'auto'."
    )
