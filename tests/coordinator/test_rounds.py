"""The service and small workers: joining, rounds, updates, means, the state, and coming back."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_bytescheduler.coordinator import global_weights
from lightning_bytescheduler.coordinator.global_weights import GlobalWeights
from lightning_bytescheduler.coordinator.service import CoordinatorServer
from lightning_bytescheduler.coordinator.state_store import StateStore
from lightning_bytescheduler.diloco import messages
from lightning_bytescheduler.diloco.outer_optimizer import OuterOptimizer
from tests.coordinator.runs import ELEMENTS, in_a_run, options_of, updates_of, weights_of
from tests.coordinator.small_worker import SmallWorker
from tests.support.plain_mean import PlainMean


async def join_all(*workers: SmallWorker) -> None:
    for worker in workers:
        await worker.join()


async def one_round(*workers: SmallWorker, samples: int = 2) -> None:
    updates = updates_of(len(workers))
    await asyncio.gather(
        *(worker.take_part(update, samples=samples) for worker, update in zip(workers, updates, strict=True))
    )


def same_weights(*workers: SmallWorker) -> bool:
    first = workers[0].outer.weights
    return all(torch.equal(first[name], worker.outer.weights[name]) for worker in workers for name in first)


def test_workers_have_the_bits_of_the_exact_mean_in_any_order_of_arrival() -> None:
    updates = updates_of(3)

    async def work(*workers: SmallWorker) -> None:
        await join_all(*workers)
        for turn in range(3):
            for worker in workers:
                round = await worker.start()
                await worker.step(1, samples=1)
            order = [*range(turn, 3), *range(turn)]
            for number in order:
                status, _ = await workers[number].push(round, updates[number], samples=number + 1)
                assert status == 200
            for worker in workers:
                ended = await worker.wait_for(messages.RoundEnded)
                assert (ended.round, ended.samples) == (round, 6)
                await worker.pull(round)
        expected = OuterOptimizer(weights_of(0))
        mean = PlainMean({"all": torch.empty(ELEMENTS)})
        for number, update in enumerate(updates):
            mean.add_plain({"all": update}, weight=number + 1)
        weight, bias = mean.mean()["all"].split([24, 6])
        for _ in range(3):
            expected.step({"layer.weight": weight.view(6, 4), "layer.bias": bias})
        assert len({worker.chain for worker in workers}) == 1
        for worker in workers:
            assert all(torch.equal(worker.outer.weights[name], tensor) for name, tensor in expected.weights.items())

    with CoordinatorServer(options_of(workers=3)) as server:
        in_a_run(server, 3, work)
        status = server.status()
    assert (status.weights_version, status.samples) == (3, 18)
    assert [(one.round, one.samples, one.merged) for one in status.rounds] == [(1, 6, 3), (2, 6, 3), (3, 6, 3)]


@pytest.mark.parametrize("wire_dtype", ["bf16", "int8", "int4", "sparse"])
def test_smaller_wires_give_everybody_the_same_bits(wire_dtype: str) -> None:
    async def work(*workers: SmallWorker) -> None:
        await join_all(*workers[:2])
        await one_round(*workers[:2])
        await workers[2].join()  # from the coordinator's own weights and momentum
        await one_round(*workers[:2])
        await workers[2].wait_for(messages.RoundEnded)  # it was let into the round, and has not taken a step in it
        await workers[2].pull(2)
        await one_round(*workers)
        assert same_weights(*workers)

    with CoordinatorServer(options_of(workers=2, wire_dtype=wire_dtype)) as server:
        in_a_run(server, 3, work)


def test_fragments_take_turns() -> None:
    async def work(one: SmallWorker, other: SmallWorker) -> None:
        await join_all(one, other)
        for round in (1, 2, 3):
            size = one.size((round - 1) % 2)
            updates = [torch.full((size,), 0.5), torch.full((size,), 1.5)]
            await asyncio.gather(one.take_part(updates[0], samples=1), other.take_part(updates[1], samples=1))
        assert same_weights(one, other)
        status, answer = await one.push(3, torch.zeros(one.size(1)), samples=1, fragment=1)
        assert status == 409
        assert "fragment=1 is not allowed: fragment must be 0" in answer["error"]

    with CoordinatorServer(options_of(workers=2, fragments=2)) as server:
        in_a_run(server, 2, work)


def test_the_first_weights_may_come_with_momentum() -> None:
    momentum = {name: torch.full_like(tensor, 0.25) for name, tensor in weights_of(0).items()}

    async def work(one: SmallWorker, other: SmallWorker) -> None:
        await one.hello()
        for wrong in ({"layer.bias": torch.zeros(5)}, {"layer.bias": torch.full((6,), float("nan"))}):
            answer = await one.provide(wrong)
            assert (answer.status, "momentum.layer.bias" in await answer.text()) == (422, True)
        assert (await one.provide(momentum)).status == 200
        await other.join()
        state = other.outer.state_dict()["optimizer"]["state"]
        assert [state[index]["momentum_buffer"].unique().item() for index in range(2)] == [0.25, 0.25]
        await other.take_part(torch.zeros(ELEMENTS), samples=1)
        await one.fetch()
        assert same_weights(one, other)
        # A mean of zero leaves the momentum as it was, but for its decay; the step goes along it.
        expected = weights_of(0)["layer.bias"] - 0.7 * 0.9 * (0.9 * 0.25)
        assert torch.allclose(one.outer.weights["layer.bias"], expected)

    with CoordinatorServer(options_of()) as server:
        in_a_run(server, 2, work)


def test_a_worker_that_was_away_follows_mean_by_mean_or_takes_the_state(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(one: SmallWorker, other: SmallWorker) -> None:
        await join_all(one, other)
        await one_round(one, other)
        await other.say(messages.PauseRounds(worker=other.name))
        await one_round(one)
        await other.socket.close()
        assert not (await other.join()).fetch
        assert (other.version, other.chain) == (2, one.chain)
        await other.say(messages.PauseRounds(worker=other.name))
        for _ in range(4):
            await one_round(one)
        await other.socket.close()
        assert (await other.join()).fetch
        assert same_weights(one, other)

    monkeypatch.setattr(global_weights, "_KEPT_ROUNDS", 3)
    with CoordinatorServer(options_of(workers=2)) as server:
        in_a_run(server, 2, work)


def test_the_last_round_is_the_last(caplog: pytest.LogCaptureFixture) -> None:
    async def work(one: SmallWorker) -> None:
        await one.join()
        assert (await one.take_part(updates_of(1)[0], samples=1)).stop
        await one.wait_for(messages.TrainingOver)

    with caplog.at_level(logging.INFO), CoordinatorServer(options_of(outer_steps=1)) as server:
        in_a_run(server, 1, work)
        assert server.status().phase == "finished"
    assert "The run is over after round 1, with 1 samples." in caplog.text


def test_a_round_that_workers_know_to_be_over_is_saved_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step, steps = GlobalWeights.step, []

    async def slow_step(self: GlobalWeights, *arguments: Any) -> None:
        steps.append(arguments)
        await asyncio.sleep(0.5)
        await step(self, *arguments)

    monkeypatch.setattr(GlobalWeights, "step", slow_step)

    async def work(one: SmallWorker) -> None:
        await one.join()
        await one.take_part(updates_of(1)[0], samples=1)
        weights.update(one.outer.weights)

    weights: dict[str, Tensor] = {}
    with CoordinatorServer(options_of(), store=StateStore(str(tmp_path))) as server:
        in_a_run(server, 1, work)
    saved = StateStore(str(tmp_path)).load()
    assert saved is not None
    assert (saved["run"]["version"], len(steps)) == (1, 1)
    assert all(torch.equal(saved["tensors"][f"weights.{name}"], weight) for name, weight in weights.items())


def test_workers_hear_of_the_last_round_when_it_is_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They end then: a coordinator that had lost it would wait for them without end."""
    write, writes, may_write = StateStore.write, threading.Event(), threading.Event()

    def slow_write(store: StateStore, state: Any) -> None:
        if state["run"]["version"] == 1:
            writes.set()
            assert may_write.wait(60)
        write(store, state)

    monkeypatch.setattr(StateStore, "write", slow_write)

    async def work(one: SmallWorker) -> None:
        await one.join()
        part = asyncio.ensure_future(one.take_part(updates_of(1)[0], samples=1))
        assert await asyncio.to_thread(writes.wait, 60)
        assert server.status().phase == "merging"
        assert not part.done()
        may_write.set()
        assert (await part).stop
        await one.wait_for(messages.TrainingOver)

    with CoordinatorServer(options_of(outer_steps=1), store=StateStore(str(tmp_path))) as server:
        in_a_run(server, 1, work)


