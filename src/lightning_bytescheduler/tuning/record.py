"""The record of a search: what was tried, how long steps took, and what that holds for.

A record is a file with one JSON object a line (:class:`TrialEntry`), appended as things happen. A step time
(:class:`StepTimeEstimate`) is made of few steps that are now and then disturbed. A result says nothing about another
model or another link (:class:`TuningIdentity`).

Location is the median and scale the median absolute deviation: neither moves much while fewer than half of the
steps are disturbed, by a checkpoint elsewhere, a slow disk, or the garbage collector. The median of ``n`` steps has a
standard error of about ``1.2533 × scale / sqrt(n)``.
"""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import msgspec

from lightning_bytescheduler.checks import require_not_negative, require_one_of, require_text, require_whole
from lightning_bytescheduler.exceptions import OptionError
from lightning_bytescheduler.tuning.default_sizes import LinkEstimate
from lightning_bytescheduler.tuning.search_space import TuningPoint

RECORD_NAME = "tuning.jsonl"
"""Of the record in a run's directory."""

KINDS = ("start", "ddp", "guess", "search", "confirm", "chosen", "drift", "failed")
"""The point in force at the start, DDP's behaviour, a guess from outside, a point of the search, a point measured
again; the choice; the step time left what was chosen for; the search could not go on."""

_OUTCOMES = ("measured", "abandoned")

_CONSISTENT = 1.4826  # makes the median absolute deviation a normal distribution's standard deviation
_MEDIAN_ERROR = math.sqrt(math.pi / 2)
_LEAST_SCALE = 0.002  # of the location; coarse clocks must not make us certain
_TRUSTED = 8  # steps; from fewer, the deviation is no estimate of the scale
_CERTAIN = 3.0  # standard errors
_SAME_LINK = 2.0  # probes of one link differ; beyond this factor it is another


@dataclass(frozen=True, slots=True)
class StepTimeEstimate:
    """A robust estimate.

    Attributes:
        seconds: Of a typical step.
        error: Standard error of ``seconds``.
        scale: Standard deviation of undisturbed steps, in seconds.
        steps: How many it was made of.
    """

    seconds: float
    error: float
    scale: float
    steps: int

    @classmethod
    def of(cls, samples: Sequence[float], *, usual_noise: float = 0.0) -> StepTimeEstimate:
        """Make the estimate.

        Args:
            samples: Seconds of steps, at least one.
            usual_noise: Scale of other measurements relative to their location. The scale is taken to be at least
                this while there are few samples, whose deviation may be small by chance.
        """
        ordered = sorted(samples)
        # Of an even number the lower of the middle two: one of two, or two of four, may be disturbed.
        seconds = statistics.median_low(ordered)
        scale = _CONSISTENT * statistics.median_low(abs(sample - seconds) for sample in ordered)
        noise = usual_noise if len(ordered) < _TRUSTED else 0.0
        scale = max(scale, seconds * max(_LEAST_SCALE, noise))
        return cls(seconds, _MEDIAN_ERROR * scale / math.sqrt(len(ordered)), scale, len(ordered))

    @property
    def noise(self) -> float:
        """Scale relative to the location."""
        return self.scale / self.seconds


def is_clearly_slower(time: StepTimeEstimate, reference: StepTimeEstimate) -> bool:
    """Whether more steps would not change that ``time`` is the larger one. One step alone is never clear."""
    margin = _CERTAIN * math.hypot(time.error, reference.error)
    return time.steps >= 2 and time.seconds - reference.seconds > margin


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialEntry:
    """What happened at one point, or what was decided.

    Attributes:
        search: Which search, from 0; another one follows a drift.
        kind: One of ``KINDS``.
        step: At which step it ended.
        credit: In parameters; ``None`` for plain DDP.
        partition_size: In parameters; ``None`` for plain DDP.
        step_seconds: Of a typical step.
        error_seconds: Standard error of ``step_seconds``.
        noise: Standard deviation of undisturbed steps, as a share of ``step_seconds``.
        steps: How many were measured.
        outcome: ``"measured"``, or ``"abandoned"`` if it was clearly worse or too costly to go on with.
        lost_seconds: Against the best that was known.
        note: For a reader; may be empty.
    """

    search: int
    kind: str
    step: int
    credit: int | None
    partition_size: int | None
    step_seconds: float
    error_seconds: float
    noise: float
    steps: int
    outcome: str = "measured"
    lost_seconds: float = 0.0
    note: str = ""

    def __post_init__(self) -> None:
        require_one_of("kind", self.kind, KINDS)
        require_one_of("outcome", self.outcome, _OUTCOMES)
        for option in ("search", "step", "steps"):
            require_whole(option, getattr(self, option), 0)
        for option in ("step_seconds", "error_seconds", "noise", "lost_seconds"):
            require_not_negative(option, getattr(self, option))
        TuningPoint(credit=self.credit, partition_size=self.partition_size)

    @property
    def point(self) -> TuningPoint:
        """Where it was."""
        return TuningPoint(credit=self.credit, partition_size=self.partition_size)

    @property
    def step_time(self) -> StepTimeEstimate:
        """What was measured."""
        return StepTimeEstimate(self.step_seconds, self.error_seconds, self.noise * self.step_seconds, self.steps)

    @property
    def is_trial(self) -> bool:
        """Whether it is one of the points that count against the number of trials."""
        return self.kind in ("start", "ddp", "guess", "search")


