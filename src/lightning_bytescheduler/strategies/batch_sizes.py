"""Gives a worker's training data loader the batch size of that worker."""

from __future__ import annotations

from typing import Any

from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from lightning_bytescheduler.exceptions import UnsupportedError

__all__ = ["with_batch_size"]


def with_batch_size(loader: object, batch_size: int) -> object:
    """The same loader with batches of another size.

    Raises:
        UnsupportedError: If it is not a plain ``DataLoader`` that makes its batches itself.
    """
    if type(loader) is not DataLoader or (loader.batch_sampler is None and loader.batch_size is None):
        raise UnsupportedError(_MESSAGE.format(what=type(loader).__name__))
    if loader.batch_size == batch_size:
        return loader
    options: dict[str, Any] = {
        "num_workers": loader.num_workers,
        "collate_fn": loader.collate_fn,
        "pin_memory": loader.pin_memory,
        "timeout": loader.timeout,
        "worker_init_fn": loader.worker_init_fn,
        "multiprocessing_context": loader.multiprocessing_context,
        "generator": loader.generator,
        "prefetch_factor": loader.prefetch_factor,
        "persistent_workers": loader.persistent_workers,
    }
    if isinstance(loader.dataset, IterableDataset):
        return DataLoader(loader.dataset, batch_size=batch_size, drop_last=loader.drop_last, **options)
    if type(loader.batch_sampler) is not BatchSampler:
        raise UnsupportedError(_MESSAGE.format(what=f"DataLoader with a {type(loader.batch_sampler).__name__}"))
    sampler = BatchSampler(loader.batch_sampler.sampler, batch_size, loader.batch_sampler.drop_last)
    return DataLoader(loader.dataset, batch_sampler=sampler, **options)


_MESSAGE = (
    "Strategy 'diloco' cannot change the batch size of a {what}. Leave batch_size out, and give each worker's loader "
    "its batch size where you make it; trainer.global_rank says which worker it is."
)
