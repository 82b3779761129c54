"""``predict()``: measures a step of a user's module, and says what to expect of it on a network.

Some training steps are taken on a copy: a deep one of the module and a shallow one of the data module, so that what
training changes, it changes there. The random state of the process and the generators of a data loader are put back.
Callbacks of the user are not run, nor what belongs to the end of an epoch, as checkpoints and metrics of a validation
have no place here. The user's batches are repeated for as long as it takes, on a single device whose strategy notes
where in a step training is.

Some steps warm up, then one that is only timed and one that is watched take turns. Watched is when each parameter is
first used in the forward pass and when its gradient is complete, seen as the strategy sees them: a touch of the
parameter itself, wherever that happens, and the end of its accumulation. Moments are those of the device
(``DeviceClock``): what has been computed by then, not what has been asked for.

The profile has the layers in the order of first use. Watched steps give each layer's share of the forward and of the
backward pass; how long these take, and the step, is taken from steps in which nothing is watched. What a step does
besides is placed where it falls when training is distributed: updates of weights before the forward pass of their
layer, in proportion to the bytes; the rest, such as waiting for data, between two steps, where no gradient is needed.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import logging
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from lightning_bytescheduler.checks import require_whole
from lightning_bytescheduler.ddp.gates import arm, can_be_gated, disarm, gate_of, is_armed
from lightning_bytescheduler.ddp.plan import (
    model_reasons,
    norm_needed_by,
    optimizer_reasons,
    precision_reasons,
    unseen_parameters,
)
from lightning_bytescheduler.exceptions import OptionError, UnsupportedError
from lightning_bytescheduler.lightning_api import (
    CombinedLoader,
    DummyLogger,
    Fabric,
    LightningEnvironment,
    SingleDeviceStrategy,
    is_overridden,
    isolate_rng,
    pl,
)
from lightning_bytescheduler.registration import require_same_package
from lightning_bytescheduler.simulation import prediction
from lightning_bytescheduler.simulation.link import LinkModel
from lightning_bytescheduler.simulation.prediction import MeasuredStep, Prediction
from lightning_bytescheduler.simulation.profiles import LayerProfile, ModelProfile

BETWEEN_STEPS = "(between steps)"
READ_UNSEEN = "(read unseen)"
UNUSED = "(unused)"

_WARM_UP_STEPS = 3
_MOMENTS = 5  # of a step
_COMPRESSED_WIDTH = 2  # bytes of a bf16 value
_MOST_STEPS_FOR_EACH = 10
_ACCELERATORS = {"cpu": "cpu", "cuda": "gpu"}
_Step = TypeVar("_Step")


def predict(
    module: pl.LightningModule,
    data: Any = None,
    *,
    link: LinkModel,
    device: str | torch.device | None = None,
    precision: Any = None,
    gradient_clip_val: float | None = None,
    gradient_clip_algorithm: str | None = None,
    steps: int = 10,
) -> Prediction:
    """Measure a few steps of a training, and say what to expect of it with each strategy on a network.

    Training happens on a copy: the module, the state of random numbers and of data loaders are left as they are. What
    was compiled in place, with ``Module.compile()``, runs uncompiled there. Print the answer, or take its figures.

    Args:
        module: What is trained.
        data: What its training data comes from: a DataLoader, a LightningDataModule, whatever ``Trainer.fit`` takes;
            left out where the module has a ``train_dataloader``.
        link: The network.
        device: ``cpu`` or a CUDA device; by default CUDA where there is one.
        precision: As for the Trainer.
        gradient_clip_val: As for the Trainer.
        gradient_clip_algorithm: As for the Trainer.
        steps: How many steps to time; as many are watched layer by layer, after a warm-up.

    Raises:
        OptionError: If an option's value is not allowed.
        UnsupportedError: If the training cannot be measured, or ``module`` is of the other package of Lightning.
    """
    require_whole("steps", steps, 1)
    require_same_package(module, "predict()")
    where = _device(device)
    if not isinstance(link, LinkModel):
        raise OptionError("link", link, 'a LinkModel, such as LinkModel(workers=4, bandwidth="10Gbit/s")')
    prediction.check(link)
    options = {
        "precision": precision,
        "gradient_clip_val": gradient_clip_val,
        "gradient_clip_algorithm": gradient_clip_algorithm,
    }
    measured = measure_step(module, data, device=where, steps=steps, trainer_options=options)
    return prediction.predict(measured, link)


advise = predict
"""An older name of it."""


def _device(device: str | torch.device | None) -> torch.device:
    try:
        found = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    except (RuntimeError, TypeError):
        found = torch.device("meta")
    if found.type not in ("cpu", "cuda"):
        raise OptionError("device", device, "'cpu', 'cuda' or one CUDA device such as 'cuda:0'")
    if found.type == "cuda" and not torch.cuda.is_available():
        raise OptionError("device", device, "'cpu', as torch finds no CUDA device here")
    if found.type == "cuda" and found.index is None:
        return torch.device("cuda", torch.cuda.current_device())  # what sets the device wants to know which
    return found


# ── The fit ─────────────────────────────────────────────────────────────────────────────────────────


class RepeatedData:
    """Begins again when the batches end, so that no epoch does; ends where there are none at all.

    Args:
        batches: Can be iterated more than once, unless it never ends.

    Attributes:
        waited: Seconds spent waiting for batches so far.
    """

    def __init__(self, batches: Iterable[Any]) -> None:
        self._batches = batches
        self.waited = 0.0

    def __iter__(self) -> Iterator[Any]:
        found = True
        while found:
            found = False
            start = time.perf_counter()
            for batch in self._batches:
                self.waited += time.perf_counter() - start
                found = True
                yield batch
                start = time.perf_counter()


class EnoughSteps(Exception):
    """Ends a fit whose steps have been recorded, before the epoch ends and what belongs to that happens."""


def measure_step(
    module: pl.LightningModule, data: Any, *, device: torch.device, steps: int, trainer_options: Mapping[str, Any]
) -> MeasuredStep:
    """Measure a step of training on one device.

    Args:
        module: What is trained; left as it is.
        data: Batches, as for ``Trainer.fit``; ``None`` for those of the module.
        device: A CPU or CUDA device.
        steps: How many steps to time, and as many to watch.
        trainer_options: For the Trainer: what a step depends on, such as ``precision``.

    Raises:
        OptionError: If ``module`` or ``data`` is not what can be trained.
        UnsupportedError: If it cannot be measured; the message names the way out.
    """
    _check_module(module)
    trained = _copy_of(module)
    # A module's own callbacks may write checkpoints.
    trained.configure_callbacks = lambda: []  # type: ignore[method-assign]
    batches: list[RepeatedData] = []
    strategy = ObservedDevice(device, trained, steps=steps, waited=lambda: sum(b.waited for b in batches))
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as restoring:
        _keep_quiet(restoring)
        _restore_random_state(restoring)

        def repeat(loader: Any) -> RepeatedData:
            _restore_generators(restoring, loader)
            batches.append(RepeatedData(_iterable(loader)))
            return batches[-1]

        trainer = pl.Trainer(
            accelerator=_ACCELERATORS[device.type],
            devices=1 if device.index is None or device.type == "cpu" else [device.index],
            strategy=strategy,
            plugins=[LightningEnvironment()],  # alone, whoever launched this process
            max_epochs=1,
            max_steps=_MOST_STEPS_FOR_EACH * (steps + 10),  # never reached, but schedules are made for so many
            limit_val_batches=0,
            num_sanity_val_steps=0,
            logger=DummyLogger(),  # modules may log to it by hand
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            use_distributed_sampler=False,
            default_root_dir=folder,
            **trainer_options,
        )
        with _gradients_kept(module), contextlib.suppress(EnoughSteps):
            trainer.fit(trained, **_data_arguments(trained, data, repeat))
        if not strategy.complete:
            raise OptionError("data", data, "batches that can be iterated over again: there were too few to measure")
        optimizers, precision = strategy.optimizers, trainer.precision_plugin
        times = typical(strategy.times, lambda step: step.step)
        watched = typical(strategy.watched, lambda step: step.forward + step.backward)
        return MeasuredStep(
            profile=make_profile(type(module).__name__, strategy.parameters(), watched, times),
            waiting=times.waiting,
            device=device.type,
            compressed_share=strategy.compressed_share(),
            unused=strategy.unused(),
            synchronised_because=(
                *optimizer_reasons(optimizers),
                *precision_reasons(precision, optimizers),
                *model_reasons(trained),
            ),
            norm_needed_by=norm_needed_by(trained, precision),
        )


def _check_module(module: object) -> None:
    if not isinstance(module, pl.LightningModule):
        raise OptionError("module", module, "a LightningModule, before torch.compile")
    if not is_overridden("training_step", module):
        raise OptionError("module", type(module).__name__, "a LightningModule with a training_step")
    if not module.automatic_optimization:
        raise UnsupportedError(
            f"{type(module).__name__} optimizes manually, so only it knows what a step is. Set "
            "automatic_optimization=True, or describe its layers in a file for 'lightning-bytescheduler predict'."
        )


def _copy_of(module: pl.LightningModule) -> pl.LightningModule:
    try:
        trained = copy.deepcopy(module)
    except Exception as error:
        raise UnsupportedError(
            f"{type(module).__name__} cannot be copied by copy.deepcopy, and is not to be changed: {error}. Give one "
            "that holds no results of training, such as a fresh one."
        ) from error
    trained._compiled_call_impl = None  # torch drops it in copies, as it belongs to the original; Lightning does not
    return trained


@contextlib.contextmanager
def _gradients_kept(module: pl.LightningModule) -> Iterator[None]:
    """Make sure that it is the copy which is trained; whatever the original gets is taken away from it.

    Raises:
        UnsupportedError: If the original got gradients.
    """
    gradients = {name: (parameter, parameter.grad) for name, parameter in module.named_parameters()}
    for parameter, _ in gradients.values():
        parameter.grad = None
    reached = None
    try:
        yield
        reached = next((name for name, (parameter, _) in gradients.items() if parameter.grad is not None), None)
    finally:
        for parameter, gradient in gradients.values():
            parameter.grad = gradient
    if reached is not None:
        raise UnsupportedError(
            f"A copy of {type(module).__name__} is trained, but {reached!r} of the original got a gradient: a function "
            "that the module keeps refers to it and not to its copy. Instead of a lambda or a nested function, make it "
            "a method."
        )


def _data_arguments(module: pl.LightningModule, data: Any, repeat: Callable[[Any], RepeatedData]) -> dict[str, Any]:
    """Arguments of ``Trainer.fit``."""
    if isinstance(data, pl.LightningDataModule):
        data = copy.copy(data)
        _repeat_loader_of(data, repeat)
        return {"datamodule": data}
    if data is not None:
        return {"train_dataloaders": repeat(data)}
    if not is_overridden("train_dataloader", module):
        raise OptionError(
            "data",
            None,
            "a DataLoader or a LightningDataModule, as the module has no train_dataloader; on the command line, let "
            "the function return a pair of model and data",
        )
    _repeat_loader_of(module, repeat)
    return {}


def _repeat_loader_of(
    owner: pl.LightningModule | pl.LightningDataModule, repeat: Callable[[Any], RepeatedData]
) -> None:
    own = owner.train_dataloader
    owner.train_dataloader = lambda: repeat(own())  # type: ignore[method-assign]


def _iterable(loader: Any) -> Iterable[Any]:
    if isinstance(loader, (Mapping, Sequence, CombinedLoader)) or not hasattr(loader, "__iter__"):
        allowed = "one DataLoader, a LightningDataModule of one, or other batches to iterate over; of several, give one"
        raise OptionError("data", loader, allowed)
    batches: Iterable[Any] = loader
    return batches


def _restore_generators(restoring: contextlib.ExitStack, loader: Any) -> None:
    """Have the random state of a data loader put back, and of its samplers."""
    holders = [loader, getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None)]
    holders.append(getattr(holders[-1], "sampler", None))
    for holder in holders:
        generator = getattr(holder, "generator", None)
        if isinstance(generator, torch.Generator):
            restoring.callback(generator.set_state, generator.get_state())


def _restore_random_state(restoring: contextlib.ExitStack) -> None:
    isolation = isolate_rng()
    isolation.__enter__()
    restoring.callback(isolation.__exit__, None, None, None)  # told of an error, it would restore nothing


def _keep_quiet(restoring: contextlib.ExitStack) -> None:
    """Without what a Trainer says at the start of a fit: it is not the user's."""
    for name in (pl.__name__, Fabric.__module__.rpartition(".")[0]):
        logger = logging.getLogger(name)
        restoring.callback(logger.setLevel, logger.level)
        logger.setLevel(logging.ERROR)
    restoring.enter_context(warnings.catch_warnings())
    warnings.simplefilter("ignore")


