"""Draws a few steps of a trace, to see at a glance what the communication was hidden under.

Needs matplotlib, which is imported when a picture is drawn. Limits: two or three steps make a readable
picture, a hundred do not.
"""

from __future__ import annotations

import heapq
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import TYPE_CHECKING

from lightning_bytescheduler.timeline.page import INK, among, headed, in_colours, page
from lightning_bytescheduler.timeline.timeline import (
    COMMUNICATION,
    COMPUTE,
    COPY_TO_DEVICE,
    COPY_TO_HOST,
    GATE,
    LOCAL_BROADCAST,
    LOCAL_REDUCE,
    PULL,
    PUSH,
    REPLY,
    STEP,
    SUM,
    WAIT,
)
from lightning_bytescheduler.timeline.trace import Interval, Span, Trace, intersection, length, subtract, union

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["draw_timeline"]

_FORWARD, _BACKWARD, _WAIT, _UPDATE = "#3f86d1", "#e58f2a", "#d7263d", "#2e8b57"
_BETWEEN, _SENT = "#6c7a86", "#6b5b95"
_STAGES = {
    COPY_TO_HOST: "#d9a441",
    LOCAL_REDUCE: "#c08457",
    PUSH: "#6b5b95",
    SUM: "#8d99a6",
    REPLY: "#b2a1d6",
    PULL: "#2f8f9d",
    LOCAL_BROADCAST: "#7fb069",
    COPY_TO_DEVICE: "#3f7d58",
}
_STEPS_SHOWN = 3
_CROWDED = 150  # bars in a row: white edges would hide them
_LETTER = 0.0095  # width of a bold letter, and some air, as a share of the width of the axes


def draw_timeline(
    trace: Trace,
    out: str | os.PathLike[str],
    *,
    steps: tuple[int, int] | None = None,
    title: str | None = None,
) -> None:
    """Draw compute, waits and communication of a few steps.

    Args:
        trace: What to draw; see ``read_timeline``.
        out: The file to write. Its suffix names the format (png, svg, pdf, ...); parent directories are
            created.
        steps: First step to draw, and the one after the last, as in ``range``. By default three steady steps of the
            kind that most steps are of, around the middle of the trace.
        title: What is drawn, in words; by default the rank.

    Raises:
        ImportError: If matplotlib is not installed; the message names the extra to install.
        OptionError: If the trace has none of ``steps``, or matplotlib does not know the suffix of ``out``.
        OSError: If ``out`` cannot be written.
        ValueError: If no forward or backward pass of the trace says which step it belongs to.
    """
    with page(out, "Drawing a timeline", 12.5, 6.4) as figure:
        shown, window = _choose(trace, steps)
        numbers = f"step {shown[0]}" if len(shown) == 1 else f"steps {shown[0]} to {shown[-1]}"
        kinds = trace.kinds()
        found = list(dict.fromkeys(kinds[step] for step in shown if step in kinds))
        kind = f" ({' and '.join(found)})" if found else ""
        _draw(figure, _clip(trace, window), f"{title or f'Rank {trace.rank}'}, {numbers}{kind}", shown)


def _choose(trace: Trace, steps: tuple[int, int] | None) -> tuple[list[int], Interval]:
    """Return the steps to draw, and from when to when they ran."""
    bounds: dict[int, Interval] = {}
    for span in [*trace.select(COMPUTE, "forward"), *trace.select(COMPUTE, "backward")]:
        if span.step is not None and span.start < span.end:
            start, end = bounds.get(span.step, (span.start, span.end))
            bounds[span.step] = min(start, span.start), max(end, span.end)
    if not bounds:
        raise ValueError("There is nothing to draw: the trace has no forward or backward pass with a step.")
    known = sorted(bounds)

    def window(chosen: Sequence[int]) -> Interval:
        # Up to the next step, so that what happens between two steps is seen too.
        following = known.index(chosen[-1]) + 1
        end = bounds[known[following]][0] if following < len(known) else bounds[chosen[-1]][1]
        return bounds[chosen[0]][0], max(end, bounds[chosen[-1]][1])

    if steps is not None:
        chosen = among(known, steps, "steps")
        return chosen, window(chosen)
    durations = {step: window([step])[1] - window([step])[0] for step in known}
    chosen = _steady(_like_most(known, trace), durations)
    return chosen, window(chosen)


