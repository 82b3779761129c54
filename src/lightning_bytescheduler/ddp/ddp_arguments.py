"""Checks the options of DDPStrategy and DistributedDataParallel that concern gradients.

Options that are passed on unchanged are not listed here; the documentation's page "Options" lists all.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_bytescheduler.checks import (
    did_you_mean,
    is_finite,
    require_bool,
    require_known,
    require_one_of,
    require_whole,
)
from lightning_bytescheduler.exceptions import OptionError, UnsupportedError
from lightning_bytescheduler.lightning_api import (
    CheckpointIO,
    ClusterEnvironment,
    FabricPrecision,
    Precision,
    pl,
    rank_zero_warn,
)
from lightning_bytescheduler.tuning.credit_tuner import CreditTuner


def _options_of(kind: type, says: str) -> dict[str, str]:
    return {name: says.format(name=name) for name in inspect.signature(kind).parameters}


ELSEWHERE = {
    **_options_of(
        CreditTuner, "It is an option of the callback CreditTuner: Trainer(callbacks=[CreditTuner({name}=...)])."
    ),
    **_options_of(pl.Trainer, "It is an option of Trainer: Trainer({name}=...)."),
}
"""Hints for options that neither strategy has, by name."""

SAID_BY_THE_STRATEGY = ("module", "device_ids", "output_device", "process_group", "device_mesh")
"""Arguments of DistributedDataParallel that the strategy itself sets."""

LAUNCH = (
    *("accelerator", "parallel_devices", "cluster_environment", "checkpoint_io", "precision_plugin"),
    *("process_group_backend", "timeout", "start_method"),
)
"""Options of DDPStrategy that do not go to DistributedDataParallel."""

SCHEDULED = ("partition_size", "credit", "cross_barrier", "mode", "timeline", "debug", "policy")
"""Options of both strategies' schedulers."""

EXAMPLE = "partition_size=131_072"
"""An option of this package's own with a value, as it is written."""

HOOKS = ("ddp_comm_state", "ddp_comm_hook", "ddp_comm_wrapper", "model_averaging_period")
"""Options of DDPStrategy that concern DDP's comm hook."""

_SWITCHES = ("broadcast_buffers", "forward_sync_buffers")  # their default is None in some versions of torch
_START_METHODS = ("popen", "spawn", "fork", "forkserver")

_REFUSED = {
    "ddp_comm_state": "the scheduler is the comm hook",
    "ddp_comm_hook": "the scheduler is the comm hook",
    "ddp_comm_wrapper": "the scheduler is the comm hook",
    "model_averaging_period": "post-local SGD needs a comm hook of its own",
    "process_group": "gradients are averaged over all ranks, on groups of the scheduler's own",
    "device_mesh": "gradients are averaged over all ranks, on groups of the scheduler's own",
    "delay_all_reduce_named_params": "DDP would reduce those parameters itself, past the scheduler",
    "param_to_hook_all_reduce": "DDP would reduce those parameters itself, past the scheduler",
    "mixed_precision": "DDP's own mixed precision replaces parameters during the step; use Trainer(precision=...)",
}


def known_ddp_options() -> list[str]:
    """Return the names of the options that DDPStrategy passes on to the installed DistributedDataParallel."""
    return [name for name in [*_ddp_parameters(), *HOOKS] if name not in SAID_BY_THE_STRATEGY]


