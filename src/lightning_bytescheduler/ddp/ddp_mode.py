"""Decides which steps are taken as DDP's: all, until overlap is seen to pay.

Deferred updates cost some time on the training thread: gates, and one optimizer call per bucket. Where gradients arrive
faster than that, DDP's way is faster. So steps begin as DDP's, at no cost, and measure how long training waits for
communication at the end of the backward pass. A wait that all ranks share, with idle processors, could be hidden. If it
is a large part of a step, overlapped steps are tried soon. If it is a smaller part, they are tried once a trial's few
steps are negligible among the steps so far. A trial ends as soon as its result is clear; each failure delays the next
one. On a link that is known to be slow, steps begin overlapped, and DDP's way is tried.

At a *look* ranks exchange their observations and rank 0 decides. Looks are before the same steps on all ranks: the
first is fixed, and the distance to the next follows from the step and from the decisions at all earlier looks, which
all ranks know (:func:`agree_on_mode`).
"""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist


class StepMode:
    """Says which steps are taken as DDP's; this class says all or none."""

    may_wait = False
    """Whether :meth:`before_forward` waits for a message of rank 0 on another group than the default one."""

    def __init__(self, ddp_mode: bool = False) -> None:
        self._ddp_mode = ddp_mode

    @property
    def ddp_mode(self) -> bool:
        """Whether steps are taken as DDP's at present."""
        return self._ddp_mode

    @property
    def tries(self) -> bool:
        """Whether sizes are being tried, on the rank that decides."""
        return False

    def before_forward(self, step: int) -> StepMode:
        """Begin a forward pass of ``step``, on all ranks; returns the mode to use from here on."""
        return self

    def begin_step(self, step: int) -> bool:
        """Begin ``step`` at its first bucket; returns whether the step is taken as DDP's."""
        return self.ddp_mode

    def add_exposed(self, seconds: float) -> None:
        """Record the seconds that training waited idle at the end of a step as DDP's; infinite if unknown."""


SeenStep = Callable[[int, float], None]
"""Called with the number of a step and its duration in seconds."""


class StepTimer:
    """Times one engine's steps, from one backward pass to the next.

    On a GPU it records events on the training's stream, as the host may be whole steps ahead, and reads them once the
    GPU has passed them.
    """

    def __init__(self, device: torch.device, clock: Callable[[], float], *, cuda: Any = torch.cuda) -> None:
        self._device = device
        self._clock = clock
        self._cuda = cuda
        self._began: Any = clock() if device.type != "cuda" else None
        self._unread: deque[tuple[int, Any, Any]] = deque()

    def begin(self, step: int, seen: SeenStep) -> None:
        """Begin ``step``; ``seen`` gets the known times of earlier steps."""
        if self._device.type != "cuda":
            now = self._clock()
            seen(step - 1, now - self._began)
            self._began = now
            return
        now = self._cuda.Event(enable_timing=True)
        now.record(self._cuda.current_stream(self._device))
        if self._began is not None:
            self._unread.append((step - 1, self._began, now))
        self._began = now
        while self._unread and self._unread[0][2].query():
            self._read(seen)

    def read_all(self, seen: SeenStep) -> None:
        """Pass the times of all ended steps to ``seen``; waits for the GPU to reach their ends."""
        while self._unread:
            self._unread[0][2].synchronize()
            self._read(seen)

    def _read(self, seen: SeenStep) -> None:
        step, start, end = self._unread.popleft()
        seen(step, start.elapsed_time(end) / 1e3)


SHOWN = 32
"""Number of last steps whose exposed communication is remembered."""

_FIRST_LOOK = 4  # before this step: only the second and third step are typical so far
_FARTHEST_LOOK = 64  # steps between looks at exposed communication
_MUCH = 0.2  # of a step: so much exposed communication means that overlap is likely to pay
_SOME = 0.05
_LEAST_S = 0.003  # each partition costs about a millisecond of processor time, so shorter waits cannot be hidden
_TRIAL_STEPS = 5  # before a trial may end, including one step that still mixes both ways and the one in progress
_MORE_TRIAL_STEPS = 8  # before it has to end
_CLEAR = 0.05
_WORTH_IT = 0.98  # of DDP's time; a tie goes to DDP, which is simpler
# Steps before a trial if only some communication is exposed: the trial has five steps, up to 1.5 times as long.
_AFFORDABLE_AFTER = 100
_FAILED_FACTOR = 4  # a failed trial is repeated after this many times the steps so far
_AGAIN_AFTER = 2000  # longest number of steps until something is tried again
_CHECK_AFTER = 20  # overlapped steps before DDP's way is tried, if no trial chose overlap
_CHECK_FOUND_AFTER = 100  # the same, if a trial chose overlap