def _like_most(known: Sequence[int], trace: Trace) -> list[list[int]]:
    """Return runs of neighbouring steps of the kind that most are of, the longest that there are up to three."""
    kinds = trace.kinds()
    counts = Counter(kinds.get(step, "") for step in known)
    most = max(counts, key=lambda kind: (counts[kind], kind == "overlapped"))
    passes = union(_intervals(trace.select(COMPUTE)))
    # What waits outside of a pass is no part of a step: a validation, a checkpoint, somebody who reads weights.
    outside = {gate.step for gate in trace.select(GATE) if not intersection(passes, [(gate.start, gate.end)])}
    good = [step for step in known if kinds.get(step, "") == most]
    calm = [step for step in good if step not in outside] or good
    for size in range(min(_STEPS_SHOWN, len(calm)), 1, -1):
        runs = [calm[i : i + size] for i in range(len(calm) - size + 1)]
        runs = [run for run in runs if known.index(run[-1]) - known.index(run[0]) == size - 1]
        if runs:
            return runs
    return [[step] for step in calm]


def _steady(runs: Sequence[list[int]], durations: Mapping[int, float]) -> list[int]:
    """Return the run whose steps take as long as most, near the middle."""
    typical = median(durations[step] for run in runs for step in run)
    middle = len(runs) // 2
    near = range(len(runs) // 4, len(runs) - len(runs) // 4)  # neither the first steps nor the last ones

    def unsteadiness(run: int) -> tuple[float, int]:
        deviation = sum(abs(durations[step] - typical) for step in runs[run]) / typical
        return round(deviation, 2), abs(run - middle)  # rounded: among equally steady ones, the middle counts

    return runs[min(near, key=unsteadiness)]


def _clip(trace: Trace, window: Interval) -> Trace:
    """Return what lies in the window, with times from its start on."""
    begin, end = window
    spans = (
        replace(span, start=max(span.start, begin) - begin, end=min(span.end, end) - begin)
        for span in trace.spans
        if span.start < end and span.end > begin
    )
    return replace(trace, origin=trace.origin + begin, spans=tuple(spans))


def _rows(spans: Iterable[Span]) -> list[int]:
    """Give each span, in the order of their starts, the lowest free row: as few rows as possible."""
    free: list[int] = []
    busy: list[tuple[float, int]] = []
    rows: list[int] = []
    for span in spans:
        while busy and busy[0][0] <= span.start:
            heapq.heappush(free, heapq.heappop(busy)[1])
        row = heapq.heappop(free) if free else len(busy)
        heapq.heappush(busy, (span.end, row))
        rows.append(row)
    return rows


def _draw(figure: Figure, trace: Trace, subject: str, steps: Sequence[int]) -> None:
    sent = trace.select(COMMUNICATION)
    rows = _rows(sent)
    heights = [1.0, 0.6, 0.8, min(max(rows, default=0) + 1, 6) * 0.6]
    labels = ["compute", "waits, updates", "communication", "messages\nin flight"]
    stages = [(name, found) for name in _STAGES if (found := union(_intervals(trace.select(name))))]
    heights += [0.4] * len(stages)
    labels += [name.replace(" ", "\n") for name, _ in stages]
    axes: list[Axes] = list(figure.subplots(len(heights), 1, sharex=True, height_ratios=heights))
    compute, waits, cover, network = axes[:4]
    for ax, label in zip(axes, labels, strict=True):
        ax.set_ylabel(label, rotation="horizontal", ha="right", va="center")
        ax.yaxis.set_label_coords(-0.03, 0.5)
        ax.set_yticks([])
        ax.tick_params(length=0)
        ax.spines[:].set_visible(False)
    forward, backward = trace.select(COMPUTE, "forward"), trace.select(COMPUTE, "backward")
    held, updates = [*trace.select(GATE), *trace.select(WAIT)], trace.select(STEP)
    end = max(span.end for span in trace.spans)
    compute.set_xlim(0, end)
    for name, spans, colour in (("forward", forward, _FORWARD), ("backward", backward, _BACKWARD)):
        _bars(compute, _intervals(spans), colour, name)
        for span in spans:
            for ax in axes:
                ax.axvspan(span.start, span.end, color=colour, alpha=0.13, linewidth=0, zorder=0)
    _mark_steps(axes, [*forward, *backward], steps)
    _bars(waits, _intervals(updates), _UPDATE)
    _bars(waits, _intervals(held), _WAIT)
    covered = _cover(sent, forward, backward, held)
    under_forward, under_backward, waited_for, between = covered
    _bars(cover, under_forward, _FORWARD, "under\nforward")
    _bars(cover, under_backward, _BACKWARD, "under\nbackward")
    _bars(cover, waited_for, _WAIT)
    _bars(cover, between, _BETWEEN)
    _draw_sub_tasks(network, sent, rows)
    if not sent:
        network.text(0.5, 0.5, "none", transform=network.transAxes, ha="center", va="center", color=INK)
    for row, (name, intervals) in zip(axes[4:], stages, strict=False):
        _bars(row, intervals, _STAGES[name])
    axes[-1].set_xlabel("time (ms)")
    axes[-1].xaxis.set_major_formatter(lambda seconds, _: f"{seconds * 1e3:g}")
    finding, figures = _finding(covered, trace.summary().exposed_seconds / len(steps), end / len(steps))
    headed(figure, finding)
    compute.set_title(f"{subject}{figures}", loc="left", fontsize=11, color=INK, pad=26)
    meaning = {
        "forward": _FORWARD,
        "backward": _BACKWARD,
        "waiting for gradients": _WAIT,
        **({"communication between passes": _BETWEEN} if between else {}),
        **({"deferred optimizer step": _UPDATE} if updates else {}),
    }
    in_colours(figure, meaning)


def _finding(covered: Sequence[Sequence[Interval]], waited: float, step: float) -> tuple[str, str]:
    """Say in a heading what the steps show, and in a line the figures; times in seconds."""
    total = length(interval for part in covered for interval in part)
    if not total:
        return "No communication in these steps", ""
    forward, backward = (round(100 * length(part) / total) for part in covered[:2])
    hidden = f": {forward + backward} % of the communication is hidden ({backward} % under backward, {forward} % under "
    return f"Training waits {1e3 * waited:.1f} of {1e3 * step:.1f} ms a step for gradients", f"{hidden}forward)"


def _cover(
    sent: Iterable[Span], forward: Iterable[Span], backward: Iterable[Span], held: Iterable[Span]
) -> tuple[list[Interval], list[Interval], list[Interval], list[Interval]]:
    """Split the time in which anything was in flight: under forward, under backward, waited for, between passes."""
    communication, waiting = union(_intervals(sent)), union(_intervals(held))
    under_forward, under_backward = (
        intersection(communication, subtract(union(_intervals(spans)), waiting)) for spans in (forward, backward)
    )
    waited_for = intersection(communication, waiting)
    between = subtract(communication, union([*under_forward, *under_backward, *waited_for]))
    return under_forward, under_backward, waited_for, between


def _mark_steps(axes: Sequence[Axes], passes: Iterable[Span], steps: Sequence[int]) -> None:
    for step in steps:
        begin = min(span.start for span in passes if span.step == step)
        axes[0].text(begin, 1.1, f" step {step}", ha="left", va="bottom", weight="bold", color=INK)
        for ax in axes:
            ax.axvline(begin, color=INK, linewidth=1.2)


def _draw_sub_tasks(ax: Axes, sent: Sequence[Span], rows: Sequence[int]) -> None:
    import numpy as np  # comes with matplotlib
    from matplotlib import colormaps
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    given = [float(span.args["priority"]) for span in sent if "priority" in span.args]
    first, last = min(given, default=0.0), max(given, default=0.0)
    scale = ScalarMappable(Normalize(first, max(last, first + 1)), colormaps["viridis"])
    colours = [
        tuple(scale.to_rgba(np.asarray(float(span.args["priority"])))) if "priority" in span.args else _SENT
        for span in sent
    ]
    crowded = max((rows.count(row) for row in set(rows)), default=0) > _CROWDED
    for row in sorted(set(rows)):
        members = [i for i, its_row in enumerate(rows) if its_row == row]
        ax.broken_barh(
            [(sent[i].start, sent[i].end - sent[i].start) for i in members],
            (row + 0.06, 0.88),
            facecolors=[colours[i] for i in members],
            edgecolors="none" if crowded else "white",
            linewidths=0.0 if crowded else 0.4,
        )
    ax.set_ylim(max(rows, default=0) + 1.05, -0.05)
    if first == last:
        return
    bar = ax.figure.colorbar(scale, cax=ax.inset_axes((1.012, 0.0, 0.012, 1.0)), ticks=[first, last])
    bar.ax.set_yticklabels([f"{first:g} first layers", f"{last:g} last layers"])
    bar.ax.invert_yaxis()


def _intervals(spans: Iterable[Span]) -> list[Interval]:
    return [(span.start, span.end) for span in spans]


def _bars(ax: Axes, intervals: Sequence[Interval], colour: str, label: str = "") -> None:
    """Draw intervals as bars, with the label in those that are long enough for it."""
    ax.broken_barh([(start, end - start) for start, end in intervals], (0, 1), facecolors=colour)
    needed = max(map(len, label.split("\n"))) * _LETTER * ax.get_xlim()[1]
    for start, end in intervals:
        if label and end - start > needed:
            ax.text((start + end) / 2, 0.5, label, ha="center", va="center", color="white", weight="bold")
