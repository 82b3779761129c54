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
from lightning_bytescheduler.diloco.worker_restart import Moment, Resumed, WorkerStates, await_writer
from lightning_bytescheduler.exceptions import UnsupportedError

LONG = 60.0
BEGUN = Moment(3, halted=False)


class Workers:
    """Two that answer, on one store."""

    def __init__(self) -> None:
        self.store = dist.HashStore()
        self.gone = False
        self.kept = [self.states(1, count=2), self.states(2)]
        self.postmen = [Postman(self.store, f"worker{number}", to="host", on_error=unexpected) for number in (1, 2)]
        self.mailboxes = [
            Mailbox(
                self.store,
                f"worker{number}",
                thread="bytescheduler-outer-mail",
                handle=lambda sender, text: None,
                on_error=unexpected,
                postman=postman,
                calls=kept.ask,
            )
            for number, (postman, kept) in enumerate(zip(self.postmen, self.kept, strict=True), 1)
        ]

    def states(self, worker: int, *, workers: int = 3, limit: float = LONG, count: int = 1) -> WorkerStates:
        """Those of a worker whose fit has not begun; those of worker 0 ask the others."""
        return WorkerStates(
            cast(Any, None),
            cast(Any, SimpleNamespace(check=self.check)),
            cast(Any, SimpleNamespace(worker=worker, workers=workers, inner_size=1, store=self.store)),
            full=True,
            timeout=4 * limit,
            count=count,
            own_state=dict,
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
    found = collection.collect(BEGUN)
    assert isinstance(found["worker1"], dict)
    assert torch.equal(found["worker1"]["numbers"], large)
    assert found["worker2"] == {"later": (1, 2.5)}
    assert isinstance(collection.collect(BEGUN)["worker2"], dict)  # as often as wanted


def test_what_cannot_be_written_is_named(workers: Workers) -> None:
    for kept in workers.kept:
        kept.keep(BEGUN, {"schedule": lambda: None})
    assert "pickle" in str(workers.states(0).collect(BEGUN)["worker1"])


def test_a_worker_that_is_late_or_silent_or_dead_is_left_out(workers: Workers) -> None:
    workers.kept[0].keep(BEGUN, {"own": 1})
    found = workers.states(0, limit=2.0).collect(BEGUN)
    assert found["worker1"] == {"own": 1}
    assert str(found["worker2"]).startswith("No answer came")
    assert str(workers.states(0, workers=4, limit=0.05).collect(BEGUN)["worker3"]).startswith("No answer came")
    workers.gone = True
    assert "rank 2 has died" in str(workers.states(0, workers=4).collect(BEGUN)["worker3"])


def test_a_worker_that_has_left_says_so_at_once(workers: Workers) -> None:
    found: list[object] = []
    asks = threading.Thread(target=lambda: found.append(workers.states(0, workers=2).collect(BEGUN)["worker1"]))
    asks.start()
    workers.kept[0].leave(failed=True)  # also to those that asked before
    asks.join(LONG)
    assert "it takes part no more" in str(found)


def test_workers_stay_until_the_writer_is_through(workers: Workers) -> None:
    threading.Timer(0.1, workers.states(0).leave, kwargs={"failed": False}).start()
    began = time.monotonic()
    await_writer(workers.store, 4 * LONG, workers.check)
    assert time.monotonic() - began < 3 * LONG
    workers.gone = True
    await_writer(workers.store, LONG, workers.check)  # it is over already


def test_a_writer_that_has_gone_with_its_store_is_not_waited_for(workers: Workers) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port = store.port
    other = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    del store
    await_writer(other, LONG, workers.check)


WHOLE: dict[str, Any] = {
    "outer": {"optimizer": {}},
    "rounds": {"round": 3},
    "unsent": {"workers": 1, "rank": 0, "own": {}, "mean": {}},
    "workers": {"halted": True, "inner_size": 1, "of": [{"position": None}, {"position": None}]},
}


@pytest.mark.parametrize(
    ("state", "lacks"),
    [
        ({}, "it lacks outer.optimizer, rounds.round"),
        ("of another package", "it lacks outer.optimizer, rounds.round"),
        ({**WHOLE, "rounds": {}}, "it lacks rounds.round"),
        ({**WHOLE, "rounds": None}, "it lacks rounds.round"),
        ({**WHOLE, "unsent": {"rank": 0}}, "it lacks unsent.workers, unsent.own, unsent.mean"),
        (
            {**WHOLE, "workers": {**WHOLE["workers"], "of": [{}, {"loops": {}, "buffers": {}}]}},
            "the state of worker 1 lacks ['global_step', 'schedulers']",
        ),
    ],
)
def test_an_outer_state_that_is_damaged_is_refused_with_what_it_lacks(state: Any, lacks: str) -> None:
    with pytest.raises(UnsupportedError) as raised:
        Resumed.from_checkpoint({OUTER_STATE: copy.deepcopy(state)}, 1, 2)
    assert lacks in str(raised.value)


def test_a_whole_outer_state_or_none_is_taken() -> None:
    assert Resumed.from_checkpoint({}, 0, 2) is None
    assert Resumed.from_checkpoint({OUTER_STATE: {"outer": {"optimizer": {}}, "rounds": {"round": 1}}}, 0, 2) is None
    resumed = Resumed.from_checkpoint({OUTER_STATE: copy.deepcopy(WHOLE)}, 0, 2)
    assert resumed is not None
    assert resumed.alike