def check_ddp_options(options: Mapping[str, object], *, scheduled: bool = True) -> None:
    """Refuse options that cannot be honoured or have values that DistributedDataParallel would misread or reject.

    Args:
        options: Options by name; those that are neither DistributedDataParallel's nor its comm hook's are ignored.
        scheduled: Whether the scheduler takes the place of the comm hook.

    Raises:
        UnsupportedError: Names the option that cannot be honoured, the reason and the way out.
        OptionError: Names the option, its value and what is allowed.
    """
    for option, reason in _REFUSED.items() if scheduled else ():
        if options.get(option) is not None:
            raise UnsupportedError(
                f"strategy 'bytescheduler' cannot honour {option}={options[option]!r}: {reason}. "
                f"Leave {option} out, or use strategy='ddp'."
            )
    for name, parameter in _ddp_parameters().items():
        value = options.get(name, parameter.default)
        if name in SAID_BY_THE_STRATEGY:
            if options.get(name) is not None:
                raise OptionError(name, value, "left out: the strategy gives it to DistributedDataParallel itself")
        elif name == "bucket_cap_mb":
            _check_megabytes(name, value)
        elif name == "bucket_cap_mb_list":
            if value is not None and (not isinstance(value, (list, tuple)) or not value):
                raise OptionError(name, value, "a list of megabytes, or None")
            for megabytes in value or ():
                _check_megabytes(name, megabytes, "a list of megabytes, each a number above 0")
        elif value is None and parameter.default is None:
            continue
        elif isinstance(parameter.default, bool) or name in _SWITCHES:
            require_bool(name, value)
        elif isinstance(parameter.default, int):
            require_whole(name, value, 0)
    for name in ("ddp_comm_hook", "ddp_comm_wrapper"):
        if options.get(name) is not None and not callable(options[name]):
            raise OptionError(name, options[name], "a function, or None")
    if options.get("model_averaging_period") is not None:
        require_whole("model_averaging_period", options["model_averaging_period"], 1)


def check_options(
    of: type,
    given: Mapping[str, object],
    *,
    ddp: Mapping[str, object],
    launch: Mapping[str, object],
    elsewhere: Mapping[str, str],
) -> dict[str, Any]:
    """Refuse unknown options of a strategy, and values that Lightning or DDP would misread.

    Args:
        of: The class of the strategy.
        given: Its ``**kwargs``.
        ddp: Further options of DistributedDataParallel.
        launch: Options of DDPStrategy that are not passed on to DistributedDataParallel.
        elsewhere: Hints for options that other classes have, by name.

    Returns:
        ``given`` and ``ddp`` without the arguments that the strategy sets itself.

    Raises:
        OptionError: Names the option, its value and what is allowed.
        UnsupportedError: Names the option that cannot be honoured, the reason and the way out.
    """
    own = [name for name in inspect.signature(of).parameters if name not in ("args", "kwargs")]
    # LightningCLI also passes the arguments that the strategy sets itself
    named = {name: value for name, value in given.items() if name not in SAID_BY_THE_STRATEGY}
    require_known(named, [*own, *launch, *_ddp_parameters(), *HOOKS], of=of.__name__, elsewhere=elsewhere)
    check_ddp_options({**given, **ddp})
    check_launch_options(launch, strategy=of.__name__, example=EXAMPLE)
    return {**named, **ddp}


_PLUGINS = {
    "cluster_environment": ClusterEnvironment,
    "checkpoint_io": CheckpointIO,
    "precision_plugin": Precision,
    "precision": FabricPrecision,
}


def check_launch_options(options: Mapping[str, object], *, strategy: str, example: str) -> None:
    """Refuse launch options with which Lightning would fail later, on all ranks.

    Args:
        options: Options of DDPStrategy that do not go to DistributedDataParallel, by name.
        strategy: Name of the class that was called.
        example: One of the class's own options with a value, as it is written.

    Raises:
        OptionError: Names the option, its value and what is allowed.
    """
    by_name = f"Options of {strategy} itself are given by name, as in {strategy}({example})."
    given = options.get("accelerator")
    if given is not None and not isinstance(given, (pl.accelerators.Accelerator.__mro__[1], str)):
        raise OptionError("accelerator", given, "an Accelerator, the name of one, or left out", by_name)
    devices = options.get("parallel_devices")
    if devices is not None and not (
        isinstance(devices, (list, tuple)) and devices and all(isinstance(device, torch.device) for device in devices)
    ):
        raise OptionError(
            "parallel_devices", devices, "a list of torch.device, or left out", f"Trainer has devices=. {by_name}"
        )
    for name, kind in _PLUGINS.items():
        value = options.get(name)
        if value is not None and not isinstance(value, kind):
            hint = "Trainer has precision=." if name == "precision_plugin" else ""
            raise OptionError(name, value, f"an instance of {kind.__name__}, or left out", hint)
    _check_backend(options.get("process_group_backend"))
    timeout = options.get("timeout")
    if timeout is not None and (not isinstance(timeout, timedelta) or timeout <= timedelta(0)):
        seconds = f"{timeout:g}" if is_finite(timeout) and timeout > 0 else "1800"
        raise OptionError(
            "timeout", timeout, "a datetime.timedelta above 0, or None", f"Write timeout=timedelta(seconds={seconds})."
        )
    require_one_of("start_method", options.get("start_method", _START_METHODS[0]), _START_METHODS)


