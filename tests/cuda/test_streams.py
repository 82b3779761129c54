"""On a GPU, with one rank on NCCL or two on gloo that share it: the weights are DDP's, each wait between streams is
needed for that, and the host waits for none of them. The first test runs on a CPU too, as a test of the tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from lightning_bytescheduler.collectives import route as route_module
from lightning_bytescheduler.collectives.device_streams import DeviceStreams, ReadyMark
from lightning_bytescheduler.collectives.operations import StartedOperation, all_reduce
from lightning_bytescheduler.ddp.fit import TrainingStream
from lightning_bytescheduler.scheduler.task import CommTask
from tests.cuda.steps import Case, Scheduled
from tests.support.rank_pool import RankPool

A_WHILE = 200_000_000  # cycles: about a tenth of a second, in which the host gets through a step

on_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
on_nccl = pytest.mark.skipif(
    not (torch.cuda.is_available() and dist.is_nccl_available()),
    reason="there is no NCCL" if torch.cuda.is_available() else "there is no CUDA device",
)
DEVICES = ["cpu", pytest.param("cuda", marks=on_cuda)]


Train = Callable[..., list[Any]]


def close(expected: list[torch.Tensor], actual: list[torch.Tensor], tolerance: float = 1e-6) -> bool:
    return all(
        torch.allclose(one, other, rtol=tolerance, atol=tolerance) for one, other in zip(expected, actual, strict=True)
    )


@pytest.mark.parametrize(
    ("mode", "max_norm"), [("overlapped", None), ("overlapped", 0.05), ("ddp", None), ("synchronised", None)]
)
@pytest.mark.parametrize("device", DEVICES)
def test_two_ranks_on_gloo(
    train: Train, two_plain_ranks: RankPool, device: str, mode: str, max_norm: float | None
) -> None:
    if max_norm is not None and device == "cuda":
        pytest.skip("gloo reduces in shards on a CPU only")
    case = Case(device=device, backend="gloo", mode=mode, max_norm=max_norm)
    answers = train(two_plain_ranks, case)
    for expected, weights, deferred, _ in answers:
        assert close(expected, weights, 1e-6 if case.max_norm is None else 1e-5)
        assert (deferred > 0) == (mode == "overlapped")
        if device == "cpu" and case.max_norm is None:
            assert all(torch.equal(one, other) for one, other in zip(expected, weights, strict=True))


@on_nccl
@pytest.mark.parametrize(
    ("mode", "max_norm"), [("overlapped", None), ("overlapped", 0.05), ("ddp", None), ("synchronised", None)]
)
def test_one_rank_on_nccl(train: Train, one_rank: RankPool, mode: str, max_norm: float | None) -> None:
    case = Case(device="cuda", backend="nccl", mode=mode, max_norm=max_norm)
    ((expected, weights, deferred, _),) = train(one_rank, case)
    assert close(expected, weights, 1e-6 if max_norm is None else 1e-5)
    assert (deferred > 0) == (mode == "overlapped")


def launch_at_once(streams: DeviceStreams, mark: ReadyMark, then: Callable[[], None]) -> None:
    then()


@contextmanager
def no_wait_for_gradients(scheduled: Scheduled) -> Iterator[None]:
    """Communicate what is in a bucket when the hook has run on the host."""
    with (
        patch.object(route_module, "ReadyMark", lambda _: ReadyMark(torch.device("cpu"))),
        patch.object(DeviceStreams, "when_ready", launch_at_once),
    ):
        yield


@on_cuda
def test_gradients_are_waited_for(train: Train, two_plain_ranks: RankPool) -> None:
    case = Case(device="cuda", backend="gloo", late_gradients=A_WHILE)
    for expected, weights, _, _ in train(two_plain_ranks, case):
        assert close(expected, weights)
    for expected, weights, _, _ in train(two_plain_ranks, case, inside=no_wait_for_gradients):
        assert not close(expected, weights), "without the wait the result is the same: the test cannot fail"


def late_half(
    group: dist.ProcessGroup, part: torch.Tensor, number: int, factor: float | None = None
) -> StartedOperation:
    """An all-reduce whose result comes late, and is half of what was sent."""
    started = all_reduce(group, part, number, factor)

    def finish() -> None:
        torch.cuda._sleep(A_WHILE // 10)
        part.mul_(0.5)

    return StartedOperation(started.works, finish)


@contextmanager
def late_results(scheduled: Scheduled) -> Iterator[list[bool]]:
    """Gives, for each gate that waited, whether its result had arrived when the host went on."""
    arrived: list[bool] = []
    join = DeviceStreams.join

    def watched_join(streams: DeviceStreams, task: CommTask, timeout: float) -> None:
        enqueued = streams._enqueued.get(task)
        join(streams, task, timeout)
        if enqueued is not None and enqueued.event is not None:
            arrived.append(enqueued.event.query())

    with (
        patch.object(scheduled.route, "all_reduce", late_half),
        patch.object(DeviceStreams, "join", watched_join),
    ):
        yield arrived


@contextmanager
def no_wait_for_results(scheduled: Scheduled) -> Iterator[None]:
    """Go on when the communication is launched, and let no stream wait for it."""

    def hurried_join(streams: DeviceStreams, task: CommTask, timeout: float) -> None:
        enqueued = streams._enqueued.get(task)
        assert enqueued is None or enqueued.known.wait(timeout)

    with (
        patch.object(scheduled.route, "all_reduce", late_half),
        patch.object(DeviceStreams, "join", hurried_join),
    ):
        yield


@on_nccl
def test_results_are_waited_for_by_the_stream_and_not_by_the_host(train: Train, one_rank: RankPool) -> None:
    case = Case(device="cuda", backend="nccl", halved=True)
    ((expected, weights, _, arrived),) = train(one_rank, case, inside=late_results)
    assert close(expected, weights)
    assert arrived.count(False) > len(arrived) // 2, "the host waited for the GPU"
    ((expected, weights, _, _),) = train(one_rank, case, inside=no_wait_for_results)
    assert not close(expected, weights), "without the wait the result is the same: the test cannot fail"


def read_beside(rank: int, waits: bool) -> bool:
    """Whether a stream that opens a gate reads the weights that a late step has written on the training's stream."""
    device = torch.device("cuda", 0)
    weights = torch.zeros(1000, device=device)
    stream = TrainingStream(device)
    stream.is_here()
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side), patch.object(torch.cuda.Stream, "wait_stream", _no_wait if not waits else _wait):
        with stream.entered():
            torch.cuda._sleep(A_WHILE)
            weights.add_(1.0)
        read = weights.clone()
    torch.cuda.synchronize(device)
    return bool((read == 1.0).all())


_wait = torch.cuda.Stream.wait_stream


def _no_wait(stream: Any, other: Any) -> None:
    pass


@on_cuda
def test_opening_a_gate_on_another_stream_waits_for_the_step(one_rank: RankPool) -> None:
    assert one_rank.run(read_beside, waits=True) == [True]
    assert one_rank.run(read_beside, waits=False) == [False]
