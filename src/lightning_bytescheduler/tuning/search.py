"""The next point to try: Bayesian optimization with a Gaussian process and expected improvement.

The process is scikit-learn's, and expected improvement the package ``bayesian-optimization``'s, with four things set
for this use.

- The process models the logarithm of the step time over the logarithms of the sizes. Points far worse than the
  best are all taken to be equally bad, so that a cliff does not dwarf the differences that matter.
- Each observation has the error with which it was measured. Improvement is counted from the best *expected* value of
  the points tried, not from the luckiest measurement, and from plain DDP's if that is better.
- Few observations would let the length scales run away, so they are the most probable ones of a grid, under a prior
  that expects the step time to change over some octaves. Without a numerical search for them, a suggestion is a
  function of the observations alone, and costs little.
- Expected improvement is evaluated on all points of the search space, which are legal by construction and few; not
  far from what was measured, and only where the time that a trial would probably lose is affordable.

The first call imports scikit-learn and SciPy, which takes a second or more; ``prepare`` does that beforehand. A
call after that takes about ten milliseconds of a processor.

Besides: how a search is run (:class:`TuningOptions`), and where to look before anything was measured
(:func:`first_guesses`).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lightning_bytescheduler.checks import require_bool, require_positive, require_whole
from lightning_bytescheduler.exceptions import OptionError
from lightning_bytescheduler.tuning.record import TrialEntry
from lightning_bytescheduler.tuning.sizes import SearchSpace, TuningPoint

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Vector = NDArray[np.float64]

_GUESSES = 2
_APART = 1.5  # octaves: nearer, the second guess would tell little that the first did not
_OCTAVES = 0.25  # of the grid of candidates
_REACH = 2.0  # octaves from the nearest point that is not bad
_NOT_BAD = 0.3  # logarithm of the step time above the best one's
_WORST = 0.5  # the same; beyond, all are equally bad
_LEAST_SPREAD = 0.05  # sizes are expected to change the step time by this share at least, whatever was seen
_FIRST_SPREAD, _FEW = 0.2, 4  # and by this one, while so few points or fewer were seen
_LENGTH_SCALES = (1.0, 1.7, 3.0, 5.0, 9.0)  # octaves
_USUAL_LENGTH_SCALE, _LENGTH_SCALE_SPREAD = 3.0, 0.7  # log-normal


@dataclass(frozen=True, kw_only=True, slots=True)
class TuningOptions:
    """Budgets of a search.

    Attributes:
        trials: Points that are tried at most, those at the start among them.
        steps_per_trial: Steps of a trial at most; fewer where the step time is steady, or the point clearly worse.
        precision: A trial ends when its step time is known with this standard error, as a share.
        plain_ddp: Whether DDP's own behaviour is among the candidates.
        least_gain: The search ends when nothing promises to save this share of the step time.
        cost_share: What may be lost, as a share of the time of the steps since the search began.
        cost_steps: So many steps' share may be lost from the start.
        warm_up: First steps that do not count.
        settle: Steps after a change that do not count; the communication of the last step before it is in them.
        lead: Steps from a decision to the first one that it governs.

    Raises:
        OptionError: Names the option that is not allowed.
    """

    trials: int = 15
    steps_per_trial: int = 100
    precision: float = 0.01
    plain_ddp: bool = True
    least_gain: float = 0.003
    cost_share: float = 0.02
    cost_steps: int = 500
    warm_up: int = 10
    settle: int = 1
    lead: int = 1

    def __post_init__(self) -> None:
        for option, least in (("trials", 1), ("steps_per_trial", 4), ("cost_steps", 1), ("warm_up", 0), ("settle", 0)):
            require_whole(option, getattr(self, option), least)
        require_whole("lead", self.lead, 1)
        for option in ("precision", "least_gain", "cost_share"):
            if require_positive(option, getattr(self, option)) >= 1:
                raise OptionError(option, getattr(self, option), "less than 1")
        require_bool("plain_ddp", self.plain_ddp)

    @property
    def least_steps(self) -> int:
        """Steps that a point takes until it can be left for good reason: two measured, and both changes' first ones."""
        return 2 + self.settle + self.lead


def first_guesses(
    space: SearchSpace,
    predicted_seconds: Callable[[TuningPoint], float],
) -> tuple[TuningPoint, ...]:
    """The points that are predicted to be fastest, the best first, and not all in one place.

    A prediction need not be right, only better than nothing: guesses are measured like all others.

    Args:
        space: Where to look.
        predicted_seconds: Time of a step at a point, such as a simulation's; called for each point of a grid.

    Raises:
        OptionError: If a prediction is not a finite number above 0.
    """
    predicted = [
        (require_positive("predicted_seconds", predicted_seconds(point)), point) for point in space.points(octaves=1.0)
    ]
    chosen: list[TuningPoint] = []
    # Of equal predictions the one with least in flight: what is not in flight yet can still be overtaken.
    for _, point in sorted(predicted, key=lambda entry: (entry[0], entry[1].sizes)):
        if len(chosen) < _GUESSES and all(distance(point, other) >= _APART for other in chosen):
            chosen.append(point)
    return tuple(chosen)


def distance(one: TuningPoint, other: TuningPoint) -> float:
    """How far apart two points are: doublings of the size that differs more.

    Raises:
        OptionError: If one of them is plain DDP.
    """
    return max(abs(math.log2(a / b)) for a, b in zip(one.sizes, other.sizes, strict=True))


