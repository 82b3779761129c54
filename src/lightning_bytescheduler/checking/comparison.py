"""Compares what two runs left behind. Pure, but for the files that hold tensors.

Bits are compared first, by digests. Where sums may be formed in another order (more than two ranks, norms), differences
are measured against those between ``ddp`` and ``ddp`` whose gradients were changed by a rounding error in each step: an
optimizer such as Adam amplifies both alike.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
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
    initial: dict[str, None] = {}
    weights: dict[str, None] = {}
    optimizer: dict[str, None] = {}
    metrics: dict[str, None] = {}
    other: list[str] = []
    losses = 0
    if len(expected.ranks) != len(actual.ranks):
        other.append(f"{len(expected.ranks)} ranks became {len(actual.ranks)}")
    for one, two in zip(expected.ranks, actual.ranks, strict=False):
        if one.steps != two.steps:
            other.append(f"rank {one.rank} took {two.steps} steps instead of {one.steps}")
        for found, left, right in (
            (initial, one.initial, two.initial),
            (weights, one.weights, two.weights),
            (optimizer, one.optimizer, two.optimizer),
            (metrics, one.metrics, two.metrics),
        ):
            found.update(dict.fromkeys(_unequal(left, right)))
        losses += sum(a != b for a, b in zip(one.losses, two.losses, strict=False))
        losses += abs(len(one.losses) - len(two.losses))
    return Difference(
        initial=tuple(initial),
        losses=losses,
        weights=tuple(weights),
        optimizer=tuple(optimizer),
        metrics=tuple(metrics),
        other=tuple(other),
    )


def _unequal(one: Mapping[str, str], two: Mapping[str, str]) -> list[str]:
    return [name for name in dict.fromkeys((*one, *two)) if one.get(name) != two.get(name)]


def first_difference(expected: RunResult, actual: RunResult, *, up_to: int | None = None) -> FirstDifference | None:
    """Where two runs part: the first loss, and with traces the first weights, that differ.

    Args:
        expected: A whole run.
        actual: Another one.
        up_to: The last step to look at.
    """
    found: list[FirstDifference] = []
    for one, two in zip(expected.ranks, actual.ranks, strict=False):
        for step, a, b in zip(one.loss_steps, one.losses, two.losses, strict=False):
            if a != b:
                values = float.fromhex(a), float.fromhex(b)
                found.append(FirstDifference(step=step + 1, rank=one.rank, losses=values))
                break
        for step in sorted(one.trace.keys() & two.trace.keys()):
            names = _unequal(one.trace[step], two.trace[step])
            if names:
                found.append(FirstDifference(step=step, rank=one.rank, tensors=tuple(names)))
                break
    if not found:
        return None
    step = min(each.step for each in found)
    if up_to is not None and step > up_to:
        return None
    at_once = [each for each in found if each.step == step]
    loss = next((each for each in at_once if each.losses is not None), None)
    named = next((each for each in at_once if each.tensors), None)
    return FirstDifference(
        step=step,
        rank=(loss or at_once[0]).rank,
        losses=None if loss is None else loss.losses,
        tensors=() if named is None else named.tensors,
    )


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
