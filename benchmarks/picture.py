"""Pictures of what was measured: panels of lines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["Line", "Panel", "draw"]


@dataclass(frozen=True, kw_only=True)
class Line:
    """Points that are joined."""

    label: str
    points: Sequence[tuple[float, float]]
    style: dict[str, Any] = field(default_factory=dict)  # further arguments of matplotlib's plot


@dataclass(frozen=True, kw_only=True)
class Panel:
    """Lines with the same axes."""

    lines: Sequence[Line]
    x: str
    y: str
    title: str = ""
    level: float | None = None  # height of a thin horizontal line
    at: float | None = None  # place of a dotted vertical line
    logarithm: int = 0  # base of a logarithmic horizontal axis; 0 for a linear one


def draw(path: Path, rows: Sequence[Sequence[Panel]]) -> None:
    """Draw rows of panels with one legend."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    across = max(map(len, rows))
    size = (max(3.6 * across, 7.5), max(3.0 * len(rows), 4.2) + 0.4)
    figure, grid = pyplot.subplots(len(rows), across, figsize=size, squeeze=False, layout="constrained")
    for place, panel in zip(grid.flat, [panel for row in rows for panel in row], strict=True):
        for line in panel.lines:
            place.plot(
                *zip(*line.points, strict=True), label=line.label, **{"marker": "o", "markersize": 3, **line.style}
            )
        if panel.level is not None:
            place.axhline(panel.level, color="black", linewidth=0.8)
        if panel.at is not None:
            place.axvline(panel.at, color="grey", linestyle=":")
        if panel.logarithm:
            place.set_xscale("log", base=panel.logarithm)
        place.set(title=panel.title, xlabel=panel.x, ylabel=panel.y)
        place.grid(alpha=0.3)
    handles, labels = grid[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncol=min(3, len(labels)), frameon=False, fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
