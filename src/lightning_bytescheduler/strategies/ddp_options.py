"""What becomes of each option of DDPStrategy and DistributedDataParallel that touches gradients.

Honoured options are passed on and not listed here; the README has the whole table.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from lightning_bytescheduler.exceptions import UnsupportedError

__all__ = ["check_ddp_options", "check_module"]

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
