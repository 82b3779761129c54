from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_bytescheduler.collectives import groups
from lightning_bytescheduler.collectives.groups import probe_link
from lightning_bytescheduler.tuning.sizes import LinkEstimate
from tests.support.rank_pool import RankPool, join_default_group, let_go


class Link:
    """A link that takes as long as it says, on a clock that only it moves."""

    def __init__(self, alpha: float, beta: float) -> None:
        self.alpha = alpha
        self.beta = beta
        self.now = 0.0
        self.sizes: list[int] = []

    def all_reduce(self, tensor: torch.Tensor, **_: Any) -> None:
        size = tensor.numel() * tensor.element_size()
        if tensor.dtype is not torch.float64:  # those are the ranks agreeing on a figure
            self.sizes.append(size)
        self.now += self.alpha + self.beta * size

    def perf_counter(self) -> float:
        return self.now


@pytest.mark.parametrize(
    ("alpha", "megabytes_per_second", "largest"),
    [
        (1e-4, 10_000.0, 8 * 2**20),
        (2e-3, 60.0, 2 * 2**20),
        (20e-3, 5.0, 512 * 2**10),
        (5e-5, 1.0, 128 * 2**10),
        (0.12, 46.0, 2 * 2**20),  # all of them take long, and the first sizes as long as nothing
    ],
)
def test_the_link_is_found_with_no_more_bytes_than_it_takes(
    alpha: float, megabytes_per_second: float, largest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = Link(alpha, 1e-6 / megabytes_per_second)
    monkeypatch.setattr(groups.dist, "all_reduce", link.all_reduce)
    monkeypatch.setattr(groups.time, "perf_counter", link.perf_counter)
    group: Any = None
    estimate = probe_link(group, torch.device("cpu"))
    assert estimate.alpha == pytest.approx(alpha, rel=1e-6)
    assert estimate.beta == pytest.approx(link.beta, rel=1e-6)
    assert max(link.sizes) == largest
    assert link.now < 2.0


@pytest.mark.parametrize(("model", "largest"), [(1, 128 * 2**10), (128 * 2**10 + 1, 512 * 2**10), (2**30, 8 * 2**20)])
def test_no_more_bytes_are_measured_than_a_model_has(model: int, largest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    link = Link(1e-4, 1e-10)
    monkeypatch.setattr(groups.dist, "all_reduce", link.all_reduce)
    monkeypatch.setattr(groups.time, "perf_counter", link.perf_counter)
    group: Any = None
    assert probe_link(group, torch.device("cpu"), largest=model).beta == pytest.approx(1e-10, rel=1e-6)
    assert max(link.sizes) == largest


def test_hiccups_of_the_processor_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    link = Link(1e-4, 1e-9)
    calls = itertools.count(1)

    def with_hiccups(tensor: torch.Tensor, **_: Any) -> None:
        link.all_reduce(tensor)
        link.now += 0.002 if next(calls) % 7 else 0.0

    monkeypatch.setattr(groups.dist, "all_reduce", with_hiccups)
    monkeypatch.setattr(groups.time, "perf_counter", link.perf_counter)
    group: Any = None
    # A long message is repeated twice only, so that a hiccup may stay in beta; it is a small share of that.
    assert probe_link(group, torch.device("cpu")).alpha == pytest.approx(1e-4, rel=2e-2)


def test_a_load_that_passes_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """A link that answers in 0.1 ms is not far, even if other work slowed the first probes."""
    link, late = Link(1e-4, 1e-9), iter([0.06, 0.0, 0.02, 0.0, 0.035, 0.0, 0.05, 0.0, 0.015])

    def under_load(tensor: torch.Tensor, **_: Any) -> None:
        link.all_reduce(tensor)
        link.now += next(late, 0.0)

    monkeypatch.setattr(groups.dist, "all_reduce", under_load)
    monkeypatch.setattr(groups.time, "perf_counter", link.perf_counter)
    group: Any = None
    assert groups.probe_start_up(group, torch.device("cpu")) == pytest.approx(1e-4, rel=0.1)


def probe_on(rank: int) -> LinkEstimate:
    join_default_group(rank)
    try:
        group = dist.new_group(backend="gloo")
        return probe_link(group, torch.device("cpu"))
    finally:
        let_go()
        dist.destroy_process_group()


def test_all_ranks_find_the_same_link(two_plain_ranks: RankPool) -> None:
    first, second = two_plain_ranks.run(probe_on)
    assert first == second