def test_a_late_update_is_dropped() -> None:
    async def work(one: SmallWorker, other: SmallWorker) -> None:
        await join_all(one, other)
        round = await one.start()
        await other.start()
        await other.say(messages.PauseRounds(worker=other.name))
        await one.step(1, samples=1)
        await one.push(round, updates_of(1)[0], samples=1)
        await one.wait_for(messages.RoundEnded)
        for _ in range(2):
            status, receipt = await other.push(round, updates_of(1)[0], samples=4)
            assert (status, receipt["verdict"], receipt["weight"]) == (200, "dropped", 0)

    with CoordinatorServer(options_of(workers=2)) as server:
        in_a_run(server, 2, work)
        counters = server.status().counters
    assert (counters["updates_added"], counters["updates_late"], counters.get("updates_again", 0)) == (1, 2, 0)


def test_a_restarted_coordinator_carries_on(tmp_path: Path) -> None:
    def coordinator(port: int = 0) -> CoordinatorServer:
        return CoordinatorServer(options_of(workers=2), port=port, store=StateStore(str(tmp_path)))

    async def before(*workers: SmallWorker) -> None:
        await join_all(*workers)
        await one_round(*workers)
        await one_round(*workers)
        for worker in workers:
            kept.append((worker.name, worker.session, worker.version, worker.chain, worker.outer, worker.wire))

    async def after(*workers: SmallWorker) -> None:
        for worker, (name, session, version, chain, outer, wire) in zip(workers, kept, strict=True):
            worker.name, worker.session, worker.version, worker.chain = name, session, version, chain
            worker.outer, worker.wire, worker.fragments = outer, wire, (tuple(worker.first_weights),)
            welcome = await worker.join()
            assert (welcome.worker, welcome.session, welcome.fetch) == (name, session, False)
        await one_round(*workers)
        assert same_weights(*workers)

    kept: list[tuple] = []  # type: ignore[type-arg]
    with coordinator() as first:
        in_a_run(first, 2, before)
    with coordinator() as second:
        assert second.status().weights_version == 2
        in_a_run(second, 2, after)
        status = second.status()
    assert (status.weights_version, status.samples, status.rounds[-1].merged) == (3, 12, 2)


def test_no_thread_is_left_once_it_is_closed() -> None:
    server = CoordinatorServer(options_of())
    server.call(lambda: server.service._threads.submit(time.sleep, 0.3))
    server.close()
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("bytescheduler")]
