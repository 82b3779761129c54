"""What becomes of each option of DDPStrategy and DistributedDataParallel that touches gradients.

Honoured options are passed on and not listed here; the documentation has the whole table (Options).
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_bytescheduler.checks import is_finite
from lightning_bytescheduler.exceptions import OptionError, UnsupportedError

__all__ = [
    "SAID_BY_THE_STRATEGY",
    "check_bucket_cap",
    "check_ddp_options",
    "check_module",
    "known_ddp_options",
    "require_known",
]

SAID_BY_THE_STRATEGY = ("module", "device_ids", "output_device", "process_group", "device_mesh")
"""Options of DistributedDataParallel that nobody has to give."""

_HOOKS = ("ddp_comm_state", "ddp_comm_hook", "ddp_comm_wrapper", "model_averaging_period")  # of Lightning's DDPStrategy

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


def check_ddp_options(options: Mapping[str, object]) -> None:
    """Refuse options that cannot be honoured.

    Raises:
        UnsupportedError: Names the option, the reason and the way out.
    """
    for option, reason in _REFUSED.items():
        if options.get(option) is not None:
            raise UnsupportedError(
                f"strategy 'bytescheduler' cannot honour {option}={options[option]!r}: {reason}. "
                f"Leave {option} out, or use strategy='ddp'."
            )


def known_ddp_options() -> list[str]:
    """Names of the options that Lightning's DDPStrategy passes on, of the DistributedDataParallel that is installed."""
    known = [*inspect.signature(DistributedDataParallel.__init__).parameters, *_HOOKS]
    return [name for name in known if name not in ("self", *SAID_BY_THE_STRATEGY)]


def require_known(names: Iterable[str], known: Iterable[str], *, where: str = "option") -> None:
    """Refuse a misspelt option here, not on all ranks in DDP's constructor.

    Args:
        names: Of the options that were given.
        known: Those that there are.
        where: What an error calls the place.

    Raises:
        OptionError: Names the option and those that there are.
    """
    known = list(dict.fromkeys(known))
    for name in names:
        if name not in known:
            raise OptionError(where, name, f"one of {', '.join(known)}")


def check_bucket_cap(megabytes: object) -> None:
    """Refuse a size of buckets that is none.

    Raises:
        OptionError: If it is neither ``None`` nor a number above 0.
    """
    if megabytes is not None and (not is_finite(megabytes) or megabytes <= 0):
        raise OptionError("bucket_cap_mb", megabytes, "a number of megabytes above 0")


def check_module(module: nn.Module) -> None:
    """Refuse models that are sharded already.

    Raises:
        UnsupportedError: Names the module or parameter.
    """
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.tensor import DTensor

    for name, child in module.named_modules():
        if isinstance(child, FullyShardedDataParallel):
            raise UnsupportedError(
                f"Module {name!r} is wrapped with FSDP. strategy 'bytescheduler' replicates the model as DDP does; use "
                "strategy='fsdp' for sharded models."
            )
    for name, parameter in module.named_parameters():
        if isinstance(parameter, DTensor) or isinstance(parameter.data, DTensor):
            raise UnsupportedError(
                f"Parameter {name!r} is a DTensor. strategy 'bytescheduler' replicates the model as DDP does; use "
                "Lightning's ModelParallelStrategy for sharded models."
            )
