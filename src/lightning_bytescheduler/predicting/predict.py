"""``predict()``: measure a step of the user's module, and predict its step time on a network.

A few training steps are run on a copy: a deep one of the module and a shallow one of the data module. So training
changes only the copy. The random state of the process and the generators of a data loader are restored. The user's
callbacks and the end of an epoch are left out, as checkpoints and validation metrics are not wanted here. The user's
batches are repeated as often as needed, on one device. A callback notes how far each step has come.

After some steps of warm-up come steps that are watched: hooks note when each module is first called in the forward
pass, and when each gradient is complete, which costs microseconds. Times are those of the device, so they
tell when work was done, not when it was requested. The step with the median time counts.

The profile has the layers in the order of first use. A parameter that is read by other code than its module's, or in
compiled code, is taken to be used as long before the end of the forward pass as its gradient comes after the start of
the backward pass. The rest of a step is placed where it falls in distributed training. The time of
weight updates is split among layers by their bytes, and goes before the forward pass of each. Other time, such as
waiting for data, goes between two steps, where no gradient is needed.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import logging
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

from lightning_bytescheduler.checks import require_whole
from lightning_bytescheduler.ddp.ddp_arguments import check_module
from lightning_bytescheduler.ddp.decided_fit import (
    model_reasons,
    norm_needed_by,
    optimizer_reasons,
    precision_reasons,
)
from lightning_bytescheduler.exceptions import OptionError, UnsupportedError
from lightning_bytescheduler.lightning_api import (
    CombinedLoader,
    DummyLogger,
    Fabric,
    LightningEnvironment,
    is_overridden,
    isolate_rng,
    pl,
)
from lightning_bytescheduler.predicting import prediction
from lightning_bytescheduler.predicting.link import LinkModel
from lightning_bytescheduler.predicting.prediction import MeasuredStep, Prediction
from lightning_bytescheduler.predicting.profiles import LayerProfile, ModelProfile
from lightning_bytescheduler.registration import require_same_package

BETWEEN_STEPS = "(between steps)"
UNUSED = "(unused)"

_WARM_UP_STEPS = 3
_MOMENTS = 4  # of a step
_COMPRESSED_WIDTH = 2  # bytes of a bf16 value
_MOST_STEPS_FOR_EACH = 10
_ACCELERATORS = {"cpu": "cpu", "cuda": "gpu"}


def predict(
    module: pl.LightningModule,
    data: Any = None,
    *,
    link: LinkModel,
    precision: Any = None,
    gradient_clip_val: float | None = None,
    steps: int = 10,
) -> Prediction:
    """Measure a few training steps, and predict their time with each strategy on a network.

    Steps are taken on the current GPU, or the processor if there is none; ``CUDA_VISIBLE_DEVICES`` chooses.

    Training runs on a copy: the module and the random state are left unchanged, and only a loader's own generator goes
    on. A module compiled in place with ``Module.compile()`` runs uncompiled. Print the result, or use its figures.

    Args:
        module: The module to train.
        data: The training data: a DataLoader, a LightningDataModule, or anything else that ``Trainer.fit`` takes. Left
            out if the module has a ``train_dataloader``.
        link: The network.
        precision: As for the Trainer.
        gradient_clip_val: As for the Trainer, where it clips by the norm.
        steps: Number of steps to measure, after a warm-up.

    Raises:
        OptionError: If an option's value is not allowed.
        UnsupportedError: If the training cannot be measured, or ``module`` is from the other package of Lightning.
    """
    require_whole("steps", steps, 1)
    require_same_package(module, "predict()")
    if not isinstance(link, LinkModel):
        raise OptionError("link", link, 'a LinkModel, such as LinkModel(workers=4, bandwidth="10Gbit/s")')
    options = {"precision": precision, "gradient_clip_val": gradient_clip_val}
    measured = measure_step(module, data, device=_device(), steps=steps, trainer_options=options)
    return prediction.predict(measured, link)


def _device() -> torch.device:
    # Code that sets the device needs an index.
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


# ── The fit ─────────────────────────────────────────────────────────────────────────────────────────


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
        steps: Number of steps to measure.
        trainer_options: Trainer options that affect a step, such as ``precision``.

    Raises:
        OptionError: If ``module`` or ``data`` cannot be trained.
        UnsupportedError: If the step cannot be measured; the message names the way out.
    """
    _require_measurable(module)
    check_module(module)
    trained = _copy_of(module)
    # A module's own callbacks may write checkpoints.
    trained.configure_callbacks = lambda: []  # type: ignore[method-assign]
    watch = StepWatch(device, trained, steps=steps)
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as restoring:
        _keep_quiet(restoring)
        _restore_random_state(restoring)
        trainer = pl.Trainer(
            accelerator=_ACCELERATORS[device.type],
            devices=1 if device.index is None or device.type == "cpu" else [device.index],
            callbacks=[watch],
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
        with contextlib.suppress(EnoughSteps):
            trainer.fit(trained, **_data_arguments(trained, data))
        if len(watch.steps) < steps:
            raise OptionError("data", data, "batches that can be iterated over again: there were too few to measure")
        optimizers, plugin = trainer.optimizers, trainer.precision_plugin
        step, parameters = typical(watch.steps), watch.parameters
        small = sum(p.numel() * min(p.element_size(), _COMPRESSED_WIDTH) for p in parameters.values())
        return MeasuredStep(
            profile=make_profile(type(module).__name__, {name: p.nbytes for name, p in parameters.items()}, step),
            between_steps=step.rest,
            device=device.type,
            compressed_share=small / sum(p.nbytes for p in parameters.values()),
            synchronised_because=(
                *optimizer_reasons(optimizers),
                *precision_reasons(plugin),
                *model_reasons(trained),
            ),
            norm_needed_by=norm_needed_by(trained),
        )


def _require_measurable(module: object) -> None:
    if not isinstance(module, pl.LightningModule):
        raise OptionError("module", module, "a LightningModule, before torch.compile")
    if not module.automatic_optimization:
        raise UnsupportedError(
            f"{type(module).__name__} optimizes manually, so only it knows what a step is. Set "
            "automatic_optimization=True, or predict by its size: --profile 350M --compute 300ms."
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


def _data_arguments(module: pl.LightningModule, data: Any) -> dict[str, Any]:
    """Arguments of ``Trainer.fit``."""
    if isinstance(data, pl.LightningDataModule):
        data = copy.copy(data)
        _repeat_loader_of(data)
        return {"datamodule": data}
    if data is not None:
        return {"train_dataloaders": repeated(data)}
    if not is_overridden("train_dataloader", module):
        raise OptionError(
            "data",
            None,
            "a DataLoader or a LightningDataModule, as the module has no train_dataloader; on the command line, let "
            "the function return a pair of model and data",
        )
    _repeat_loader_of(module)
    return {}


def _repeat_loader_of(owner: pl.LightningModule | pl.LightningDataModule) -> None:
    own = owner.train_dataloader
    owner.train_dataloader = lambda: repeated(own())  # type: ignore[method-assign]


def repeated(loader: Any) -> Iterator[Any]:
    """Batches that begin again when they end, so that no epoch ends. Ends only where there is no batch at all.

    Raises:
        OptionError: If these are no batches of one loader.
    """
    if isinstance(loader, (Mapping, Sequence, CombinedLoader)) or not hasattr(loader, "__iter__"):
        allowed = "one DataLoader, a LightningDataModule of one, or other batches to iterate over; of several, give one"
        raise OptionError("data", loader, allowed)

    def batches() -> Iterator[Any]:
        count = -1
        while count:  # until a pass has no batch
            count = 0
            for count, batch in enumerate(loader, 1):  # noqa: B007
                yield batch

    return batches()


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


def _moment(device: torch.device) -> Any:
    """The current moment. On CUDA an event on the current stream, so that the device need not wait for it."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _seconds(start: Any, end: Any) -> float:
    """Seconds between two moments. Waits until the device has passed both."""
    if isinstance(start, float):
        return float(end - start)
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


class StepWatch(pl.Callback):
    """Notes moments of each step.

    Args:
        device: The device to train on.
        module: The module to train.
        steps: Number of steps to measure, after a warm-up.

    Attributes:
        parameters: The trained parameters, each under its first name.
        steps: The measured steps.
    """

    def __init__(self, device: torch.device, module: pl.LightningModule, *, steps: int) -> None:
        self._device = device
        self._wanted = steps
        self._begun = 0
        # The current step.
        self._moments: list[Any] = []
        self._first_use: dict[str, Any] = {}
        self._gradient: dict[str, Any] = {}
        self._module = module
        self.parameters: dict[str, nn.Parameter] = {}
        self.steps: list[StepTimes] = []

    def _watch(self) -> None:
        """Set hooks on the trained parameters and their modules; some of them are made or frozen as a fit begins."""
        module = self._module
        self.parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
        names = {id(parameter): name for name, parameter in self.parameters.items()}
        for part in module.modules():
            # The LightningModule itself is not called: Lightning calls its training_step.
            held = [names[id(p)] for p in part.parameters(recurse=False) if id(p) in names and part is not module]
            if held:
                part.register_forward_pre_hook(lambda *_, held=held: self._used(held))
        for name, parameter in self.parameters.items():
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: self._accumulated(name))

    def on_train_batch_start(self, *_: Any) -> None:
        """End the step before, and begin another.

        Raises:
            EnoughSteps: If enough steps were measured.
            UnsupportedError: If the steps so far did not consist of one forward pass, one backward pass and one update.
        """
        now = _moment(self._device)
        if not self._begun:
            self._watch()
        elif self._begun > _WARM_UP_STEPS and len(self._moments) == _MOMENTS:
            self.steps.append(self._measured(now))
        if len(self.steps) >= self._wanted:
            raise EnoughSteps
        if self._begun > 2 * (_WARM_UP_STEPS + self._wanted):
            raise UnsupportedError(
                f"{self._begun} calls of training_step were not {self._wanted} steps that can be measured: each "
                "has to return a loss, and to be followed by one backward pass and one update."
            )
        self._begun += 1
        self._moments, self._first_use, self._gradient = [now], {}, {}

    def on_before_backward(self, *_: Any) -> None:
        """Note the end of the forward pass, and stop watching it: a recomputation is no first use."""
        self._moments.append(_moment(self._device))

    def on_after_backward(self, *_: Any) -> None:
        """Note the end of the backward pass."""
        self._moments.append(_moment(self._device))

    def on_train_batch_end(self, *_: Any) -> None:
        """Note the end of the update."""
        self._moments.append(_moment(self._device))

    def _used(self, names: Sequence[str]) -> None:
        # Compiled code does not note moments.
        if not torch.compiler.is_compiling() and len(self._moments) == 1:
            now = _moment(self._device)
            for name in names:
                self._first_use.setdefault(name, now)

    def _accumulated(self, name: str) -> None:
        # The last time counts: with reentrant checkpointing a gradient comes in parts.
        self._gradient[name] = _moment(self._device)

    def _measured(self, now: Any) -> StepTimes:
        begun, began, ended, updated = self._moments
        return StepTimes(
            step=_seconds(begun, now),
            forward=_seconds(begun, began),
            backward=_seconds(began, ended),
            update=_seconds(ended, updated),
            first_use={name: _seconds(begun, moment) for name, moment in self._first_use.items()},
            gradient={name: _seconds(began, moment) for name, moment in self._gradient.items()},
        )


# ── A profile of them ───────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTimes:
    """Seconds of a step, from the start of a forward pass to the start of the next.

    Attributes:
        step: The whole step. The time that the parts below do not cover is between steps.
        forward: ``training_step``.
        backward: The backward pass.
        update: Clipping and the optimizer's step.
        first_use: Seconds from the start of the forward pass, by parameter; without parameters whose use was not seen.
        gradient: Seconds from the start of the backward pass, by parameter; without parameters that got no gradient.
    """

    step: float
    forward: float
    backward: float
    update: float
    first_use: Mapping[str, float] = field(default_factory=dict)
    gradient: Mapping[str, float] = field(default_factory=dict)

    @property
    def rest(self) -> float:
        """The time between two steps: waiting for data, hooks, logging."""
        return max(0.0, self.step - self.forward - self.backward - self.update)


def typical(steps: Sequence[StepTimes]) -> StepTimes:
    """The step with the median time."""
    return sorted(steps, key=lambda step: step.step)[len(steps) // 2]


class _Layer(NamedTuple):
    name: str
    size: int = 0  # bytes
    start: float = 0.0
    ready: float = 0.0


def make_profile(name: str, parameters: Mapping[str, int], step: StepTimes) -> ModelProfile:
    """Make a profile, whose layers take ``step.step`` together.

    Parameters of one module that are first used one after another are one layer. Parameters that got no gradient and
    were not used come last: DDP sends zeros for them as soon as the backward pass begins.

    Args:
        name: The model's name.
        parameters: All trained parameters, by name, and the bytes of their gradients.
        step: A measured step.

    Raises:
        UnsupportedError: If no parameter gets a gradient.
    """
    forward, backward, gradient = step.forward, step.backward, step.gradient
    if not gradient:
        raise UnsupportedError(
            "No parameter of the module gets a gradient, so there is nothing to send: let training_step return a loss "
            "that depends on parameters with requires_grad=True."
        )
    mirrored = {key: forward * (1 - ready / backward) if backward else 0.0 for key, ready in gradient.items()}
    used = {key: max(0.0, min(moment, forward)) for key, moment in {**mirrored, **step.first_use}.items()}
    layers = [_Layer(BETWEEN_STEPS, ready=backward)]
    in_order = sorted((key for key in parameters if key in used), key=used.__getitem__)
    for layer, group in itertools.groupby(in_order, key=lambda key: key.rpartition(".")[0] or name):
        keys = list(group)
        last = max(min(gradient.get(key, 0.0), backward) for key in keys)
        layers.append(_Layer(layer, sum(parameters[key] for key in keys), used[keys[0]], last))
    updated = sum(layer.size for layer in layers)
    if unused := [key for key in parameters if key not in used]:
        # At the very end of the forward pass, so that they take no part of it.
        layers.append(_Layer(UNUSED, sum(parameters[key] for key in unused), forward))
    # When a layer and all after it are complete: a profile's backward pass goes through the layers in reverse order.
    ready = list(itertools.accumulate((layer.ready for layer in reversed(layers)), max))[::-1]
    besides = {BETWEEN_STEPS: step.rest, UNUSED: 0.0}
    made = (
        LayerProfile(
            name=layer.name,
            parameter_bytes=layer.size,
            forward_seconds=end - layer.start + besides.get(layer.name, step.update * layer.size / updated),
            backward_seconds=done - before,
        )
        for layer, end, done, before in zip(
            layers, [*(after.start for after in layers[1:]), forward], ready, [*ready[1:], 0.0], strict=True
        )
    )
    return ModelProfile(name=name, layers=tuple(made))
