"""Pictures: helpers for all of them, the picture of a few timeline steps, and its command.

The picture shows what hides the communication. It needs matplotlib, which is imported when a picture is drawn. Limits:
two or three steps make a readable picture, a hundred do not.
"""

from __future__ import annotations

import argparse
import itertools
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_bytescheduler.checks import importing
from lightning_bytescheduler.exceptions import OptionError
from lightning_bytescheduler.timeline.timeline import (
    COMMUNICATION,
    COMPUTE,
    STEP,
    Cover,
    Interval,
    Span,
    Trace,
    TraceSummary,
    intervals,
    length,
    read_timeline,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK = "#26323d"

_DOTS_PER_INCH = 130
_FORWARD, _BACKWARD, _WAIT, _UPDATE = "#3f86d1", "#e58f2a", "#d7263d", "#2e8b57"
_BETWEEN, _SENT = "#6c7a86", "#6b5b95"
_STEPS_SHOWN = 3
_CROWDED = 150  # bars in a row: white edges would hide them
_LETTER = 0.0095  # width of a bold letter, and some air, as a share of the width of the axes


def require_picture(option: str, out: str | os.PathLike[str], what: str = "A picture") -> Path:
    """Return ``out`` as a path if a picture can be written in the format that its suffix names.

    Args:
        option: The option's name, for errors.
        out: The file.
        what: What is drawn, as the subject of a sentence.

    Raises:
        ImportError: If matplotlib is not installed; the message names the extra to install.
        OptionError: If matplotlib does not know the suffix; names ``option``.
    """
    with importing(what, extra="plots"):
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    path, allowed = Path(out), FigureCanvasAgg(Figure()).get_supported_filetypes()
    if path.suffix[1:].lower() not in allowed:
        raise OptionError(option, os.fspath(out), f"a file name with one of the suffixes {', '.join(allowed)}")
    return path


@contextmanager
def page(out: str | os.PathLike[str], what: str, width: float, height: float) -> Iterator[Figure]:
    """A figure to draw on; written to ``out`` when the context ends.

    Args:
        out: The file. Its suffix names the format (png, svg, pdf, ...); parent directories are created.
        what: What is drawn, as the subject of a sentence.
        width: In inches.
        height: In inches.

    Raises:
        ImportError: If matplotlib is not installed; the message names the extra to install.
        OptionError: If matplotlib does not know the suffix of ``out``.
        OSError: If ``out`` cannot be written.
    """
    target = require_picture("out", out, what)
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    yield figure
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, dpi=_DOTS_PER_INCH)


def headed(figure: Figure, text: str, size: float = 15) -> None:
    """Write the finding above the picture."""
    figure.suptitle(text, x=0.01, ha="left", fontsize=size, weight="bold", color=INK)


def in_colours(figure: Figure, meaning: Mapping[str, str], *others: object) -> None:
    """Write the meaning of colours below the picture.

    Args:
        figure: The picture.
        meaning: Colours, by what they stand for.
        others: Further entries, such as lines.
    """
    from matplotlib.patches import Patch

    handles = [*(Patch(color=colour, label=label) for label, colour in meaning.items()), *others]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)


def ruled(ax: Axes) -> None:
    """Give axes with scales a grid."""
    ax.grid(True, which="major", color="#dde3e8", linewidth=0.8)
    ax.set_axisbelow(True)
    ax.spines[["top", "right"]].set_visible(False)


def add_record(parser: argparse.ArgumentParser, name: str) -> None:
    """Declare ``RUN``: the file ``name`` that a run has written, or a folder that it is in."""
    folders = "a run's folder, such as lightning_logs or lightning_logs/version_0"
    parser.add_argument("record", metavar="RUN", help=f"{folders}, or its {name}")


def add_picture(parser: argparse.ArgumentParser, what: str, *, of: str = "", default: str = "") -> None:
    """Declare ``--png`` and, if ``of`` is given, the option that limits what is drawn.

    Args:
        parser: The command's parser.
        what: What is drawn.
        of: The other option's name, such as ``steps``.
        default: What is drawn without it.
    """
    parser.add_argument(
        "--png", metavar="OUT", help=f"draw {what} to this file, a .png, .svg or .pdf (needs the extra 'plots')"
    )
    if of:
        which = f"only the {of} from A up to, but not including, B (default: {default})"
        parser.add_argument(f"--{of}", metavar="A:B", type=_range, help=which)


def _range(text: str) -> tuple[int, int]:
    first, _, after = text.partition(":")
    try:
        bounds = int(first), int(after)
    except ValueError:
        bounds = 0, 0
    if not bounds[0] < bounds[1]:
        raise argparse.ArgumentTypeError(f"{text!r} is not a range A:B with A < B, such as 10:13")
    return bounds


def among(known: Sequence[int], asked: tuple[int, int], option: str) -> list[int]:
    """The steps or rounds within a range.

    Raises:
        OptionError: If there are none; names ``option``.
    """
    chosen = [number for number in known if asked[0] <= number < asked[1]]
    if not chosen:
        raise OptionError(option, asked, f"a range among the {option} {known[0]} to {known[-1]}")
    return chosen