@dataclass(frozen=True, slots=True)
class Proposal:
    """The point that promises most.

    Attributes:
        point: It, or ``None`` if nothing is affordable.
        gain: Expected improvement, as a share of the best step time, of this point.
        gain_anywhere: The same of the most promising point of all, affordable or not.
    """

    point: TuningPoint | None
    gain: float
    gain_anywhere: float


def prepare() -> None:
    """Import what a search needs, so that no step has to wait for it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what old versions of SciPy and scikit-learn say of each other
        import bayes_opt  # noqa: F401


def propose(space: SearchSpace, trials: Sequence[TrialEntry], *, affordable: float = math.inf) -> Proposal:
    """Say where to measure next. Deterministic.

    Args:
        space: Where to look.
        trials: What is known, in any order; a point may occur several times. One at least has sizes.
        affordable: How much slower than the best known a point may probably be, as a share of its step time.

    Raises:
        OptionError: If there are no trials of points with sizes.
    """
    merged = _merged(trial for trial in trials if not trial.point.is_plain_ddp)
    if not merged:
        raise OptionError("trials", trials, "at least one of a point with sizes")
    ddp = min((trial.step_seconds for trial in trials if trial.point.is_plain_ddp), default=math.inf)
    best = min(ddp, *(seconds for seconds, _ in merged.values()))
    targets = {point: -min(math.log(seconds / best), _WORST) for point, (seconds, _) in merged.items()}
    near = [point for point, target in targets.items() if target >= -_NOT_BAD]
    near = near or [max(targets, key=targets.__getitem__)]
    away = {
        point: min(distance(point, other) for other in near)
        for point in space.points(octaves=_OCTAVES)
        if point not in merged
    }
    if not away:
        return Proposal(None, 0.0, 0.0)
    # All that was tried may be outside the space, or on the far side of a gap in it.
    reach = max(_REACH, min(away.values()) + _OCTAVES)
    candidates = [point for point, octaves in away.items() if octaves <= reach]
    limit = math.log1p(affordable) if affordable > 0 else 0.0
    errors = [error / seconds for seconds, error in merged.values()]
    gains, probably_lost = _improvements(space, targets, errors, candidates, -math.log(ddp / best))
    within = [gain if lost <= limit else -1.0 for gain, lost in zip(gains, probably_lost, strict=True)]
    chosen = max(range(len(candidates)), key=within.__getitem__)
    if within[chosen] < 0:
        return Proposal(None, 0.0, max(gains))
    return Proposal(candidates[chosen], within[chosen], max(gains))


def _merged(trials: Iterable[TrialEntry]) -> dict[TuningPoint, tuple[float, float]]:
    """One mean and error for each point, weighted by what each measurement is worth."""
    sums: dict[TuningPoint, tuple[float, float]] = {}
    for trial in trials:
        weight = max(trial.error_seconds, 1e-9 * trial.step_seconds) ** -2
        total, weights = sums.get(trial.point, (0.0, 0.0))
        sums[trial.point] = total + weight * trial.step_seconds, weights + weight
    return {point: (total / weights, weights**-0.5) for point, (total, weights) in sums.items()}


def _improvements(
    space: SearchSpace,
    targets: Mapping[TuningPoint, float],
    errors: Sequence[float],
    candidates: Sequence[TuningPoint],
    ceiling: float,
) -> tuple[list[float], list[float]]:
    """Expected improvement of each candidate, and what it probably loses; in logarithms of the step time."""
    import numpy as np
    from bayes_opt.acquisition import ExpectedImprovement
    from sklearn.gaussian_process import GaussianProcessRegressor
    from sklearn.gaussian_process.kernels import Matern

    tuned = 2 if space.tunes_partitions else 1

    def octaves(points: Iterable[TuningPoint]) -> Vector:
        return np.log2(np.array([point.sizes[:tuned] for point in points], dtype=np.float64))

    seen, known = np.array(list(targets.values())), octaves(targets)
    least_spread = _FIRST_SPREAD if len(seen) <= _FEW else _LEAST_SPREAD
    middle, spread = float(np.mean(seen)), max(float(np.std(seen)), least_spread)
    process = GaussianProcessRegressor(
        kernel=Matern(length_scale=[_USUAL_LENGTH_SCALE] * tuned, length_scale_bounds=(0.1, 100.0), nu=2.5),
        alpha=np.square(np.maximum(errors, 1e-3) / spread),
        optimizer=_most_probable,
        random_state=0,  # nothing is drawn
    )
    process.fit(known, (seen - middle) / spread)
    improvement = ExpectedImprovement(xi=0.0)
    # Over the best expected value of what was tried.
    improvement.y_max = max(float(process.predict(known).max()), (ceiling - middle) / spread)  # type: ignore[assignment]
    mean, deviation = process.predict(octaves(candidates), return_std=True)
    gains, lost = spread * improvement.base_acq(mean, deviation), -(middle + spread * (mean - deviation))
    return gains.tolist(), lost.tolist()


def _most_probable(negative_likelihood: Callable[..., float], initial: Vector, bounds: Vector) -> tuple[Vector, float]:
    """Choose logarithms of length scales from a grid, as scikit-learn's ``optimizer``."""
    import itertools

    import numpy as np

    def cost(theta: Vector) -> float:
        prior = np.square((theta - math.log(_USUAL_LENGTH_SCALE)) / _LENGTH_SCALE_SPREAD).sum() / 2
        return float(negative_likelihood(theta, eval_gradient=False) + prior)

    grid = [np.log(scales) for scales in itertools.product(_LENGTH_SCALES, repeat=len(initial))]
    costs = [cost(theta) for theta in grid]
    least = min(range(len(grid)), key=costs.__getitem__)
    return grid[least], costs[least]
