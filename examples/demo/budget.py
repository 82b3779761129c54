"""How long the demo's trainings may be and how fast its link, from what computing alone was seen to cost."""

from __future__ import annotations

from collections.abc import Sequence

from examples.demo.comparison import typical_step_seconds
from examples.demo.report import RankResult
from examples.demo.run_spec import RANKS

MOST_STEPS = 80
_FEWEST_STEPS = 12
_TRAINING_SECONDS = 100.0
_TRAININGS = 2

_BITS_PER_GRADIENT = 32
# Of an Ethernet frame of 1514 bytes, 1448 are payload.
_PAYLOAD_SHARE = 1448 / 1514


def balanced_mbit(baseline: Sequence[RankResult]) -> float:
    """The rate, in Mbit/s, at which communication takes as long as computing, where its order matters most.

    Args:
        baseline: The ranks training alone, side by side.
    """
    return float(f"{_bits_on_link(baseline) / typical_step_seconds(baseline) / 1e6:.2g}")


def communication_seconds(baseline: Sequence[RankResult], mbit: float) -> float:
    """The least time in which a link can carry the gradients of one step.

    Args:
        baseline: The ranks training alone, side by side.
        mbit: Rate of the link in Mbit/s.
    """
    return _bits_on_link(baseline) / mbit / 1e6


def affordable_steps(baseline: Sequence[RankResult], communication: float) -> int:
    """The number of steps with which both trainings take less than two minutes, even if nothing is hidden.

    Args:
        baseline: The ranks training alone, side by side.
        communication: Seconds of communication per step.
    """
    step = typical_step_seconds(baseline) + communication
    return max(_FEWEST_STEPS, min(MOST_STEPS, round(_TRAINING_SECONDS / _TRAININGS / step)))


def _bits_on_link(baseline: Sequence[RankResult]) -> float:
    # An all-reduce among n ranks sends, and receives, 2 (n - 1) / n times the gradients on each link.
    payload = 2 * (RANKS - 1) / RANKS * _BITS_PER_GRADIENT * baseline[0].parameters
    return payload / _PAYLOAD_SHARE
