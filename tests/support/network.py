"""A network and ranks that are late at random, so that races show and a synchronous implementation is found out."""

from __future__ import annotations

import queue
import random
import sys
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from lightning_bytescheduler.collectives.route import AllReduce, Served
from lightning_bytescheduler.ddp.fabric_strategy import FabricFit
from lightning_bytescheduler.ddp.fit import Fit
from lightning_bytescheduler.ddp.strategy import ByteSchedulerStrategy
from lightning_bytescheduler.scheduler.task import CommTask, SubCommTask

__all__ = ["LateNetwork"]

_ENOUGH_FORCED = 3


class LateNetwork:
    """While entered, gradients of this process become ready late and leave late, each by a random time.

    Args:
        rank: Seeds the delays, so that they differ between ranks.
        mean_delay: Mean delay of each partition, in seconds.
        held: Let no gradient of a step leave before the *next* training step has begun. A wait for
            gradients before that is in vain: after ``patience`` they leave after all, and ``forced`` counts it.
        patience: In seconds.

    Attributes:
        forced: How many steps had to be sent before the next training step began; after three, nothing is held.
    """

    def __init__(self, rank: int, *, mean_delay: float = 2e-4, held: bool = False, patience: float = 20.0) -> None:
        self.forced = 0
        self._random = random.Random(rank)
        self._mean_delay = mean_delay
        self._held = held
        self._patience = patience
        self._released = threading.Condition()
        self._released_step = 1  # the first is synchronised: DDP rebuilds its buckets after it
        self._becoming_ready: queue.SimpleQueue[CommTask | None] = queue.SimpleQueue()
        self._herald = threading.Thread(target=self._make_ready, name="late-readiness", daemon=True)
        self._patched: list[tuple[type, str, Any]] = []

    def __enter__(self) -> LateNetwork:
        notify_ready = CommTask.notify_ready
        training_step, flush = ByteSchedulerStrategy.training_step, ByteSchedulerStrategy.flush

        def late(send: Callable[..., None]) -> Callable[..., None]:
            def late_send(route: AllReduce, part: Any, sub_task: SubCommTask, *how: Any) -> None:
                if self._held:
                    self._await_release(sub_task.parent.key.step)
                self._delay()
                send(route, part, sub_task, *how)

            return late_send

        def late_notify_ready(task: CommTask) -> None:
            if threading.current_thread() is self._herald:
                notify_ready(task)
            else:
                self._becoming_ready.put(task)

        def releasing_training_step(strategy: ByteSchedulerStrategy, *args: Any, **kwargs: Any) -> Any:
            self._release(strategy.fit)
            return training_step(strategy, *args, **kwargs)

        def releasing_flush(strategy: ByteSchedulerStrategy) -> None:
            self._release(strategy.fit)
            flush(strategy)

        forward, flush_module = FabricFit.forward, FabricFit.flush

        def releasing_forward(fit: FabricFit) -> AbstractContextManager[None]:
            self._release(fit)
            return forward(fit)

        def releasing_flush_module(fit: FabricFit) -> None:
            self._release(fit)
            flush_module(fit)

        self._patch(FabricFit, "forward", releasing_forward)
        self._patch(FabricFit, "flush", releasing_flush_module)
        for route in (AllReduce, Served):
            self._patch(route, "send", late(route.send))
        self._patch(CommTask, "notify_ready", late_notify_ready)
        self._patch(ByteSchedulerStrategy, "training_step", releasing_training_step)
        self._patch(ByteSchedulerStrategy, "flush", releasing_flush)
        self._herald.start()
        return self

    def __exit__(self, *_: object) -> None:
        for owner, name, original in reversed(self._patched):
            setattr(owner, name, original)
        self._becoming_ready.put(None)
        self._herald.join(10.0)

    def _patch(self, owner: type, name: str, replacement: Any) -> None:
        self._patched.append((owner, name, getattr(owner, name)))
        setattr(owner, name, replacement)

    def _delay(self) -> None:
        time.sleep(min(self._random.expovariate(1.0 / self._mean_delay), 10 * self._mean_delay))

    def _make_ready(self) -> None:
        """One thread for all buckets: they become ready in their order, while the backward pass goes on."""
        while True:
            task = self._becoming_ready.get()
            if task is None:
                return
            self._delay()
            task.notify_ready()

    def _release(self, fit: Fit | None) -> None:
        if fit is not None:
            self._release_up_to(fit.step.number)

    def _release_up_to(self, step: int) -> None:
        with self._released:
            self._released_step = max(self._released_step, step)
            self._released.notify_all()

    def _await_release(self, step: int) -> None:
        with self._released:
            if not self._released.wait_for(lambda: step <= self._released_step, self._patience):
                self.forced += 1
                self._released_step = step if self.forced < _ENOUGH_FORCED else sys.maxsize
