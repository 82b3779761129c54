"""Takes a few steps of a user's training, on a copy, and measures them.

The copy is a deep one of the module and a shallow one of the data module: what training changes, it changes there. The
random state of the process and the generators of a data loader are put back. Callbacks of the user are not run, nor
what belongs to the end of an epoch, as checkpoints and metrics of a validation have no place here. The user's batches
are repeated for as long as it takes, on a single device whose strategy tells a recorder where in a step training is.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_bytescheduler.ddp.plan import model_reasons, norm_needed_by, optimizer_reasons, precision_reasons
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
from lightning_bytescheduler.predicting.step_recorder import DeviceClock, StepParts, StepRecorder, make_profile
from lightning_bytescheduler.simulation.prediction import MeasuredStep

__all__ = ["measure_step"]

_MOST_STEPS_FOR_EACH = 10
_ACCELERATORS = {"cpu": "cpu", "cuda": "gpu"}


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


class ObservedDevice(SingleDeviceStrategy):
    """Tells a recorder where in a step training is.

    Args:
        device: Where to train.
        recorder: Is told.
    """

    def __init__(self, device: torch.device, recorder: StepRecorder) -> None:
        super().__init__(device=device)
        self._recorder = recorder

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """See Strategy.

        Raises:
            EnoughSteps: If the recorder has all it wants.
        """
        self._recorder.begin_forward()
        if self._recorder.complete:
            raise EnoughSteps
        output = super().training_step(*args, **kwargs)
        self._recorder.end_forward()
        return output

    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """See Strategy."""
        self._recorder.begin_backward()
        loss = super().backward(closure_loss, optimizer, *args, **kwargs)
        self._recorder.end_backward()
        return loss

    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: pl.LightningModule | nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        """See Strategy."""
        output = super().optimizer_step(optimizer, closure, model, **kwargs)
        self._recorder.end_update()
        return output


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
    recorder = StepRecorder(trained, DeviceClock(device), steps=steps, waited=lambda: sum(b.waited for b in batches))
    strategy = ObservedDevice(device, recorder)
    with (
        _quiet(),
        _random_state_restored(),
        tempfile.TemporaryDirectory() as folder,
        contextlib.ExitStack() as restoring,
    ):

        def repeat(loader: Any) -> RepeatedData:
            restoring.enter_context(_generators_restored(loader))
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
        try:
            with _gradients_kept(module), contextlib.suppress(EnoughSteps):
                trainer.fit(trained, **_data_arguments(trained, data, repeat))
        finally:
            recorder.abandon()
        if not recorder.complete:
            raise OptionError("data", data, "batches that can be iterated over again: there were too few to measure")
        reasons = [
            *optimizer_reasons(strategy.optimizers),
            *precision_reasons(trainer.precision_plugin, strategy.optimizers),
        ]
        return MeasuredStep(
            profile=make_profile(
                type(module).__name__, recorder.parameters(), recorder.watched, StepParts.typical(recorder.times)
            ),
            waiting=statistics.median(recorder.waiting),
            device=device.type,
            compressed_share=recorder.compressed_share(),
            unused=recorder.unused(),
            synchronised_because=(*reasons, *model_reasons(trained)),
            norm_needed_by=norm_needed_by(trained, trainer.precision_plugin),
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
            "the function return a pair of model and data, or name one with --data",
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


@contextlib.contextmanager
def _generators_restored(loader: Any) -> Iterator[None]:
    """Put the random state of a data loader back, and of its samplers."""
    holders = [loader, getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None)]
    holders.append(getattr(holders[-1], "sampler", None))
    found = {id(g): g for h in holders if isinstance(g := getattr(h, "generator", None), torch.Generator)}
    states = [(generator, generator.get_state()) for generator in found.values()]
    try:
        yield
    finally:
        for generator, state in states:
            generator.set_state(state)


@contextlib.contextmanager
def _random_state_restored() -> Iterator[None]:
    isolation = isolate_rng()
    isolation.__enter__()
    try:
        yield
    finally:
        isolation.__exit__(None, None, None)  # told of an error, it would restore nothing


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without what a Trainer says at the start of a fit: it is not the user's."""
    loggers = [logging.getLogger(name) for name in (pl.__name__, Fabric.__module__.rpartition(".")[0])]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
