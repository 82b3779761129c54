"""Records steps as they are taken, and makes a profile of them: layers in the order of first use, with their times.

Some steps warm up, then one that is only timed and one that is watched take turns. Watched is when each parameter is
first used in the forward pass and when its gradient is complete, seen as the strategy sees them: a touch of the
parameter itself, wherever that happens, and the end of its accumulation. Moments are those of the device
(:class:`DeviceClock`): what has been computed by then, not what has been asked for.

Watched steps give each layer's share of the forward and of the backward pass; how long these take, and the step, is
taken from steps in which nothing is watched. What a step does besides is placed where it falls when training is
distributed: updates of weights before the forward pass of their layer, in proportion to the bytes; the rest, such as
waiting for data, between two steps, where no gradient is needed.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from lightning_bytescheduler.ddp.gates import arm, can_be_gated, disarm, gate_of, is_armed
from lightning_bytescheduler.ddp.plan import unseen_parameters
from lightning_bytescheduler.exceptions import UnsupportedError
from lightning_bytescheduler.simulation.profiles import LayerProfile, ModelProfile

BETWEEN_STEPS = "(between steps)"
READ_UNSEEN = "(read unseen)"
UNUSED = "(unused)"

_WARM_UP_STEPS = 3
_COMPRESSED_WIDTH = 2  # bytes of a bf16 value


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


class DeviceClock:
    """Takes moments and tells the time between them.

    On CUDA a moment is an event on the current stream, so that taking one does not hold the device up.

    Args:
        device: Where the model computes, a CPU or a CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_cuda = device.type == "cuda"

    def moment(self) -> Any:
        """Now, for :meth:`seconds`."""
        if not self._on_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, start: Any, end: Any) -> float:
        """From one moment to a later one; waits until the device has passed both."""
        if not self._on_cuda:
            return float(end - start)
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3


class StepWatch:
    """Notes moments of one step at a time.

    Args:
        parameters: Those that are trained.
        unseen: Ids of those whose touches cannot be seen; only their gradients are watched.
        clock: Of the device that computes.

    Attributes:
        first_use: By id of a parameter, the moment of its first use in the step.
        gradient: By id of a parameter, the moment when its gradient was complete.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], unseen: Iterable[int], clock: DeviceClock) -> None:
        self._parameters = list(parameters)
        self._unseen = set(unseen)
        self._clock = clock
        self._handles: list[RemovableHandle] = []
        self.first_use: dict[int, Any] = {}
        self.gradient: dict[int, Any] = {}

    def begin_forward(self) -> None:
        """Watch the forward pass that comes."""
        self.first_use, self.gradient = {}, {}
        seen = (p for p in self._parameters if id(p) not in self._unseen and can_be_gated(p) and not is_armed(p))
        arm(seen, self)

    def end_forward(self) -> None:
        """Stop watching it."""
        disarm([p for p in self._parameters if gate_of(p) is self])

    def begin_backward(self) -> None:
        """Watch the backward pass that comes."""
        self._handles = [p.register_post_accumulate_grad_hook(self._accumulated) for p in self._parameters]

    def end_backward(self) -> None:
        """Stop watching it."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def touched(self, parameter: nn.Parameter, gradient_only: bool) -> None:
        """See :class:`~lightning_bytescheduler.ddp.gates.Gate`."""
        if gradient_only:
            return
        disarm((parameter,))
        if torch.compiler.is_compiling():
            # Compiled code is specialised on what it met; in its next run there would be no touch.
            self._unseen.add(id(parameter))
        else:
            self.first_use.setdefault(id(parameter), self._clock.moment())

    def open_all(self, reason: str) -> None:
        """See :class:`~lightning_bytescheduler.ddp.gates.Gate`: what is used from here on is not seen."""
        self.end_forward()

    def _accumulated(self, parameter: torch.Tensor) -> None:
        # The last time counts: with reentrant checkpointing a gradient can come in parts.
        self.gradient[id(parameter)] = self._clock.moment()


@dataclass(slots=True)
class _Step:
    """Moments of the step under way."""

    begin: Any
    waited: float
    watched: bool
    forward: Any = None
    backward: list[Any] = field(default_factory=list)
    updated: Any = None


