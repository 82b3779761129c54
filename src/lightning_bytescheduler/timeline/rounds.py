"""What the timelines of workers that train in rounds say: where their time went, what they sent, and a picture of it.

The picture has steps, waits, what was on the network and outer steps of a few rounds. It needs matplotlib, which is
imported when a picture is drawn. Limits: clocks of several machines are taken as they are.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lightning_bytescheduler.checks import importing, require_suffix
from lightning_bytescheduler.exceptions import OptionError
from lightning_bytescheduler.timeline.timeline import CODEC, COMMUNICATION, INNER, STEP, STILL, WAIT
from lightning_bytescheduler.timeline.trace import Interval, Span, Trace, intersection, length, subtract, union

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["RoundsSummary", "draw_rounds_timeline", "in_rounds", "others_awaited", "rounds_summary"]

_TRAIN, _OTHERS, _NETWORK, _OUTER, _STILL = "#3f86d1", "#f2b441", "#d7263d", "#2e8b57", "#aab4be"
_PUSH, _EARLY, _PULL, _CODEC, _INK = "#6b5b95", "#cdc6df", "#1b998b", "#6c7a86", "#26323d"
_ROUNDS_SHOWN = 3
_MOST_EDGES = 200  # steps in a row: white edges would hide them


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundsSummary:
    """Where the time of one worker went; all times in seconds.

    Attributes:
        worker: Whose it is.
        rounds: In which steps were taken.
        steps: Taken.
        training: In steps.
        waiting: Of the training thread, for other workers and for the network.
        outer: In which pseudo-gradients were formed, and outer steps taken.
        still: In validations and the like.
        coding: In which parts were encoded, added up or decoded, on any thread.
        network: In which anything was on the network.
        hidden: Part of that while steps were taken.
        pushed: Bytes of pseudo-gradients.
        pulled: Bytes of means.
    """

    worker: str
    rounds: int
    steps: int
    training: float
    waiting: float
    outer: float
    still: float
    coding: float
    network: float
    hidden: float
    pushed: int
    pulled: int


def in_rounds(trace: Trace) -> bool:
    """Whether it is a worker's that trains in rounds."""
    return any(span.category == INNER for span in trace.spans)


def worker_of(trace: Trace) -> str:
    """Whose it is."""
    named = (str(span.args["worker"]) for span in trace.spans if span.args.get("worker"))
    return next(named, f"rank {trace.rank}")


def round_of(span: Span) -> int:
    """The round that a span belongs to; 0 before the first one."""
    number = span.args.get("round")
    return number if isinstance(number, int) else 0


def rounds_summary(trace: Trace) -> RoundsSummary:
    """Add up where the time went."""

    def covered(category: str) -> list[Interval]:
        return union((span.start, span.end) for span in trace.select(category) if round_of(span))

    def sent(name: str) -> int:
        spans = trace.select(COMMUNICATION, name)
        return int(sum(span.args.get("bytes", 0) for span in spans if round_of(span)))

    training, network = covered(INNER), covered(COMMUNICATION)
    steps = trace.select(INNER)
    return RoundsSummary(
        worker=worker_of(trace),
        rounds=len({round_of(span) for span in steps}),
        steps=len(steps),
        training=length(training),
        waiting=length(covered(WAIT)),
        outer=length(covered(STEP)),
        still=length(covered(STILL)),
        coding=length(covered(CODEC)),
        network=length(network),
        hidden=length(intersection(network, training)),
        pushed=sent("push"),
        pulled=sent("pull"),
    )


def others_awaited(traces: Sequence[Trace]) -> Mapping[int, list[Interval]]:
    """By position in ``traces``: from when on a worker sends, in each round, until the last one does; from the epoch.

    What it waits for in that time is other workers; later it is the network, and what is done with what has come.
    """
    began: defaultdict[int, dict[int, float]] = defaultdict(dict)  # by round and position
    for number, trace in enumerate(traces):
        for span in trace.select(COMMUNICATION, "push"):
            if round_of(span):
                began[round_of(span)].setdefault(number, trace.origin + span.start)
    return {
        number: union((starts[number], max(starts.values())) for starts in began.values() if number in starts)
        for number in range(len(traces))
    }


