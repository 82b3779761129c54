"""What the demo takes from a timeline: one number and a picture."""

from __future__ import annotations

from pathlib import Path

from lightning_bytescheduler.timeline.picture import draw_timeline
from lightning_bytescheduler.timeline.timeline import read_timeline


def hidden_share(timeline: Path) -> float:
    """The share of communication that ran during a forward or backward pass, 0 to 1."""
    return read_timeline(timeline).summary().hidden_share


def picture(timeline: Path) -> str:
    """Draws a few steps of a timeline beside its file.

    Returns:
        The picture's path, or why there is none.
    """
    out = timeline.with_suffix(".png")
    try:
        draw_timeline(read_timeline(timeline), out)
    except ImportError as error:
        return f"not drawn: {error}"
    return str(out)
