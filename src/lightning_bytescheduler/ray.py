"""Both strategies on the workers of Ray Train; needs the extra ``ray``.

Ray starts the workers, makes a default process group of all of them, and ends both. Its ``prepare_trainer`` accepts
only Ray's strategies, which start no processes. So these derive from our strategies and from Ray's. They replace
``RayDDPStrategy`` in an otherwise unchanged Ray script: make the strategy in the function that Ray runs on each worker,
with ``RayLightningEnvironment`` among the Trainer's plugins.

All waits end with ``TorchConfig(timeout_s=...)``, which is the group's timeout.

Source: Ray's guide "Get Started with Distributed Training using PyTorch Lightning".
"""

from __future__ import annotations

import itertools
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist

from lightning_bytescheduler.checks import importing
from lightning_bytescheduler.ddp.strategy import ByteSchedulerStrategy
from lightning_bytescheduler.diloco.strategy import DiLoCoStrategy
from lightning_bytescheduler.exceptions import OptionError, UnsupportedError
from lightning_bytescheduler.lightning_api import PACKAGE, DDPStrategy

with importing("lightning_bytescheduler.ray", extra="ray"):
    import ray.train
    from ray.train.lightning import RayDDPStrategy

if not issubclass(RayDDPStrategy, DDPStrategy):
    raise UnsupportedError(
        f"Ray Train works with 'lightning' here, and lightning-bytescheduler with {PACKAGE!r} in this process. Import "
        "lightning.pytorch throughout, or uninstall lightning: Ray takes pytorch_lightning where that is alone."
    )

_RAYS = ("process_group_backend", "timeout", "start_method")  # Ray decides these when it makes the group
_given_back = itertools.count()  # numbers the groups given back to Ray; the same on all workers


def _group_timeout(strategy: str, options: dict[str, Any]) -> timedelta:
    """Return the timeout of collectives in Ray's process group.

    Args:
        strategy: Name of the strategy's class, for errors.
        options: The strategy's options.

    Raises:
        OptionError: If an option is Ray's to decide.
        UnsupportedError: If this is not a worker of Ray Train.
    """
    for name in _RAYS:
        if name in options:
            hint = {"process_group_backend": "backend", "timeout": "timeout_s"}.get(name)
            said = f"Write TorchTrainer(..., torch_config=TorchConfig({hint}=...))." if hint else "Ray starts workers."
            raise OptionError(name, options[name], f"left out of {strategy}", said)
    if not dist.is_initialized():
        raise UnsupportedError(
            f"{strategy} joins the process group that Ray has made, and there is none. Make it within the function "
            "that TorchTrainer runs on each worker (train_loop_per_worker)."
        )
    group = dist.distributed_c10d._get_default_group()
    device = torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")
    return group._get_backend(device).options._timeout


class RayByteSchedulerStrategy(ByteSchedulerStrategy, RayDDPStrategy):  # type: ignore[misc]  # Ray's has no types
    """:class:`~lightning_bytescheduler.ByteSchedulerStrategy` on the workers of Ray Train.

    Args:
        **options: See ByteSchedulerStrategy; ``process_group_backend`` and ``timeout`` are Ray's (``TorchConfig``).

    Raises:
        OptionError: If an option has a value that is not allowed, or is Ray's.
        UnsupportedError: Outside of a worker of Ray Train.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(timeout=_group_timeout(type(self).__name__, options), **options)


class RayDiLoCoStrategy(DiLoCoStrategy, RayDDPStrategy):  # type: ignore[misc]  # Ray's has no types
    """:class:`~lightning_bytescheduler.DiLoCoStrategy` on the workers of Ray Train.

    Each worker of DiLoCo has a default process group of its own. So Ray's group is ended while the strategy is in use;
    the workers meet at its store. Afterwards a group like it is made again.

    Args:
        **options: See DiLoCoStrategy; ``process_group_backend`` and ``timeout`` are Ray's (``TorchConfig``).

    Raises:
        OptionError: If an option has a value that is not allowed, or is Ray's.
        UnsupportedError: Outside of a worker of Ray Train.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(timeout=_group_timeout(type(self).__name__, options), **options)
        self._backend = dist.get_backend()
        self._rays_store: dist.Store | None = None  # kept while Ray's group is ended

    @property
    def ranks(self) -> int:
        """Number of ranks in all."""
        return int(ray.train.get_context().get_world_size())

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Each rank has its own share of the data, whatever worker it belongs to."""
        return {"num_replicas": self.ranks, "rank": self.global_rank}

    def setup_distributed(self) -> None:
        """Make this worker's process groups in place of Ray's; see DiLoCoStrategy."""
        if self._rays_store is None:
            self._rays_store = dist.distributed_c10d._get_default_store()
            dist.destroy_process_group()
        super().setup_distributed()

    def _meet_ranks(self, strategy: str, ranks: int) -> dist.Store:
        return dist.PrefixStore("lightning_bytescheduler", cast(dist.Store, self._rays_store))  # Ray's ranks have met

    def teardown(self) -> None:
        """Leave all groups, and make a group for Ray like the one before; see DiLoCoStrategy."""
        failed = self._failed
        super().teardown()
        store, self._rays_store = self._rays_store, None
        if store is not None and not failed and not dist.is_initialized():
            dist.init_process_group(
                self._backend,
                store=dist.PrefixStore(f"given_back/{next(_given_back)}", store),
                rank=self.global_rank,
                world_size=self.ranks,
                timeout=self._timeout,
            )
