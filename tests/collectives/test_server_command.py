"""The command ends when it is told to."""

from __future__ import annotations

import argparse
import threading
from functools import partial

import pytest
import torch.distributed as dist

from lightning_bytescheduler.collectives import server_meeting
from lightning_bytescheduler.exceptions import RankFailedError, SchedulerTimeoutError
from lightning_bytescheduler.failures import rendezvous
from lightning_bytescheduler.failures.standstill import Sign
from tests.support.waiting import WAIT, until


class Left(BaseException):
    """In place of the process's end."""


def test_what_a_server_waits_for_is_said_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: object) -> None:
        raise OSError("name or service not known")

    said: list[str] = []
    monkeypatch.setattr(rendezvous, "StorePresence", unknown)
    with pytest.raises(SchedulerTimeoutError, match=r"server still waits for rank 0 to open node-zero:1"):
        server_meeting.serve("node-zero", 1, timeout=0.1, say=said.append)
    assert said == ["Looking for the training at node-zero:1."]


def test_a_server_shows_that_it_lives_while_it_waits_for_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """For example while it connects to a worker that has just died."""
    job = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store = server_meeting.meeting_store(job)

    def next_fit(own: dist.Store, *_: object) -> None:
        own.get("over")

    def beats() -> int:
        return Sign.decode(store.get("signs/0")).beat if store.check(["signs/0"]) else 0

    monkeypatch.setattr(server_meeting, "_next_fit", next_fit)
    monkeypatch.setattr(server_meeting, "choose_interface", lambda _: None)
    said: list[str] = []
    serving = threading.Thread(target=partial(server_meeting.serve, "127.0.0.1", job.port, say=said.append))
    serving.start()
    until(lambda: beats() > 4)
    assert serving.is_alive()
    store.set("over", "")
    serving.join(WAIT)
    assert said[-1] == "The training is over."


@pytest.mark.parametrize(
    ("raised", "code", "said"),
    [
        (KeyboardInterrupt(), 130, "Interrupted."),
        (RankFailedError(1, "it is gone"), 1, "The training has ended: Rank 1 failed: it is gone"),
    ],
)
def test_nothing_is_waited_for_at_the_end(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    raised: BaseException,
    code: int,
    said: str,
) -> None:
    codes: list[int] = []

    def serve(*_: object, **__: object) -> None:
        raise raised

    def leave(code: int) -> None:
        codes.append(code)
        raise Left

    monkeypatch.setattr(server_meeting, "serve", serve)
    monkeypatch.setattr(server_meeting.os, "_exit", leave)
    monkeypatch.setattr(server_meeting.torch, "set_num_threads", lambda _: None)
    with pytest.raises(Left):
        server_meeting.run(argparse.Namespace(master_addr="127.0.0.1", master_port=1, timeout=1.0))
    assert codes == [code]
    assert capsys.readouterr().out.strip() == said