# ── What is seen of its steps ───────────────────────────────────────────────────────────────────────


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


class ObservedDevice(SingleDeviceStrategy):
    """Trains on one device, and notes moments of the steps, as a gate of the parameters when they are first used.

    Args:
        device: Where to train.
        module: What is trained; its parameters are looked up when the first step is watched.
        steps: How many to time, and as many to watch, after the warm-up.
        waited: Seconds spent waiting for data so far, whenever asked.

    Attributes:
        times: Of the steps that were only timed.
        watched: What was seen in the others.
    """

    def __init__(
        self, device: torch.device, module: pl.LightningModule, *, steps: int, waited: Callable[[], float]
    ) -> None:
        super().__init__(device=device)
        self._trained = module
        self._clock = DeviceClock(device)
        self._wanted = steps
        self._waited = waited
        self._parameters: dict[str, nn.Parameter] = {}
        self._unseen: set[int] = set()  # ids of parameters whose touches cannot be seen
        self._begun = 0
        # Of the step under way.
        self._moments: dict[str, Any] = {}
        self._waited_before = 0.0
        self._watches = False
        self._first_use: dict[int, Any] = {}
        self._gradient: dict[int, Any] = {}
        self.times: list[StepParts] = []
        self.watched: list[WatchedStep] = []

    @property
    def complete(self) -> bool:
        """Whether enough was noted."""
        return len(self.times) >= self._wanted and len(self.watched) >= self._wanted

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """See Strategy. A forward pass begins a step; the one before it has ended.

        Raises:
            EnoughSteps: If enough was noted.
            UnsupportedError: If the steps so far were no steps of one forward pass, one backward pass and one update.
        """
        now, waited = self._clock.moment(), self._waited()
        self._end(now, waited)
        if self.complete:
            raise EnoughSteps
        if self._begun > _WARM_UP_STEPS + 4 * self._wanted:
            raise UnsupportedError(
                f"{self._begun} calls of training_step were not {2 * self._wanted} steps that can be measured: each "
                "has to return a loss, and to be followed by one backward pass and one update."
            )
        self._begun += 1
        self._watches = self._begun > _WARM_UP_STEPS and len(self.watched) < len(self.times)
        if self._watches:
            self._watch()
            now = self._clock.moment()
        self._moments, self._waited_before = {"begun": now}, waited
        try:
            output = super().training_step(*args, **kwargs)
            self._note("forward")
            return output
        finally:
            self.open_all("the forward pass has ended")

    def backward(self, *args: Any, **kwargs: Any) -> Tensor:
        """See Strategy."""
        watched = self._parameters.values() if self._watches else ()
        handles = [parameter.register_post_accumulate_grad_hook(self._accumulated) for parameter in watched]
        if "backward" in self._moments:
            self._moments.clear()  # a step of two is none that can be measured
        self._note("backward")
        try:
            loss = super().backward(*args, **kwargs)
            self._note("gradients")
            return loss
        finally:
            for handle in handles:
                handle.remove()

    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        """See Strategy."""
        output = super().optimizer_step(*args, **kwargs)
        self._note("updated")
        return output

    def touched(self, parameter: nn.Parameter, gradient_only: bool) -> None:
        """See :class:`~lightning_bytescheduler.ddp.gates.Gate`."""
        if gradient_only:
            return
        disarm((parameter,))
        if torch.compiler.is_compiling():
            # Compiled code is specialised on what it met; in its next run there would be no touch.
            self._unseen.add(id(parameter))
        else:
            self._first_use.setdefault(id(parameter), self._clock.moment())

    def open_all(self, reason: str) -> None:
        """See :class:`~lightning_bytescheduler.ddp.gates.Gate`: what is used from here on is not seen."""
        disarm([p for p in self._parameters.values() if gate_of(p) is self])

    def parameters(self) -> list[WatchedParameter]:
        """Those that were watched, each once, under the name of the module that holds it first."""
        whole = type(self._trained).__name__
        return [
            WatchedParameter(key=id(parameter), layer=name.rpartition(".")[0] or whole, size=parameter.nbytes)
            for name, parameter in self._parameters.items()
        ]

    def compressed_share(self) -> float:
        """Bytes of the gradients as bf16, as a share of what they are."""
        whole = sum(p.nbytes for p in self._parameters.values())
        small = sum(p.numel() * min(p.element_size(), _COMPRESSED_WIDTH) for p in self._parameters.values())
        return small / whole if whole else 1.0

    def unused(self) -> tuple[str, ...]:
        """Names of parameters that got no gradient in any watched step."""
        seen = {key for step in self.watched for key in step.gradient}
        return tuple(name for name, parameter in self._parameters.items() if id(parameter) not in seen)

    def _note(self, what: str) -> None:
        """Something of a step has ended, or begun."""
        if self._moments:
            self._moments[what] = self._clock.moment()

    def _watch(self) -> None:
        """Watch the forward pass that comes."""
        if not self._parameters:
            self._parameters = {n: p for n, p in self._trained.named_parameters() if p.requires_grad}
            self._unseen = set(unseen_parameters(self._trained))
        self._first_use, self._gradient = {}, {}
        seen = (p for p in self._parameters.values() if id(p) not in self._unseen)
        arm((p for p in seen if can_be_gated(p) and not is_armed(p)), self)

    def _accumulated(self, parameter: torch.Tensor) -> None:
        # The last time counts: with reentrant checkpointing a gradient can come in parts.
        self._gradient[id(parameter)] = self._clock.moment()

    def _end(self, now: Any, waited: float) -> None:
        if len(self._moments) < _MOMENTS or self._begun <= _WARM_UP_STEPS:
            return
        begun, ended, began, gradients, updated = self._moments.values()
        seconds = self._clock.seconds
        forward, backward = seconds(begun, ended), seconds(began, gradients)
        if self._watches:
            first_use = {key: seconds(begun, moment) for key, moment in self._first_use.items()}
            ready = {key: seconds(began, moment) for key, moment in self._gradient.items()}
            self.watched.append(WatchedStep(forward=forward, backward=backward, first_use=first_use, gradient=ready))
            return
        update, step = seconds(gradients, updated), seconds(begun, now)
        # On a device that is behind, waiting for data can be hidden.
        waiting = min(waited - self._waited_before, step - forward - backward - update)
        self.times.append(StepParts(step=step, forward=forward, backward=backward, update=update, waiting=waiting))


