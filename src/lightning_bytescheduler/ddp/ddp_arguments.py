"""Checks the options of DDPStrategy and DistributedDataParallel that concern gradients.

Options that are passed on unchanged are not listed here; the documentation's page "Options" lists all.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, NoReturn

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_bytescheduler.checks import is_finite, require_bool, require_known
from lightning_bytescheduler.exceptions import OptionError, UnsupportedError
from lightning_bytescheduler.lightning_api import pl

ELSEWHERE = {
    name: f"It is an option of Trainer: Trainer({name}=...)." for name in inspect.signature(pl.Trainer).parameters
}
"""Hints for options that neither strategy has, by name."""

SAID_BY_THE_STRATEGY = ("module", "device_ids", "output_device", "process_group", "device_mesh")
"""Arguments of DistributedDataParallel that the strategy itself sets."""

SCHEDULED = ("partition_size", "credit", "cross_barrier", "mode", "timeline", "debug", "policy")
"""Options of both strategies' schedulers."""

HOOKS = ("ddp_comm_state", "ddp_comm_hook", "ddp_comm_wrapper", "model_averaging_period")
"""Options of DDPStrategy that concern DDP's comm hook."""

_REFUSED = {
    **dict.fromkeys(HOOKS, "the scheduler is the comm hook"),
    **dict.fromkeys(SAID_BY_THE_STRATEGY, "the strategy gives it to DistributedDataParallel itself"),
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
        if name.startswith("bucket_cap_mb"):
            for megabytes in value if isinstance(value, (list, tuple)) else [value]:
                if megabytes is not None and (not is_finite(megabytes) or megabytes <= 0):
                    raise OptionError(name, value, "megabytes above 0, or None")
        elif isinstance(parameter.default, bool):
            require_bool(name, value)


def options_of(
    of: type, base: type, given: Mapping[str, object], *, elsewhere: Mapping[str, str] = ELSEWHERE, **ddp: object
) -> dict[str, Any]:
    """Return the options that a strategy passes on to Lightning's: the user's, without those that the strategy sets.

    Args:
        of: The class of the strategy.
        base: Lightning's.
        given: The user's options, except for the strategy's own.
        elsewhere: Hints for options that other classes have, by name.
        **ddp: Further options of DistributedDataParallel.

    Raises:
        OptionError: Names the option that is unknown or has a value that Lightning or DDP would misread.
        UnsupportedError: Names the option that cannot be honoured, the reason and the way out.
    """
    own = [name for kind in (of, base) for name in inspect.signature(kind).parameters if name != "kwargs"]
    require_known(given, [*own, *_ddp_parameters()], of=of.__name__, elsewhere=elsewhere)
    check_ddp_options({**given, **ddp})
    require_timeout(given)
    # LightningCLI also passes the arguments that the strategy sets itself
    return {**{name: value for name, value in given.items() if name not in SAID_BY_THE_STRATEGY}, **ddp}


def require_timeout(options: Mapping[str, object]) -> None:
    """Check the option ``timeout``, if it is given.

    Raises:
        OptionError: If it is no time.
    """
    timeout = options.get("timeout")
    if timeout is not None and not isinstance(timeout, timedelta):
        raise OptionError("timeout", timeout, "a datetime.timedelta, such as timedelta(seconds=1800), or None")


def _ddp_parameters() -> Mapping[str, inspect.Parameter]:
    return inspect.signature(DistributedDataParallel).parameters


def check_module(module: nn.Module) -> None:
    """Refuse models that are already sharded, or have sparse gradients.

    Raises:
        UnsupportedError: Names the module or parameter.
    """
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.tensor import DTensor

    sharded = [name for name, child in module.named_modules() if isinstance(child, FullyShardedDataParallel)]
    sharded += [name for name, p in module.named_parameters() if isinstance(p, DTensor) or isinstance(p.data, DTensor)]
    if sharded:
        raise UnsupportedError(
            f"{sharded[0]!r} is sharded, by FSDP or as a DTensor. strategy 'bytescheduler' replicates the model as DDP "
            "does; use strategy='fsdp', or Lightning's ModelParallelStrategy, for sharded models."
        )
    for name, child in module.named_modules():
        sparse = isinstance(child, (nn.Embedding, nn.EmbeddingBag)) and child.sparse  # DDP's rule
        if sparse and child.weight.requires_grad:
            raise UnsupportedError(
                f"{name!r} has sparse gradients (sparse=True), which cannot be cut into partitions. Make it with "
                "sparse=False, which trains alike but for optimizers such as SparseAdam, or use strategy='ddp'."
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
