"""Shards: the bits of one process, whichever of them is killed, and nobody left behind."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest
import torch
from torch import Tensor

from lightning_bytescheduler.compression.wire_format import WireDtype, WireFormat
from lightning_bytescheduler.coordinator import buffers, shard_process
from lightning_bytescheduler.coordinator.inspection import Inspection
from lightning_bytescheduler.coordinator.pieces import PiecedFormat
from lightning_bytescheduler.coordinator.server import CoordinatorServer
from lightning_bytescheduler.coordinator.shards import Shards
from lightning_bytescheduler.coordinator.state_keeper import StateKeeper
from lightning_bytescheduler.coordinator.update_sum import Update, UpdateSum
from lightning_bytescheduler.exceptions import UnsupportedError
from tests.coordinator.runs import in_a_run, options_of, updates_of, weights_of
from tests.coordinator.small_worker import SmallWorker
from tests.diloco.coordinated_workers import until

ELEMENTS, PIECE = 1500, 256
ENDS_S = 30.0


@pytest.fixture(autouse=True)
def _everything_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffers, "LARGE", 1)


@pytest.fixture(scope="module")
def shards() -> Iterator[Shards]:
    """Two, which all tests of this file share that do not end them."""
    made = Shards(2)
    made.start()
    yield made
    made.close()


def kill(process: int) -> None:
    os.kill(process, signal.SIGKILL)


def is_there(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    status = Path(f"/proc/{process}/stat")  # where the first process of a container does not wait for orphans
    return not (status.exists() and status.read_text().rpartition(")")[2].split()[0] == "Z")


class Summed:
    """The mean of updates, with shards or in threads."""

    def __init__(self, pieced: PiecedFormat, executor: ThreadPoolExecutor, shards: Shards | None) -> None:
        self.pieced = pieced
        self.executor = executor
        self.shards = shards
        self.sums = UpdateSum(pieced, executor, by=None if shards is None else shards.sums_of(pieced))

    def memory(self, length: int) -> Tensor:
        return torch.empty(length, dtype=torch.uint8) if self.shards is None else self.shards.buffers.take(length)

    async def add(self, payload: Tensor, *, weight: int) -> Update:
        own = self.memory(payload.numel()).copy_(payload)
        digest, extents = await Inspection(self.pieced, own, self.executor, shards=self.shards).finish()
        update = Update(own, extents, digest)
        self.sums.begin(update, weight=weight)
        await self.sums.add(update)
        return update

    async def mean(self) -> tuple[Tensor, Tensor]:
        """Its payload, and what it loses."""
        await self.sums.settled()
        payload = self.memory(self.pieced.of_means.payload_bytes)
        known, lost = (self.memory(4 * self.pieced.elements).view(torch.float32) for _ in range(2))
        keeps = self.pieced.wire.keeps_residuals
        known.fill_(0.001)
        lost.zero_()
        await self.sums.encode_mean(payload, round=3, known=known, lost=lost if keeps else None)
        return payload, lost


@pytest.mark.parametrize("held", [None, 0], ids=["held", "summed"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "int8", "int4", "sparse"])
def test_they_have_the_bits_of_one_process(dtype: WireDtype, held: int | None, shards: Shards) -> None:
    pieced = PiecedFormat(WireFormat(dtype=dtype), ELEMENTS, PIECE)
    generator = torch.Generator().manual_seed(5)
    sent = [pieced.wire.encode(torch.randn(ELEMENTS, generator=generator), seed=n) for n in range(3)]

    async def run(executor: ThreadPoolExecutor, by: Shards | None) -> list[tuple[Tensor, Tensor]]:
        one = Summed(pieced, executor, by)
        if held is not None:
            one.sums._most_held = held
        found = []
        for order in ([0, 1, 2], [2, 0]):  # the second in the memory of the first
            for number in order:
                update = await one.add(sent[number], weight=2 * number + 1)
                indices = range(len(pieced.pieces))
                assert list(update.extents) == [pieced.extent(sent[number], index) for index in indices]
            found.append(await one.mean())
            await one.sums.reopen()
        return found

    with ThreadPoolExecutor(1) as executor:
        plain = asyncio.run(run(executor, None))
        shared = asyncio.run(run(executor, shards))
    for (payload, lost), (other, its_lost) in zip(plain, shared, strict=True):
        assert torch.equal(payload, other)
        assert torch.equal(lost, its_lost)


def test_one_that_is_killed_is_started_again_and_nothing_is_lost(
    shards: Shards, caplog: pytest.LogCaptureFixture
) -> None:
    pieced = PiecedFormat(WireFormat(dtype="int8"), ELEMENTS, PIECE)
    update = pieced.wire.encode(torch.linspace(-1, 1, ELEMENTS), seed=0)

    async def run(executor: ThreadPoolExecutor, by: Shards | None) -> Tensor:
        one = Summed(pieced, executor, by)
        for weight in (1, 2):
            await one.add(update, weight=weight)
        if by is not None:
            kill(by.processes[0])
        return (await one.mean())[0]

    with ThreadPoolExecutor(1) as executor, caplog.at_level(logging.WARNING):
        assert torch.equal(asyncio.run(run(executor, shards)), asyncio.run(run(executor, None)))
    assert "Shard 1 (process" in caplog.text
    assert "was killed by SIGKILL. It is started again, and nothing is lost." in caplog.text


def test_sums_that_are_lost_with_one_end_the_run() -> None:
    said: list[BaseException] = []
    shards = Shards(1, on_lost=said.append)
    shards.start()
    try:
        with ThreadPoolExecutor(1) as executor:
            pieced = PiecedFormat(WireFormat(), ELEMENTS, PIECE)

            async def run() -> None:
                one = Summed(pieced, executor, shards)
                one.sums._most_held = 0
                update = torch.ones(ELEMENTS).view(torch.uint8)
                await one.add(update, weight=1)
                kill(shards.processes[0])
                # Not even a sum of what comes after it: the mean would be without the first one.
                with pytest.raises(ChildProcessError, match=r"was killed by SIGKILL, and sums of the round"):
                    await one.add(update, weight=1)
                with pytest.raises(ChildProcessError):
                    await one.mean()

            asyncio.run(run())
    finally:
        shards.close()
    assert "Start the coordinator again" in str(said[0])


def test_sums_that_nobody_needs_any_more_are_no_loss() -> None:
    lost: list[BaseException] = []
    shards = Shards(1, on_lost=lost.append)
    shards.start()
    try:
        with ThreadPoolExecutor(1) as executor:
            pieced = PiecedFormat(WireFormat(), ELEMENTS, PIECE)
            update = torch.ones(ELEMENTS).view(torch.uint8)

            async def sum_and_drop() -> None:
                one = Summed(pieced, executor, shards)
                one.sums._most_held = 0
                own = one.memory(update.numel()).copy_(update)
                digest, extents = await Inspection(pieced, own, executor, shards=shards).finish()
                known = Update(own, extents, digest)
                one.sums.begin(known, weight=1)
                kill(shards.processes[0])
                await one.sums.add(known)  # the first: there was nothing to lose

            async def go_on() -> Tensor:
                other = Summed(pieced, executor, shards)
                await other.add(update, weight=2)
                return (await other.mean())[0]

            asyncio.run(sum_and_drop())
            gc.collect()
            kill(shards.processes[0])
            shards._shards[0]._process.wait(ENDS_S)
            shards.look()
            assert torch.equal(asyncio.run(go_on()), update)
    finally:
        shards.close()
    assert not lost


def test_one_that_is_started_again_while_all_end_is_not_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    shards = Shards(1)
    shards.start()
    begun: list[subprocess.Popen[bytes]] = []
    ended, may_start = threading.Event(), threading.Event()
    shard, plain = shards._shards[0], shards._shards[0]._ended

    def slowly() -> str:
        what = plain()
        ended.set()
        assert may_start.wait(ENDS_S)
        begun.append(shard._process)
        return what

    monkeypatch.setattr(shard, "_ended", slowly)
    kill(shards.processes[0])
    shard._process.wait(ENDS_S)
    shards.look()
    assert ended.wait(ENDS_S)
    closing = threading.Thread(target=shards.close)
    closing.start()
    until(lambda: shard._closed, "the end of all")
    may_start.set()
    closing.join(ENDS_S)
    assert not closing.is_alive()
    assert begun == [shard._process]  # there is no other
    assert not is_there(shard.process_id)


def test_buffers_that_are_not_used_any_more_are_let_go(shards: Shards) -> None:
    pool = shards.buffers
    descriptors = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    for length in range(4000, 4040):
        assert pool.shared(pool.take(length)).length == length
    assert len(pool._shared) < 20
    if descriptors:
        assert len(os.listdir("/proc/self/fd")) < descriptors + 40


def test_a_run_goes_on_over_a_killed_shard_and_leaves_nobody(tmp_path: Path) -> None:
    rounds = 2

    async def work(*workers: SmallWorker) -> None:
        for worker in workers:
            await worker.join()
        for _ in range(rounds):
            await asyncio.gather(
                *(one.take_part(two, samples=2) for one, two in zip(workers, updates_of(2), strict=True))
            )
            if killing:
                kill(killing.pop())
        assert all(torch.equal(workers[0].outer.weights[name], workers[1].outer.weights[name]) for name in weights_of())
        chains.append(workers[0].chain)

    chains: list[str] = []
    killing: list[int] = []
    for count in (1, 2):
        options = options_of(workers=2, shards=count, wire_dtype="bf16")
        with CoordinatorServer(options, keeper=StateKeeper(str(tmp_path / str(count)))) as server:
            running = [] if server.service.shards is None else server.service.shards.processes
            killing = running[:1]
            in_a_run(server, 2, work)
            running += [] if server.service.shards is None else server.service.shards.processes
            counters = server.status().counters
        assert counters.get("shards_restarted", 0) == (count == 2)
        assert not any(map(is_there, running))
    assert chains[0] == chains[1]  # of the digests of all means


def test_a_shard_ends_when_its_coordinator_is_gone_and_not_before() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", shard_process.__name__, str(theirs.fileno())], pass_fds=[theirs.fileno()]
        )
    with process, ours:
        ours.settimeout(ENDS_S)
        request = shard_process.Request(work=shard_process.Clear(sum=1, pieces=()))
        for number in (signal.SIGINT, signal.SIGTERM, None):
            shard_process.send(ours, request)
            assert msgspec.msgpack.decode(shard_process.receive(ours)[0], type=shard_process.Answer).error is None
            if number is not None:
                process.send_signal(number)
        ours.shutdown(socket.SHUT_RDWR)  # as the system does with a process that is killed
        assert process.wait(ENDS_S) == 0


def test_where_memory_cannot_be_handed_over_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("socket.send_fds")
    with pytest.raises(UnsupportedError, match="--shards 1"):
        Shards(2)
