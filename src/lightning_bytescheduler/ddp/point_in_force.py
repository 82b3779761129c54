"""The point in force on each rank: sizes of the scheduler, or plain DDP.

Rank 0 decides, and is the only one to time steps: its tuner gets their durations, and what could be hidden in steps as
DDP's. A wait on one rank alone is for a late rank, which no order of communication changes, so the least counts that
any rank saw. ``AgreedValues`` brings it to rank 0, and rank 0's decision to all ranks, with the step before which it
takes effect. All ranks change credit, partition size and mode at that step, between two backward passes, so all buckets
of a step are cut or merged alike. The credit must change on all ranks, too: a rank with a smaller window than rank 0's
would hold back what rank 0 has launched.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Callable

import torch

from lightning_bytescheduler.collectives.number_exchange import MOST, AgreedValues
from lightning_bytescheduler.ddp.device_time import StepTimer
from lightning_bytescheduler.scheduler.core import ByteCore
from lightning_bytescheduler.tuning.credit_tuner import CreditTuner
from lightning_bytescheduler.tuning.sizes import TuningPoint

SETTLED_INTERVAL = 16  # steps between exchanges while nothing is tried
_SHOWN = 16  # last steps as DDP's whose exposed communication is remembered
_UNKNOWN = MOST - 1  # nanoseconds, for what cannot be known


class StepMode:
    """Says which steps are taken as DDP's; this class says all or none.

    Attributes:
        ddp_mode: Whether steps are taken as DDP's at present.
        may_wait: Whether :meth:`before_forward` waits for other ranks on another group than the default one.
    """

    may_wait = False

    def __init__(self, ddp_mode: bool = False) -> None:
        self.ddp_mode = ddp_mode

    @property
    def tries(self) -> bool:
        """Whether something is being tried, on the rank that decides."""
        return False

    def before_forward(self, step: int) -> None:
        """Begin a forward pass of ``step``, on all ranks."""

    def add_exposed(self, seconds: float) -> None:
        """Record the seconds that training waited idle at the end of a step as DDP's; infinite if unknown."""


class PointInForce(StepMode):
    """Sizes and mode in force on one rank; all ranks make it at the same point.

    Args:
        tuner: Decides; only on rank 0.
        others_try: Returns whether something else is being tried, so that times of steps do not belong to the point.
    """

    may_wait = True

    def __init__(
        self,
        *,
        core: ByteCore,
        values: AgreedValues,
        point: TuningPoint,
        tuner: CreditTuner | None = None,
        on_change: Callable[[TuningPoint], None],
        device: torch.device,
        others_try: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        super().__init__()
        self._others_try = others_try
        self._core = core
        self._values = values
        self._tuner = tuner
        self._on_change = on_change
        self._times = StepTimer(device, clock)
        self._exposed: deque[float] = deque(maxlen=_SHOWN)
        self._hideable: float | None = None
        self._step = 0
        self._put(point)

    @property
    def tries(self) -> bool:
        """See :class:`StepMode`."""
        return self._tuner is not None and not self._tuner.is_settled

    def before_forward(self, step: int) -> None:
        """See :class:`StepMode`.

        Args:
            step: Number of the step that this pass belongs to, from 1; several passes may belong to one.
        """
        if step <= self._step:
            return
        self._step = step
        if self._tuner is not None:
            self._times.begin(step, self._step_took)
        wanted, interval = None, 1
        if self._tuner is not None:
            wanted, interval = self._tuner.current.numbers, SETTLED_INTERVAL if self._tuner.is_settled else 1
        seen = [_UNKNOWN if math.isinf(seconds) else int(1e9 * seconds) for seconds in self._exposed]
        seen += [MOST] * (_SHOWN - len(seen))
        agreed = self._values.before_step(step, wanted, interval=interval, seen=seen)
        if agreed is None:
            return
        point, known = TuningPoint.of(agreed[:2]), [least for least in agreed[2:] if least < MOST]
        hideable = statistics.median_low(known) if known else None
        self._hideable = math.inf if hideable == _UNKNOWN else hideable and hideable / 1e9
        if point != self._point:
            self._put(point)

    def _step_took(self, step: int, seconds: float) -> None:
        # Something else is tried in overlapped steps only.
        if self._tuner is None or step < 1 or (self._others_try() and not self.ddp_mode):
            return
        # Until all ranks know a decision, steps are still at the old point.
        as_decided = step >= self._since and self._tuner.current == self._point
        self._tuner.step_took(step, seconds, as_decided=as_decided, hideable=self._hideable)

    def add_exposed(self, seconds: float) -> None:
        """See :class:`StepMode`."""
        self._exposed.append(seconds)

    def close(self) -> None:
        """Leave the exchange with the other ranks; bounded, idempotent."""
        self._values.close()

    def _put(self, point: TuningPoint) -> None:
        self._point, self._since = point, self._step
        self.ddp_mode = point.is_plain_ddp
        self._exposed.clear()
        self._hideable = None
        if not point.is_plain_ddp:
            self._core.credit, self._core.partition_size = point.sizes
        self._on_change(point)
