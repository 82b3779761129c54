"""From the moments of some steps to a profile: layers in the order of first use, with the times of a whole step.

The steps in which parameters are watched give each layer's share of the forward and of the backward pass; how long
these take, and the step, is taken from steps in which nothing is watched. What a step does besides is placed where it
falls when training is distributed: updates of weights before the forward pass of their layer, in proportion to the
bytes; the rest, such as waiting for data, between two steps, where no gradient is needed.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lightning_bytescheduler.exceptions import UnsupportedError
from lightning_bytescheduler.simulation.profiles import LayerProfile, ModelProfile

__all__ = ["BETWEEN_STEPS", "READ_UNSEEN", "UNUSED", "StepParts", "WatchedParameter", "WatchedStep", "make_profile"]

BETWEEN_STEPS = "(between steps)"
READ_UNSEEN = "(read unseen)"
UNUSED = "(unused)"


@dataclass(frozen=True, kw_only=True, slots=True)
class StepParts:
    """Seconds of a step, from the start of a forward pass to the start of the next.

    Attributes:
        forward: ``training_step``.
        backward: The backward pass.
        update: Clipping and the optimizer's step.
        step: All of it; what is not in the above lies between steps.
    """

    forward: float
    backward: float
    update: float
    step: float

    @classmethod
    def typical(cls, steps: Sequence[StepParts]) -> StepParts:
        """The median of several steps, its parts in proportion to the medians of their shares."""
        step = statistics.median(times.step for times in steps)
        forward = statistics.median(times.forward / times.step for times in steps)
        backward = statistics.median(times.backward / times.step for times in steps)
        update = statistics.median(times.update / times.step for times in steps)
        rest = statistics.median(times.rest / times.step for times in steps)
        unit = step / (forward + backward + update + rest)  # medians of shares need not add up to 1
        return cls(forward=unit * forward, backward=unit * backward, update=unit * update, step=step)

    @property
    def rest(self) -> float:
        """What lies between two steps: waiting for data, hooks, logging."""
        return max(0.0, self.step - self.forward - self.backward - self.update)


@dataclass(frozen=True, kw_only=True, slots=True)
class WatchedParameter:
    """A parameter that is trained.

    Attributes:
        key: Identifies it in :class:`WatchedStep`.
        layer: Name of the module that holds it.
        size: Bytes of its gradient.
    """

    key: int
    layer: str
    size: int


@dataclass(frozen=True, kw_only=True, slots=True)
class WatchedStep:
    """What was seen of one step.

    Attributes:
        forward: Seconds of the forward pass.
        backward: Seconds of the backward pass.
        first_use: By key of a parameter, seconds from the start of the forward pass; lacks what was not seen.
        gradient: By key of a parameter, seconds from the start of the backward pass; lacks what got none.
    """

    forward: float
    backward: float
    first_use: Mapping[int, float]
    gradient: Mapping[int, float]


def make_profile(
    name: str, parameters: Sequence[WatchedParameter], steps: Sequence[WatchedStep], times: StepParts
) -> ModelProfile:
    """Put a profile together; its layers take ``times.step`` together.

    Parameters of one module that are first used after each other are one layer. Those that got a gradient though
    nobody was seen to use them come first, as their updates do not wait for the forward pass. Those that got no
    gradient and were not used come last: DDP sends zeros for them, as soon as the backward pass begins.

    Args:
        name: Of the model.
        parameters: All that are trained, each once.
        steps: At least one.
        times: Of a step in which nothing was watched.

    Raises:
        UnsupportedError: If no parameter gets a gradient.
    """
    forward = statistics.median(step.forward for step in steps)
    backward = statistics.median(step.backward for step in steps)
    first_use = {p.key: _median(p.key, [step.first_use for step in steps]) for p in parameters}
    gradient = {p.key: _median(p.key, [step.gradient for step in steps]) for p in parameters}
    if all(moment is None for moment in gradient.values()):
        raise UnsupportedError(
            "No parameter of the module gets a gradient, so there is nothing to send: let training_step return a loss "
            "that depends on parameters with requires_grad=True."
        )
    layers = _layers(parameters, first_use, gradient)
    starts = [max(0.0, min(layer.start, forward)) for layer in layers] or [0.0]
    ends = [*starts[1:], forward]
    ready = _complete_from_the_end([min(layer.ready, backward) for layer in layers])
    earlier = [*ready[1:], 0.0]
    forward_share = times.forward / forward if forward else 0.0
    backward_share = times.backward / backward if backward else 0.0
    updated = sum(layer.size for layer in layers if layer.name != UNUSED)
    made = [
        LayerProfile(
            name=BETWEEN_STEPS,
            parameter_bytes=0,
            forward_seconds=times.rest + forward_share * starts[0],
            # What the backward pass still does when the last gradient is complete.
            backward_seconds=backward_share * (backward - ready[0]),
        )
    ]
    for layer, start, end, done, before in zip(layers, starts, ends, ready, earlier, strict=True):
        update = times.update * layer.size / updated if layer.name != UNUSED else 0.0
        made.append(
            LayerProfile(
                name=layer.name,
                parameter_bytes=layer.size,
                forward_seconds=forward_share * (end - start) + update,
                backward_seconds=backward_share * (done - before),
            )
        )
    return ModelProfile(name=name, layers=tuple(made))


@dataclass(frozen=True, slots=True)
class _Layer:
    name: str
    size: int
    start: float
    ready: float


def _layers(
    parameters: Sequence[WatchedParameter],
    first_use: Mapping[int, float | None],
    gradient: Mapping[int, float | None],
) -> list[_Layer]:
    unseen = [p for p in parameters if first_use[p.key] is None and gradient[p.key] is not None]
    unused = [p for p in parameters if first_use[p.key] is None and gradient[p.key] is None]
    used = sorted((p for p in parameters if first_use[p.key] is not None), key=lambda p: first_use[p.key] or 0.0)

    def layer(name: str, members: Sequence[WatchedParameter], start: float) -> _Layer:
        return _Layer(
            name,
            sum(p.size for p in members),
            start,
            max(gradient[p.key] or 0.0 for p in members),
        )

    layers = [layer(READ_UNSEEN, unseen, 0.0)] if unseen else []
    for name, group in itertools.groupby(used, key=lambda p: p.layer):
        members = list(group)
        layers.append(layer(name, members, first_use[members[0].key] or 0.0))
    # At the very end of the forward pass, so that they take none of it.
    return [*layers, layer(UNUSED, unused, float("inf"))] if unused else layers


def _complete_from_the_end(ready: Sequence[float]) -> list[float]:
    """When a layer and all after it are complete: a profile's backward pass goes through the layers in order."""
    return list(itertools.accumulate(reversed(ready), max))[::-1]


def _median(key: int, seen: Sequence[Mapping[int, float]]) -> float | None:
    """The median over the steps, if more than half of them saw it."""
    moments = [moment for step in seen if (moment := step.get(key)) is not None]
    return statistics.median(moments) if 2 * len(moments) > len(seen) else None
