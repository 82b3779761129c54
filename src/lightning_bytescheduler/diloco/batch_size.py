"""Each worker's batch size: given, from the environment, or found by growing it until memory or throughput stops it.

It takes a few steps of the model with batches of growing size, before training begins. The optimizer takes no step;
gradients, buffers and random numbers are restored. Limits: whatever else ``training_step`` changes stays changed, and a
module with manual optimization is not tried. The loader of the training data then gets that size, or the given one.
"""

from __future__ import annotations

import inspect
import logging
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from lightning_bytescheduler.checks import is_whole, require_positive, require_whole
from lightning_bytescheduler.ddp.batches import arguments_of
from lightning_bytescheduler.diloco.worker_restart import random_numbers, set_random_numbers
from lightning_bytescheduler.exceptions import OptionError, UnsupportedError
from lightning_bytescheduler.lightning_api import garbage_collection_cuda, is_oom_error, pl

log = logging.getLogger(__name__)

BATCH_SIZE_VARIABLE = "BYTESCHEDULER_BATCH_SIZE"
"""The batch size of one worker: a number, or ``auto``."""

_ALLOWED = "a positive whole number or 'auto'"
_REFINED_TO = 8  # when memory is the limit, the size is found to an eighth
_GAIN = 1.05  # of samples a second, for a larger size to be chosen
_STEPS = 3  # measured steps of each size
_MESSAGE = (
    "Strategy 'diloco' cannot change the batch size of a {what}. Leave batch_size out, and give each worker's loader "
    "its batch size where you make it; trainer.global_rank says which worker it is."
)
_CANNOT = "A batch size cannot be found with batch_size='auto'; give batch_size as a number"


def resolve_batch_size(
    batch_size: int | Sequence[int | Literal["auto"]] | Literal["auto"] | None,
    *,
    worker: int = 0,
    environ: Mapping[str, str] | None = None,
) -> int | Literal["auto"] | None:
    """Say which batch size a worker is to use. An argument beats the environment variable.

    Args:
        batch_size: One for all workers, one for each, ``"auto"`` to find it, or ``None``.
        worker: The worker's number, from 0.
        environ: Where the variable is looked up; the process's environment unless given.

    Returns:
        ``None`` if neither is given: the data loader keeps its own.

    Raises:
        OptionError: Names the argument or variable, its value and what is allowed.
    """
    if batch_size is None:
        env = os.environ if environ is None else environ
        text = env.get(BATCH_SIZE_VARIABLE, "").strip()
        if not text:
            return None
        return _one(BATCH_SIZE_VARIABLE, int(text) if text.isascii() and text.isdigit() else text)
    if isinstance(batch_size, (list, tuple)):
        if worker >= len(batch_size):
            raise OptionError("batch_size", batch_size, f"one for each worker, of which there are {worker + 1} or more")
        return _one("batch_size", batch_size[worker])
    return _one("batch_size", batch_size)


