"""The run's slices for its workers: what one holds that is cut off goes to others before its lease is over."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from lightning_bytescheduler.coordinator import connection
from lightning_bytescheduler.coordinator.membership import Member
from lightning_bytescheduler.coordinator.run import CoordinatorOptions
from lightning_bytescheduler.coordinator.service import CoordinatorServer
from lightning_bytescheduler.coordinator.slice_routes import SliceRoutes
from lightning_bytescheduler.diloco.coordinator_protocol import SLICES_PATH, run_options
from lightning_bytescheduler.diloco.messages import TrainingOver
from lightning_bytescheduler.diloco.round_end import RoundOptions
from lightning_bytescheduler.exceptions import OptionError
from lightning_bytescheduler.slices.tracker import (
    AskLater,
    Assignment,
    JoinAgain,
    JoinTracker,
    ReportProgress,
    RequestSlice,
    decode,
    encode,
)
from tests.coordinator.runs import ELEMENTS, in_a_run, options_of
from tests.coordinator.small_worker import SmallWorker
from tests.coordinator.test_rounds import weights_of
from tests.slices.fits import make_rows


async def ask(worker: SmallWorker, message: Any) -> Any:
    async with worker.http.post(worker.url + SLICES_PATH, data=encode(message), headers=worker.headers) as response:
        assert response.status == 200, await response.text()
        return decode(await response.read())


def test_slices_of_a_worker_that_is_cut_off_are_handed_out_again(tmp_path: Path) -> None:
    rows = make_rows(tmp_path / "rows", [10])  # one slice
    options = CoordinatorOptions(
        run=run_options(inner_steps=1), rounds=RoundOptions(quorum=0.0, silent_after=0.2), lease=60.0
    )
    slices = SliceRoutes([rows])

    async def work(url: str) -> None:
        async with SmallWorker(url, "one", weights_of()) as one, SmallWorker(url, "two", weights_of()) as two:
            await one.hello()
            session = (await ask(one, JoinTracker(worker="one", incarnation="1"))).session
            assert isinstance(await ask(one, RequestSlice(session=session, epoch=0)), Assignment)
            await two.hello()
            session = (await ask(two, JoinTracker(worker="two", incarnation="2"))).session
            assert isinstance(await ask(two, RequestSlice(session=session, epoch=0)), AskLater)
            await one.socket.close()
            while isinstance(await ask(two, RequestSlice(session=session, epoch=0)), AskLater):
                await asyncio.sleep(0.05)

    with CoordinatorServer(options, slices=slices) as server:
        asyncio.run(asyncio.wait_for(work(server.url), 60))


def test_slices_of_a_worker_that_stands_still_are_handed_out_again(tmp_path: Path) -> None:
    """Its connection stays open for long, as if a cable was unplugged."""
    slices = SliceRoutes([make_rows(tmp_path / "rows", [10, 10])])
    rounds = RoundOptions(silent_after=10.0)
    one, two = members = [cast(Member, SimpleNamespace(name=name, digest=name, silent=False)) for name in "ab"]
    workers: Any = {
        "a": SimpleNamespace(is_silent=lambda rounds, now: now >= rounds.silent_after),
        "b": SimpleNamespace(is_silent=lambda rounds, now: False),
    }

    def answer(member: Member, message: Any) -> Any:
        return slices.answer(member, encode(message))

    joins = [JoinTracker(worker=member.name, incarnation="1") for member in members]
    sessions = [answer(member, join).session for member, join in zip(members, joins, strict=True)]
    first, second = (
        answer(member, RequestSlice(session=session, epoch=0))
        for member, session in zip(members, sessions, strict=True)
    )
    assert isinstance(first, Assignment)
    answer(two, ReportProgress(session=sessions[1], grant=second.grant, trained=10))
    more = RequestSlice(session=sessions[1], epoch=0, holding=(second.grant,))  # until it is in the weights
    assert isinstance(answer(two, more), AskLater)
    slices.take_back(members, workers, rounds, 19.9)
    assert slices.tracker.held("a") == 1
    slices.take_back(members, workers, rounds, 20.0)
    assert isinstance(answer(two, more), Assignment)
    assert isinstance(answer(one, RequestSlice(session=sessions[0], epoch=0)), JoinAgain)


@pytest.mark.slow
def test_a_worker_that_answers_no_ping_as_a_round_begins_stands_still(tmp_path: Path) -> None:
    """It may say nothing while it gets weights; if its link is cut, it answers no ping either."""
    rows = make_rows(tmp_path / "rows", [10, 10])
    options = CoordinatorOptions(
        run=run_options(inner_steps=1), rounds=RoundOptions(quorum=0.0, silent_after=3.0, start_workers=2), lease=60.0
    )
    slices = SliceRoutes([rows])

    async def work(one: SmallWorker, two: SmallWorker) -> None:
        await one.join()
        await two.join()
        await asyncio.gather(*(worker.take_part(torch.zeros(ELEMENTS), samples=1) for worker in (one, two)))
        reading = [asyncio.create_task(worker.wait_for(TrainingOver)) for worker in (one, two)]  # answers pings
        sessions, grants = [], []
        for number, worker in enumerate((one, two)):
            joined = await ask(worker, JoinTracker(worker=worker.name, incarnation=str(number)))
            sessions.append(joined.session)
            grants.append((await ask(worker, RequestSlice(session=joined.session, epoch=0))).grant)
        await ask(two, ReportProgress(session=sessions[1], grant=grants[1], trained=10))
        more = RequestSlice(session=sessions[1], epoch=0, holding=(grants[1],))  # until it is in the weights
        for _ in range(80):  # longer than it may be silent
            assert isinstance(await ask(two, more), AskLater)
            await asyncio.sleep(0.05)
        reading[0].cancel()
        while isinstance(await ask(two, more), AskLater):
            await asyncio.sleep(0.05)
        assert all(worker.connected for worker in server.status().workers)
        reading[1].cancel()

    with CoordinatorServer(options, slices=slices) as server:
        in_a_run(server, 2, work)


def test_a_worker_that_asks_too_often_is_told_to_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "_BURST", 3.0)
    monkeypatch.setattr(connection, "_PER_SECOND", 1e-6)
    slices = SliceRoutes([make_rows(tmp_path / "rows", [10])])

    async def status(worker: SmallWorker) -> int:
        data = encode(JoinTracker(worker=worker.name, incarnation="1"))
        async with worker.http.post(worker.url + SLICES_PATH, data=data, headers=worker.headers) as response:
            assert response.status == 200 or response.headers["Retry-After"] == "1"
            return response.status

    async def work(one: SmallWorker, two: SmallWorker) -> None:
        await one.hello()
        await two.hello()
        assert [await status(one) for _ in range(5)] == [200, 200, 200, 429, 429]
        assert await status(two) == 200

    with CoordinatorServer(options_of(), slices=slices) as server:
        in_a_run(server, 2, work)
        assert server.status().counters["slow_downs"] == 2


def test_a_member_does_not_take_the_place_of_another_one(tmp_path: Path) -> None:
    slices = SliceRoutes([make_rows(tmp_path / "rows", [10])])
    one = cast(Member, SimpleNamespace(name="one", digest="one"))
    with pytest.raises(OptionError, match=r"worker='other'.*'one', the name of this worker"):
        slices.answer(one, encode(JoinTracker(worker="other", incarnation="1")))


def restarted_while_one_holds_a_slice(folder: Path, *, patience: float) -> tuple[Member, SliceRoutes]:
    """A silent member, and the slices of the coordinator that goes on from a state in which it holds one."""
    rows = make_rows(folder / "rows", [10])
    before, after = (SliceRoutes([rows]) for _ in range(2))
    one = cast(Member, SimpleNamespace(name="one", digest="one", silent=True))
    session = before.answer(one, encode(JoinTracker(worker="one", incarnation="1"))).session
    before.answer(one, encode(RequestSlice(session=session, epoch=0)))
    after.tracker.load_state_dict(before.tracker.state_dict(), workers=["one"], patience=patience)
    return one, after


def test_what_a_member_holds_by_a_saved_state_is_its_own_until_it_has_joined_again(tmp_path: Path) -> None:
    """It may be cut off like the coordinator, and may hold more than the state says."""
    one, after = restarted_while_one_holds_a_slice(tmp_path, patience=60.0)
    after.take_back([one], {}, RoundOptions(silent_after=10.0), now=0.0)
    session = after.answer(one, encode(JoinTracker(worker="one", incarnation="1"))).session
    assert isinstance(after.answer(one, encode(RequestSlice(session=session, epoch=0))), Assignment)
    assert after.tracker.held("one") == 1
    after.take_back([one], {}, RoundOptions(silent_after=10.0), now=0.0)
    assert after.tracker.held("one") == 0


def test_what_a_silent_member_holds_by_a_saved_state_comes_back_when_it_was_awaited_long_enough(tmp_path: Path) -> None:
    one, after = restarted_while_one_holds_a_slice(tmp_path, patience=0.0)
    assert after.tracker.held("one") == 1
    after.take_back([one], {}, RoundOptions(silent_after=10.0), now=0.0)
    assert not after.tracker._workers


def test_a_worker_that_left_while_it_asked_gets_no_slice(tmp_path: Path) -> None:
    slices = SliceRoutes([make_rows(tmp_path / "rows", [10])])
    handed = asyncio.Event()

    async def work(one: SmallWorker, two: SmallWorker) -> None:
        for worker in (one, two):
            await worker.hello()
        session = (await ask(one, JoinTracker(worker="w0", incarnation="1"))).session

        async def slowly() -> Any:
            yield b""
            await handed.wait()
            yield encode(RequestSlice(session=session, epoch=0)).encode()

        asked = one.http.post(one.url + SLICES_PATH, data=slowly(), headers=one.headers)
        sending = asyncio.ensure_future(asked.__aenter__())
        await asyncio.sleep(0.2)
        await one.socket.close()
        server.call(lambda: server.service.run.leave(server.service.run.members.by_name("w0"), time.monotonic()))
        handed.set()
        assert (await sending).status == 403
        assert not slices.tracker.held("w0")

    with CoordinatorServer(options_of(), slices=slices) as server:
        in_a_run(server, 2, work)