def draw_rounds_timeline(
    traces: Sequence[Trace],
    out: str | os.PathLike[str],
    *,
    rounds: tuple[int, int] | None = None,
) -> None:
    """Draw what workers did, one below the other.

    Args:
        traces: Of workers that train in rounds, see ``in_rounds``. With several, waits for others are told from those
            for the network.
        out: The file to write. Its suffix names the format (png, svg, pdf, ...); parent directories are created.
        rounds: First round to draw, and the one after the last. By default three around the middle.

    Raises:
        ImportError: If matplotlib is not installed; the message names the extra to install.
        OptionError: If the traces have none of ``rounds``, or matplotlib does not know the suffix of ``out``.
        OSError: If ``out`` cannot be written.
        ValueError: If a trace is no such worker's.
    """
    with importing("Drawing a timeline", extra="plots"):
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    if not traces or not all(in_rounds(trace) for trace in traces):
        raise ValueError("There is nothing to draw: not every trace is of a worker that trains in rounds.")
    shown = _choose(traces, rounds)
    begin, end = _window(traces, shown)
    height = 1.9 + 1.75 * len(traces)
    figure = Figure(figsize=(12.5, height), layout="constrained")
    target = require_suffix("out", out, FigureCanvasAgg(figure).get_supported_filetypes())
    axes: list[Axes] = list(figure.subplots(len(traces), 1, sharex=True, squeeze=False)[:, 0])
    others = others_awaited(traces)
    waited = [
        _draw(ax, trace, (begin, end), others[number], shown)
        for number, (ax, trace) in enumerate(zip(axes, traces, strict=True))
    ]
    axes[-1].set_xlabel("time (s)")
    axes[0].set_xlim(0, end - begin)
    numbers = f"round {shown[0]}" if len(shown) == 1 else f"rounds {shown[0]} to {shown[-1]}"
    total = (end - begin) * len(traces)
    for_others, for_network = (sum(one[kind] for one in waited) / total for kind in (0, 1))
    several = len(traces) > 1
    figures = f"{for_others:.0%} for others, {for_network:.0%} for the network" if several else ""
    who = "Workers wait" if several else f"{worker_of(traces[0])} waits"
    finding = f"{who} {for_others + for_network:.0%} of the time" + (f": {figures}" if figures else "")
    figure.suptitle(f"{finding} ({numbers})", x=0.01, ha="left", fontsize=15, weight="bold", color=_INK)
    meaning = {
        "inner steps": _TRAIN,
        **({"waits for other workers": _OTHERS} if several else {}),
        "waits for the network" if several else "waits": _NETWORK,
        "pseudo-gradient, outer step": _OUTER,
        "validation and the like": _STILL,
        "push: pseudo-gradients": _PUSH,
        **({"push, while others still train": _EARLY} if several else {}),
        "pull: the mean": _PULL,
        "encode, add, decode": _CODEC,
    }
    handles = [Patch(color=colour, label=label) for label, colour in meaning.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=5 if several else 4, frameon=False)
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, dpi=140)


def _choose(traces: Sequence[Trace], rounds: tuple[int, int] | None) -> list[int]:
    known = sorted({round_of(span) for trace in traces for span in trace.select(INNER)} - {0})
    if rounds is None:
        first = max((len(known) - _ROUNDS_SHOWN) // 2, 0)
        return known[first : first + _ROUNDS_SHOWN]
    chosen = [round for round in known if rounds[0] <= round < rounds[1]]
    if not chosen:
        among = f"{known[0]} to {known[-1]}" if known else "none"
        raise OptionError("steps", rounds, f"a range among the rounds of the trace, {among}")
    return chosen


def _window(traces: Sequence[Trace], shown: Sequence[int]) -> Interval:
    """From the first step of the first round to the first one after the last, as all have it; from the epoch."""
    own = [
        (trace.origin + span.start, trace.origin + span.end)
        for trace in traces
        for span in trace.spans
        if round_of(span) in shown and span.category in (INNER, WAIT, STEP, STILL)
    ]
    return min(start for start, _ in own), max(end for _, end in own)


def _draw(
    ax: Axes, trace: Trace, window: Interval, others: Sequence[Interval], shown: Sequence[int]
) -> tuple[float, float]:
    """Draw one worker; returns how long it waited for others, and for the network."""
    begin, end = window

    def clipped(spans: Iterable[Span]) -> list[Interval]:
        found = ((max(trace.origin + s.start, begin), min(trace.origin + s.end, end)) for s in spans)
        return [(start - begin, stop - begin) for start, stop in found if start < stop]

    waits, pushes = union(clipped(trace.select(WAIT))), union(clipped(trace.select(COMMUNICATION, "push")))
    early = [(start - begin, stop - begin) for start, stop in others]
    for_others, for_network = intersection(waits, early), subtract(waits, early)
    steps = clipped(trace.select(INNER))
    edges = "white" if len(steps) < _MOST_EDGES else "none"
    rows: list[tuple[float, list[Interval], str]] = [
        (2.0, steps, _TRAIN),
        (2.0, clipped(trace.select(STILL)), _STILL),
        (2.0, for_others, _OTHERS),
        (2.0, for_network, _NETWORK),
        (2.0, clipped(trace.select(STEP)), _OUTER),
        (1.0, intersection(pushes, early), _EARLY),
        (1.0, subtract(pushes, early), _PUSH),
        (0.5, union(clipped(trace.select(COMMUNICATION, "pull"))), _PULL),
        (0.0, clipped(trace.select(CODEC)), _CODEC),
    ]
    for bottom, intervals, colour in rows:
        high = 0.9 if bottom == 2 else 0.42
        ax.broken_barh(
            [(start, stop - start) for start, stop in intervals],
            (bottom + 0.05, high),
            facecolors=colour,
            edgecolors=edges if colour == _TRAIN else "none",
            linewidths=0.4 if colour == _TRAIN else 0.0,
        )
    ax.set_ylim(0, 3.05)
    ax.set_yticks([2.5, 1.25, 0.75, 0.25], ["training", "push", "pull", "codec"])
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
    firsts: dict[int, float] = {}
    for span in trace.select(INNER):
        firsts.setdefault(round_of(span), trace.origin + span.start - begin)
    for round in shown:
        if round in firsts:
            ax.axvline(firsts[round], color=_INK, linewidth=1.0, zorder=0)
            ax.text(firsts[round], 3.05, f" round {round}", ha="left", va="bottom", fontsize=9, color=_INK)
    ax.set_title(worker_of(trace), loc="left", fontsize=11, weight="bold", color=_INK, pad=16)
    return length(for_others), length(for_network)