def find_batch_size(
    try_batch: Callable[[int], float | None],
    *,
    start: int = 1,
    limit: int = 1 << 20,
) -> int:
    """Find a batch size that a worker computes fast.

    It is doubled until memory is exhausted or the throughput stops to grow. When memory was the limit, sizes between
    the last that fitted and the first that did not are tried, too.

    Args:
        try_batch: Takes a step, or a few, of that size, and returns the seconds of one, or ``None`` if there is not
            enough memory. What it measures should be the median of some steps after a warm-up.
        start: The first size.
        limit: The largest size to try.

    Returns:
        The smallest size tried whose throughput no larger one tried exceeds by a twentieth or more.

    Raises:
        OptionError: If an argument is not allowed, or ``try_batch`` returned no positive time.
        UnsupportedError: If memory is not enough for ``start``.
    """
    require_whole("start", start, 1)
    require_whole("limit", limit, start)
    best, best_rate = 0, 0.0

    def fits(size: int) -> bool:
        """Try a size, and choose it if it is worth it."""
        nonlocal best, best_rate
        seconds = try_batch(size)
        if seconds is None:
            return False
        rate = size / require_positive("try_batch", seconds)
        if rate >= best_rate * _GAIN:
            best, best_rate = size, rate
        return True

    size = start
    while fits(size):
        if best != size or size == limit:
            return best
        size = min(2 * size, limit)
    if not best:
        raise UnsupportedError(f"Memory is not enough for a batch of {start}. Use a smaller start, or a smaller model.")
    fitting, too_large = best, size  # while doubling, each size that fitted was chosen, or the search was over
    while too_large - fitting > max(fitting // _REFINED_TO, 1):
        middle = (fitting + too_large) // 2
        if fits(middle):
            fitting = middle
        else:
            too_large = middle
    return best


def _one(option: str, value: object) -> int | Literal["auto"]:
    if value == "auto":
        return "auto"
    if not is_whole(value, 1):
        raise OptionError(option, value, _ALLOWED)
    return value


def with_batch_size(loader: object, batch_size: int) -> object:
    """The same loader with batches of another size.

    Raises:
        UnsupportedError: If it is not a plain ``DataLoader`` that makes its batches itself.
    """
    if type(loader) is not DataLoader or (loader.batch_sampler is None and loader.batch_size is None):
        raise UnsupportedError(_MESSAGE.format(what=type(loader).__name__))
    if loader.batch_size == batch_size:
        return loader
    options = arguments_of(loader)
    if isinstance(loader.dataset, IterableDataset):
        return DataLoader(loader.dataset, batch_size=batch_size, drop_last=loader.drop_last, **options)
    if type(loader.batch_sampler) is not BatchSampler:
        raise UnsupportedError(_MESSAGE.format(what=f"DataLoader with a {type(loader.batch_sampler).__name__}"))
    sampler = BatchSampler(loader.batch_sampler.sampler, batch_size, loader.batch_sampler.drop_last)
    return DataLoader(loader.dataset, batch_sampler=sampler, **options)


def sized_loader(
    module: pl.LightningModule, loader: object, size: int | Literal["auto"] | None, *, alone: bool, workers: int
) -> object:
    """Give a loader of training data the batch size that :func:`resolve_batch_size` says, which may be found first.

    Args:
        module: What is trained.
        loader: Its training data.
        size: What was resolved; ``None`` leaves the loader as it is.
        alone: Whether this rank is a worker by itself.
        workers: How many there are.

    Raises:
        OptionError: If the size is to be found, and several ranks are one worker.
        UnsupportedError: If the loader's batch size cannot be changed, or none can be found.
    """
    if size == "auto":
        if not alone:
            raise OptionError("batch_size", "auto", "left out, or numbers, where inner is given")
        size = measured_batch_size(module, loader, workers=workers)
        log.info("[rank %d] batches of %d samples are used", module.global_rank, size)
    return loader if size is None else with_batch_size(loader, size)


def measured_batch_size(module: pl.LightningModule, loader: object, *, workers: int) -> int:
    """The smallest batch size that this worker computes about as fast as any.

    Args:
        module: Set up for training, on its device.
        loader: Its only training data.
        workers: Among whom the data are shared out: a batch is no larger than a worker's share.

    Raises:
        UnsupportedError: If such steps cannot be taken; says why and what to do instead.
    """
    if type(loader) is not DataLoader or isinstance(loader.dataset, IterableDataset):
        raise UnsupportedError(f"{_CANNOT}: the training data do not come from a DataLoader with numbered samples.")
    if not module.automatic_optimization:
        raise UnsupportedError(f"{_CANNOT}: the module optimizes manually.")
    dataset: Any = loader.dataset
    collate, length = loader.collate_fn, len(dataset)

    def try_batch(size: int) -> float | None:
        batch = collate([dataset[index % length] for index in range(size)])
        batch = module.trainer.strategy.batch_to_device(batch, dataloader_idx=0)
        try:
            seconds = [_step(module, batch) for _ in range(1 + _STEPS)]
        except RuntimeError as error:
            if not is_oom_error(error):
                raise
            return None
        finally:
            module.zero_grad(set_to_none=True)
            garbage_collection_cuda()
        return statistics.median(seconds[1:])

    with _unchanged(module):
        return find_batch_size(try_batch, limit=max(length // workers, 1))


def _step(module: pl.LightningModule, batch: Any) -> float:
    _synchronize(module.device)
    began = time.perf_counter()
    arguments = (batch, 0) if len(inspect.signature(module.training_step).parameters) > 1 else (batch,)
    output = module.trainer.strategy.training_step(*arguments)
    loss = output["loss"] if isinstance(output, Mapping) else output
    if isinstance(loss, Tensor):
        loss.backward()
    _synchronize(module.device)
    return time.perf_counter() - began


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextmanager
def _unchanged(module: pl.LightningModule) -> Iterator[None]:
    """Restore what steps change, and have nothing logged within this context."""
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
    numbers = random_numbers(module.device)
    silenced = {"log": lambda *_, **__: None, "log_dict": lambda *_, **__: None}
    vars(module).update(silenced)
    try:
        yield
    finally:
        set_random_numbers(numbers, module.device)
        for name in silenced:
            vars(module).pop(name, None)
        with torch.no_grad():
            for name, buffer in module.named_buffers():
                buffer.copy_(buffers[name])
