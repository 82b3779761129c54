"""Each worker's batch size: given, or from the environment. The loader of the training data gets it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from lightning_bytescheduler.checks import is_whole
from lightning_bytescheduler.ddp.batches import arguments_of
from lightning_bytescheduler.exceptions import OptionError, UnsupportedError

BATCH_SIZE_VARIABLE = "BYTESCHEDULER_BATCH_SIZE"
"""The batch size of one worker."""

_FINDS = "Lightning's Tuner.scale_batch_size finds the largest that fits, with Trainer(devices=1)."
_MESSAGE = (
    "Strategy 'diloco' cannot change the batch size of a {what}. Leave batch_size out, and give each worker's loader "
    "its batch size where you make it; trainer.global_rank says which worker it is."
)


def resolve_batch_size(
    batch_size: int | Sequence[int] | None,
    *,
    worker: int = 0,
    environ: Mapping[str, str] | None = None,
) -> int | None:
    """Say which batch size a worker is to use. An argument beats the environment variable.

    Args:
        batch_size: One for all workers, one for each, or ``None``.
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


def _one(option: str, value: object) -> int:
    if not is_whole(value, 1):
        raise OptionError(option, value, "a positive whole number", _FINDS if value == "auto" else "")
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
