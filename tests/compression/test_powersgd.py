"""PowerSGD beside torch's own hook, whose workers add up their thin matrices."""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as torchs

from lightning_bytescheduler.compression.powersgd import Matrix, PowerSGD
from tests.support.rank_pool import RankPool, join_default_group, let_go

SHAPE = (30, 20)
RANK = 3
SEED = 5
STEPS = 8
PLAIN = 2  # steps before torch's hook compresses


def gradient(rank: int, step: int) -> Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(10 * step + rank))


class Product(nn.Module):
    """A model whose gradient is the given one."""

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
        dist.group.WORLD, matrix_approximation_rank=RANK, start_powerSGD_iter=PLAIN, random_seed=SEED
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
    rows, columns = SHAPE
    generator = torch.Generator().manual_seed(int(np.random.RandomState(SEED).randint(1_000_000_000)))
    right = torch.randn(columns, RANK, generator=generator)  # what torch begins with
    workers = [Matrix(0, SHAPE, torch.zeros(rows * columns), right.clone()) for _ in range(2)]
    for step in range(PLAIN, STEPS):
        buffers = [gradient(rank, step).view(-1).clone() for rank in range(2)]
        lefts, rights = torch.empty(2, rows * RANK), torch.empty(2, columns * RANK)
        for worker, buffer, left in zip(workers, buffers, lefts, strict=True):
            worker.begin(buffer, 0.5, left)
        lefts[:] = lefts.sum(dim=0)
        for worker, left, own in zip(workers, lefts, rights, strict=True):
            worker.go_on(left, own)
        rights[:] = rights.sum(dim=0)
        for worker, buffer, left, own in zip(workers, buffers, lefts, rights, strict=True):
            worker.end_with(buffer, 2, left, own)
        torch.testing.assert_close(buffers[0].view(SHAPE), expected[step], rtol=1e-4, atol=1e-5)
        assert torch.equal(*buffers)


def test_which_gradients_are_matrices() -> None:
    of_four, of_one = PowerSGD(4).shape_of, PowerSGD(1).shape_of
    assert of_four(nn.Parameter(torch.zeros(40, 24))) == (40, 24)
    assert of_four(nn.Parameter(torch.zeros(40, 6, 2, 2))) == (40, 24)
    assert of_four(nn.Parameter(torch.zeros(24, 40).t())) == (24, 40)
    assert of_four(nn.Parameter(torch.zeros(40, 10))) is None
    assert of_one(nn.Parameter(torch.zeros(10_000))) is None
    assert of_one(nn.Parameter(torch.zeros(0, 9))) is None
    assert of_one(nn.Parameter(torch.zeros(40, 40, dtype=torch.complex64))) is None
