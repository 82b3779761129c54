"""How workers' states come to a checkpoint, and what becomes of it where they do not."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from lightning_bytescheduler.diloco.mailbox import Mailbox, Postman
from lightning_bytescheduler.diloco.worker_restart import KeptStates, Moment, StateCollection, await_writer

LONG = 60.0
BEGUN, HALTED = Moment(3, halted=False), Moment(3, halted=True)


class Workers:
    """Two that answer, on one store."""

    def __init__(self) -> None:
        self.store = dist.HashStore()
        self.kept = [KeptStates(2), KeptStates(1)]
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
        self.gone = False

    def check(self) -> None:
        if self.gone:
            raise ConnectionError("rank 2 has died")

    def collection(self, *workers: str, limit: float = LONG) -> StateCollection:
        return StateCollection(self.store, workers or ("worker1", "worker2"), limit=limit, check=self.check)

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
    collection = workers.collection()
    found = collection.collect(BEGUN)
    assert isinstance(found["worker1"], dict)
    assert torch.equal(found["worker1"]["numbers"], large)
    assert found["worker2"] == {"later": (1, 2.5)}
    assert isinstance(collection.collect(BEGUN)["worker2"], dict)  # as often as wanted


def test_a_state_is_waited_for_until_all_of_it_is_there(workers: Workers) -> None:
    for kept in workers.kept:
        kept.keep(HALTED, {"random": 1}, settled=False)
        threading.Timer(0.1, kept.settle, kwargs={"random": 2}).start()
    assert workers.collection().collect(HALTED) == {"worker1": {"random": 2}, "worker2": {"random": 2}}


def test_what_a_validation_adds_is_not_waited_for_amid_one(workers: Workers) -> None:
    for kept in workers.kept:
        kept.keep(HALTED, {"random": 1}, settled=False)
    assert workers.collection().collect(HALTED, settled=False) == {"worker1": {"random": 1}, "worker2": {"random": 1}}


def test_what_cannot_be_written_is_named(workers: Workers) -> None:
    for kept in workers.kept:
        kept.keep(BEGUN, {"schedule": lambda: None})
    assert "pickle" in str(workers.collection().collect(BEGUN)["worker1"])


def test_who_is_late_or_silent_or_dead_is_left_out(workers: Workers) -> None:
    workers.kept[0].keep(BEGUN, {"own": 1})
    found = workers.collection(limit=2.0).collect(BEGUN)
    assert found["worker1"] == {"own": 1}
    assert str(found["worker2"]).startswith("No answer came")
    assert str(workers.collection("worker3", limit=0.05).collect(BEGUN)["worker3"]).startswith("No answer came")
    workers.gone = True
    assert "rank 2 has died" in str(workers.collection("worker3").collect(BEGUN)["worker3"])


def test_who_has_left_says_so_at_once(workers: Workers) -> None:
    found: list[object] = []
    asks = threading.Thread(target=lambda: found.append(workers.collection("worker1").collect(BEGUN)["worker1"]))
    asks.start()
    workers.kept[0].close()  # also whoever has asked before
    asks.join(LONG)
    assert "it takes part no more" in str(found)


def test_workers_stay_until_the_writer_is_through(workers: Workers) -> None:
    threading.Timer(0.1, workers.collection().end).start()
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
