"""Compare two runs of the same training under different strategies."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from examples.demo.report import RankResult

# The first steps build buckets, connections and caches.
WARM_UP_STEPS = 5
# Below this share of computing, the difference of two step times says more about noise than about hiding.
_NOTICEABLE_SHARE = 0.1
# A step this many times as long as computing and communication in turn was held up by something else.
_HELD_UP = 1.15


def typical_step_seconds(results: Sequence[RankResult]) -> float:
    """The median step of the ranks, without the first few steps; ranks that train together share one clock."""
    steady = [seconds for result in results for seconds in _steady(result.step_seconds)]
    return statistics.median(steady)


def _steady(step_seconds: Sequence[float]) -> Sequence[float]:
    # A short trial run has nothing left without its first steps.
    return step_seconds[WARM_UP_STEPS:] or step_seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """One strategy's row of the comparison.

    Args:
        strategy: Its name.
        validation_loss: Nats per character on held-out files.
        step_seconds: The typical step.
        communication_seconds: An all-reduce of all gradients, with nothing else going on.
        hidden_estimate: Share of ``communication_seconds`` that does not make the step longer, 0 to 1; None if it
            cannot be told, because communication is too short beside computing, or a step is longer than both together.
        hidden_in_timeline: Recorded share of the communication that ran during a forward or backward pass; None
            without a timeline.
        ranks_agree: Whether all ranks ended with the same weights, bit for bit.
    """

    strategy: str
    validation_loss: float
    step_seconds: float
    communication_seconds: float
    hidden_estimate: float | None
    hidden_in_timeline: float | None
    ranks_agree: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightDifference:
    """How the final weights of two runs differ.

    Args:
        tensors: Number of tensors compared, all of the ``state_dict``.
        different: Names of those that are not bit-for-bit identical.
        maximum: Greatest absolute difference of any element; 0 if all are identical.
    """

    tensors: int
    different: list[str]
    maximum: float


def outcome(
    strategy: str, results: Sequence[RankResult], compute_seconds: float, hidden_in_timeline: float | None
) -> Outcome:
    """Sums up the ranks of one run.

    Args:
        strategy: The run's strategy.
        results: One per rank.
        compute_seconds: The typical step of the same ranks training alone.
        hidden_in_timeline: As in `Outcome`.
    """
    step = typical_step_seconds(results)
    measured = [r.communication_seconds for r in results if r.communication_seconds is not None]
    communication = statistics.median(measured)
    noticeable = communication >= _NOTICEABLE_SHARE * compute_seconds
    held_up = step > _HELD_UP * (compute_seconds + communication)
    hidden = min(1.0, max(0.0, 1.0 - (step - compute_seconds) / communication))
    return Outcome(
        strategy=strategy,
        validation_loss=results[0].validation_loss,
        step_seconds=step,
        communication_seconds=communication,
        hidden_estimate=hidden if noticeable and not held_up else None,
        hidden_in_timeline=hidden_in_timeline,
        ranks_agree=all(result.digests == results[0].digests for result in results),
    )


def weight_difference(reference: RankResult, candidate: RankResult) -> WeightDifference:
    """Compares the final weights of the first ranks of two runs, bit for bit."""
    names = sorted(reference.digests.keys() | candidate.digests.keys())
    different = [name for name in names if reference.digests.get(name) != candidate.digests.get(name)]
    maximum = _maximum_difference(reference, candidate, different) if different else 0.0
    return WeightDifference(tensors=len(names), different=different, maximum=maximum)


def _maximum_difference(reference: RankResult, candidate: RankResult, names: Sequence[str]) -> float:
    # Imported only when needed: the demo's own process has no other use for it.
    import torch

    if reference.weights is None or candidate.weights is None:
        raise ValueError("Only the results of rank 0 carry weights to compare.")
    left, right = (torch.load(Path(path)) for path in (reference.weights, candidate.weights))
    return max(float((left[name] - right[name]).abs().max()) for name in names)