# ── A few steps ─────────────────────────────────────────────────────────────────────────────────────


def draw_timeline(
    trace: Trace,
    out: str | os.PathLike[str],
    *,
    steps: tuple[int, int] | None = None,
) -> None:
    """Draw compute, waits and communication of a few steps.

    Args:
        trace: What to draw; see ``read_timeline``.
        out: The file to write. Its suffix names the format (png, svg, pdf, ...); parent directories are
            created.
        steps: First step to draw, and the one after the last, as in ``range``. By default three from the middle of
            those of the kind that most steps are of.

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
        _draw(figure, _clip(trace, window), f"Rank {trace.rank}, {numbers}{kind}", shown)


def _choose(trace: Trace, asked: tuple[int, int] | None) -> tuple[list[int], Interval]:
    """Return the steps to draw, and from when to when they ran."""
    bounds: dict[int, Interval] = {}
    for span in trace.select(COMPUTE):
        if span.step is not None and span.start < span.end:
            start, end = bounds.get(span.step, (span.start, span.end))
            bounds[span.step] = min(start, span.start), max(end, span.end)
    if not bounds:
        raise ValueError("There is nothing to draw: the trace has no forward or backward pass with a step.")
    known = sorted(bounds)
    # Up to the next step, so that what happens between two steps is seen too.
    for step, following in itertools.pairwise(known):
        bounds[step] = bounds[step][0], max(bounds[step][1], bounds[following][0])
    if asked is not None:
        chosen = among(known, asked, "steps")
    else:
        kinds = trace.kinds()
        of_kind = Counter(kinds.get(step) for step in known).most_common(1)[0][0]
        usual = [step for step in known if kinds.get(step) == of_kind]
        first = known.index(usual[max((len(usual) - _STEPS_SHOWN) // 2, 0)])
        chosen = known[first : first + _STEPS_SHOWN]
    return chosen, (bounds[chosen[0]][0], bounds[chosen[-1]][1])


def _clip(trace: Trace, window: Interval) -> Trace:
    """Return the part of the trace within the window, with times from its start."""
    begin, end = window
    spans = (
        replace(span, start=max(span.start, begin) - begin, end=min(span.end, end) - begin)
        for span in trace.spans
        if span.start < end and span.end > begin
    )
    return replace(trace, spans=tuple(spans))


def _rows(spans: Iterable[Span]) -> list[int]:
    """Give each span, in the order of their starts, the lowest free row: as few rows as possible."""
    ends: list[float] = []
    rows: list[int] = []
    for span in spans:
        row = next((row for row, end in enumerate(ends) if end <= span.start), len(ends))
        ends[row : row + 1] = [span.end]
        rows.append(row)
    return rows


def _draw(figure: Figure, trace: Trace, subject: str, steps: Sequence[int]) -> None:
    sent = trace.select(COMMUNICATION)
    rows = _rows(sent)
    heights = {
        "compute": 1.0,
        "waits, updates": 0.6,
        "communication": 0.8,
        "messages\nin flight": min(max(rows, default=0) + 1, 6) * 0.6,
    }
    axes: list[Axes] = list(figure.subplots(len(heights), 1, sharex=True, height_ratios=list(heights.values())))
    compute, waits, cover, network = axes
    for ax, label in zip(axes, heights, strict=True):
        ax.set_ylabel(label, rotation="horizontal", ha="right", va="center")
        ax.yaxis.set_label_coords(-0.03, 0.5)
        ax.set_yticks([])
        ax.tick_params(length=0)
        ax.spines[:].set_visible(False)
    updates, found = trace.select(STEP), trace.cover()
    end = max(span.end for span in trace.spans)
    compute.set_xlim(0, end)
    for name, colour in (("forward", _FORWARD), ("backward", _BACKWARD)):
        spans = trace.select(COMPUTE, name)
        _bars(compute, intervals(spans), colour, name)
        for span in spans:
            for ax in axes:
                ax.axvspan(span.start, span.end, color=colour, alpha=0.13, linewidth=0, zorder=0)
    _mark_steps(axes, trace.select(COMPUTE), steps)
    _bars(waits, intervals(updates), _UPDATE)
    _bars(waits, intervals(trace.waits()), _WAIT)
    _bars(cover, found.forward, _FORWARD, "under\nforward")
    _bars(cover, found.backward, _BACKWARD, "under\nbackward")
    _bars(cover, found.waited_for, _WAIT)
    _bars(cover, found.between, _BETWEEN)
    _draw_sub_tasks(network, sent, rows)
    if not sent:
        network.text(0.5, 0.5, "none", transform=network.transAxes, ha="center", va="center", color=INK)
    axes[-1].set_xlabel("time (ms)")
    axes[-1].xaxis.set_major_formatter(lambda seconds, _: f"{seconds * 1e3:g}")
    finding, figures = _finding(found, trace.summary().exposed_seconds / len(steps), end / len(steps))
    headed(figure, finding)
    compute.set_title(f"{subject}{figures}", loc="left", fontsize=11, color=INK, pad=26)
    meaning = {
        "forward": _FORWARD,
        "backward": _BACKWARD,
        "waiting for gradients": _WAIT,
        **({"communication between passes": _BETWEEN} if found.between else {}),
        **({"deferred optimizer step": _UPDATE} if updates else {}),
    }
    in_colours(figure, meaning)


def _finding(cover: Cover, waited: float, step: float) -> tuple[str, str]:
    """A heading with the finding, and a line with the figures; times in seconds."""
    total = length(interval for part in cover for interval in part)
    if not total:
        return "No communication in these steps", ""
    forward, backward = (round(100 * length(part) / total) for part in (cover.forward, cover.backward))
    hidden = f": {forward + backward} % of the communication is hidden ({backward} % under backward, {forward} % under "
    return f"Training waits {1e3 * waited:.1f} of {1e3 * step:.1f} ms a step for gradients", f"{hidden}forward)"


def _mark_steps(axes: Sequence[Axes], passes: Iterable[Span], steps: Sequence[int]) -> None:
    for step in steps:
        begin = min(span.start for span in passes if span.step == step)
        axes[0].text(begin, 1.1, f" step {step}", ha="left", va="bottom", weight="bold", color=INK)
        for ax in axes:
            ax.axvline(begin, color=INK, linewidth=1.2)


def _draw_sub_tasks(ax: Axes, sent: Sequence[Span], rows: Sequence[int]) -> None:
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    given = [float(span.args["priority"]) for span in sent if "priority" in span.args]
    first, last = min(given, default=0.0), max(given, default=0.0)
    colours = ScalarMappable(Normalize(first, last), "viridis")
    shades = [colours.cmap(colours.norm(span.args.get("priority", last))) for span in sent]
    crowded = max(Counter(rows).values(), default=0) > _CROWDED
    ax.barh(
        [row + 0.5 for row in rows],
        [span.end - span.start for span in sent],
        left=[span.start for span in sent],
        height=0.88,
        color=_SENT if first == last else shades,
        edgecolor="white",
        linewidth=0.0 if crowded else 0.4,
    )
    ax.set_ylim(max(rows, default=0) + 1.05, -0.05)
    if first < last:
        scale = ax.figure.colorbar(colours, cax=ax.inset_axes((1.012, 0.0, 0.012, 1.0)), ticks=[first, last])
        scale.ax.set_yticklabels([f"{first:g} first layers", f"{last:g} last layers"])
        scale.ax.invert_yaxis()


def _bars(ax: Axes, times: Sequence[Interval], colour: str, label: str = "") -> None:
    """Draw intervals as bars, with the label in those that are long enough for it."""
    ax.broken_barh([(start, end - start) for start, end in times], (0, 1), facecolors=colour)
    needed = max(map(len, label.split("\n"))) * _LETTER * ax.get_xlim()[1]
    for start, end in times:
        if label and end - start > needed:
            ax.text((start + end) / 2, 0.5, label, ha="center", va="center", color="white", weight="bold")


# ── The command ─────────────────────────────────────────────────────────────────────────────────────


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to its parser."""
    parser.add_argument("file", metavar="FILE", help="what a training with timeline=FILE wrote")
    add_picture(parser, "a few steps", of="steps", default="three in the middle")