def _check_backend(backend: object) -> None:
    """Check the default group's backend: one name, or one for each kind of device, as in ``cpu:gloo,cuda:nccl``."""
    if backend is None:
        return
    there = [name for name in dist.Backend.backend_list if name != "undefined" and dist.is_backend_available(name)]
    allowed = f"{' or '.join(map(repr, there))}, which this PyTorch has, or None"
    for part in backend.split(",") if isinstance(backend, str) else [backend]:
        name = part.rpartition(":")[2].strip().lower() if isinstance(part, str) else part
        if name not in there:
            raise OptionError("process_group_backend", backend, allowed, did_you_mean(name, there))


def _check_megabytes(option: str, value: object, allowed: str = "a number of megabytes above 0, or None") -> None:
    if (value is not None or option != "bucket_cap_mb") and (not is_finite(value) or value <= 0):
        raise OptionError(option, value, allowed)


def _ddp_parameters() -> Mapping[str, inspect.Parameter]:
    return inspect.signature(DistributedDataParallel).parameters


def check_module(module: nn.Module) -> None:
    """Refuse models that are already sharded, or have sparse gradients.

    Raises:
        UnsupportedError: Names the module or parameter.
    """
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.tensor import DTensor

    wrapped = [name for name, child in module.named_modules() if isinstance(child, FullyShardedDataParallel)]
    sharded = [name for name, p in module.named_parameters() if isinstance(p, DTensor) or isinstance(p.data, DTensor)]
    if wrapped or sharded:
        found = f"Module {wrapped[0]!r} is wrapped with FSDP" if wrapped else f"Parameter {sharded[0]!r} is a DTensor"
        raise UnsupportedError(
            f"{found}. strategy 'bytescheduler' replicates the model as DDP does; use strategy='fsdp', or Lightning's "
            "ModelParallelStrategy, for sharded models."
        )
    for name, child in module.named_modules():
        sparse = isinstance(child, (nn.Embedding, nn.EmbeddingBag)) and child.sparse  # DDP's rule
        if sparse and child.weight.requires_grad:
            raise UnsupportedError(
                f"{name!r} has sparse gradients (sparse=True), which cannot be cut into partitions. Make it with "
                "sparse=False, which trains alike but for optimizers such as SparseAdam, or use strategy='ddp'."
            )


def check_hooks(module: nn.Module) -> None:
    """Refuse optimizers that step in the backward pass, and warn of hooks that run before the average.

    Raises:
        UnsupportedError: Names the parameter.
    """
    refuse_steps_in_backward(module)
    hooked = [name for name, p in module.named_parameters() if getattr(p, "_post_accumulate_grad_hooks", None)]
    if hooked:
        rank_zero_warn(
            f"{hooked[0]!r} has a hook after accumulation of its gradient (register_post_accumulate_grad_hook; "
            f"{len(hooked)} parameters have one). It sees this rank's gradient, before the average over ranks, as with "
            "DDP: an optimizer that steps there leaves each rank with weights of its own."
        )


def refuse_steps_in_backward(module: nn.Module) -> None:
    """Refuse optimizers that step in the backward pass, as DDP checks for them only in its first forward pass.

    Raises:
        UnsupportedError: Names the parameter.
    """
    for name, parameter in module.named_parameters():
        if hasattr(parameter, "_in_backward_optimizers"):
            raise UnsupportedError(
                f"Parameter {name!r} is stepped in the backward pass, by _apply_optimizer_in_backward, which takes the "
                "place of the scheduler in DDP. Step it with the optimizer that configure_optimizers returns, or use "
                "strategy='ddp'."
            )


def refuse_join(**_: object) -> NoReturn:
    """Replace :meth:`DistributedDataParallel.join_hook`, whose collectives would not meet the scheduler's.

    Raises:
        UnsupportedError: Says what to do instead.
    """
    raise UnsupportedError(
        "torch.distributed.algorithms.Join cannot stand in for a rank whose data is used up, as gradients travel by "
        "the scheduler. Leave it out, and give all ranks as many batches: pad or drop, or bound them with "
        "Trainer(limit_train_batches=N)."
    )