class StepRecorder:
    """Told by whoever trains when something begins and ends.

    Args:
        module: What is trained; its parameters are looked up when the first step is watched.
        clock: Of the device that computes.
        steps: How many to time, and as many to watch, after the warm-up.
        waited: Seconds spent waiting for data so far, whenever asked.

    Attributes:
        times: Of the steps that were only timed.
        waiting: Of those steps, seconds spent waiting for data.
        watched: What was seen in the others.
    """

    def __init__(self, module: nn.Module, clock: DeviceClock, *, steps: int, waited: Callable[[], float]) -> None:
        self._module = module
        self._clock = clock
        self._wanted = steps
        self._waited = waited
        self._watch: StepWatch | None = None
        self._parameters: dict[str, nn.Parameter] = {}
        self._step: _Step | None = None
        self._begun = 0
        self.times: list[StepParts] = []
        self.waiting: list[float] = []
        self.watched: list[WatchedStep] = []

    @property
    def complete(self) -> bool:
        """Whether enough was recorded."""
        return len(self.times) >= self._wanted and len(self.watched) >= self._wanted

    def begin_forward(self) -> None:
        """A forward pass begins, and with it a step; the one before it ends.

        Raises:
            UnsupportedError: If the steps so far were no steps of one forward pass, one backward pass and one update.
        """
        now, waited = self._clock.moment(), self._waited()
        if self._step is not None:
            self._end(self._step, now, waited)
        self._step = None
        if self.complete:
            return
        if self._begun > _WARM_UP_STEPS + 4 * self._wanted:
            raise UnsupportedError(
                f"{self._begun} calls of training_step were not {2 * self._wanted} steps that can be measured: each "
                "has to return a loss, and to be followed by one backward pass and one update."
            )
        self._begun += 1
        watched = self._begun > _WARM_UP_STEPS and len(self.watched) < len(self.times)
        if watched:
            self._watching().begin_forward()
            now = self._clock.moment()
        self._step = _Step(begin=now, waited=waited, watched=watched)

    def end_forward(self) -> None:
        """The forward pass has ended."""
        if self._step is not None:
            self._step.forward = self._clock.moment()
            if self._step.watched:
                self._watching().end_forward()

    def begin_backward(self) -> None:
        """A backward pass begins."""
        if self._step is not None:
            if self._step.watched:
                self._watching().begin_backward()
            self._step.backward.append(self._clock.moment())

    def end_backward(self) -> None:
        """The backward pass has ended."""
        if self._step is not None:
            self._step.backward.append(self._clock.moment())
            if self._step.watched:
                self._watching().end_backward()

    def end_update(self) -> None:
        """The optimizer has taken its step."""
        if self._step is not None:
            self._step.updated = self._clock.moment()

    def abandon(self) -> None:
        """Leave nothing behind in the module."""
        if self._watch is not None:
            self._watch.end_forward()
            self._watch.end_backward()

    def parameters(self) -> list[WatchedParameter]:
        """Those that were watched, each once, under the name of the module that holds it first."""
        return [
            WatchedParameter(
                key=id(parameter),
                layer=name.rpartition(".")[0] or type(self._module).__name__,
                size=parameter.numel() * parameter.element_size(),
            )
            for name, parameter in self._parameters.items()
        ]

    def compressed_share(self) -> float:
        """Bytes of the gradients as bf16, as a share of what they are."""
        whole = sum(p.numel() * p.element_size() for p in self._parameters.values())
        small = sum(p.numel() * min(p.element_size(), _COMPRESSED_WIDTH) for p in self._parameters.values())
        return small / whole if whole else 1.0

    def unused(self) -> tuple[str, ...]:
        """Names of parameters that got no gradient in any watched step."""
        return tuple(
            name
            for name, parameter in self._parameters.items()
            if not any(id(parameter) in step.gradient for step in self.watched)
        )

    def _watching(self) -> StepWatch:
        if self._watch is None:
            self._parameters = {n: p for n, p in self._module.named_parameters() if p.requires_grad}
            self._watch = StepWatch(self._parameters.values(), unseen_parameters(self._module), self._clock)
        return self._watch

    def _end(self, step: _Step, now: Any, waited: float) -> None:
        if step.forward is None or len(step.backward) != 2 or step.updated is None or self._begun <= _WARM_UP_STEPS:
            return
        seconds = self._clock.seconds
        forward, backward = seconds(step.begin, step.forward), seconds(*step.backward)
        if step.watched:
            watch = self._watching()
            self.watched.append(
                WatchedStep(
                    forward=forward,
                    backward=backward,
                    first_use={key: seconds(step.begin, moment) for key, moment in watch.first_use.items()},
                    gradient={key: seconds(step.backward[0], moment) for key, moment in watch.gradient.items()},
                )
            )
            return
        whole = seconds(step.begin, now)
        update = seconds(step.backward[1], step.updated)
        self.times.append(StepParts(forward=forward, backward=backward, update=update, step=whole))
        # On a device that is behind, waiting for data can be hidden.
        self.waiting.append(min(waited - step.waited, whole - forward - backward - update))
