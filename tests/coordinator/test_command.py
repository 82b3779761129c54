"""``lightning-bytescheduler coordinator``: its options, the line that says how to join, and its end."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_bytescheduler.__main__ import main
from lightning_bytescheduler.coordinator.command import _say_end
from lightning_bytescheduler.diloco.messages import LeaveRounds
from lightning_bytescheduler.slices.make import make_slices
from lightning_bytescheduler.slices.tracker import (
    JoinAgain,
    Joined,
    JoinTracker,
    ReportProgress,
    RequestSlice,
    encode,
)
from lightning_bytescheduler.slices.tracker import decode as decode_slices
from tests.coordinator.runs import updates_of, weights_of
from tests.coordinator.small_worker import SmallWorker


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        (["--bind", "nowhere"], "--bind='nowhere' is not allowed"),
        (["--bind", "0.0.0.0:0"], "--bind='0.0.0.0' is not allowed"),
        (["--inner-steps", "0"], "--inner-steps=0 is not allowed"),
        (["--samples-per-round", "8", "--inner-steps", "2"], "left out where samples_per_round ends a round"),
        (["--overlap-steps", "200"], "--overlap-steps=200 is not allowed"),
        (["--overlap-steps", "auto"], "'auto' is not a whole number"),
        (["--overlap-steps", "-1"], "--overlap-steps=-1 is not allowed"),
        (["--quorum", "2"], "--quorum=2.0 is not allowed"),
        (["--grace-s", "auto"], "--grace-s: 'auto' is not a number"),
        (["--lease-s", "0"], "--lease-s=0.0 is not allowed"),
        (["--shards", "2"], "there is no option --shards"),
        (["--tls", "c.pem"], "--tls='c.pem' is not allowed: --tls must be CERT KEY"),
        (["--tls", "missing.pem", "missing.key"], "--tls='missing.pem' is not allowed"),
    ],
)
def test_options_are_checked(argv: list[str], reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["coordinator", *argv]) == 2
    assert reason in capsys.readouterr().err


def test_a_run_with_slices_stops_politely_and_is_kept(tmp_path: Path) -> None:
    (tmp_path / "rows.txt").write_text("\n".join(f"row {number}" for number in range(40)))
    make_slices([str(tmp_path / "rows.txt")], str(tmp_path / "slices"), slice_bytes=64)
    argv = ["coordinator", "--bind", "127.0.0.1:0", "--state", str(tmp_path / "state"), "--inner-steps", "1"]
    argv += ["--train", str(tmp_path / "slices")]
    command = [sys.executable, "-m", "lightning_bytescheduler", *argv]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        url = line.split(" at ")[1].split(". A worker")[0]
        assert f'DiLoCoStrategy(coordinator="{url}")' in line
        asyncio.run(asyncio.wait_for(_train(url), 60))
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0, errors
    assert "was not saved" not in errors, errors
    assert "Round 1: 3 samples of 1 of 1 workers" in errors
    assert any(name.startswith("state-") for name in os.listdir(tmp_path / "state"))
    assert len((tmp_path / "state" / "rounds.jsonl").read_text().splitlines()) == 1


@pytest.mark.slow
@pytest.mark.parametrize("stays", [False, True])
def test_it_ends_once_the_run_is_over_and_all_have_left(stays: bool, tmp_path: Path) -> None:
    argv = ["coordinator", "--bind", "127.0.0.1:0", "--state", str(tmp_path / "state"), "--inner-steps", "1"]
    argv += ["--outer-steps", "1", *(["--stay"] if stays else [])]
    command = [sys.executable, "-m", "lightning_bytescheduler", *argv]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        url = process.stdout.readline().split(" at ")[1].split(". A worker")[0]
        asyncio.run(asyncio.wait_for(_train_and_leave(url), 60))
        if stays:
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(2.0)
            process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0, errors
    assert ("All workers have left, and the coordinator ends" in errors) is not stays
    assert any(name.startswith("state-") for name in os.listdir(tmp_path / "state"))


@pytest.mark.parametrize("over", [False, True])
def test_its_last_line_says_whether_the_run_can_go_on(over: bool, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "lightning_bytescheduler")
    full = "OSError: [Errno 28] No space left on device"
    for store, code, said in (
        (None, 0, "Without --state, the run cannot go on."),
        (SimpleNamespace(url="st", failure=None), 0, "the run goes on" if over else "The run can go on"),
        (
            SimpleNamespace(url="st", failure=full, saved_round=2),
            1,
            f"not in st, and only the run up to round 2 is: {full}",
        ),
        (SimpleNamespace(url="st", failure=full, saved_round=None), 1, f"and nothing of the run is: {full}"),
    ):
        caplog.clear()
        server: Any = SimpleNamespace(store=store)
        assert _say_end(server, over=over) == code
        assert said in caplog.messages[-1]


async def _train_and_leave(url: str) -> None:
    async with SmallWorker(url, "one", weights_of()) as one:
        await one.join()
        assert (await one.take_part(updates_of(1)[0], samples=3)).stop
        await one.say(LeaveRounds(worker=one.name))
        await asyncio.sleep(0.2)


async def _train(url: str) -> None:
    async with SmallWorker(url, "one", weights_of()) as one, SmallWorker(url, "two", weights_of()) as two:
        await one.join()
        await two.hello()
        status, joined = await _ask(one, JoinTracker(worker=one.name, incarnation="a"))
        assert isinstance(joined, Joined), status
        status, answer = await _ask(two, JoinTracker(worker=one.name, incarnation="b"))
        assert (status, "worker='one' is not allowed" in answer["error"]) == (400, True)
        _, given = await _ask(one, RequestSlice(session=joined.session, epoch=0))
        for trained in (0, given.samples):
            report = ReportProgress(session=joined.session, grant=given.grant, trained=trained)
            assert (await _ask(two, report))[1] == JoinAgain()
            assert (await _ask(one, report))[1].accepted
        await one.take_part(updates_of(1)[0], samples=3)


async def _ask(worker: SmallWorker, message) -> tuple:  # type: ignore[no-untyped-def,type-arg]
    async with worker.http.post(worker.url + "/v1/slices", data=encode(message), headers=worker.headers) as response:
        text = await response.text()
        return response.status, decode_slices(text) if response.status == 200 else await response.json()
