"""In each of the user's processes: the strategy is replaced, the first fit recorded, and the process ended after it."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import torch

from lightning_bytescheduler.checking.recorder import Recorder
from lightning_bytescheduler.checking.runs import SPEC_VARIABLE, RunSpec, refuse
from lightning_bytescheduler.ddp.strategy import ByteSchedulerStrategy
from lightning_bytescheduler.exceptions import UnsupportedError
from lightning_bytescheduler.lightning_api import (
    DDPStrategy,
    SingleDeviceStrategy,
    Strategy,
    StrategyRegistry,
    pl,
    trainer_module,
)
from lightning_bytescheduler.registration import registered_class

__all__ = ["install", "strategy_for", "watch_fits"]

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


def install() -> None:
    """Take over what this process does with Lightning, as the environment says."""
    spec, folder = RunSpec.load(Path(os.environ[SPEC_VARIABLE]))
    _choose_strategies(spec, folder)
    watch_fits(spec, folder)


def _patch(owner: Any, name: str, around: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace a method; signature, name and source stay visible, as LightningCLI reads them."""
    original = getattr(owner, name)
    setattr(owner, name, wraps(original)(around(original)))


def _choose_strategies(spec: RunSpec, folder: Path) -> None:
    """Have each Trainer made from here on use the strategy under check."""

    def connect(original: Callable[..., Any]) -> Callable[..., Any]:
        # Arguments of the Trainer arrive here with defaults and variables of the environment in place.
        def connected(connector: Any, **arguments: Any) -> None:
            try:
                arguments["strategy"] = strategy_for(spec, arguments.get("strategy"))
            except UnsupportedError as error:
                refuse(folder, str(error))
            except KeyError:
                pass  # no strategy has this name, and Lightning says so
            if spec.devices is not None:
                arguments["devices"] = spec.devices
            original(connector, **arguments)

        return connected

    _patch(trainer_module._AcceleratorConnector, "__init__", connect)


def watch_fits(spec: RunSpec, folder: Path) -> None:
    """Record the first fit on every rank, and end the process after it."""

    def fit(original: Callable[..., Any]) -> Callable[..., Any]:
        def checked(trainer: pl.Trainer, *arguments: Any, **options: Any) -> None:
            if trainer.num_nodes > 1:
                refuse(
                    folder,
                    f"The script's Trainer has num_nodes={trainer.num_nodes}, and the check drives one machine. Let "
                    "the script take num_nodes=1 for it.",
                )
            if trainer.world_size < 2:
                refuse(
                    folder,
                    "The script's Trainer has 1 device, where there is nothing to communicate. Give the check "
                    "`--devices 2` (in a notebook: devices=2).",
                )
            original(trainer, *arguments, **options)
            sys.stdout.flush()
            raise SystemExit(0)  # what comes after the fit may publish or overwrite something

        return checked

    def fit_on_rank(original: Callable[..., Any]) -> Callable[..., Any]:
        def recorded(trainer: pl.Trainer, model: pl.LightningModule, *arguments: Any, **options: Any) -> None:
            recorder = Recorder(spec, folder)
            # A forked rank learns its number only later; on one machine it is the local one.
            _seed_everything(spec, int(os.environ.get("LOCAL_RANK", trainer.global_rank)))
            recorder.attach(trainer)
            try:
                original(trainer, model, *arguments, **options)
            except BaseException as error:
                recorder.failed(trainer, error)
                raise
            recorder.finish(trainer, model)

        return recorded

    _patch(pl.Trainer, "fit", fit)
    _patch(pl.Trainer, "_fit_impl", fit_on_rank)


def _seed_everything(spec: RunSpec, rank: int) -> None:
    """Whatever a training leaves to chance is the same in each run from here on."""
    import numpy

    seed = spec.seed + rank
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    os.environ["PL_GLOBAL_SEED"] = str(spec.seed)  # Lightning's samplers take it, on all ranks the same
    if spec.deterministic:
        torch.set_num_threads(1)
        torch.backends.cudnn.benchmark = False
        torch.use_deterministic_algorithms(True, warn_only=True)
