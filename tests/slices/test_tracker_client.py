"""Threads that call one tracker."""

from __future__ import annotations

import threading
from collections import Counter

from lightning_bytescheduler.slices.tracker_client import LocalTracker, TrackerClient
from tests.slices.tracker_workers import Worker, make_tracker


def test_workers_in_threads_train_on_each_sample_once():
    counts = [3] * 200
    tracker = make_tracker(counts)
    client = LocalTracker(tracker)
    assert client.join.__name__ in dir(TrackerClient)
    trained = [Counter[tuple[str, int]]() for _ in range(4)]

    def work(rank: int) -> None:
        worker = Worker(client, str(rank), trained[rank])
        for _ in range(5000):
            if client.report().over:
                return
            worker.ask()
            worker.train(2)

    threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30.0)
        assert not thread.is_alive()
    total = sum(trained, Counter())
    assert set(total.values()) == {1}
    assert sum(total.values()) == sum(counts)
    assert client.release("0")
    assert client.expire() == ()
    assert client.start_epoch(1)
    client.load_state_dict(client.state_dict(), workers=["1"])
    assert client.report().epoch == 1
