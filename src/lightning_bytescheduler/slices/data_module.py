"""``SliceDataModule``: training, validation, test and prediction data in slices."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any, Literal

from lightning_bytescheduler.checks import options_by_name, require_one_of, require_whole
from lightning_bytescheduler.exceptions import OptionError, UnsupportedError
from lightning_bytescheduler.lightning_api import rank_zero_info, rank_zero_warn
from lightning_bytescheduler.slices.batches import BatchPlan, BatchReader, ReadReport
from lightning_bytescheduler.slices.cache import CAN_CACHE
from lightning_bytescheduler.slices.catalogue import SliceCatalogue
from lightning_bytescheduler.slices.epoch_plan import EpochPlan
from lightning_bytescheduler.slices.fetch import SliceCounters, SliceStatistics
from lightning_bytescheduler.slices.formats import SliceReader
from lightning_bytescheduler.slices.loader import BatchWorkers, SliceLoader, collate_samples
from lightning_bytescheduler.slices.lock_step import LockStepPlan
from lightning_bytescheduler.slices.make import SLICE_BYTES
from lightning_bytescheduler.slices.options import (
    Delivery,
    LoaderOptions,
    Shortage,
    StoreOptions,
    TrackerOptions,
    batch_sizes_of,
    default_cache_dir,
    require_batch_size,
    require_function,
    require_packages,
    require_urls,
)
from lightning_bytescheduler.slices.shared_plan import SharedPlan
from lightning_bytescheduler.slices.slice_coordinator import SliceCoordinator
from lightning_bytescheduler.slices.source import SliceSource, open_source
from lightning_bytescheduler.slices.store import SliceStore
from lightning_bytescheduler.slices.training import (
    CoordinatedDataModule,
    LockStepTraining,
    TrackedTraining,
    TrackerHost,
    TrainingSlices,
    require_same_reading,
    require_same_slices,
    require_tracker_host,
)
from lightning_bytescheduler.slices.urls import require_protocols, require_storage_options, takes

__all__ = ["SliceDataModule"]

_SPLITS = {
    "fit": ("train", "val"),
    "validate": ("val",),
    "test": ("test",),
    "predict": ("predict",),
}


@options_by_name
class SliceDataModule(CoordinatedDataModule):
    """Data in slices, for any strategy: each sample of an epoch is trained on exactly once.

    A fit may be stopped anywhere and resumed with another number of ranks, other batch sizes or another number of
    ``num_workers``, on a machine with an empty cache; with the same ranks and batch sizes the next batch is the one
    that would have come. The position in the checkpoint is what was trained on, not what was read ahead.

    Ranks that step together (``ddp``, ``bytescheduler``) take the same number of steps, and work out their shares
    without a message. A slice that is corrupt however often it is fetched is named in a warning, and left out from the
    next epoch on; for the rest of its epoch other samples are repeated in its place, so that no rank runs out of steps.

    Where the strategy shares out batches of all ranks, as ``ByteSchedulerStrategy(batch_size="balanced")`` does, each
    rank takes its share of every batch from slices of its own, and whoever is faster gets more of them.

    Workers of unequal speed take slices from a tracker as they need them, if their strategy has called
    :meth:`bind_tracker`. The loader has no length then, and corrupt slices are left out at once.

    As with DDP, gradients are averaged over ranks; with unequal batch sizes, samples of smaller batches weigh more;
    under ``ByteSchedulerStrategy(weighting="samples")`` they weigh alike.

    Args:
        train: URL, glob or folder of files or slices, or a list of them; anything that fsspec opens.
        val: Of the validation.
        test: Of the test.
        predict: Of the prediction.
        batch_size: Samples of a batch; a list has one number for each rank. Where the strategy shares batches out,
            it is one number: times the ranks, or of all ranks, as the strategy says.
        eval_batch_size: The same for validation, test and prediction; None is ``batch_size``.
        num_workers: Processes that read, of each rank. Each makes the samples of its own batches only; a ``reader``
            should come to its ``first`` sample quickly for that. They stay from epoch to epoch, until ``teardown``.
        shuffle: Take the training slices in another order in each epoch; ``"samples"``: and the samples of each, which
            maps one whole slice into memory, for each process that reads.
        seed: Of these orders.
        shortage: ``"pad"`` repeats or ``"drop"`` leaves out training samples where a step has fewer than there are
            ranks. Other data is always padded.
        transform: Applied to each sample, in the process that reads.
        collate: Makes a batch of a list of samples; None stacks arrays, and else does as PyTorch does.
        reader: Makes samples of bytes, for files whose suffix is not known.
        slice_bytes: Target size of the slices into which files without an index are divided.
        storage_options: For fsspec's file systems, as what asks for a token takes it; by protocol where URLs need
            different ones, as in ``{"s3": {...}, "https": {...}}``.
        cache_dir: Folder of the cache, for sources that are not on this machine; None is the user's folder for caches.
        cache_bytes: Bound of the cache.
        delivery: Of workers that take slices as they need them: ``"at_least_once"`` trains again on what a dead worker
            did not report, ``"at_most_once"`` leaves that out. Without deaths, both are exactly once.
        timeout: Seconds that a source may stay away.

    Attributes:
        batch_size: As given; may be changed before a fit, as Lightning's search for a batch size does.

    Raises:
        OptionError: If an option is not allowed.
        ImportError: If a package is missing, such as those of the extra ``data``.
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
        shuffle: bool | Literal["samples"] = True,
        seed: int = 0,
        shortage: Shortage = "pad",
        transform: Callable[[Any], Any] | None = None,
        collate: Callable[[list[Any]], Any] | None = None,
        reader: SliceReader | None = None,
        slice_bytes: int = SLICE_BYTES,
        storage_options: dict[str, Any] | None = None,
        cache_dir: str | None = None,
        cache_bytes: int = 10 * 1024**3,
        delivery: Delivery = "at_least_once",
        timeout: float = 60.0,
    ) -> None:
        super().__init__()
        given = {"train": train, "val": val, "test": test, "predict": predict}
        self._urls = {split: require_urls(split, urls) for split, urls in given.items()}
        if not any(self._urls.values()):
            raise OptionError("train", train, "given, or val, test or predict")
        require_packages("SliceDataModule")
        for split, urls in self._urls.items():
            require_protocols(split, urls or ())
        for split, urls in self._urls.items():
            if urls is None:  # as if the method was not there, which Lightning can tell from a loader without batches
                setattr(self, f"{split}_dataloader", getattr(super(), f"{split}_dataloader"))
        self.batch_size = require_batch_size("batch_size", batch_size)
        self.eval_batch_size = (
            None if eval_batch_size is None else require_batch_size("eval_batch_size", eval_batch_size)
        )
        if not isinstance(shuffle, bool) and shuffle != "samples":
            raise OptionError("shuffle", shuffle, "True, False or 'samples'")
        self._loading = LoaderOptions(
            num_workers=num_workers,
            shuffle=shuffle == "samples" or shuffle,
            shuffle_samples=shuffle == "samples",
            seed=seed,
            shortage=shortage,
            transform=transform,
            collate=collate,
        )
        self._storing = StoreOptions(
            cache_dir=default_cache_dir() if cache_dir is None and CAN_CACHE else cache_dir,
            cache_bytes=cache_bytes,
            timeout=timeout,
        )
        self._tracking = TrackerOptions(seed=seed, shuffle=self._loading.shuffle, delivery=delivery)
        require_function("reader", reader, "stream", "first")
        self._opening: dict[str, Any] = {
            "reader": reader,
            "slice_bytes": require_whole("slice_bytes", slice_bytes, 1),
            "storage_options": require_storage_options(
                [url for urls in self._urls.values() for url in urls or ()], storage_options
            ),
        }
        self._sources: dict[str, SliceSource] = {}
        self._catalogues: dict[str, SliceCatalogue] = {}
        self._stores: dict[str, SliceStore] = {}
        self._workers: dict[str, BatchWorkers] = {}
        self._host: TrackerHost | None = None
        self._training: TrainingSlices | None = None
        self._pending: dict[str, Any] | None = None
        self._counters = SliceCounters()
        self._waited = 0.0  # for loaders that are gone
        self._loader_of_training: SliceLoader | None = None
        self._warned: set[str] = set()

    def bind_tracker(self, host: TrackerHost | None) -> None:
        """Take training slices from a tracker, as they are needed: what a strategy of unequal workers calls.

        To be called before ``setup``, as in ``Strategy.setup_environment``; each worker is its own Lightning world.

        Args:
            host: The way to the tracker; None goes back to ranks that step together.

        Raises:
            OptionError: If it is no ``TrackerHost``, or in the middle of a fit.
        """
        if host is not None:
            require_tracker_host(host)
        if self._stores:
            allowed = "bound before setup(), as in Strategy.setup_environment, or after teardown()"
            raise OptionError("host", host, allowed)
        if (host is None) != (self._host is None):
            self._training = None
        self._host = host

    @property
    def training(self) -> TrainingSlices:
        """Where the training data stands.

        Raises:
            OptionError: Before ``setup("fit")``.
        """
        if self._training is None:
            raise OptionError("training", None, "asked for after setup('fit')")
        return self._training

    @property
    def statistics(self) -> SliceStatistics:
        """What reading has cost this rank and its workers so far."""
        return self._counters.snapshot()

    @property
    def waited(self) -> float:
        """Seconds that the training of this rank has waited for batches so far, whatever for."""
        return self._waited + (0.0 if self._loader_of_training is None else self._loader_of_training.waited)

    # ------------------------------------------------------------------ life cycle

    def setup(self, stage: str) -> None:
        """Find the slices of a stage; see LightningDataModule.

        Raises:
            OptionError: If the stage has no data, a batch size is missing for a rank, the cache is smaller than a
                slice, or ranks see different slices.
            SourceUnavailableError: If a source stays away.
            UnsupportedError: If a tracker is bound, and a worker has several ranks that do not share its batches.
        """
        splits = _SPLITS[require_one_of("stage", getattr(stage, "value", stage), _SPLITS)]  # Lightning's is an enum
        if self._urls[splits[0]] is None:
            raise OptionError(splits[0], None, f"given, for trainer.{getattr(stage, 'value', stage)}()")
        for split in splits:
            urls = self._urls[split]
            if urls is None:
                continue
            if split not in self._sources:
                self._sources[split] = self._open(split, urls)
            self._stores[split] = SliceStore(self._sources[split], self._storing)
        if self._storing.cache_dir is None and not all(store.is_local for store in self._stores.values()):
            rank_zero_warn(
                "slices: this system has no file locks as Linux and macOS have them, so there is no cache, and slices "
                "are fetched anew in each epoch. Copy them to this machine, or train in WSL."
            )
        if stage == "fit":
            self._set_up_training()

    def _open(self, split: str, urls: Sequence[str]) -> SliceSource:
        options = self._opening["storage_options"]  # each of them is for some of the URLs, but not for all
        taken = {name: value for name, value in options.items() if any(takes(url, name) for url in urls)}
        opening = {**self._opening, "storage_options": taken}
        return open_source(urls, option=split, options=self._storing.fetch_options(), **opening)

    def teardown(self, stage: str) -> None:
        """Stop what fetches, and give back what is held; see LightningDataModule."""
        if stage == "fit" and self._training is not None:
            self._training.close()
        self._end_workers()
        for store in self._stores.values():
            store.close()
        self._stores = {}
        if stage == "fit" and self.trainer is not None:
            SliceCoordinator.release(self.trainer)

    def on_exception(self, exception: BaseException) -> None:
        """End the processes that read, as there is no teardown; see LightningDataModule."""
        self._end_workers()

    def _end_workers(self) -> None:
        workers, self._workers = self._workers, {}
        for each in workers.values():
            each.close()

    def _set_up_training(self) -> None:
        before = self._training
        self._training = self._together(before) if self._host is None else self._tracked(self._host, before)
        if self._pending is not None:
            self._training.load_state_dict(self._pending)
            self._pending = None
        if self.trainer is not None:
            SliceCoordinator.bind(self.trainer, has_length=self._host is None)

    def _together(self, before: TrainingSlices | None) -> LockStepTraining:
        rank, ranks = self._rank_and_ranks()
        catalogue, size = self._catalogue("train"), require_batch_size("batch_size", self.batch_size)
        order: dict[str, Any] = {
            "rank": rank,
            "seed": self._loading.seed,
            "shuffle": self._loading.shuffle,
            "shortage": self._loading.shortage,
        }
        together = self._batch_of_all(size)
        plan: EpochPlan
        if together is None:
            plan = LockStepPlan(catalogue, batch_sizes=batch_sizes_of("batch_size", size, ranks), **order)
        else:
            plan = SharedPlan(catalogue, batch_size=together, ranks=ranks, **order)
        training = LockStepTraining(plan)
        if before is not None:  # a further fit goes on where the last one stopped
            training.load_state_dict(before.state_dict())
        if self.trainer is not None:
            require_same_slices(self.trainer, catalogue)
        return training

    def _batch_of_all(self, size: int | list[int]) -> int | None:
        """Samples of a batch of all ranks, where the strategy shares batches out."""
        shared = None if self.trainer is None else getattr(self.trainer.strategy, "batch_of_all", None)
        if shared is None or shared(1) is None:
            return None
        if not isinstance(size, int):
            allowed = "one number, of which each rank gets its share by the strategy's batch_size"
            raise OptionError("batch_size", size, allowed)
        found: int | None = shared(size)
        return found

    def _tracked(self, host: TrackerHost, before: TrainingSlices | None) -> TrackedTraining:
        ranks = self._rank_and_ranks()[1]
        if ranks > 1 and getattr(host, "ranks", None) is None:
            raise UnsupportedError(
                "A worker that takes slices from a tracker has to be one rank, as ranks that train together need the "
                "same number of steps: use one rank for each worker."
            )
        size = require_batch_size("batch_size", self.batch_size)
        if ranks > 1 and self.trainer is not None:
            batch_sizes = batch_sizes_of("batch_size", size, ranks)
            require_same_slices(self.trainer, self._catalogue("train"))
            require_same_reading(self.trainer, self._loading)
        else:
            batch_sizes = (batch_sizes_of("batch_size", size, host.workers)[host.worker],)
        training = TrackedTraining(
            host,
            self._stores["train"],
            options=self._tracking,
            batch_sizes=batch_sizes,
            ahead=self._storing.prefetch,
        )
        if before is not None:
            training.load_state_dict(before.state_dict())
        return training

    def _rank_and_ranks(self) -> tuple[int, int]:
        return (0, 1) if self.trainer is None else (self.trainer.global_rank, self.trainer.world_size)

    def _rank_and_ranks_of_evaluation(self) -> tuple[int, int]:
        """Workers that train on their own may evaluate together."""
        sampling = None if self.trainer is None else self.trainer.distributed_sampler_kwargs
        return self._rank_and_ranks() if sampling is None else (sampling["rank"], sampling["num_replicas"])

    def _catalogue(self, split: str) -> SliceCatalogue:
        if split not in self._catalogues:
            self._catalogues[split] = SliceCatalogue(self._sources[split].slices)
        return self._catalogues[split]

    # ------------------------------------------------------------------ loaders

    def train_dataloader(self) -> SliceLoader:
        """Batches of what is left of the running epoch."""
        self.training.open(self.trainer)
        self._waited = self.waited
        self._loader_of_training = self._loader("train", self.training.plan, self.training.batches)
        return self._loader_of_training

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
            allowed = f"asked for after setup('{'fit' if split == 'val' else split}'), as a Trainer does it"
            raise OptionError(f"{split}_dataloader", None, allowed)
        rank, ranks = self._rank_and_ranks_of_evaluation()
        name = "batch_size" if self.eval_batch_size is None else "eval_batch_size"
        size = require_batch_size(name, getattr(self, name))
        if self._host is not None and ranks == 1 and not isinstance(size, int):  # of a world of its own
            size = batch_sizes_of(name, size, self._host.workers)[self._host.worker]
        plan = LockStepPlan(
            self._catalogue(split),
            batch_sizes=batch_sizes_of(name, size, ranks),
            rank=rank,
            shuffle=False,
            repeats=False,
        )
        shares = plan.shares
        if shares.padded:
            rank_zero_info(
                f"slices: the samples of {split} do not go round, so {shares.padded} will be repeated, for every rank "
                f"to take {shares.steps} steps."
            )
        return [self._loader(split, plan, len(plan))]

    def _loader(self, split: str, plan: BatchPlan, length: int | None) -> SliceLoader:
        on_report = self._heed_training if split == "train" else self._heed
        return SliceLoader(
            plan, self._workers_of(split), length=length, on_report=on_report, is_alone=self.trainer is None
        )

    def _workers_of(self, split: str) -> BatchWorkers:
        """Those of the loader before, as there is one for each epoch."""
        loading, store = self._loading, self._stores[split]
        before = self._workers.get(split)
        if before is not None:
            if before.reader.store is store and loading.num_workers:
                return before
            before.close()
        is_training = split == "train"
        reader = BatchReader(
            store,
            transform=loading.transform,
            shuffle_samples=loading.shuffle_samples and is_training,
            seed=loading.seed,
            fill=self.training.fills if is_training else True,
        )
        self._workers[split] = BatchWorkers(
            reader,
            collate=loading.collate or collate_samples,
            num_workers=loading.num_workers,
            pin_memory=self.trainer is not None and self.trainer.strategy.root_device.type == "cuda",
        )
        return self._workers[split]

    def _heed_training(self, report: ReadReport) -> None:
        self._heed(report)
        self.training.received(report)

    def _heed(self, report: ReadReport) -> None:
        self._counters.add(**report.cost)
        for key, reason in report.corrupt:
            if key not in self._warned:  # several processes may find it
                self._warned.add(key)
                warnings.warn(
                    f"Slice {key!r} is corrupt, also when fetched again, and is quarantined: {reason} Check it with "
                    "'lightning-bytescheduler slices verify'.",
                    stacklevel=2,
                )

    # ------------------------------------------------------------------ position

    def state_dict(self) -> dict[str, Any]:
        """What was trained on, of the running epoch; see LightningDataModule."""
        return {} if self._training is None else self._training.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where a state was saved; see LightningDataModule.

        Raises:
            TrackerStateError: If it was saved in the middle of an epoch of other slices or another order.
        """
        if self._training is None:
            self._pending = dict(state_dict)
        else:
            self._training.load_state_dict(state_dict)
