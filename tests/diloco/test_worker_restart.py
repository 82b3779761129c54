"""How workers' states come to a checkpoint, and what becomes of it where they do not."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from lightning_bytescheduler.ddp.rank_strategy import OUTER_STATE
from lightning_bytescheduler.diloco.mailbox import Mailbox, Postman
from lightning_bytescheduler.diloco.worker_restart import Moment, Resumed, WorkerStates
from lightning_bytescheduler.exceptions import UnsupportedError

LONG = 60.0
BEGUN = Moment(3, halted=False)


class Workers:
    """Two that answer, on one store."""

    def __init__(self) -> None:
        self.store: dist.Store = dist.HashStore()
        self.gone = False
        self.kept = [self.states(1, count=2), self.states(2)]
        self.postmen = [Postman(self.store, f"worker{number}", to="host", on_error=unexpected) for number in (1, 2)]
        self.mailboxes = [
            Mailbox(
                self.store,
                f"worker{number}",
                thread="bytescheduler-outer-mail",
                handle=lambda _, text, kept=kept: kept.answer(text),  # type: ignore[misc]
                on_error=unexpected,
                postman=postman,
            )
            for number, (postman, kept) in enumerate(zip(self.postmen, self.kept, strict=True), 1)
        ]

    def states(self, worker: int, *, workers: int = 3, limit: float = LONG, count: int = 1) -> WorkerStates:
        """Those of a worker whose fit has not begun; those of worker 0 ask the others."""
        return WorkerStates(
            cast(Any, None),
            cast(Any, SimpleNamespace(check=self.check, at_begin=None)),
            cast(Any, SimpleNamespace(worker=worker, workers=workers, store=self.store)),
            full=True,
            timeout=4 * limit,
            count=count,
            unsent=dict,
        )

    def check(self) -> None:
        if self.gone:
            raise ConnectionError("rank 2 has died")

    def stop(self) -> None:
        assert all(mailbox.stop(LONG) for mailbox in self.mailboxes)
        assert all(postman.stop(LONG) for postman in self.postmen)
        assert not [thread for thread in threading.enumerate() if thread.name.startswith("bytescheduler-outer")]


def unexpected(error: BaseException) -> None:
    raise AssertionError from error


@pytest.fixture
def workers() -> Iterator[Workers]:
    made = Workers()
    yield made
    made.stop()


def test_states_of_one_moment_come_together(workers: Workers) -> None:
    large = torch.arange(3_000_000)  # several parts
    workers.kept[0].keep(BEGUN, {"numbers": large})
    workers.kept[0].keep(Moment(4, halted=False), {"numbers": None})
    threading.Timer(0.1, workers.kept[1].keep, (BEGUN, {"later": (1, 2.5)})).start()
    collection = workers.states(0)
    first, second = collection.collect(BEGUN)
    assert first is not None
    assert torch.equal(first["numbers"], large)
    assert second == {"later": (1, 2.5)}
    assert collection.collect(BEGUN)[1] == second  # as often as it is wanted


def test_a_state_that_cannot_be_written_is_left_out(workers: Workers, caplog: pytest.LogCaptureFixture) -> None:
    for kept in workers.kept:
        kept.keep(BEGUN, {"schedule": lambda: None})
    assert workers.states(0).collect(BEGUN) == [None, None]
    assert "pickle" in caplog.text


def test_a_worker_that_is_late_or_silent_or_dead_is_left_out(
    workers: Workers, caplog: pytest.LogCaptureFixture
) -> None:
    workers.kept[0].keep(BEGUN, {"own": 1})
    assert workers.states(0, limit=2.0).collect(BEGUN) == [{"own": 1}, None]
    assert "own state of worker2: It has not come to the end of round 3" in caplog.text
    assert workers.states(0, workers=4, limit=2.0).collect(BEGUN)[2] is None
    assert "own state of worker3: No answer came" in caplog.text
    workers.gone = True
    assert workers.states(0, workers=4).collect(BEGUN)[2] is None
    assert "own state of worker3: rank 2 has died" in caplog.text


def test_workers_stay_until_the_writer_is_through(workers: Workers) -> None:
    threading.Timer(0.1, workers.states(0).leave, kwargs={"failed": False}).start()
    began = time.monotonic()
    workers.kept[0].leave(failed=False)
    assert time.monotonic() - began < 3 * LONG
    workers.gone = True
    workers.kept[1].leave(failed=False)  # it is over already


def test_a_writer_that_has_gone_with_its_store_is_not_waited_for(workers: Workers) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    workers.store = dist.TCPStore("127.0.0.1", store.port, is_master=False, wait_for_workers=False)
    left = workers.states(1)
    del store
    left.leave(failed=False)


WHOLE: dict[str, Any] = {
    "outer": {"optimizer": {}},
    "rounds": {"round": 3},
    "unsent": {"workers": 2, "rank": 0, "own": {}, "mean": {}},
    "workers": [{}, {}],
}


@pytest.mark.parametrize(
    ("state", "lacks"),
    [
        ({}, "it lacks outer.optimizer, rounds.round"),
        ("of another package", "it lacks outer.optimizer, rounds.round"),
        ({**WHOLE, "rounds": {}}, "it lacks rounds.round"),
        ({**WHOLE, "rounds": None}, "it lacks rounds.round"),
    ],
)
def test_an_outer_state_that_is_damaged_is_refused_with_what_it_lacks(state: Any, lacks: str) -> None:
    with pytest.raises(UnsupportedError) as raised:
        Resumed.from_checkpoint({OUTER_STATE: copy.deepcopy(state)}, 1, 2)
    assert lacks in str(raised.value)


def test_a_whole_outer_state_or_none_is_taken() -> None:
    assert Resumed.from_checkpoint({}, 0, 2) is None
    with pytest.warns(UserWarning, match=r"lacks the own states of workers \[1\]"):
        coordinated = Resumed.from_checkpoint({OUTER_STATE: {"outer": {"optimizer": {}}, "rounds": {"round": 1}}}, 0, 2)
    assert coordinated is not None
    assert not coordinated.alike
    resumed = Resumed.from_checkpoint({OUTER_STATE: copy.deepcopy(WHOLE)}, 0, 2)
    assert resumed is not None
    assert resumed.alike
    resumed = Resumed.from_checkpoint({OUTER_STATE: copy.deepcopy(WHOLE)}, 0, 2, 4)
    assert resumed is not None
    assert not resumed.alike
