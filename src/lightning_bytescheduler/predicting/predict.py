"""``predict()``: measure a step of the user's module, and predict its step time on a network.

A few training steps are run on a copy: a deep one of the module and a shallow one of the data module. So training
changes only the copy. The random state of the process and the generators of a data loader are restored. The user's
callbacks and the end of an epoch are left out, as checkpoints and validation metrics are not wanted here. The user's
batches are repeated as often as needed, on one device. Its strategy notes how far each step has come.

After some steps of warm-up, steps that are only timed alternate with steps that are watched. A watched step notes when
each parameter is first used in the forward pass and when its gradient is complete. It sees that in the same way as the
strategy: by a touch of the parameter itself, wherever that happens, and by the end of its accumulation. Times are those
of the device (``DeviceClock``), so they tell when work was done, not when it was requested.

The profile has the layers in the order of first use. Watched steps give each layer's share of the forward and backward
pass. The times of both passes, and of the step, come from steps that were not watched. The rest of a step is placed
where it falls in distributed training. The time of weight updates is split among layers by their bytes, and goes before
the forward pass of each. Other time, such as waiting for data, goes between two steps, where no gradient is needed.
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
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_bytescheduler.checks import require_whole
from lightning_bytescheduler.ddp.decided_fit import (
    model_reasons,
    norm_needed_by,
    optimizer_reasons,
    precision_reasons,
    unseen_parameters,
)
from lightning_bytescheduler.ddp.gates import arm, can_be_gated, disarm, gate_of, is_armed
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
    """Measure a few training steps, and predict their time with each strategy on a network.

    Training runs on a copy: the module, the random state and the data loaders are left unchanged. A module compiled in
    place with ``Module.compile()`` runs uncompiled there. Print the result, or use its figures.

    Args:
        module: The module to train.
        data: The training data: a DataLoader, a LightningDataModule, or anything else that ``Trainer.fit`` takes. Left
            out if the module has a ``train_dataloader``.
        link: The network.
        device: ``cpu`` or a CUDA device; if left out, CUDA where there is one.
        precision: As for the Trainer.
        gradient_clip_val: As for the Trainer.
        gradient_clip_algorithm: As for the Trainer.
        steps: Number of steps to time. After a warm-up, as many are watched layer by layer.

    Raises:
        OptionError: If an option's value is not allowed.
        UnsupportedError: If the training cannot be measured, or ``module`` is from the other package of Lightning.
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
        return torch.device("cuda", torch.cuda.current_device())  # code that sets the device needs an index
    return found


# ── The fit ─────────────────────────────────────────────────────────────────────────────────────────


class RepeatedData:
    """Batches that begin again when they end, so that no epoch ends. Ends only if there is no batch at all.

    Args:
        batches: An iterable that can be iterated again, unless it never ends.

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
    """Ends a fit whose steps have been recorded, before the epoch ends."""


def measure_step(
    module: pl.LightningModule, data: Any, *, device: torch.device, steps: int, trainer_options: Mapping[str, Any]
) -> MeasuredStep:
    """Measure a step of training on one device.

    Args:
        module: The module to train; left unchanged.
        data: Batches, as for ``Trainer.fit``; ``None`` for those of the module.
        device: A CPU or CUDA device.
        steps: Number of steps to time, and of steps to watch.
        trainer_options: Trainer options that affect a step, such as ``precision``.

    Raises:
        OptionError: If ``module`` or ``data`` cannot be trained.
        UnsupportedError: If the step cannot be measured; the message names the way out.
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
            plugins=[LightningEnvironment()],  # one process, also under a launcher
            max_epochs=1,
            max_steps=_MOST_STEPS_FOR_EACH * (steps + 10),  # never reached, but schedules are made for that many
            limit_val_batches=0,
            num_sanity_val_steps=0,
            logger=DummyLogger(),  # modules may call it themselves
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
    """Check that the copy is trained and not the original, and restore the original's gradients.

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
    """Restore the random state of a data loader and its samplers at the end."""
    holders = [loader, getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None)]
    holders.append(getattr(holders[-1], "sampler", None))
    for holder in holders:
        generator = getattr(holder, "generator", None)
        if isinstance(generator, torch.Generator):
            restoring.callback(generator.set_state, generator.get_state())


def _restore_random_state(restoring: contextlib.ExitStack) -> None:
    isolation = isolate_rng()
    isolation.__enter__()
    restoring.callback(isolation.__exit__, None, None, None)  # without the error, as it would restore nothing otherwise


def _keep_quiet(restoring: contextlib.ExitStack) -> None:
    """Hide what the Trainer prints at the start of a fit, as the fit is not the user's."""
    for name in (pl.__name__, Fabric.__module__.rpartition(".")[0]):
        logger = logging.getLogger(name)
        restoring.callback(logger.setLevel, logger.level)
        logger.setLevel(logging.ERROR)
    restoring.enter_context(warnings.catch_warnings())
    warnings.simplefilter("ignore")