@dataclass(frozen=True, slots=True)
class ModeChoice:
    """How steps are taken from one look to the next."""

    ddp_mode: bool
    trying: bool

    @property
    def kept(self) -> bool:
        """Whether steps are DDP's outside trials."""
        return self.ddp_mode != self.trying


@dataclass(frozen=True, slots=True)
class ModeFound:
    """Rank 0's decision and the observations behind it.

    Attributes:
        ddp_mode_s: Seconds of a typical step as DDP's; NaN if unknown.
        overlapped_s: Seconds of a typical overlapped step; NaN if unknown.
        exposed_s: Seconds that could be hidden in a step as DDP's; NaN if unknown.
        to_be_tried: Whether so much is exposed that overlap will be tried when a trial is affordable.
        changed: Whether ``ddp_mode`` differs from the last result; the same on all ranks.
    """

    ddp_mode: bool
    ddp_mode_s: float
    overlapped_s: float
    exposed_s: float
    to_be_tried: bool = False
    changed: bool = True

    @property
    def compared(self) -> bool:
        """Whether both ways were timed."""
        return not (math.isnan(self.ddp_mode_s) or math.isnan(self.overlapped_s))


class ModeTrial:
    """Chooses for each step whether it is taken as DDP's. It reads no clock and sends nothing.

    Args:
        finds_layers: Whether the first overlapped steps are exact and the number of compressed layers is found later.
            DDP's way is compared with compressed steps.
    """

    def __init__(self, *, overlapped: bool = False, finds_layers: bool = False) -> None:
        self._check_after = _CHECK_FOUND_AFTER if finds_layers else _CHECK_AFTER
        self._in_force = ModeChoice(ddp_mode=not overlapped, trying=False)
        self._since = 1  # first step of the mode in force
        self._failed = 0  # failed trials of overlap
        self._try_from = _AFFORDABLE_AFTER
        self._seconds: dict[bool, deque[float]] = {mode: deque(maxlen=SHOWN) for mode in (False, True)}
        self._exposed: deque[float] = deque(maxlen=SHOWN)
        self._told: bool | None = None
        self._exposed_by_all: float = math.nan
        self.next_look = _FIRST_LOOK if not overlapped else 1 + self._check_after
        """The step before which ranks agree next."""

    # Observations of this rank.

    def ddp_mode(self, step: int) -> bool:
        """Whether ``step``, counted from 1, is taken as DDP's."""
        return self._in_force.ddp_mode

    @property
    def in_force(self) -> ModeChoice:
        """How steps are taken at present."""
        return self._in_force

    def is_due(self, step: int) -> bool:
        """Whether ranks have to agree before ``step``."""
        return step >= self.next_look

    def add_step(self, step: int, seconds: float) -> None:
        """Record the duration of ``step``, from its backward pass to the next one.

        The first step after a change of mode is ignored, as it contains the end of a step of the other mode.
        """
        if step > self._since:
            self._seconds[self._in_force.ddp_mode].append(seconds)

    def add_exposed(self, seconds: float) -> None:
        """Record the seconds that could have been hidden in a step as DDP's; infinite if unknown."""
        self._exposed.append(seconds)

    @property
    def exposed(self) -> list[float]:
        """The recorded values of the last `SHOWN` steps; infinite where there is none."""
        return [math.inf] * (SHOWN - len(self._exposed)) + list(self._exposed)

    # Decisions of rank 0, which every rank follows.

    def choose(self, step: int, exposed: Sequence[float]) -> ModeChoice:
        """Decide before ``step``.

        Args:
            step: The step that begins.
            exposed: The least value that any rank recorded for each step, as `exposed`. A wait on one rank alone is for
                a late rank, which no order of communication changes.
        """
        kept = self._in_force.kept
        if self._in_force.trying:
            if not self._is_clear(step):
                return self._in_force
            ddp_mode_s, overlapped_s = self._typical(True), self._typical(False)
            return ModeChoice(ddp_mode=not overlapped_s < _WORTH_IT * ddp_mode_s, trying=False)
        if not kept:
            return ModeChoice(ddp_mode=True, trying=True)
        share = self._share_exposed(exposed)
        affordable = step >= self._try_from or (share >= _MUCH and not self._failed)
        return ModeChoice(ddp_mode=False, trying=True) if share >= _SOME and affordable else self._in_force

    def follow(self, step: int, choice: ModeChoice, exposed: Sequence[float]) -> ModeFound | None:
        """Follow rank 0's choice before ``step``. Returns a result if a trial has ended or the mode is new.

        Args:
            step: The step that begins.
            choice: Result of `choose` on rank 0.
            exposed: As for `choose`.
        """
        before, self._in_force = self._in_force, choice
        self._exposed_by_all = self._typical_exposed(exposed)
        found = None
        changed = choice.ddp_mode != self._told
        if not choice.trying and (before.trying or (changed and step > _FIRST_LOOK)):
            self._told = choice.ddp_mode
            found = ModeFound(
                choice.ddp_mode,
                self._typical(True),
                self._typical(False),
                self._exposed_by_all,
                to_be_tried=self._share_exposed(exposed) >= _SOME,
                changed=changed,
            )
        if before.trying and not choice.trying:
            if choice.ddp_mode:  # overlap has failed, in a trial or against DDP's way
                self._failed += 1
                self._try_from = step + min(_FAILED_FACTOR * max(step, _AFFORDABLE_AFTER), _AGAIN_AFTER)
            else:
                self._check_after = _CHECK_FOUND_AFTER if not before.ddp_mode else _FAILED_FACTOR * self._check_after
                self._check_after = min(self._check_after, _AGAIN_AFTER)
        if choice.ddp_mode != before.ddp_mode:
            self._since = step
            self._seconds[choice.ddp_mode].clear()
            self._exposed.clear()
        self.next_look = step + self._until_next_look(step, before)
        return found

    def _until_next_look(self, step: int, before: ModeChoice) -> int:
        if self._in_force.trying:
            return _TRIAL_STEPS if not before.trying else _MORE_TRIAL_STEPS
        if not self._in_force.ddp_mode:
            return self._check_after
        wait = self._try_from - step if self._failed else 0
        return max(min(max(step - self._since + 1, _FIRST_LOOK), _FARTHEST_LOOK), wait)

    def _is_clear(self, step: int) -> bool:
        if step - self._since > _TRIAL_STEPS:
            return True
        here, other = self._typical(self._in_force.ddp_mode), self._typical(not self._in_force.ddp_mode)
        return not abs(here - other) <= _CLEAR * other  # also true if a time is missing

    def _share_exposed(self, exposed: Sequence[float]) -> float:
        typical, step_s = self._typical_exposed(exposed), self._typical(True)
        if math.isnan(typical) or math.isnan(step_s) or typical < _LEAST_S:
            return 0.0
        return min(typical / step_s, 1.0)

    def _typical_exposed(self, exposed: Sequence[float]) -> float:
        seen = exposed[SHOWN - len(self._exposed) :]
        return statistics.median_low(seen) if seen else math.nan

    def _typical(self, ddp_mode: bool) -> float:
        seconds = self._seconds[ddp_mode]
        return statistics.median_low(seconds) if seconds else math.nan


