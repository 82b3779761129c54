"""What is compared: strategies, by name.

No postponed annotations here: DDP looks at those of a comm hook as objects.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy, Strategy
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from lightning_bytescheduler import ByteSchedulerStrategy
from lightning_bytescheduler.scheduler.options import POLICIES as ALL_POLICIES

__all__ = ["ALONE", "CONTENDERS", "DDP_BUCKETS", "POLICIES", "Contender", "PowerSGDHook"]

ALONE = "alone"
_HALF = ", bf16-true"
_BY_NODE = ", by node"
DDP_BUCKETS = (1, 2, 4, 8)
"""Bucket sizes tried beside DDP's default of 25, in MB."""

POLICIES = {f"policy {policy}": policy for policy in ALL_POLICIES[1:]}
"""Scheduling policies beside ByteScheduler's own, by name of the contender."""


@dataclass(frozen=True, kw_only=True)
class Contender:
    """One way to train.

    Attributes:
        name: In tables.
        strategy: Makes it.
        trainer: Further arguments of the Trainer.
    """

    name: str
    strategy: Callable[[], Strategy]
    trainer: dict[str, Any] = field(default_factory=dict)


class _HalfTheBytes(DDPStrategy):
    """DDP with PyTorch's compression to bfloat16; Lightning passes comm hooks on for CUDA only."""

    def _register_ddp_hooks(self) -> None:
        if not isinstance(self.model, DistributedDataParallel):
            raise TypeError("DDP did not wrap the model.")
        self.model.register_comm_hook(None, _compressed)


def _compressed(group: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    # Under its own name torch allows it on GPUs only; gloo adds up bfloat16 too.
    compressed: torch.futures.Future[torch.Tensor] = bf16_compress_hook(group, bucket)
    return compressed


class PowerSGDHook(DDPStrategy):
    """DDP with PyTorch's own PowerSGD of rank 4, from as early on as it can.

    A bucket's turn comes when the one before has its result: the hook starts collectives in callbacks, so that those of
    two buckets would come in another order on each rank, and with gloo's two threads they wait for each other for ever.
    """

    def _register_ddp_hooks(self) -> None:
        if not isinstance(self.model, DistributedDataParallel):
            raise TypeError("DDP did not wrap the model.")
        state = PowerSGDState(process_group=None, matrix_approximation_rank=4, start_powerSGD_iter=2)
        self.model.register_comm_hook([state, None], _powersgd_in_turn)


def _powersgd_in_turn(state: list[Any], bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    settings, last = state
    if last is not None:
        last.wait()
    found: torch.futures.Future[torch.Tensor] = powerSGD_hook(settings, bucket)
    state[1] = None if bucket.is_last() else found
    return found


_CLIP = {"gradient_clip_val": 1e-3, "gradient_clip_algorithm": "norm"}


def _contenders() -> list[Contender]:
    found = [
        Contender(name=ALONE, strategy=lambda: SingleDeviceStrategy(device="cpu")),
        Contender(name="ddp", strategy=DDPStrategy),
        *(
            Contender(
                name=f"ddp, {size} MB buckets",
                strategy=partial(DDPStrategy, bucket_cap_mb=size, gradient_as_bucket_view=True),
            )
            for size in DDP_BUCKETS
        ),
        Contender(name="ddp, bf16 on the wire", strategy=_HalfTheBytes),
        *(
            Contender(
                name=f"ddp, powersgd, {size} MB buckets",
                strategy=partial(PowerSGDHook, bucket_cap_mb=size, gradient_as_bucket_view=True),
            )
            for size in (64, *DDP_BUCKETS)
        ),
        Contender(name="bytescheduler", strategy=ByteSchedulerStrategy),
        Contender(name="bytescheduler, overlapped", strategy=partial(ByteSchedulerStrategy, mode="overlapped")),
        Contender(name="bytescheduler, as ddp", strategy=partial(ByteSchedulerStrategy, mode="ddp")),
        *(
            Contender(
                name=f"bytescheduler, {wire}",
                strategy=partial(ByteSchedulerStrategy, mode="overlapped", compression=wire),
            )
            for wire in ("bf16", "int8", "int4", "powersgd", "auto")
        ),
        *(
            Contender(name=name, strategy=partial(ByteSchedulerStrategy, mode="overlapped", policy=policy))
            for name, policy in POLICIES.items()
        ),
        *(
            Contender(
                name=f"bytescheduler, {servers} servers{by_node}",
                strategy=partial(
                    ByteSchedulerStrategy,
                    mode="overlapped",
                    servers={"spare": servers, "group": "node"} if by_node else servers,
                ),
            )
            for servers in range(5)
            for by_node in ("", _BY_NODE)
        ),
        Contender(name="ddp, norm clipping", strategy=DDPStrategy, trainer=_CLIP),
        Contender(
            name="bytescheduler, norm clipping",
            strategy=partial(ByteSchedulerStrategy, mode="overlapped"),
            trainer=_CLIP,
        ),
    ]
    return found


def _servers(spare: str | None, *, by_node: bool) -> int | dict[str, int | str] | None:
    if spare is None:
        return None
    return {"spare": int(spare), "group": "node"} if by_node else int(spare)


def _first_layers(count: int) -> dict[str, str]:
    """Of the emulated layers, the first ones of the forward pass in int4, and the others as they are."""
    return {f"layers.{number}.*": "int4" for number in range(count)}


class _Named(dict[str, Contender]):
    """Makes what is asked for with sizes of its own: ``"bytescheduler, partition 65536, credit 131072"``.

    Any name with ``", bf16-true"`` after it trains with weights and gradients of two bytes.
    """

    def __missing__(self, name: str) -> Contender:
        plain = name.removesuffix(_HALF)
        if plain != name:
            known = self[plain]
            return replace(known, name=name, trainer={**known.trainer, "precision": "bf16-true"})
        found = re.fullmatch(
            r"bytescheduler, partition (\d+), credit (\d+)(, norm clipping)?"
            r"(?:, (bf16|int8|int4|powersgd|auto))?(?:, (\d+) servers)?(?:, first (\d+) layers int4)?"
            r"(, by node)?",
            name,
        )
        if found is None:
            raise KeyError(name)
        return Contender(
            name=name,
            strategy=partial(
                ByteSchedulerStrategy,
                mode="overlapped",
                partition_size=int(found[1]),
                credit=int(found[2]),
                compression=found[4] if found[6] is None else _first_layers(int(found[6])),
                servers=_servers(found[5], by_node=found[7] is not None),
            ),
            trainer=_CLIP if found[3] else {},
        )


CONTENDERS: dict[str, Contender] = _Named({contender.name: contender for contender in _contenders()})
"""All of them, by name; sizes may be part of a name, see :class:`_Named`."""