# ── What is seen of its steps ───────────────────────────────────────────────────────────────────────


class DeviceClock:
    """Takes moments, and measures the time between them.

    On CUDA a moment is an event on the current stream, so that the device need not wait for it.

    Args:
        device: The device of the model, a CPU or a CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_cuda = device.type == "cuda"

    def moment(self) -> Any:
        """The current moment, for :meth:`seconds`."""
        if not self._on_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, start: Any, end: Any) -> float:
        """Seconds between two moments. Waits until the device has passed both."""
        if not self._on_cuda:
            return float(end - start)
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3


class ObservedDevice(SingleDeviceStrategy):
    """Trains on one device and notes moments of each step. It serves as the parameters' gate, to see their first use.

    Args:
        device: The device to train on.
        module: The module to train; its parameters are looked up at the first watched step.
        steps: Number of steps to time, and of steps to watch, after the warm-up.
        waited: Returns the seconds spent waiting for data so far.

    Attributes:
        times: The steps that were only timed.
        watched: The watched steps.
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
        # The current step.
        self._moments: dict[str, Any] = {}
        self._waited_before = 0.0
        self._watches = False
        self._first_use: dict[int, Any] = {}
        self._gradient: dict[int, Any] = {}
        self.times: list[StepTimes] = []
        self.watched: list[StepTimes] = []

    @property
    def complete(self) -> bool:
        """Whether enough steps were measured."""
        return len(self.times) >= self._wanted and len(self.watched) >= self._wanted

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """See Strategy. A forward pass ends the step before and begins another.

        Raises:
            EnoughSteps: If enough steps were measured.
            UnsupportedError: If the steps so far did not consist of one forward pass, one backward pass and one update.
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
        self._first_use, self._gradient = {}, {}
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
            self._moments.clear()  # a step with two backward passes cannot be measured
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
            # Compiled code is specialised on what it has met, so its next run would not touch the parameter.
            self._unseen.add(id(parameter))
        else:
            self._first_use.setdefault(id(parameter), self._clock.moment())

    def open_all(self, reason: str) -> None:
        """See :class:`~lightning_bytescheduler.ddp.gates.Gate`: uses from here on are not seen."""
        disarm([p for p in self._parameters.values() if gate_of(p) is self])

    def parameters(self) -> list[WatchedParameter]:
        """The watched parameters, each once, under the name of the first module that holds it."""
        whole = type(self._trained).__name__
        return [
            WatchedParameter(key=id(parameter), layer=name.rpartition(".")[0] or whole, size=parameter.nbytes)
            for name, parameter in self._parameters.items()
        ]

    def compressed_share(self) -> float:
        """Bytes of the gradients as bf16, relative to their actual bytes."""
        whole = sum(p.nbytes for p in self._parameters.values())
        small = sum(p.numel() * min(p.element_size(), _COMPRESSED_WIDTH) for p in self._parameters.values())
        return small / whole if whole else 1.0

    def unused(self) -> tuple[str, ...]:
        """Names of parameters that got no gradient in any watched step."""
        seen = {key for step in self.watched for key in step.gradient}
        return tuple(name for name, parameter in self._parameters.items() if id(parameter) not in seen)

    def _note(self, what: str) -> None:
        """Note the moment at which a part of the step begins or ends."""
        if self._moments:
            self._moments[what] = self._clock.moment()

    def _watch(self) -> None:
        """Watch the coming forward pass."""
        if not self._parameters:
            self._parameters = {n: p for n, p in self._trained.named_parameters() if p.requires_grad}
            self._unseen = set(unseen_parameters(self._trained))
        seen = (p for p in self._parameters.values() if id(p) not in self._unseen)
        arm((p for p in seen if can_be_gated(p) and not is_armed(p)), self)

    def _accumulated(self, parameter: torch.Tensor) -> None:
        # The last time counts: with reentrant checkpointing a gradient comes in parts.
        self._gradient[id(parameter)] = self._clock.moment()

    def _end(self, now: Any, waited: float) -> None:
        if len(self._moments) < _MOMENTS or self._begun <= _WARM_UP_STEPS:
            return
        begun, ended, began, gradients, updated = self._moments.values()
        seconds = self._clock.seconds
        forward, backward, update = seconds(begun, ended), seconds(began, gradients), seconds(gradients, updated)
        step = seconds(begun, now)
        found = StepTimes(
            step=step,
            forward=forward,
            backward=backward,
            update=update,
            # If the device is behind, waiting for data may be hidden.
            waiting=min(waited - self._waited_before, step - forward - backward - update),
            first_use={key: seconds(begun, moment) for key, moment in self._first_use.items()},
            gradient={key: seconds(began, moment) for key, moment in self._gradient.items()},
        )
        (self.watched if self._watches else self.times).append(found)


# ── A profile of them ───────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTimes:
    """Seconds of a step, from the start of a forward pass to the start of the next.

    Attributes:
        step: The whole step. The time that the parts below do not cover is between steps.
        forward: ``training_step``.
        backward: The backward pass.
        update: Clipping and the optimizer's step.
        waiting: Waiting for data; a part of the time between steps.
        first_use: In a watched step, seconds from the start of the forward pass, by parameter key; without parameters
            whose use was not seen.
        gradient: In a watched step, seconds from the start of the backward pass, by parameter key; without parameters
            that got no gradient.
    """

    step: float
    forward: float
    backward: float
    update: float
    waiting: float = 0.0
    first_use: Mapping[int, float] = field(default_factory=dict)
    gradient: Mapping[int, float] = field(default_factory=dict)

    @property
    def rest(self) -> float:
        """The time between two steps: waiting for data, hooks, logging."""
        return max(0.0, self.step - self.forward - self.backward - self.update)


def typical(steps: Sequence[StepTimes], seconds: Callable[[StepTimes], float]) -> StepTimes:
    """The step with the median time."""
    return sorted(steps, key=seconds)[len(steps) // 2]


@dataclass(frozen=True, kw_only=True, slots=True)
class WatchedParameter:
    """A trained parameter.

    Attributes:
        key: Identifies it in :class:`StepTimes`.
        layer: Name of the module that holds it.
        size: Bytes of its gradient.
    """

    key: int
    layer: str
    size: int


def make_profile(name: str, parameters: Sequence[WatchedParameter], step: StepTimes, times: StepTimes) -> ModelProfile:
    """Make a profile, whose layers take ``times.step`` together.

    Parameters of one module that are first used one after another are one layer. Parameters that got a gradient
    although their use was not seen come first, as their updates do not wait for the forward pass. Parameters that got
    no gradient and were not used come last: DDP sends zeros for them as soon as the backward pass begins.

    Args:
        name: The model's name.
        parameters: All trained parameters, each once.
        step: A watched step.
        times: Times of a step that was not watched.

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
    # When a layer and all after it are complete: a profile's backward pass goes through the layers in reverse order.
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
    # At the very end of the forward pass, so that they take no part of it.
    return [*layers, layer(UNUSED, unused, float("inf"))] if unused else layers
