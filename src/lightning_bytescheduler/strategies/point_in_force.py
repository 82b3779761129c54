"""Credit, partition size and mode of a fit that is tuned: the same on all ranks in every step.

Rank 0 times steps and lets its tuner decide; `AgreedValues` makes the decision known, and says before which step it
comes into force. All ranks change all three at that step, between the last step's backward pass and the next one's, so
no bucket of one step is cut, or merged, in two ways. The credit would not have to change on all ranks, but a rank with
a smaller window than rank 0's would hold back what rank 0 has let go.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from lightning_bytescheduler.callbacks.credit_tuner import CreditTuner
from lightning_bytescheduler.collectives.agreed_values import AgreedValues
from lightning_bytescheduler.gradients.engine import GradientEngine
from lightning_bytescheduler.scheduler.core import ByteCore
from lightning_bytescheduler.tuning.point import PLAIN_DDP, TuningPoint

__all__ = ["PointInForce"]

_SETTLED_INTERVAL = 16  # steps between exchanges while nothing is tried


class PointInForce:
    """One rank's.

    Args:
        core: Whose sizes are changed.
        engine: Whose mode is changed.
        values: What ranks agree with; of two numbers.
        point: What all ranks begin with.
        tuner: Decides; on rank 0 only.
        on_change: Told what has come into force.
        clock: Seconds.
    """

    def __init__(
        self,
        *,
        core: ByteCore,
        engine: GradientEngine,
        values: AgreedValues,
        point: TuningPoint,
        tuner: CreditTuner | None = None,
        on_change: Callable[[TuningPoint], None],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._core = core
        self._engine = engine
        self._values = values
        self._tuner = tuner
        self._on_change = on_change
        self._clock = clock
        self._step = 0
        self._began = 0.0
        self._put(point)

    def before_forward(self, step: int) -> None:
        """Every rank comes here at the start of each forward pass.

        Args:
            step: Number of the step that this pass belongs to, from 1; several passes may belong to one.
        """
        if step <= self._step:
            return
        now = self._clock()
        if self._tuner is None:
            agreed = self._values.before_step(step)
        else:
            if self._step:
                # A decision that not all ranks know yet is none: these steps are still at the old point.
                self._tuner.note(self._step, now - self._began, as_decided=self._tuner.current == self._point)
            wanted = self._tuner.current
            agreed = self._values.before_step(
                step,
                (wanted.credit or 0, wanted.partition_size or 0),
                interval=_SETTLED_INTERVAL if self._tuner.is_settled else 1,
            )
        self._step, self._began = step, now
        if agreed is not None:
            credit, partition_size = agreed
            point = TuningPoint(credit=credit, partition_size=partition_size) if credit else PLAIN_DDP
            if point != self._point:
                self._put(point)

    def close(self) -> None:
        """Say goodbye to the other ranks; bounded, idempotent."""
        self._values.close()

    def _put(self, point: TuningPoint) -> None:
        self._point = point
        self._engine.mode = point.is_plain_ddp
        if not point.is_plain_ddp:
            self._core.credit, self._core.partition_size = point.sizes
        self._on_change(point)