# ── A profile of them ───────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, kw_only=True, slots=True)
class StepParts:
    """Seconds of a step, from the start of a forward pass to the start of the next.

    Attributes:
        step: All of it; what is not in the following lies between steps.
        forward: ``training_step``.
        backward: The backward pass.
        update: Clipping and the optimizer's step.
        waiting: Of what lies between steps, for data.
    """

    step: float
    forward: float
    backward: float
    update: float
    waiting: float = 0.0

    @property
    def rest(self) -> float:
        """What lies between two steps: waiting for data, hooks, logging."""
        return max(0.0, self.step - self.forward - self.backward - self.update)


def typical(steps: Sequence[_Step], seconds: Callable[[_Step], float]) -> _Step:
    """The step that took neither longer nor shorter than half of the others."""
    return sorted(steps, key=seconds)[len(steps) // 2]


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
    name: str, parameters: Sequence[WatchedParameter], step: WatchedStep, times: StepParts
) -> ModelProfile:
    """Put a profile together; its layers take ``times.step`` together.

    Parameters of one module that are first used after each other are one layer. Those that got a gradient though
    nobody was seen to use them come first, as their updates do not wait for the forward pass. Those that got no
    gradient and were not used come last: DDP sends zeros for them, as soon as the backward pass begins.

    Args:
        name: Of the model.
        parameters: All that are trained, each once.
        step: What was seen of one.
        times: Of a step in which nothing was watched.

    Raises:
        UnsupportedError: If no parameter gets a gradient.
    """
    forward, backward = step.forward, step.backward
    first_use = {p.key: step.first_use.get(p.key) for p in parameters}
    gradient = {p.key: step.gradient.get(p.key) for p in parameters}
    if all(moment is None for moment in gradient.values()):
        raise UnsupportedError(
            "No parameter of the module gets a gradient, so there is nothing to send: let training_step return a loss "
            "that depends on parameters with requires_grad=True."
        )
    layers = [_Layer(BETWEEN_STEPS, 0, 0.0, backward), *_layers(parameters, first_use, gradient)]
    starts = [max(0.0, min(layer.start, forward)) for layer in layers]
    # When a layer and all after it are complete: a profile's backward pass goes through the layers in order.
    ready = list(itertools.accumulate((min(layer.ready, backward) for layer in reversed(layers)), max))[::-1]
    forward_share = times.forward / forward if forward else 0.0
    backward_share = times.backward / backward if backward else 0.0
    updated = sum(layer.size for layer in layers if layer.name != UNUSED)
    besides = {BETWEEN_STEPS: times.rest, UNUSED: 0.0}
    made = (
        LayerProfile(
            name=layer.name,
            parameter_bytes=layer.size,
            forward_seconds=forward_share * (end - start)
            + besides.get(layer.name, times.update * layer.size / updated),
            backward_seconds=backward_share * (done - before),
        )
        for layer, start, end, done, before in zip(
            layers, starts, [*starts[1:], forward], ready, [*ready[1:], 0.0], strict=True
        )
    )
    return ModelProfile(name=name, layers=tuple(made))


class _Layer(NamedTuple):
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
        return _Layer(name, sum(p.size for p in members), start, max(gradient[p.key] or 0.0 for p in members))

    layers = [layer(READ_UNSEEN, unseen, 0.0)] if unseen else []
    for name, group in itertools.groupby(used, key=lambda p: p.layer):
        members = list(group)
        layers.append(layer(name, members, first_use[members[0].key] or 0.0))
    # At the very end of the forward pass, so that they take none of it.
    return [*layers, layer(UNUSED, unused, float("inf"))] if unused else layers
