"""The record of a search: which points were tried, how long steps took, and what the results hold for.

A record is a file with one JSON object per line (:class:`TrialEntry`), appended as things happen. A step time
(:class:`StepTimeEstimate`) comes from few steps, some of them disturbed. A result says nothing about another model or
another link (:class:`TuningIdentity`).

Location is the median and scale the median absolute deviation. Neither moves much while fewer than half of the steps
are disturbed, by a checkpoint elsewhere, a slow disk, or the garbage collector. The median of ``n`` steps has a
standard error of about ``1.2533 × scale / sqrt(n)``.

The module also has the command ``lightning-bytescheduler tuning``. It shows a record as a table and as a picture (with
matplotlib, imported when needed), and the choice as options to paste.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec

from lightning_bytescheduler.checks import read_lines
from lightning_bytescheduler.exceptions import OptionError
from lightning_bytescheduler.timeline.picture import INK, add_picture, add_record, headed, page, ruled
from lightning_bytescheduler.tuning.sizes import LinkEstimate, TuningPoint

if TYPE_CHECKING:
    from matplotlib.axes import Axes

RECORD_NAME = "tuning.jsonl"
"""Name of the record in a run's directory."""

Kind = Literal["start", "ddp", "guess", "search", "confirm", "chosen", "drift"]
"""Kinds of entries: the point in force at the start, plain DDP, the sizes that the link suggests, a point that the
search proposed, a point measured again; the choice; the step time drifted from that of the choice."""

Outcome = Literal["measured", "abandoned"]

_Count = Annotated[int, msgspec.Meta(ge=0)]
_Figure = Annotated[float, msgspec.Meta(ge=0)]

_CONSISTENT = 1.4826  # makes the median absolute deviation a normal distribution's standard deviation
_MEDIAN_ERROR = math.sqrt(math.pi / 2)
_LEAST_SCALE = 0.002  # of the location; a coarse clock must not suggest certainty
_TRUSTED = 8  # steps; the deviation of fewer is no estimate of the scale
_CERTAIN = 3.0  # standard errors
_SAME_LINK = 2.0  # probes of one link differ; beyond this factor it is another link


@dataclass(frozen=True, slots=True)
class StepTimeEstimate:
    """A robust estimate of a step time.

    Attributes:
        seconds: Time of a typical step.
        error: Standard error of ``seconds``.
        scale: Standard deviation of undisturbed steps, in seconds.
        steps: Number of steps in the estimate.
    """

    seconds: _Figure
    error: _Figure
    scale: _Figure
    steps: _Count

    @classmethod
    def of(cls, samples: Sequence[float], *, usual_noise: float = 0.0) -> StepTimeEstimate:
        """Make the estimate.

        Args:
            samples: Seconds of each step, at least one.
            usual_noise: Relative scale of other measurements. A few samples may deviate little by chance, so their
                scale is taken to be at least this.
        """
        ordered = sorted(samples)
        # For an even number, the lower of the middle two: of two steps one may be disturbed, and of four two.
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
    """Whether ``time`` is the larger one, and more steps would not change that. One step alone is never enough."""
    margin = _CERTAIN * math.hypot(time.error, reference.error)
    return time.steps >= 2 and time.seconds - reference.seconds > margin


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialEntry:
    """What happened at one point, or what was decided.

    Attributes:
        search: The search's number, from 0; another search follows a drift.
        kind: What happened.
        step: The step at which it ended.
        point: The sizes, or plain DDP.
        time: The measured step time.
        outcome: ``"measured"``, or ``"abandoned"`` if the point was clearly worse or the trial too costly to continue.
    """

    search: _Count
    kind: Kind
    step: _Count
    point: TuningPoint
    time: StepTimeEstimate
    outcome: Outcome = "measured"

    @property
    def is_trial(self) -> bool:
        """Whether it counts against the number of trials."""
        return self.kind in ("start", "ddp", "guess", "search")


