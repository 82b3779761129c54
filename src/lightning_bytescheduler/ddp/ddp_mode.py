"""Which steps are taken as DDP's: as DDP, until it is seen that something could be hidden and that hiding it pays.

Deferring updates costs a little on the training thread: gates, one optimizer call per bucket. Where gradients arrive
faster than that, DDP's own way is the faster one. So steps begin as DDP's, which cost nothing beside DDP, and show how
long training waits for communication at the end of their backward passes. What all ranks wait for at the same time,
while their processors have nothing to do, could be hidden. Where that is much of a step, overlapped steps are tried
soon; where it is some, once the few steps of a trial do not matter beside those that were taken. A trial ends as soon
as it is clear, and another one is the later the more have failed. On a link that is known to be slow from the start,
steps begin overlapped, and it is DDP's way that is tried.

Looks, at which ranks exchange what they have seen and rank 0 decides, are before the same steps on all ranks: the first
one is known beforehand, and how far it is to the next one follows from the step and from what was decided at all looks
before, which all ranks know (:func:`agree_on_mode`).
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
    """Says which steps are taken as DDP's; here, all or none.

    Args:
        ddp_mode: Whether they are.
    """

    may_wait = False
    """Whether :meth:`before_forward` waits for what rank 0 tells, past the default group."""

    def __init__(self, ddp_mode: bool = False) -> None:
        self._ddp_mode = ddp_mode

    @property
    def ddp_mode(self) -> bool:
        """Whether steps are taken as DDP's, at present."""
        return self._ddp_mode

    @property
    def tries(self) -> bool:
        """Whether sizes are being tried, on the rank that decides."""
        return False

    def before_forward(self, step: int) -> StepMode:
        """A forward pass of ``step`` begins, on all ranks; returns what says so from here on."""
        return self

    def begin_step(self, step: int) -> bool:
        """The backward pass of ``step`` has its first bucket; returns whether the step is one as DDP's."""
        return self.ddp_mode

    def add_exposed(self, seconds: float) -> None:
        """So long has training waited at the end of a step as DDP's with nothing to do; infinite if unknown."""


SeenStep = Callable[[int, float], None]
"""Told the number of a step and how long it took, in seconds."""


class StepTimer:
    """Takes the time of one engine's steps, from one backward pass to the next one.

    On a GPU by what it has done, not by what it has been told: the host may be whole steps ahead. Events on the
    training's stream take the moments, and are read once the GPU has passed them.

    Args:
        device: Where they are computed.
        clock: Seconds; for a CPU.
        cuda: Events and streams; replaced by tests.
    """

    def __init__(self, device: torch.device, clock: Callable[[], float], *, cuda: Any = torch.cuda) -> None:
        self._device = device
        self._clock = clock
        self._cuda = cuda
        self._began: Any = clock() if device.type != "cuda" else None
        self._unread: deque[tuple[int, Any, Any]] = deque()

    def begin(self, step: int, seen: SeenStep) -> None:
        """``step`` begins where the caller is; ``seen`` is told what is known of steps before it."""
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
        """``seen`` is told what is not known yet of steps that have ended; waits for a GPU to pass their ends."""
        while self._unread:
            self._unread[0][2].synchronize()
            self._read(seen)

    def _read(self, seen: SeenStep) -> None:
        step, start, end = self._unread.popleft()
        seen(step, start.elapsed_time(end) / 1e3)


SHOWN = 32
"""Last steps whose exposed communication is remembered."""

_FIRST_LOOK = 4  # before this step: the second and third are the first that a look can go by
_FARTHEST_LOOK = 64  # steps between looks at what is exposed
_MUCH = 0.2  # of a step: no link like this is met where nothing is to be gained
_SOME = 0.05
_LEAST_S = 0.003  # each partition takes a millisecond of processor time: less than a few cannot be hidden
_TRIAL_STEPS = 5  # until a trial may end, the one in which the last way is still felt and the one under way among them
_MORE_TRIAL_STEPS = 8  # until it has to
_CLEAR = 0.05
_WORTH_IT = 0.98  # of DDP's time; a tie goes to DDP, which has fewer moving parts
# Steps until a trial where only some communication is exposed: it is five of them, and may make them 1.5 times as long.
_AFFORDABLE_AFTER = 100
_FAILED_FACTOR = 4  # so many times the steps taken so far pass until another trial
_AGAIN_AFTER = 2000  # steps at most until something is tried again
_CHECK_AFTER = 20  # overlapped steps that were not found by a trial, until DDP's way is tried
_CHECK_FOUND_AFTER = 100  # those that were


@dataclass(frozen=True, slots=True)
class ModeChoice:
    """How steps are taken from one look to the next.

    Attributes:
        ddp_mode: As DDP's, or overlapped.
        trying: Whether that is a trial.
    """

    ddp_mode: bool
    trying: bool

    @property
    def kept(self) -> bool:
        """Whether steps are DDP's when no trial is made."""
        return self.ddp_mode != self.trying


