"""The next point to try: Bayesian optimization with a Gaussian process and expected improvement.

The search itself is the package ``bayesian-optimization``'s, with four things set for this use.

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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lightning_bytescheduler.checks import require_bool, require_positive, require_whole
from lightning_bytescheduler.exceptions import OptionError
from lightning_bytescheduler.tuning.search_space import SearchSpace, TuningPoint

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Vector = NDArray[np.float64]

__all__ = ["Observation", "Proposal", "TuningOptions", "distance", "first_guesses", "prepare", "propose"]

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
    *,
    count: int = 2,
    octaves: float = 1.0,
) -> tuple[TuningPoint, ...]:
    """The points that are predicted to be fastest, the best first, and not all in one place.

    A prediction need not be right, only better than nothing: guesses are measured like all others.

    Args:
        space: Where to look.
        predicted_seconds: Time of a step at a point, such as a simulation's; called for each point of a grid.
        count: How many to return at most.
        octaves: Distance of neighbours in the grid, in doublings.

    Raises:
        OptionError: If ``count`` or ``octaves`` is not allowed, or a prediction is not a finite number above 0.
    """
    require_whole("count", count, 0)
    predicted = [
        (require_positive("predicted_seconds", predicted_seconds(point)), point)
        for point in space.points(octaves=octaves)
    ]
    chosen: list[TuningPoint] = []
    # Of equal predictions the one with least in flight: what is not in flight yet can still be overtaken.
    for _, point in sorted(predicted, key=lambda entry: (entry[0], entry[1].sizes)):
        if len(chosen) < count and all(distance(point, other) >= _APART for other in chosen):
            chosen.append(point)
    return tuple(chosen)


def distance(one: TuningPoint, other: TuningPoint) -> float:
    """How far apart two points are: doublings of the size that differs more.

    Raises:
        OptionError: If one of them is plain DDP.
    """
    return max(abs(math.log2(a / b)) for a, b in zip(one.sizes, other.sizes, strict=True))


@dataclass(frozen=True, slots=True)
class Observation:
    """What was measured at a point.

    Attributes:
        point: One with sizes.
        seconds: Of a step.
        error: Standard error of ``seconds``.
    """

    point: TuningPoint
    seconds: float
    error: float


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


def propose(
    space: SearchSpace,
    observations: Sequence[Observation],
    *,
    plain_ddp_seconds: float | None = None,
    affordable: float = math.inf,
) -> Proposal:
    """Say where to measure next. Deterministic.

    Args:
        space: Where to look.
        observations: What is known, in any order; a point may occur several times.
        plain_ddp_seconds: Of a step as DDP takes it, where measured.
        affordable: How much slower than the best known a point may probably be, as a share of its step time.

    Raises:
        OptionError: If there are no observations, or one is of plain DDP.
    """
    if not space.tunes_partitions and len({seen.point.partition_size for seen in observations}) > 1:
        raise OptionError("observations", observations, "of one partition size where partitions are not tuned")
    merged = _merged(observations)
    if not merged:
        raise OptionError("observations", observations, "at least one")
    best = min(seconds for seconds, _ in merged.values())
    if plain_ddp_seconds is not None:
        best = min(best, plain_ddp_seconds)
    tried = list(merged)
    targets = [-min(math.log(merged[point][0] / best), _WORST) for point in tried]
    errors = [merged[point][1] / merged[point][0] for point in tried]
    near = [point for point, target in zip(tried, targets, strict=True) if target >= -_NOT_BAD]
    near = near or [max(zip(targets, tried, strict=True), key=lambda entry: entry[0])[1]]
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
    ceiling = -math.log(plain_ddp_seconds / best) if plain_ddp_seconds is not None else -math.inf
    gains, probably_lost = _improvements(space, tried, targets, errors, candidates, ceiling)
    within = [gain if lost <= limit else -1.0 for gain, lost in zip(gains, probably_lost, strict=True)]
    chosen = max(range(len(candidates)), key=within.__getitem__)
    if within[chosen] < 0:
        return Proposal(None, 0.0, max(gains))
    return Proposal(candidates[chosen], within[chosen], max(gains))


def _merged(observations: Sequence[Observation]) -> dict[TuningPoint, tuple[float, float]]:
    """One mean and error for each point, weighted by what each measurement is worth."""
    sums: dict[TuningPoint, tuple[float, float]] = {}
    for seen in observations:
        if seen.point.is_plain_ddp:
            raise OptionError("observations", seen, "of points with sizes; plain DDP's time is an argument of its own")
        weight = max(seen.error, 1e-9 * seen.seconds) ** -2
        total, weights = sums.get(seen.point, (0.0, 0.0))
        sums[seen.point] = total + weight * seen.seconds, weights + weight
    return {point: (total / weights, weights**-0.5) for point, (total, weights) in sums.items()}


def _improvements(
    space: SearchSpace,
    tried: Sequence[TuningPoint],
    targets: Sequence[float],
    errors: Sequence[float],
    candidates: Sequence[TuningPoint],
    ceiling: float,
) -> tuple[list[float], list[float]]:
    """Expected improvement of each candidate, and what it probably loses; in logarithms of the step time."""
    import numpy as np
    from bayes_opt import BayesianOptimization
    from sklearn.gaussian_process.kernels import Matern

    names = ["credit", "partition"] if space.tunes_partitions else ["credit"]

    def coordinates(points: Sequence[TuningPoint]) -> Vector:
        return np.log2(np.array([point.sizes[: len(names)] for point in points], dtype=np.float64))

    known, wanted = coordinates(tried), coordinates(candidates)
    everywhere = np.concatenate([known, wanted])
    # Wider than any point, because a point on a bound may be outside by rounding.
    bounds = zip(everywhere.min(axis=0) - 1, everywhere.max(axis=0) + 1, strict=True)
    least_spread = _FIRST_SPREAD if len(tried) <= _FEW else _LEAST_SPREAD
    middle, spread = float(np.mean(targets)), max(float(np.std(targets)), least_spread)
    acquisition = _acquisition()(wanted, (ceiling - middle) / spread)
    optimizer = BayesianOptimization(
        f=None,
        pbounds={name: (float(low), float(high)) for name, (low, high) in zip(names, bounds, strict=True)},
        acquisition_function=acquisition,
        random_state=0,  # nothing is drawn; without it, a generator would be seeded from the system
        verbose=0,
    )
    for point, target in zip(known, targets, strict=True):
        optimizer.register(dict(zip(names, point, strict=True)), (target - middle) / spread)
    optimizer.set_gp_params(
        kernel=Matern(length_scale=[_USUAL_LENGTH_SCALE] * len(names), length_scale_bounds=(0.1, 100.0), nu=2.5),
        alpha=np.square(np.maximum(errors, 1e-3) / spread),
        normalize_y=False,
        n_restarts_optimizer=0,
        optimizer=_most_probable,
    )
    optimizer.suggest()
    return (
        [spread * value for value in acquisition.improvements],
        [-(middle + spread * value) for value in acquisition.pessimistic],
    )


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


def _acquisition() -> Any:
    """Make the class, because its base takes long to import."""
    from bayes_opt.acquisition import ExpectedImprovement

    class ImprovementOnGrid(ExpectedImprovement):
        """Expected improvement at given places, over the best expected value at the places tried."""

        def __init__(self, places: Vector, ceiling: float) -> None:
            super().__init__(xi=0.0)
            self._places = places
            self._ceiling = ceiling
            self.improvements: list[float] = []
            self.pessimistic: list[float] = []

        def suggest(self, gp: Any, target_space: Any, *args: Any, **kwargs: Any) -> Vector:
            gp.fit(target_space.params, target_space.target)
            best = max(float(gp.predict(target_space.params).max()), self._ceiling)
            self.y_max = best  # type: ignore[assignment]  # declared as what it is at first
            mean, deviation = gp.predict(self._places, return_std=True)
            self.improvements = self.base_acq(mean, deviation).tolist()
            self.pessimistic = (mean - deviation).tolist()
            chosen: Vector = self._places[max(range(len(self._places)), key=self.improvements.__getitem__)]
            return chosen

    return ImprovementOnGrid