def standing_of(entries: Sequence[TrialEntry], most: int = 0) -> str:
    """The fastest point of the last search so far, what it is compared with, and after how many trials of ``most``."""
    entries = [entry for entry in entries if entry.search == entries[-1].search]
    trials = [entry for entry in entries if entry.is_trial]
    chosen = next((entry for entry in reversed(entries) if entry.kind == "chosen"), None)
    measured = [entry for entry in trials if entry.outcome == "measured"] or entries
    best = chosen or min(measured, key=lambda entry: entry.time.seconds)
    as_ddp = best.point.is_plain_ddp
    others = [entry for entry in entries if entry.point.is_plain_ddp != as_ddp]
    again = [entry for entry in others if entry.kind == "confirm"]  # measured in turns, so these can be compared
    other_ms = [1e3 * entry.time.seconds for entry in again or others if entry.is_trial or again]
    ms = 1e3 * best.time.seconds
    if as_ddp and other_ms and min(other_ms) < ms:
        words = f"overlapped steps are hardly faster ({min(other_ms):.1f} ms against {ms:.1f} ms synchronised)"
    else:
        way = "synchronised steps" if as_ddp else f"overlapped steps with {best.point}"
        other = "overlapped" if as_ddp else "synchronised"
        against = f" against {min(other_ms):.1f} ms {other}" if other_ms else ""
        words = f"{way} are fastest{'' if chosen else ' so far'} ({ms:.1f} ms{against})"
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
    """Read a record, also one of a newer version with more fields; see ``read_lines``."""
    return tuple(read_lines(file, msgspec.json.Decoder(TrialEntry).decode, "lines of a tuning record"))


@dataclass(frozen=True, kw_only=True, slots=True)
class TuningIdentity:
    """What a result holds for: model, workers and link.

    Attributes:
        parameters: Number of trained parameters.
        bytes_per_parameter: Size of one gradient element.
        workers: Number of workers that train together.
        backend: What reduces gradients, such as ``"gloo"``.
        link: The measured link, or ``None`` if it was not measured.
        in_shards: Whether gradients are reduced in shards, for which other sizes are best.
        credit: The credit that the user chose; ``None`` if it follows the link, 0 if it is tuned.
        partition_size: The same of the partition size.
    """

    parameters: int
    bytes_per_parameter: int
    workers: int
    backend: str
    link: LinkEstimate | None = None
    in_shards: bool = False
    credit: int | None = 0
    partition_size: int | None = 0

    def matches(self, other: TuningIdentity) -> bool:
        """Whether results for one hold for the other. A link that was not measured matches any link."""
        if replace(self, link=None) != replace(other, link=None):
            return False
        if self.link is None or other.link is None:
            return True
        # Start-up costs are tiny and noisy, so the times of messages of a typical size are compared.
        size = self.parameters * self.bytes_per_parameter / 64
        ratio = self.link.seconds(size) / other.link.seconds(size)
        return 1 / _SAME_LINK <= ratio <= _SAME_LINK


# ── The command ───────────────────────────────────────────────────────────────────────────────────

_BLUE, _GREY, _RED, _GREEN = "#3f86d1", "#9aa7b2", "#d7263d", "#2e8b57"
_LABELLED = 20  # trials, at most: labels of more would overlap


def draw_tuning(record: Sequence[TrialEntry], out: str | os.PathLike[str]) -> None:
    """Draw the last search: the sizes and step time of each trial, the best so far, and the choice.

    Args:
        record: As read by ``read_record``; at least one trial.
        out: The file to write. Its suffix names the format (png, svg, pdf, ...); parent directories are created.

    Raises:
        ImportError: If matplotlib is not installed; the message names the extra to install.
        OptionError: If matplotlib does not know the suffix of ``out``.
        OSError: If ``out`` cannot be written.
    """
    last = max(entry.search for entry in record if entry.is_trial)
    trials = [entry for entry in record if entry.is_trial and entry.search == last]
    chosen = next((entry for entry in record if entry.kind == "chosen" and entry.search == last), None)
    with page(out, "Drawing a search", 12.5, 5.4) as figure:
        ax = figure.subplots()
        _draw_trials(ax, trials, chosen)
        ruled(ax)
        figure.legend(loc="outside lower center", ncols=5, frameon=False)
        found = standing_of([entry for entry in record if entry.search == last])
        headed(figure, f"{found[0].upper()}{found[1:]}.", 11)