def standing_of(entries: Sequence[TrialEntry], most: int = 0) -> str:
    """What is fastest so far in the last search, against what, and after how many trials; of ``most``, if given."""
    entries = [entry for entry in entries if entry.search == entries[-1].search]
    trials = [entry for entry in entries if entry.is_trial]
    if not trials:
        return "the fastest credit is searched while training"
    chosen = next((entry for entry in reversed(entries) if entry.kind == "chosen"), None)
    measured = [entry for entry in trials if entry.outcome == "measured"] or trials
    best = chosen or min(measured, key=lambda entry: entry.step_seconds)
    as_ddp = best.point.is_plain_ddp
    others = [entry for entry in entries if entry.point.is_plain_ddp != as_ddp]
    again = [entry for entry in others if entry.kind == "confirm"]  # in turns: these can be compared
    others = again or [entry for entry in others if entry.is_trial]
    against = ""
    if others:
        way = "overlapped" if as_ddp else "synchronised"
        against = f" against {1e3 * min(entry.step_seconds for entry in others):.1f} ms {way}"
    way = "synchronised steps" if as_ddp else f"overlapped steps with {best.point}"
    words = f"{way} are fastest{'' if chosen else ' so far'} ({1e3 * best.step_seconds:.1f} ms{against})"
    if chosen or not most:
        return f"{words}, after {len(trials)} trial{'s' * (len(trials) > 1)}"
    return f"{words}; {'trials are used up' if len(trials) >= most else f'{len(trials)} of {most} trials made'}"


def append_entries(file: str | os.PathLike[str], entries: Iterable[TrialEntry]) -> None:
    """Add entries to a record; the file and its parent directories are created.

    Raises:
        OSError: If the file cannot be written.
    """
    target = Path(file)
    target.parent.mkdir(parents=True, exist_ok=True)
    lines = b"".join(msgspec.json.encode(entry) + b"\n" for entry in entries)
    with target.open("ab") as stream:
        stream.write(lines)


def read_record(file: str | os.PathLike[str]) -> tuple[TrialEntry, ...]:
    """Read a record. A last line that was cut off, by a crash, is left out.

    Raises:
        OptionError: If the file is no record; names the line.
        OSError: If the file cannot be read.
    """
    lines = Path(file).read_bytes().split(b"\n")
    entries = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            # A newer version may say more: fields that are not known are left out.
            entries.append(msgspec.json.decode(line, type=TrialEntry))
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            if number == len(lines):
                break  # no newline after it
            raise OptionError("record", f"{os.fspath(file)}:{number}", f"lines of a tuning record ({error})") from error
    return tuple(entries)


@dataclass(frozen=True, kw_only=True, slots=True)
class TuningIdentity:
    """Model, workers and link.

    Attributes:
        parameters: How many are trained.
        bytes_per_parameter: Size of one gradient element.
        workers: How many train together.
        backend: What reduces gradients, such as ``"gloo"``.
        link: As measured, or ``None`` if it was not.
        in_shards: Whether gradients are reduced in shards, for which other sizes are good.

    Raises:
        OptionError: Names the attribute that is not allowed.
    """

    parameters: int
    bytes_per_parameter: int
    workers: int
    backend: str
    link: LinkEstimate | None = None
    in_shards: bool = False

    def __post_init__(self) -> None:
        for option in ("parameters", "bytes_per_parameter", "workers"):
            require_whole(option, getattr(self, option), 1)
        require_text("backend", self.backend)

    def matches(self, other: TuningIdentity) -> bool:
        """Whether results for one hold for the other. A link that was not measured matches any."""
        for field in fields(self):
            if field.name != "link" and getattr(self, field.name) != getattr(other, field.name):
                return False
        if self.link is None or other.link is None:
            return True
        # Start-up costs are tiny and noisy, so what the model's messages take is compared.
        size = self.parameters * self.bytes_per_parameter / 64
        ratio = self.link.seconds(size) / other.link.seconds(size)
        return 1 / _SAME_LINK <= ratio <= _SAME_LINK
