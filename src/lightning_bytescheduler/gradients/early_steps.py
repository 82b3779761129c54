"""A thread that takes the steps of buckets when they arrive, so that the forward pass finds them taken.

On a CPU the training thread is asleep or elsewhere while an accelerator computes, and would otherwise take each step
between two layers. Where PyTorch computes with several threads there is none: a second thread would have as many of its
own, and these take the processors from the first ones'.

The thread, ``bytescheduler-steps``, is owned by the engine, sleeps until a bucket has arrived, and ends within the time
given to :meth:`EarlySteps.stop`. It takes the engine's lock for one bucket at a time; nothing waits for it but by that
lock. What a step fails with has aborted the core by then, so the training thread learns it at its next wait.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

__all__ = ["EarlySteps"]

_IDLE_WAIT_S = 1.0  # only bounds how long a lost wake-up could stay unnoticed


class EarlySteps:
    """See the module.

    Args:
        step_one: Takes the step of one bucket that has arrived; returns whether there was one.
    """

    def __init__(self, step_one: Callable[[], bool]) -> None:
        self._step_one = step_one
        self._arrived = threading.Event()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="bytescheduler-steps", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """A bucket has arrived, or steps have become due; for any thread."""
        self._arrived.set()

    def stop(self, timeout: float) -> bool:
        """End the thread; returns whether it ended within ``timeout`` seconds. Not under the engine's lock."""
        self._stopping = True
        self._arrived.set()
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while not self._stopping:
            self._arrived.wait(_IDLE_WAIT_S)
            self._arrived.clear()
            try:
                while not self._stopping and self._step_one():
                    pass
            except BaseException:
                return  # the core is aborted; whoever trains raises it
