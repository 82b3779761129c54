"""The record of a run's rounds: what each worker did when; its picture, and the command that makes it.

One line of JSON per round, written by worker 0. Times are seconds of the batch scheduler's clock at which messages came
in. Limits: where sending overlaps with training, a worker trains while it is recorded as sending, waiting or receiving.

The picture has a row for each worker. It needs matplotlib, which is imported when a picture is drawn. A handful of
rounds make a readable picture, a hundred do not.
"""

from __future__ import annotations

import argparse
import logging
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Literal, TypeAlias

import msgspec

from lightning_bytescheduler.checks import read_lines
from lightning_bytescheduler.exceptions import OptionError
from lightning_bytescheduler.timeline.picture import INK, add_picture, add_record, among, headed, in_colours, page

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

log = logging.getLogger(__name__)

RECORD_NAME = "rounds.jsonl"
"""Name of the file that a training writes."""

Activity = Literal["receiving", "working", "sending", "waiting"]

_Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]


class WorkerRound(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One worker's part in a round.

    Attributes:
        worker: Its name.
        steps: Steps taken.
        samples: Samples processed.
        merged: Whether its pseudo-gradient became part of the weights.
        spans: Its activities, each with start and end.
    """

    worker: str
    steps: _Count
    samples: _Count
    merged: bool
    spans: tuple[tuple[Activity, float, float], ...]

    def seconds(self, activity: Activity) -> float:
        """Time spent on one kind of activity."""
        return sum(end - start for kind, start, end in self.spans if kind == activity)


class RoundRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One round.

    Attributes:
        round: Its number, from 1.
        start: When workers were told to start.
        end: When its pseudo-gradients were merged.
        decided: When its end was scheduled, or ``None`` if that was not needed.
        workers: Those who took part; who has left before the end was decided, only if what it sent was there.
        metrics: Means over the round and all workers, by name; finite.
    """

    round: _Count
    start: float
    end: float
    decided: float | None
    workers: tuple[WorkerRound, ...]
    metrics: dict[str, float] = {}  # copied for each record

    @property
    def samples(self) -> int:
        """Samples that became part of the weights."""
        return sum(worker.samples for worker in self.workers if worker.merged)

    @property
    def merged(self) -> tuple[str, ...]:
        """Workers whose pseudo-gradients became part of the weights."""
        return tuple(worker.worker for worker in self.workers if worker.merged)


def waiting_share(rounds: Iterable[RoundRecord]) -> float:
    """Share of the workers' time that they waited for each other; 0 without any time."""
    workers = [worker for record in rounds for worker in record.workers]
    total = sum(end - start for worker in workers for _, start, end in worker.spans)
    return sum(worker.seconds("waiting") for worker in workers) / total if total else 0.0


def read_rounds(path: str | os.PathLike[str]) -> list[RoundRecord]:
    """Read the rounds of a run; see ``read_lines``."""
    return read_lines(path, _read, "a file of rounds")


def _read(line: bytes) -> RoundRecord:
    record = _DECODER.decode(line)
    if record.start > record.end:
        raise ValueError("it ends before it starts")
    return record


_DECODER = msgspec.json.Decoder(RoundRecord)


class RoundFile:
    """Where a training writes its rounds. For one thread; a disk that is full does not end the training.

    Args:
        path: Path of the file, or ``None`` to write nothing.
        append: Whether to append to an existing file.
        option: The option that named the file, if the user did.

    Raises:
        OptionError: If a file that the user named cannot be written.
    """

    def __init__(self, path: Path | None, *, append: bool, option: str = "") -> None:
        self._file: IO[bytes] | None = None
        if path is None:
            return
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("ab" if append else "wb", buffering=0)  # a round is in the file if the run dies
        except OSError as error:
            if option:
                raise OptionError(option, os.fspath(path), f"a file that can be written ({error.strerror})") from error
            log.warning("Rounds are not recorded: %s", error)

    def write(self, record: RoundRecord) -> None:
        """Append a round."""
        if self._file is None:
            return
        try:
            self._file.write(msgspec.json.encode(record) + b"\n")
        except OSError as error:
            log.warning("Rounds are not recorded from here on: %s", error)
            self.close()

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None


_ACTIVITIES: dict[Activity, tuple[str, str]] = {  # colour, and in words
    "working": ("#3f86d1", "training"),
    "waiting": ("#d7263d", "waiting for the others"),
    "sending": ("#e58f2a", "sending its pseudo-gradient"),
    "receiving": ("#8456b5", "fetching weights"),
}
_ROUNDS_SHOWN = 6
_PAGE = 11.0  # inches for all workers


def draw_rounds(
    record: Sequence[RoundRecord], out: str | os.PathLike[str], *, rounds: tuple[int, int] | None = None
) -> None:
    """Draw what each worker did in some rounds.

    Args:
        record: The rounds; see ``read_rounds``.
        out: The file to write. Its suffix names the format (png, svg, pdf, ...); parent directories are created.
        rounds: First round to draw, and the one after the last, as in ``range``. By default the last six.

    Raises:
        ImportError: If matplotlib is not installed; the message names the extra to install.
        OptionError: If the record has none of ``rounds``, or matplotlib does not know the suffix of ``out``.
        OSError: If ``out`` cannot be written.
    """
    if not record:
        raise OptionError("record", [], "of one round or more")
    shown = list(record[-_ROUNDS_SHOWN:] if rounds is None else _among(record, rounds))
    workers = sorted({worker.worker for one in shown for worker in one.workers}, key=_natural)
    height = 2.4 + _row_height(len(workers)) * max(len(workers), 2)
    with page(out, "Drawing rounds", 12.5, height) as figure:
        numbers = f"{shown[0].round}" if len(shown) == 1 else f"{shown[0].round} to {shown[-1].round}"
        found = f"workers waited {waiting_share(shown):.1%} of their time"
        heading = f"Round{'s' if len(shown) > 1 else ''} {numbers}: {found}"
        _draw(figure, shown, workers, heading)


def _row_height(workers: int) -> float:
    """Height of a row in inches: comfortable for a few workers; for many, as much as the page has."""
    return min(0.45, max(_PAGE / max(workers, 1), 0.12))


def _among(record: Sequence[RoundRecord], rounds: tuple[int, int]) -> list[RoundRecord]:
    chosen = among([one.round for one in record], rounds, "rounds")
    return [one for one in record if one.round in chosen]


def _natural(name: str) -> tuple[int, str]:
    """Sorts ``worker 2`` before ``worker 10``, where names differ in a number at the end."""
    return len(name), name


def _draw(figure: Figure, shown: Sequence[RoundRecord], workers: Sequence[str], heading: str) -> None:
    from matplotlib.patches import Patch

    axes: Axes = figure.subplots()
    origin, height = shown[0].start, _row_height(len(workers))
    axes.set_xlim(0, shown[-1].end - origin or 1.0)
    axes.set_ylim(max(len(workers), 1) - 0.4, -0.55 - 0.4 * 0.45 / height)
    axes.set_yticks(range(len(workers)), workers, fontsize=min(10.0, 52 * height))
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    axes.set_xlabel("time (s)")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,g}")
    for one in shown:
        start = one.start - origin
        axes.axvline(start, color=INK, linewidth=1.2)
        axes.text(start, -0.62, f" round {one.round}", va="bottom", weight="bold", color=INK, clip_on=True)
        if one.decided is not None:
            axes.axvline(one.decided - origin, color=INK, linewidth=0.8, linestyle=":")
        for worker in one.workers:
            row = workers.index(worker.worker)
            for activity, (colour, _) in _ACTIVITIES.items():
                bars = [(begin - origin, stop - begin) for kind, begin, stop in worker.spans if kind == activity]
                drawn = axes.broken_barh(bars, (row - 0.34, 0.68), facecolors=colour)
                if not worker.merged:
                    drawn.set(hatch="////", edgecolor="white", linewidth=0)
    others: list[Artist] = [*axes.plot([], [], color=INK, linewidth=0.8, linestyle=":", label="end decided")]
    if not all(worker.merged for one in shown for worker in one.workers):
        others.append(Patch(facecolor="#aab4be", hatch="////", edgecolor="white", linewidth=0, label="not merged"))
    in_colours(figure, {meaning: colour for colour, meaning in _ACTIVITIES.values()}, *others)
    headed(figure, heading)
    samples = sum(one.samples for one in shown)
    axes.set_title(f"{samples:,} samples became part of the weights", loc="left", fontsize=11, color=INK)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``lightning-bytescheduler rounds``."""
    add_record(parser, RECORD_NAME)
    add_picture(parser, "rounds", of="rounds", default="all, and the last six in the picture")


def tables(options: argparse.Namespace) -> list[tuple[str, list[tuple[str, str]]]]:
    """Sum up the rounds, and draw them where that was asked for.

    Args:
        options: The parsed arguments; ``record`` is the file.

    Returns:
        A title, and pairs of a label and a value to print below it.

    Raises:
        OptionError: If the file is not one of rounds, or an argument is not allowed.
        ImportError: If a picture was asked for and matplotlib is not installed.
        OSError: If a file cannot be read or written.
    """
    record = read_rounds(Path(options.record))
    if not record:
        raise OptionError("record", options.record, "a file with one round or more")
    shown = record if options.rounds is None else _among(record, options.rounds)
    if options.png is not None:
        draw_rounds(record, options.png, rounds=options.rounds)
    seconds = shown[-1].end - shown[0].start
    samples = sum(one.samples for one in shown)
    rows = [
        ("rounds", f"{len(shown):,}"),
        ("  without an outer step", f"{sum(not one.merged for one in shown):,}"),
        ("time", f"{seconds:,.1f} s"),
        ("samples", f"{samples:,}"),
        ("samples per second", f"{samples / seconds if seconds else 0.0:,.1f}"),
        ("waiting", f"{waiting_share(shown):.1%} of the workers' time"),
    ]
    for name in sorted({worker.worker for one in shown for worker in one.workers}, key=_natural):
        parts = [worker for one in shown for worker in one.workers if worker.worker == name]
        spent = {kind: sum(part.seconds(kind) for part in parts) for kind in _ACTIVITIES}
        total = sum(spent.values()) or 1.0
        shares = ", ".join(f"{_ACTIVITIES[kind][1]} {share / total:.1%}" for kind, share in spent.items())
        rows.append((name, f"{sum(part.steps for part in parts):,} steps: {shares}"))
    return [(options.record, rows)]