def _draw_trials(ax: Axes, trials: Sequence[TrialEntry], chosen: TrialEntry | None) -> None:
    kinds = ["plain DDP" if entry.kind == "ddp" else entry.outcome for entry in trials]
    for kind, colour, marker in (("measured", _BLUE, "o"), ("abandoned", _GREY, "x"), ("plain DDP", _RED, "s")):
        shown = [number for number, its in enumerate(kinds) if its == kind]
        if shown:
            ax.errorbar(
                [number + 1 for number in shown],
                [trials[number].time.seconds * 1e3 for number in shown],
                yerr=[trials[number].time.error * 1e3 for number in shown],
                color=colour,
                marker=marker,
                linestyle="none",
                capsize=2,
                label=kind,
            )
    measured = [entry.time.seconds * 1e3 if entry.outcome == "measured" else float("inf") for entry in trials]
    best = list(itertools.accumulate(measured, min))
    ax.step(range(1, len(best) + 1), best, where="post", color=INK, linewidth=1.2, label="best so far", zorder=3)
    if chosen is not None:
        place = [len(trials) + 0.35], [chosen.time.seconds * 1e3]
        ax.plot(*place, "*", markersize=13, color=_GREEN, label="chosen", zorder=4)
    numbers = range(1, len(trials) + 1, 1 + len(trials) // _LABELLED)
    ax.set_xticks(numbers, labels=[_short(trials[number - 1].point) for number in numbers])
    ax.set_xlabel("trial, by its credit and partition size (parameters)")
    ax.set_ylabel("step time (ms)")


def _short(point: TuningPoint) -> str:
    if point.is_plain_ddp:
        return "plain\nDDP"
    return "\n".join(f"{size / 1e6:.3g} M" if size >= 1e6 else f"{size / 1e3:.3g} k" for size in point)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add_record(parser, RECORD_NAME)
    add_picture(parser, "the last search")


def tables(options: argparse.Namespace) -> list[tuple[str, list[tuple[str, str]]]]:
    """Describe the trials and the choice, and draw them if the arguments say so.

    Args:
        options: The parsed arguments; ``record`` is the file.

    Returns:
        A title, and pairs of a label and a value to print below it.

    Raises:
        OptionError: If the file is not a record, or has no trials.
        ImportError: If a picture is wanted and matplotlib is not installed.
        OSError: If a file cannot be read or written.
    """
    record = read_record(Path(options.record))
    if not any(entry.is_trial for entry in record):
        raise OptionError("record", options.record, "one with at least one trial")
    if options.png is not None:
        draw_tuning(record, options.png)
    return [(f"{options.record}: what was tried, and a step's time", list(_rows(record)))]


def _rows(record: Sequence[TrialEntry]) -> Iterator[tuple[str, str]]:
    for entry in record:
        time = f"{entry.time.seconds * 1e3:,.1f} ± {entry.time.error * 1e3:,.1f} ms"
        abandoned = f"  {entry.outcome}" if entry.outcome == "abandoned" else ""
        yield f"step {entry.step:,}  {entry.kind}", f"{entry.point}  {time}{abandoned}"
    chosen = [fixed_options(entry.point) for entry in record if entry.kind == "chosen"]
    yield ("to keep it", chosen[-1]) if chosen else ("chosen", "nothing yet")


def fixed_options(point: TuningPoint) -> str:
    """The result of a search as an argument to paste, for trainings that do not search.

    Args:
        point: The point that a search chose.
    """
    if point.is_plain_ddp:
        return 'ByteSchedulerStrategy(mode="ddp")'
    return f'ByteSchedulerStrategy(partition_size={point.partition_size}, credit={point.credit}, mode="overlapped")'