class TriedMode(StepMode):
    """Tries which mode is faster; see the module.

    Args:
        device: Where the default group needs its tensors, and where steps are computed.
        on_found: Called with a result if a trial has ended or the mode is new, on all ranks before the same step; may
            return another mode to use from then on.
    """

    def __init__(
        self,
        trial: ModeTrial,
        device: torch.device,
        on_found: Callable[[ModeFound], StepMode | None],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        super().__init__()
        self._trial = trial
        self._device = device
        self._on_found = on_found
        self._times = StepTimer(device, clock)

    @property
    def ddp_mode(self) -> bool:
        """See :class:`StepMode`."""
        return self._trial.in_force.ddp_mode

    def before_forward(self, step: int) -> StepMode:
        """See :class:`StepMode`: agrees with the other ranks if a look is due."""
        if not self._trial.is_due(step):
            return self
        self._times.read_all(self._trial.add_step)
        found = agree_on_mode(self._trial, step, self._device)
        return self if found is None else self._on_found(found) or self

    def begin_step(self, step: int) -> bool:
        """See :class:`StepMode`."""
        self._times.begin(step, self._trial.add_step)
        return self._trial.ddp_mode(step)

    def add_exposed(self, seconds: float) -> None:
        """See :class:`StepMode`."""
        self._trial.add_exposed(seconds)


def agree_on_mode(trial: ModeTrial, step: int, device: torch.device) -> ModeFound | None:
    """Let rank 0 decide, from all ranks' observations and its own clock; every rank calls this before the same step.

    Why it is the same step: only `ModeTrial.follow` sets the step of the next look, from the step of this look, its own
    state and rank 0's choice. All ranks begin with the same state and see the same choices at the same looks, so by
    induction they reach the same number. A rank's own times enter only `ModeTrial.choose`, whose result counts on rank
    0 alone.

    Returns:
        The result, if a trial has ended or the mode is new.
    """
    exposed = torch.tensor(trial.exposed, dtype=torch.float64, device=device)
    dist.all_reduce(exposed, op=dist.ReduceOp.MIN)
    by_all: list[float] = exposed.tolist()
    wanted = trial.choose(step, by_all)
    message = torch.tensor([wanted.ddp_mode, wanted.trying], dtype=torch.int64, device=device)
    dist.broadcast(message, src=0)
    ddp_mode, trying = (bool(number) for number in message.tolist())
    return trial.follow(step, ModeChoice(ddp_mode=ddp_mode, trying=trying), by_all)
