"""``SliceDataModule``: training, validation, test and prediction data in slices.

It is a room of its own beside ``strategies`` and ``callbacks``: the data room itself does not import Lightning.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, Literal

import lightning.pytorch as pl
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_bytescheduler.callbacks.slice_coordinator import SliceCoordinator
from lightning_bytescheduler.data.batch_reader import BatchReader, ReadNote
from lightning_bytescheduler.data.catalogue import SliceCatalogue
from lightning_bytescheduler.data.formats import SliceReader
from lightning_bytescheduler.data.lock_step_plan import LockStepPlan
from lightning_bytescheduler.data.open_source import SLICE_BYTES, open_source
from lightning_bytescheduler.data.slice_loader import SliceLoader, collate_samples
from lightning_bytescheduler.data.source import SliceSource
from lightning_bytescheduler.data.statistics import SliceCounters, SliceStatistics
from lightning_bytescheduler.data.store import SliceStore
from lightning_bytescheduler.data.store_options import StoreOptions
from lightning_bytescheduler.data_modules.slice_options import (
    LoaderOptions,
    batch_sizes_of,
    default_cache_dir,
    require_batch_size,
    require_urls,
)
from lightning_bytescheduler.exceptions import OptionError

__all__ = ["SliceDataModule"]

_SPLITS = {
    "fit": ("train", "val"),
    "validate": ("val",),
    "test": ("test",),
    "predict": ("predict",),
}


class SliceDataModule(pl.LightningDataModule):
    """Data in slices, for one process and for ranks that step together (``ddp``, ``bytescheduler``).

    Every rank takes the same number of steps. Each sample of an epoch is trained on exactly once, also when a fit is
    stopped anywhere and resumed with another number of ranks, other batch sizes or another number of workers; with the
    same ranks and batch sizes the next batch is the one that would have come. The position in the checkpoint is what
    was trained on, not what workers have read ahead.

    A slice that is corrupt however often it is fetched is named in a warning and left out from the next epoch on. For
    the rest of its epoch other samples are repeated in its place, so that no rank runs out of steps.

    As with DDP, gradients are averaged over ranks; with unequal batch sizes, samples of smaller batches weigh more.

    Args:
        train: URL, glob or folder of files or slices, or a list of them; anything that fsspec opens.
        val: Of the validation.
        test: Of the test.
        predict: Of the prediction.
        batch_size: Samples of a batch; a list has one number for each rank.
        eval_batch_size: The same for validation, test and prediction; None is ``batch_size``.
        num_workers: Processes that read, of each rank. Each reads all of its rank's bytes and transforms its own
            batches.
        prefetch_factor: Batches that each of them reads ahead.
        pin_memory: Copy batches to pinned memory.
        shuffle: Take the training slices in another order in each epoch.
        shuffle_samples: And the samples of each; holds one whole slice in memory, for each process that reads.
        seed: Of these orders.
        shortage: ``"pad"`` repeats or ``"drop"`` leaves out training samples where a step has fewer than there are
            ranks. Other data is always padded.
        transform: Applied to each sample, in the process that reads.
        collate: Makes a batch of a list of samples; None stacks arrays, and else does as PyTorch does.
        reader: Makes samples of bytes, for files whose suffix is not known.
        slice_bytes: Target size of the slices into which files without an index are divided.
        storage_options: For fsspec's file systems.
        cache_dir: Folder of the cache, for sources that are not on this machine; None is the user's folder for caches.
        cache_bytes: Bound of the cache.
        prefetch: Slices to fetch ahead; None follows the speeds.
        timeout: Seconds that a source may stay away.
        attempts: How often a chunk is fetched that is short or wrong.

    Attributes:
        batch_size: As given; may be changed before a fit, as Lightning's search for a batch size does.

    Raises:
        OptionError: If an option is not allowed.
    """

    def __init__(
        self,
        train: str | list[str] | None = None,
        *,
        val: str | list[str] | None = None,
        test: str | list[str] | None = None,
        predict: str | list[str] | None = None,
        batch_size: int | list[int] = 1,
        eval_batch_size: int | list[int] | None = None,
        num_workers: int = 0,
        prefetch_factor: int = 2,
        pin_memory: bool = False,
        shuffle: bool = True,
        shuffle_samples: bool = False,
        seed: int = 0,
        shortage: Literal["pad", "drop"] = "pad",
        transform: Callable[[Any], Any] | None = None,
        collate: Callable[[list[Any]], Any] | None = None,
        reader: SliceReader | None = None,
        slice_bytes: int = SLICE_BYTES,
        storage_options: dict[str, Any] | None = None,
        cache_dir: str | None = None,
        cache_bytes: int = 10 * 1024**3,
        prefetch: int | None = None,
        timeout: float = 60.0,
        attempts: int = 3,
    ) -> None:
        super().__init__()
        given = {"train": train, "val": val, "test": test, "predict": predict}
        self._urls = {split: require_urls(split, urls) for split, urls in given.items()}
        if not any(self._urls.values()):
            raise OptionError("train", train, "given, or val, test or predict")
        self.batch_size = require_batch_size("batch_size", batch_size)
        self.eval_batch_size = None if eval_batch_size is None else require_batch_size("eval_batch_size", eval_batch_size)
        self._loading = LoaderOptions(
            num_workers=num_workers,
            prefetch_factor=prefetch_factor,
            pin_memory=pin_memory,
            shuffle=shuffle,
            shuffle_samples=shuffle_samples,
            seed=seed,
            shortage=shortage,
            transform=transform,
            collate=collate,
        )
        self._storing = StoreOptions(
            cache_dir=default_cache_dir() if cache_dir is None else cache_dir,
            cache_bytes=cache_bytes,
            prefetch=prefetch,
            timeout=timeout,
            attempts=attempts,
        )
        if isinstance(slice_bytes, bool) or not isinstance(slice_bytes, int) or slice_bytes < 1:
            raise OptionError("slice_bytes", slice_bytes, "a positive whole number of bytes")
        self._opening = {"reader": reader, "slice_bytes": slice_bytes, "storage_options": storage_options}
        self._sources: dict[str, SliceSource] = {}
        self._stores: dict[str, SliceStore] = {}
        self._plan: LockStepPlan | None = None
        self._pending: dict[str, Any] | None = None
        self._counters = SliceCounters()
        self._corrupt: dict[str, str] = {}
        self._lost = 0

    @property
    def plan(self) -> LockStepPlan:
        """The batches of the training data, and where their epoch stands.

        Raises:
            OptionError: Before ``setup("fit")``.
        """
        if self._plan is None:
            raise OptionError("plan", None, "asked for after setup('fit')")
        return self._plan

    @property
    def statistics(self) -> SliceStatistics:
        """What reading has cost this rank and its workers so far."""
        return self._counters.snapshot()

    @property
    def corrupt(self) -> dict[str, str]:
        """Reason by key of the training slices that this rank has found to be corrupt in the running epoch."""
        return dict(self._corrupt)

    # ------------------------------------------------------------------ life cycle

    def setup(self, stage: str) -> None:
        """Find the slices of a stage; see LightningDataModule.

        Raises:
            OptionError: If the stage has no data, a batch size is missing for a rank, the cache is smaller than a
                slice, or ranks see different slices.
            SourceUnavailableError: If a source stays away.
        """
        splits = _SPLITS[stage]
        if self._urls[splits[0]] is None:
            raise OptionError(splits[0], None, f"given, for the stage {stage!r}")
        for split in splits:
            urls = self._urls[split]
            if urls is None:
                continue
            if split not in self._sources:
                self._sources[split] = open_source(list(urls), options=self._storing.fetch_options(), **self._opening)
            self._stores[split] = SliceStore(self._sources[split], self._storing)
        if stage == "fit":
            self._set_up_training()

    def teardown(self, stage: str) -> None:
        """Stop what fetches; see LightningDataModule."""
        for store in self._stores.values():
            store.close()
        self._stores = {}
        if stage == "fit" and self.trainer is not None:
            SliceCoordinator.release(self.trainer)

    def _set_up_training(self) -> None:
        rank, ranks = self._rank_and_ranks()
        sizes = batch_sizes_of("batch_size", self.batch_size, ranks)
        before = self._plan
        catalogue = SliceCatalogue(self._sources["train"].slices) if before is None else before.catalogue
        self._plan = LockStepPlan(
            catalogue,
            batch_sizes=sizes,
            rank=rank,
            seed=self._loading.seed,
            shuffle=self._loading.shuffle,
            shortage=self._loading.shortage,
        )
        if before is not None:  # a further fit goes on where the last one stopped
            self._plan.load_state_dict(before.state_dict())
        if self._pending is not None:
            self._plan.load_state_dict(self._pending)
            self._pending = None
        self._plan.counted = 0  # a loop that is restored says so after this
        self._corrupt = {}
        if self.trainer is not None:
            self._require_same_slices(catalogue)
            SliceCoordinator.bind(self.trainer)

    def _require_same_slices(self, catalogue: SliceCatalogue) -> None:
        if self.trainer is None or self.trainer.world_size == 1:
            return
        here = asdict(catalogue.fingerprint)
        there = self.trainer.strategy.broadcast(here)
        if {**here, "blocks": list(here["blocks"])} != {**there, "blocks": list(there["blocks"])}:
            raise OptionError(
                "train",
                self._urls["train"],
                f"the same slices on every rank: here are {here['slices']} with {here['samples']} samples, "
                f"rank 0 has {there['slices']} with {there['samples']}, or their keys differ",
            )

    def _rank_and_ranks(self) -> tuple[int, int]:
        return (0, 1) if self.trainer is None else (self.trainer.global_rank, self.trainer.world_size)

    # ------------------------------------------------------------------ loaders

    def train_dataloader(self) -> SliceLoader:
        """Batches of what is left of the running epoch."""
        plan = self.plan
        if plan.over and len(plan.catalogue) and plan.begun:
            plan.end_epoch()
        shares = plan.shares
        if shares.padded or shares.dropped:
            what = f"{shares.padded} are repeated" if shares.padded else f"{shares.dropped} are left out"
            rank_zero_info(f"slices: in epoch {plan.epoch} not every rank has a sample in every step; {what}.")
        return self._loader("train", plan)

    def val_dataloader(self) -> list[SliceLoader]:
        """The validation data, if there is any."""
        return self._evaluation("val")

    def test_dataloader(self) -> list[SliceLoader]:
        """The test data."""
        return self._evaluation("test")

    def predict_dataloader(self) -> list[SliceLoader]:
        """The data to predict for."""
        return self._evaluation("predict")

    def _evaluation(self, split: str) -> list[SliceLoader]:
        if split not in self._stores:
            return []
        rank, ranks = self._rank_and_ranks()
        name = "batch_size" if self.eval_batch_size is None else "eval_batch_size"
        plan = LockStepPlan(
            SliceCatalogue(self._sources[split].slices),
            batch_sizes=batch_sizes_of(name, getattr(self, name), ranks),
            rank=rank,
            shuffle=False,
        )
        if plan.shares.padded:
            rank_zero_info(f"slices: {plan.shares.padded} samples of {split} are repeated, so that each rank has one.")
        return [self._loader(split, plan)]

    def _loader(self, split: str, plan: LockStepPlan) -> SliceLoader:
        loading = self._loading
        reader = BatchReader(
            self._stores[split],
            transform=loading.transform,
            shuffle_samples=loading.shuffle_samples and split == "train",
            seed=loading.seed,
        )
        return SliceLoader(
            plan,
            reader,
            collate=loading.collate or collate_samples,
            num_workers=loading.num_workers,
            prefetch_factor=loading.prefetch_factor,
            pin_memory=loading.pin_memory,
            on_note=self._note_training if split == "train" else self._note,
        )

    def _note_training(self, note: ReadNote) -> None:
        self._note(note)
        self._corrupt.update({key: reason for key, reason in note.corrupt if key not in self._corrupt})

    def _note(self, note: ReadNote) -> None:
        self._counters.add(**note.cost)
        self._lost += note.lost
        for key, reason in note.corrupt:
            if key not in self._corrupt:
                warnings.warn(
                    f"Slice {key!r} is corrupt, also when fetched again, and is quarantined: {reason} Other samples "
                    "are repeated in its place; in the next epoch it is left out. Check it with "
                    "'lightning-bytescheduler slices verify'.",
                    stacklevel=2,
                )

    # ------------------------------------------------------------------ position

    def state_dict(self) -> dict[str, Any]:
        """What was trained on, of the running epoch; see LightningDataModule."""
        return {} if self._plan is None else self._plan.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where a state was saved; see LightningDataModule.

        Raises:
            TrackerStateError: If it was saved in the middle of an epoch of other slices or another order.
        """
        if self._plan is None:
            self._pending = dict(state_dict)
        else:
            self._plan.load_state_dict(state_dict)
