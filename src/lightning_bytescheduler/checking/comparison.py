"""Compares what two runs left behind. Pure, but for the files that hold tensors.

Bits are compared first, by digests. Where sums may be formed in another order (more than two ranks, norms), differences
are measured against those between ``ddp`` and ``ddp`` whose gradients were changed by a rounding error in each step: an
optimizer such as Adam amplifies both alike.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from lightning_bytescheduler.checking.runs import RunResult

_ROUNDING = 1e-6
"""Relative difference that is rounding in any case; a step from an identical state stays below it."""

_FACTOR = 10.0
"""How many times more than under nudged gradients is still rounding."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """What is not the same to the last bit, by name; on any rank.

    Attributes:
        initial: Weights when training began.
        losses: Number of losses that differ.
        weights: Weights and buffers.
        optimizer: Parts of the optimizers' state.
        metrics: Logged metrics.
        other: Anything else, in words.
    """

    initial: tuple[str, ...] = ()
    losses: int = 0
    weights: tuple[str, ...] = ()
    optimizer: tuple[str, ...] = ()
    metrics: tuple[str, ...] = ()
    other: tuple[str, ...] = ()

    @property
    def trained_alike(self) -> bool:
        """Whether weights, optimizer state and losses are the same; a metric may hold a time of day."""
        return not (self.initial or self.losses or self.weights or self.optimizer or self.other)


@dataclass(frozen=True, kw_only=True, slots=True)
class FirstDifference:
    """Where two runs part.

    Attributes:
        step: The first optimizer step, counted from 1, whose forward pass has another loss or whose update differs.
        rank: Where it was seen first.
        losses: Both losses of that step, if they differ.
        tensors: Weights that differ after that step, in the order of registration.
    """

    step: int
    rank: int
    losses: tuple[float, float] | None = None
    tensors: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Rounding:
    """How far two runs are apart, measured against rounding.

    Attributes:
        equal: Whether it is rounding.
        largest: Largest relative difference of a tensor.
        tensor: Its name.
        allowed: What that tensor may differ by.
        step: The first step whose loss differs by more, if any does.
    """

    equal: bool
    largest: float
    tensor: str
    allowed: float
    step: int | None = None


def compare(expected: RunResult, actual: RunResult) -> Difference:
    """What two whole runs differ in."""
    pairs = list(zip(expected.ranks, actual.ranks, strict=False))

    def unequal(what: str) -> tuple[str, ...]:
        return tuple(dict.fromkeys(n for one, two in pairs for n in _unequal(getattr(one, what), getattr(two, what))))

    other = [f"rank {a.rank} took {b.steps} steps instead of {a.steps}" for a, b in pairs if a.steps != b.steps]
    if len(expected.ranks) != len(actual.ranks):
        other.insert(0, f"{len(expected.ranks)} ranks became {len(actual.ranks)}")
    return Difference(
        losses=sum(a != b for one, two in pairs for a, b in itertools.zip_longest(one.losses, two.losses)),
        other=tuple(other),
        **{what: unequal(what) for what in ("initial", "weights", "optimizer", "metrics")},
    )


def _unequal(one: Mapping[str, str], two: Mapping[str, str]) -> list[str]:
    return [name for name in dict.fromkeys((*one, *two)) if one.get(name) != two.get(name)]


def first_difference(expected: RunResult, actual: RunResult) -> FirstDifference | None:
    """Where two whole runs part: the first loss, and with traces the first weights, that differ."""
    found: list[FirstDifference] = []
    for one, two in zip(expected.ranks, actual.ranks, strict=False):
        losses = zip(one.loss_steps, one.losses, two.losses, strict=False)
        parted = next(((step, a, b) for step, a, b in losses if a != b), None)
        if parted is not None:
            values = float.fromhex(parted[1]), float.fromhex(parted[2])
            found.append(FirstDifference(step=parted[0] + 1, rank=one.rank, losses=values))
        for step in sorted(one.trace.keys() & two.trace.keys()):
            if names := _unequal(one.trace[step], two.trace[step]):
                found.append(FirstDifference(step=step, rank=one.rank, tensors=tuple(names)))
                break
    first = min(found, key=lambda each: (each.step, each.losses is None), default=None)
    if first is None:
        return None
    named = (each.tensors for each in found if each.step == first.step and each.tensors)
    return replace(first, tensors=next(named, ()))


def tensor_distances(expected: Path, actual: Path) -> dict[str, float]:
    """Relative distance, in the Euclidean norm, of each floating-point tensor in two files of weights.

    Args:
        expected: As :attr:`RunResult.state_file`.
        actual: The same of another run.
    """
    one = torch.load(expected, weights_only=True)["weights"]
    two = torch.load(actual, weights_only=True)["weights"]
    distances = {}
    for name, a in one.items():
        b = two.get(name)
        if b is None or a.shape != b.shape or not (a.is_floating_point() or a.is_complex()):
            continue
        kind = torch.complex128 if a.is_complex() else torch.float64
        a, b = a.to(kind), b.to(kind)
        apart = (a - b).norm().item()
        size = a.norm().item()
        distances[name] = apart / size if apart and size else apart
    return distances


def rounding(expected: RunResult, actual: RunResult, nudged: RunResult) -> Rounding:
    """Whether ``actual`` differs from ``expected`` by rounding only.

    Args:
        expected: ``ddp``.
        actual: ``bytescheduler``.
        nudged: ``ddp`` whose gradients were changed by a rounding error in each step.
    """
    seen = tensor_distances(expected.state_file, actual.state_file)
    usual = tensor_distances(expected.state_file, nudged.state_file)
    typical = statistics.median(usual.values()) if usual else 0.0

    def allowed(name: str) -> float:
        return max(_ROUNDING, _FACTOR * max(usual.get(name, 0.0), typical))

    def excess(name: str) -> float:
        return math.inf if math.isnan(seen[name]) else seen[name] / allowed(name)

    step = first_loss_beyond(expected, actual, nudged)
    if not seen:
        return Rounding(equal=step is None, largest=0.0, tensor="", allowed=_ROUNDING, step=step)
    beyond = max(seen, key=excess)
    equal = excess(beyond) <= 1.0 and step is None
    worst = max(seen, key=lambda name: seen[name]) if equal else beyond
    return Rounding(equal=equal, largest=seen[worst], tensor=worst, allowed=allowed(worst), step=step)


def first_loss_beyond(expected: RunResult, actual: RunResult, nudged: RunResult) -> int | None:
    """The first step, counted from 1, whose loss is further off than rounding explains."""
    steps = []
    for one, two, three in zip(expected.ranks, actual.ranks, nudged.ranks, strict=False):
        usual = 0.0
        for step, *texts in zip(one.loss_steps, one.losses, two.losses, three.losses, strict=False):
            a, b, c = map(float.fromhex, texts)
            size = max(abs(a), 1e-12)
            usual = max(usual, abs(a - c) / size)
            # One step's rounding is seen in the next step's loss, so the next one's may be larger already.
            if not (abs(a - b) / size <= max(_ROUNDING, _FACTOR * usual) or texts[0] == texts[1]):
                steps.append(step + 1)
                break
    return min(steps, default=None)
