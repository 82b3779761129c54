"""Threads that call one tracker."""

from __future__ import annotations

import threading
from collections import Counter

from tests.slices.tracker_workers import Worker, make_tracker


def test_workers_in_threads_train_on_each_sample_once():
    counts = [3] * 200
    tracker = make_tracker(counts)
    trained = [Counter[tuple[str, int]]() for _ in range(4)]

    def work(rank: int) -> None:
        worker = Worker(tracker, str(rank), trained[rank])
        for _ in range(5000):
            if tracker.over:
                return
            worker.ask()
            worker.train(2)

    threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
        assert not thread.is_alive()
    total = sum(trained, Counter())
    assert set(total.values()) == {1}
    assert sum(total.values()) == sum(counts)
    tracker.release("0")
    tracker.load_state_dict(tracker.state_dict(), workers=["1"])
    assert tracker.report().epoch == 1