def tables(options: argparse.Namespace) -> list[tuple[str, list[tuple[str, str]]]]:
    """Sum up the timeline, and draw it if the arguments say so.

    Raises:
        OptionError: If there is no such file, it is not one to draw, or it has none of the steps that were chosen.
        ImportError: If a picture was asked for and matplotlib is not installed.
        OSError: If the file cannot be read, or the picture not be written.
        ValueError: If it is no timeline, if steps were chosen without a picture, or if there is nothing to draw.
    """
    if options.steps is not None and options.png is None:
        raise ValueError("--steps chooses what to draw and needs --png OUT.")
    if not Path(options.file).is_file():
        allowed = "a file that a training wrote with BYTESCHEDULER_TIMELINE=FILE or timeline=FILE"
        raise OptionError("FILE", options.file, allowed)
    trace = read_timeline(options.file)
    if options.png is not None:
        draw_timeline(trace, options.png, steps=options.steps)
    return [(options.file, _figures_of(trace.summary()))]


def _figures_of(summary: TraceSummary) -> list[tuple[str, str]]:
    def share(seconds: float) -> str:
        of = seconds / summary.communication_seconds if summary.communication_seconds else 0.0
        return f"{seconds:.3f} s ({of:.0%})"

    def waits(seconds: float) -> str:
        return f"{seconds:.3f} s ({1e3 * seconds / max(summary.steps, 1):.1f} ms a step)"

    return [
        ("steps", f"{summary.steps}"),
        *((f"  {kind}", f"{count}") for kind, count in summary.kinds.items()),
        ("sub-tasks", f"{summary.sub_tasks}"),
        ("sent", f"{summary.total_bytes / 1e6:.1f} MB"),
        ("communication", f"{summary.communication_seconds:.3f} s"),
        ("  under backward", share(summary.under_backward)),
        ("  under forward", share(summary.under_forward)),
        ("  hidden", f"{summary.hidden_share:.0%}"),
        ("training waits", waits(summary.exposed_seconds)),
    ]
