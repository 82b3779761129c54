"""PowerSGD beside torch's own hook, whose workers add up their thin matrices."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as torchs

from lightning_bytescheduler.compression.powersgd import PowerSGD
from tests.support.rank_pool import RankPool, join_default_group, let_go

SHAPE = (30, 20)
STEPS = 8
PLAIN = 2  # steps before torch's hook compresses


def gradient(rank: int, step: int) -> Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(10 * step + rank))


class Product(nn.Module):
    """Whose gradient is what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(SHAPE))

    def forward(self, given: Tensor) -> Tensor:
        return (self.weight * given).sum()


def reduced_by_torch(rank: int) -> list[Tensor]:
    join_default_group(rank)
    try:
        return _reduced_by_torch(rank)
    finally:
        let_go()
        dist.destroy_process_group()


def _reduced_by_torch(rank: int) -> list[Tensor]:
    model = nn.parallel.DistributedDataParallel(Product())
    state = torchs.PowerSGDState(
        dist.group.WORLD, matrix_approximation_rank=3, start_powerSGD_iter=PLAIN, random_seed=5
    )
    model.register_comm_hook(state, torchs.powerSGD_hook)
    found = []
    for step in range(STEPS):
        model.zero_grad()
        model(gradient(rank, step)).backward()
        found.append(model.module.weight.grad.clone())
    return found


def test_two_workers_get_what_torchs_hook_gives_them(two_plain_ranks: RankPool) -> None:
    expected = two_plain_ranks.run(reduced_by_torch)[0]
    workers = [PowerSGD(3, SHAPE) for _ in range(2)]
    residuals = [torch.zeros(600) for _ in range(2)]
    for step in range(PLAIN, STEPS):
        parts = [gradient(rank, step).view(-1) + residuals[rank] for rank in range(2)]
        total = sum(worker.left(part, seed=5) for worker, part in zip(workers, parts, strict=True))
        rights = [worker.right(part, total) for worker, part in zip(workers, parts, strict=True)]
        mean = (rights[0][1] + rights[1][1]) / 2
        found = [worker.product(rights[0][0], mean, 600) for worker in workers]
        residuals = [part - found[0] for part in parts]
        torch.testing.assert_close(found[0].view(SHAPE), expected[step], rtol=1e-4, atol=1e-5)
        assert torch.equal(*found)