@dataclass(frozen=True, slots=True)
class ModeFound:
    """What rank 0 has decided, and from what.

    Attributes:
        ddp_mode: Whether steps are taken as DDP's from here on.
        ddp_mode_s: Typical step as DDP's, in seconds; not a number if unknown.
        overlapped_s: Typical overlapped step, likewise.
        exposed_s: What could be hidden in a step as DDP's, likewise.
        to_be_tried: Whether so much is exposed that overlap is tried when the steps of a trial do not matter any more.
        changed: Whether ``ddp_mode`` is another one than was found last; the same on all ranks.
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
    """Says for each step whether it is to be one as DDP's. Pure: no clock, no communication.

    Args:
        overlapped: Begin overlapped, as the link is known to be slow.
        finds_layers: Whether the first overlapped steps are exact, and compressed ones come later, once it is known of
            how many layers: DDP's way is compared with those.
    """

    def __init__(self, *, overlapped: bool = False, finds_layers: bool = False) -> None:
        self._check_after = _CHECK_FOUND_AFTER if finds_layers else _CHECK_AFTER
        self._in_force = ModeChoice(ddp_mode=not overlapped, trying=False)
        self._since = 1  # first step of the mode in force
        self._failed = 0  # trials of overlap
        self._try_from = _AFFORDABLE_AFTER
        self._seconds: dict[bool, deque[float]] = {mode: deque(maxlen=SHOWN) for mode in (False, True)}
        self._exposed: deque[float] = deque(maxlen=SHOWN)
        self._told: bool | None = None
        self._exposed_by_all: float = math.nan
        self.next_look = _FIRST_LOOK if not overlapped else 1 + self._check_after
        """Before which step the ranks agree next."""

    # What this rank sees.

    def ddp_mode(self, step: int) -> bool:
        """Whether ``step``, counted from 1, is to be one as DDP's."""
        return self._in_force.ddp_mode

    @property
    def in_force(self) -> ModeChoice:
        """How steps are taken at present."""
        return self._in_force

    def is_due(self, step: int) -> bool:
        """Whether ranks have to agree before ``step``."""
        return step >= self.next_look

    def add_step(self, step: int, seconds: float) -> None:
        """Take down how long ``step`` took, from its backward pass to the next one.

        Not the first of a stretch of steps of one kind: the end of a step of the other kind is in it.
        """
        if step > self._since:
            self._seconds[self._in_force.ddp_mode].append(seconds)

    def add_exposed(self, seconds: float) -> None:
        """Take down what could have been hidden in a step as DDP's; infinite where that cannot be told."""
        self._exposed.append(seconds)

    @property
    def exposed(self) -> list[float]:
        """What was noted of the last steps, `SHOWN` numbers; infinite where nothing was."""
        return [math.inf] * (SHOWN - len(self._exposed)) + list(self._exposed)

    # What rank 0 decides, and every rank then does.

    def choose(self, step: int, exposed: Sequence[float]) -> ModeChoice:
        """Decide before ``step``.

        Args:
            step: The one that begins.
            exposed: The least that any rank has noted of each step, as `exposed`: what one rank alone waits for is
                another one that is late, which no order of communication changes.
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
        """Do what rank 0 has chosen before ``step``; returns what was found, where a trial has ended or that is news.

        Args:
            step: The one that begins.
            choice: Of `choose`, on rank 0.
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
            if choice.ddp_mode:  # overlap has been tried, or has been found wanting
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
        return not abs(here - other) <= _CLEAR * other  # also if there are no figures

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
    """Tries what is faster, see the module.

    Args:
        trial: This rank's.
        device: Where the default group wants its tensors, and where steps are computed.
        on_found: Told what was found if it is new or a trial has ended, on all ranks before the same step; may return
            what says so from there on.
        clock: Seconds.
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
        """See :class:`StepMode`: agree with the other ranks if a look is due."""
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
    """Let rank 0 decide, from what all ranks have seen and its own clock; every rank comes here before the same step.

    Why the same step: a look is due at a number of steps that only `ModeTrial.follow` changes, from the step of the
    look, its own state and rank 0's choice. All ranks begin with the same state and go through the same looks with the
    same choices, so they come to the same number; by induction, for good. What a rank has timed itself enters nothing
    but `ModeTrial.choose`, whose result counts on rank 0 alone.

    Args:
        trial: This rank's; its steps have been noted.
        step: The one that begins.
        device: Where the default group wants its tensors.

    Returns:
        What was found if it is new, or a trial has ended.
    """
    exposed = torch.tensor(trial.exposed, dtype=torch.float64, device=device)
    dist.all_reduce(exposed, op=dist.ReduceOp.MIN)
    by_all: list[float] = exposed.tolist()
    wanted = trial.choose(step, by_all)
    message = torch.tensor([wanted.ddp_mode, wanted.trying], dtype=torch.int64, device=device)
    dist.broadcast(message, src=0)
    ddp_mode, trying = (bool(number) for number in message.tolist())
    return trial.follow(step, ModeChoice(ddp_mode=ddp_mode, trying=trying), by_all)
