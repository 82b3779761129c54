"""What is compared: strategies, by name.

No postponed annotations here: DDP looks at those of a comm hook as objects.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy, Strategy
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from lightning_bytescheduler import ByteSchedulerStrategy

__all__ = ["ALONE", "DDP_BUCKETS", "Contender", "PowerSGDHook", "contender"]

ALONE = "alone"
DDP_BUCKETS = (1, 2, 4, 8)
"""Bucket sizes tried beside DDP's default of 25, in MB."""

_CLIP = {"gradient_clip_val": 1e-3, "gradient_clip_algorithm": "norm"}


@dataclass(frozen=True, kw_only=True)
class Contender:
    """One way to train."""

    name: str
    strategy: Callable[..., Strategy]  # makes it, with further options of its own
    trainer: dict[str, Any] = field(default_factory=dict)  # further arguments of the Trainer


class _HookedDDP(DDPStrategy):
    """DDP with a comm hook; Lightning passes comm hooks on for CUDA only."""

    def hook(self) -> tuple[Any, Callable[[Any, dist.GradBucket], torch.futures.Future[torch.Tensor]]]:
        """The hook with its state."""
        return None, _compressed

    def _register_ddp_hooks(self) -> None:
        if not isinstance(self.model, DistributedDataParallel):
            raise TypeError("DDP did not wrap the model.")
        self.model.register_comm_hook(*self.hook())


def _compressed(group: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    # Under its own name torch allows it on GPUs only; gloo adds up bfloat16 too.
    compressed: torch.futures.Future[torch.Tensor] = bf16_compress_hook(group, bucket)
    return compressed


class PowerSGDHook(_HookedDDP):
    """DDP with PyTorch's own PowerSGD of rank 4, from as early on as it can.

    A bucket's turn comes when the one before has its result: the hook starts collectives in callbacks, so that those of
    two buckets would come in another order on each rank, and with gloo's two threads they wait for each other for ever.
    """

    def hook(self) -> tuple[Any, Callable[[Any, dist.GradBucket], torch.futures.Future[torch.Tensor]]]:
        """See `_HookedDDP`."""
        state = PowerSGDState(process_group=None, matrix_approximation_rank=4, start_powerSGD_iter=2)
        return [state, None], _powersgd_in_turn


def _powersgd_in_turn(state: list[Any], bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    settings, last = state
    if last is not None:
        last.wait()
    found: torch.futures.Future[torch.Tensor] = powerSGD_hook(settings, bucket)
    state[1] = None if bucket.is_last() else found
    return found


# How each word of a contender's name changes the options of its strategy.
_DDP: dict[str, Callable[[Any], dict[str, Any]]] = {
    "no broadcast": lambda _: {"broadcast_buffers": False},
    r"(\d+) MB buckets": lambda size: {"bucket_cap_mb": int(size), "gradient_as_bucket_view": True},
    "bf16 on the wire": lambda _: {"kind": _HookedDDP},
    "powersgd": lambda _: {"kind": PowerSGDHook},
}
_OURS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "overlapped": lambda _: {},
    "no broadcast": _DDP["no broadcast"],
    "as ddp": lambda _: {"mode": "ddp"},
    r"partition (\d+)": lambda size: {"partition_size": int(size)},
    r"credit (\d+)": lambda size: {"credit": int(size)},
    r"((?:bf16|fp16|int8|int4|onebit|topk|powersgd|auto)\b.*)": lambda wire: {"compression": wire},
    # The first layers of the forward pass of an emulated network; the others travel as they are.
    r"first (\d+) layers int4": lambda count: {"compression": {f"layers.{n}.*": "int4" for n in range(int(count))}},
    r"(\d+) servers": lambda servers: {"servers": int(servers)},
    "policy (.+)": lambda policy: {"policy": policy},
}
_TRAINER: dict[str, dict[str, Any]] = {"norm clipping": _CLIP, "bf16-true": {"precision": "bf16-true"}}


def contender(name: str) -> Contender:
    """What a name stands for, or a ``ValueError``.

    It is ``"alone"``, ``"ddp"`` or ``"bytescheduler"``, and words after commas, such as ``"ddp, 4 MB buckets"`` or
    ``"bytescheduler, partition 65536, credit 131072, norm clipping"``. With any word ``bytescheduler`` overlaps, but
    for ``"as ddp"``. ``"bf16-true"`` trains with weights and gradients of two bytes.
    """
    kind, *words = name.split(", ")
    trainer = {key: value for word in words for key, value in _TRAINER.get(word, {}).items()}
    own = [word for word in words if word not in _TRAINER and word != "by node"]
    if kind == ALONE and not own:
        return Contender(name=name, strategy=partial(SingleDeviceStrategy, device="cpu"), trainer=trainer)
    if kind not in ("ddp", "bytescheduler"):
        raise ValueError(f"There is no contender {name!r}.")
    options: dict[str, Any] = {"mode": "overlapped"} if kind == "bytescheduler" and words else {}
    for word in own:
        for pattern, option in (_DDP if kind == "ddp" else _OURS).items():
            if found := re.fullmatch(pattern, word):
                options |= option(found[1] if found.groups() else None)
                break
        else:
            raise ValueError(f"There is no contender {name!r}: {word!r} is unknown.")
    if "by node" in words:
        options["servers"] = {"spare": options["servers"], "group": "node"}
    made = options.pop("kind", DDPStrategy if kind == "ddp" else ByteSchedulerStrategy)
    return Contender(name=name, strategy=partial(made, **options), trainer=trainer)
