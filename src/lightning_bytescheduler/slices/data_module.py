"""``SliceDataModule``: training, validation, test and prediction data in slices."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import numpy as np

from lightning_bytescheduler.checks import options_by_name, require_one_of, require_positive, require_whole
from lightning_bytescheduler.exceptions import BadSampleError, OptionError, UnsupportedError
from lightning_bytescheduler.lightning_api import pl
from lightning_bytescheduler.registration import require_same_package
from lightning_bytescheduler.slices.catalogue import require_seed
from lightning_bytescheduler.slices.epoch_plan import EpochPlan, Mixture, ReadReport
from lightning_bytescheduler.slices.fetch import SliceCounters, SliceStatistics
from lightning_bytescheduler.slices.formats import SliceReader
from lightning_bytescheduler.slices.loader import BatchReader, SliceLoader, collate_samples
from lightning_bytescheduler.slices.options import (
    StoreOptions,
    batch_sizes_of,
    require_cache,
    require_function,
    require_mixture,
    require_urls,
)
from lightning_bytescheduler.slices.source import SliceSource, open_source
from lightning_bytescheduler.slices.store import SliceStore
from lightning_bytescheduler.slices.training import (
    Plan,
    TrackedTraining,
    TrackerHost,
    require_same,
)
from lightning_bytescheduler.slices.urls import require_protocols, require_storage_options

_FEW_SKIPPED, _READ_FOR_A_SKIPPED = 10, 100  # skipped samples that are allowed; beyond them, one in so many read

_MOST_HELD = 4 * 1024**3  # bytes of a slice whose samples are shuffled

_SPLITS = {
    "fit": ("train", "val"),
    "validate": ("val",),
    "test": ("test",),
    "predict": ("predict",),
}


@options_by_name
class SliceDataModule(pl.LightningDataModule):
    """Data in slices, for any strategy: each sample of an epoch is trained on exactly once.

    A fit may be stopped anywhere and resumed with another number of ranks, other batch sizes or another
    ``num_workers``, on a machine with an empty cache. With the same ranks and batch sizes the next batch is the one
    that would have come. The position in the checkpoint is what was trained on, not what was read ahead.

    Ranks that step together (``ddp``, ``bytescheduler``) take the same number of steps and compute their shares without
    messages. A slice that stays corrupt when fetched again is named in a warning and left out from the next epoch on.
    For the rest of its epoch other samples are repeated in its place, each about once, so that all ranks have the same
    number of steps.
    If the strategy shares out batches of all ranks, as ``ByteSchedulerStrategy(batch_size="balanced")`` does, each rank
    takes its share of every batch from its own slices, and faster ranks get more slices.

    Workers of unequal speed take slices from a tracker as needed, if their strategy has called :meth:`bind_tracker`.
    The loader then has no length, and corrupt slices are left out at once.

    As with DDP, gradients are averaged over ranks; with unequal batch sizes, samples of smaller batches have more
    weight. With ``ByteSchedulerStrategy(weighting="samples")`` they have equal weight.

    Args:
        train: URL, glob or folder of files or slices, or a list of them; any URL that fsspec opens. Or a mixture, with
            the weight of each: ``{"data/a": 0.7, "data/b": 0.3}``. Its shares hold in any window of batches, and an
            epoch ends with the first source that is used up, or with ``Trainer(limit_train_batches=...)``. Each epoch
            begins all sources anew, in another order if they are shuffled. It is for ranks that step together.
        val: Validation data.
        test: Test data.
        predict: Prediction data.
        batch_size: Samples of a batch; a list has one number for each rank. If the strategy shares batches out, it is
            one number: for each rank, or for all ranks together, depending on the strategy.
        eval_batch_size: The same for validation, test and prediction; ``None`` means ``batch_size``.
        num_workers: Processes of each rank that read. Each makes only the samples of its own batches, but a ``reader``
            makes all of a slice: leave decoding to ``transform``. They live from epoch to epoch, until ``teardown``.
        shuffle: Shuffle the training slices anew in each epoch; ``"samples"`` also shuffles the samples of each, for
            which each process that reads holds one whole slice in memory, of at most 4 GiB.
        seed: Seed of these orders.
        transform: Applied to each sample, in the process that reads.
        collate: Makes a batch of a list of samples; ``None`` stacks arrays, and otherwise does as PyTorch.
        reader: Makes samples of bytes, for files whose suffix is not known.
        storage_options: For fsspec's file systems, such as tokens; by protocol if URLs need different ones, as in
            ``{"s3": {...}, "https": {...}}``.
        cache: Folder of the cache, for sources that are not on this machine, or ``{"dir": ..., "bytes": ...}`` with its
            limit, by default 10 GiB; ``None`` is the user's folder for caches.
        on_bad_sample: What to do about a sample that cannot be decoded, or whose transform raises: ``"raise"`` a
            ``BadSampleError`` that names it, or ``"skip"``, which repeats another one in its place and warns. Beyond
            the first ten, more than one in a hundred are an error; a sample counts once, even if several epochs leave
            it out.
        timeout: Seconds that a source may be unavailable.

    Attributes:
        batch_size: As given; may be changed before a fit, as Lightning's batch size finder does.

    Raises:
        OptionError: If an option is not allowed.
        ImportError: If a package is missing, such as those of the extra ``data``.
    """

    def __init__(
        self,
        train: str | list[str] | dict[str, float] | None = None,
        *,
        val: str | list[str] | None = None,
        test: str | list[str] | None = None,
        predict: str | list[str] | None = None,
        batch_size: int | list[int] = 1,
        eval_batch_size: int | list[int] | None = None,
        num_workers: int = 0,
        shuffle: bool | Literal["samples"] = True,
        seed: int = 0,
        transform: Callable[[Any], Any] | None = None,
        collate: Callable[[list[Any]], Any] | None = None,
        reader: SliceReader | None = None,
        storage_options: dict[str, Any] | None = None,
        cache: str | dict[str, Any] | None = None,
        on_bad_sample: Literal["raise", "skip"] = "raise",
        timeout: float = 60.0,
    ) -> None:
        super().__init__()
        self._urls: dict[str, tuple[str, ...]] = {}  # of the given splits
        self._weights: tuple[float, ...] | None = None
        if train is not None:
            self._urls["train"], self._weights = require_mixture("train", train)
        given = {"val": val, "test": test, "predict": predict}
        self._urls.update({split: require_urls(split, urls) for split, urls in given.items() if urls is not None})
        if not self._urls:
            raise OptionError("train", train, "given, or val, test or predict")
        for split, urls in self._urls.items():
            require_protocols(split, urls)
        for split in {"train", *given} - self._urls.keys():
            # as if the method did not exist, which Lightning distinguishes from a loader without batches
            setattr(self, f"{split}_dataloader", getattr(super(), f"{split}_dataloader"))
        self.batch_size, self.eval_batch_size = batch_size, eval_batch_size
        batch_sizes_of("batch_size", batch_size)
        if eval_batch_size is not None:
            batch_sizes_of("eval_batch_size", eval_batch_size)
        if not isinstance(shuffle, bool) and shuffle != "samples":
            raise OptionError("shuffle", shuffle, "True, False or 'samples'")
        require_function("transform", transform, "sample")
        require_function("collate", collate, "samples")
        require_function("reader", reader, "stream")
        processes = require_whole("num_workers", num_workers, 0)
        skips = require_one_of("on_bad_sample", on_bad_sample, ("raise", "skip")) == "skip"
        require_positive("timeout", timeout, of="seconds")
        self._storing = StoreOptions(*require_cache("cache", cache), timeout)
        require_seed("seed", seed)
        self._seed, self._shuffle = seed, shuffle
        self._reads = partial(BatchReader, transform=transform, seed=seed, skip=skips)
        self._loads = partial(SliceLoader, collate=collate or collate_samples, num_workers=processes)
        known = require_storage_options([url for urls in self._urls.values() for url in urls], storage_options)
        self._opens = partial(open_source, reader=reader, storage_options=known, timeout=timeout)
        self._sources: dict[str, SliceSource] = {}
        self._stores: dict[str, SliceStore] = {}
        self._loaders: dict[str, SliceLoader] = {}
        self._host: TrackerHost | None = None
        self._training: Plan | None = None
        self._pending: dict[str, Any] | None = None
        self._counters = SliceCounters()
        self._warned: set[str] = set()
        self._skipped: set[tuple[str, str, int]] = set()  # split, slice and number

    def bind_tracker(self, host: TrackerHost | None) -> None:
        """Take training slices from a tracker, as needed; called by strategies of unequal workers.

        Call it before ``setup``, as in ``Strategy.setup_environment``; each worker is its own Lightning world. Call the
        tracker's ``release`` for a worker that has died or left, so that others get its slices.

        Args:
            host: The way to the tracker; ``None`` goes back to ranks that step together.

        Raises:
            OptionError: If a fit is running.
        """
        if self._stores:
            allowed = "bound before setup(), as in Strategy.setup_environment, or after teardown()"
            raise OptionError("host", host, allowed)
        if (host is None) != (self._host is None):
            self._training = None
        self._host = host

    @property
    def training(self) -> Plan:
        """Position in the training data.

        Raises:
            OptionError: Before ``setup("fit")``.
        """
        if self._training is None:
            raise _not_set_up("train")
        return self._training

    @property
    def statistics(self) -> SliceStatistics:
        """Cost of reading for this rank and its workers so far."""
        return self._counters.snapshot()

    # ------------------------------------------------------------------ life cycle

    def setup(self, stage: str) -> None:
        """Find the slices of a stage; see LightningDataModule.

        Raises:
            OptionError: If the stage has no data, a batch size is missing for a rank, the cache is smaller than a
                slice, or ranks see different slices.
            SourceUnavailableError: If a source is unavailable.
            UnsupportedError: If a tracker is bound, and a worker has several ranks that do not share its batches.
        """
        splits = _SPLITS[require_one_of("stage", getattr(stage, "value", stage), _SPLITS)]  # Lightning's is an enum
        if self.trainer is not None:
            require_same_package(self.trainer, "SliceDataModule")
        if splits[0] not in self._urls:
            raise OptionError(splits[0], None, f"given, for trainer.{getattr(stage, 'value', stage)}()")
        for split in splits:
            if split in self._urls:
                if split not in self._sources:
                    self._sources[split] = self._opens(self._urls[split], option=split)
                self._stores[split] = SliceStore(self._sources[split], self._storing)
        if stage == "fit":
            self._set_up_training()

    def teardown(self, stage: str) -> None:
        """Stop fetching and release what is held; see LightningDataModule."""
        if stage == "fit" and self._training is not None:
            self._training.close()
        self._end_processes()
        for store in self._stores.values():
            store.close()
        self._stores = {}
        if stage == "fit":
            self._leave_trainer()

    def on_exception(self, exception: BaseException) -> None:
        """End the processes that read, and leave the Trainer, as there is no teardown; see LightningDataModule."""
        self._end_processes()
        self._leave_trainer()

    def _leave_trainer(self) -> None:
        if self.trainer is None:
            return
        callbacks: list[pl.Callback] = self.trainer.callbacks  # type: ignore[attr-defined]  # set by a connector
        for steps in [callback for callback in callbacks if isinstance(callback, SliceSteps)]:
            callbacks.remove(steps)
            self.trainer.reload_dataloaders_every_n_epochs = steps.reload_epochs  # type: ignore[attr-defined]

    def _end_processes(self) -> None:
        loaders, self._loaders = self._loaders, {}
        for loader in loaders.values():
            loader.close()

    def _set_up_training(self) -> None:
        before = self._training
        training = self._together() if self._host is None else self._tracked(self._host)
        largest = max(self._sources["train"].slices, key=lambda slice_: slice_.size)
        if self._shuffle == "samples" and largest.size > _MOST_HELD:
            most = f"used with slices of at most {_MOST_HELD >> 30} GiB, each of which a process holds in memory"
            raise OptionError("shuffle", "samples", f"{most}, and {largest.key!r} is larger. 'slices make' cuts files")
        if self.trainer is not None:
            shares = "" if training.mixture is None else f" in shares of {training.mixture.shares}"
            require_same(self.trainer, "train", f"{self._sources['train'].catalogue!r}{shares}", self._urls["train"])
        # A further fit continues where the last one stopped.
        state = before.state_dict() if self._pending is None and before is not None else self._pending
        self._training, self._pending = training, None
        if state is not None:
            training.load_state_dict(state)
        if self.trainer is not None:
            self._leave_trainer()
            own: int = self.trainer.reload_dataloaders_every_n_epochs  # type: ignore[attr-defined]
            self.trainer.callbacks.insert(0, SliceSteps(self, own))  # type: ignore[attr-defined]
            if self._host is None:
                # An epoch that is resumed in the middle, or whose slices were quarantined, has another number of steps
                # than the next one. Lightning asks each new loader for it, which costs nothing until the first batch.
                self.trainer.reload_dataloaders_every_n_epochs = 1  # type: ignore[attr-defined]

    def _mixed(self, weights: Sequence[float]) -> Mixture:
        source = self._sources["train"]
        missing = [url for number, url in enumerate(self._urls["train"]) if number not in source.places]
        if missing:
            raise OptionError("train", missing[0], "a source with samples that no other source of the mixture has")
        return Mixture(weights, np.array(source.places, np.int64))

    def _together(self) -> EpochPlan:
        rank, ranks = self._rank_and_ranks()
        batch_sizes = batch_sizes_of("batch_size", self.batch_size, ranks)
        # A strategy may share out batches of all ranks.
        shared = None if self.trainer is None else getattr(self.trainer.strategy, "batch_of_all", None)
        is_shared = shared is not None and shared(1) is not None
        if shared is not None and is_shared:
            if not isinstance(self.batch_size, int):
                allowed = "one number, of which each rank gets its share by the strategy's batch_size"
                raise OptionError("batch_size", self.batch_size, allowed)
            together: int = shared(self.batch_size)
            batch_sizes = tuple(together // ranks + (one < together % ranks) for one in range(ranks))
        return EpochPlan(
            self._sources["train"].catalogue,
            batch_sizes=batch_sizes,
            mixture=None if self._weights is None else self._mixed(self._weights),
            rank=rank,
            seed=self._seed,
            shuffle=bool(self._shuffle),
            is_shared=is_shared,
        )

    def _tracked(self, host: TrackerHost) -> TrackedTraining:
        if self._weights is not None:
            raise UnsupportedError(
                "Workers that take slices from a tracker, as under 'diloco', take them of all sources alike: give "
                "train one URL or a list, or mix sources with strategy='bytescheduler' or 'ddp'."
            )
        rank, ranks = self._rank_and_ranks()
        if host.waits and self.trainer is not None and self.trainer.reload_dataloaders_every_n_epochs:  # type: ignore[attr-defined]
            raise UnsupportedError(
                "reload_dataloaders_every_n_epochs is not allowed with slices of a coordinator: each pass over them is "
                "of the next epoch of the data, and Lightning begins two where it reloads. Leave it out: a "
                "SliceDataModule needs no reloading."
            )
        if ranks > 1 and getattr(host, "ranks", None) is None:
            raise UnsupportedError(
                "A worker that takes slices from a tracker has to be one rank, as ranks that train together need the "
                "same number of steps: use one rank for each worker."
            )
        if ranks > 1 and self.trainer is not None:
            batch_sizes = batch_sizes_of("batch_size", self.batch_size, ranks)
            # as ranks of a worker get parts of one batch
            require_same(self.trainer, "num_workers", str(self._loads.keywords["num_workers"]))
        else:
            batch_sizes = (batch_sizes_of("batch_size", self.batch_size, host.workers)[host.worker],)
            rank = 0  # of its own world, whatever its number among all workers
        store = self._stores["train"]
        return TrackedTraining(
            host, store, batch_sizes=batch_sizes, seed=self._seed, shuffle=bool(self._shuffle), rank=rank
        )

    def _rank_and_ranks(self) -> tuple[int, int]:
        return (0, 1) if self.trainer is None else (self.trainer.global_rank, self.trainer.world_size)

    # ------------------------------------------------------------------ loaders

    def train_dataloader(self) -> SliceLoader:
        """The remaining batches of the current epoch.

        Raises:
            OptionError: Before ``setup("fit")``.
        """
        if "train" not in self._stores:
            raise _not_set_up("train")
        self.training.open(self.trainer)
        return self._loader("train", self.training)

    def val_dataloader(self) -> list[SliceLoader]:
        """The validation data, if any."""
        return self._evaluation("val")

    def test_dataloader(self) -> list[SliceLoader]:
        """The test data."""
        return self._evaluation("test")

    def predict_dataloader(self) -> list[SliceLoader]:
        """The data to predict for."""
        return self._evaluation("predict")

    def _evaluation(self, split: str) -> list[SliceLoader]:
        if split not in self._stores:
            raise _not_set_up(split)
        sampling = None if self.trainer is None else self.trainer.distributed_sampler_kwargs
        rank, ranks = (sampling["rank"], sampling["num_replicas"]) if sampling else self._rank_and_ranks()
        name = "batch_size" if self.eval_batch_size is None else "eval_batch_size"
        size = getattr(self, name)
        if self._host is not None and ranks == 1 and not isinstance(size, int):  # in a world of its own
            size = batch_sizes_of(name, size, self._host.workers)[self._host.worker]
        plan = EpochPlan(
            self._sources[split].catalogue,
            batch_sizes=batch_sizes_of(name, size, ranks),
            rank=rank,
            shuffle=False,
            repeats=False,
        )
        plan.say_padded(split)
        return [self._loader(split, plan)]

    def _loader(self, split: str, plan: Plan) -> SliceLoader:
        """Return the earlier loader with another plan, as Lightning asks for a loader in each epoch."""
        store, loader, is_training = self._stores[split], self._loaders.get(split), split == "train"
        if loader is not None and loader.reader.store is store:
            loader.plan = plan
            return loader
        if loader is not None:
            loader.close()
        reader = self._reads(
            store,
            shuffle_samples=is_training and self._shuffle == "samples",
            fill=plan.fills,
            rank=self._rank_and_ranks()[0],
            source_of=None if plan.mixture is None else plan.mixture.source_of,
        )
        self._loaders[split] = loader = self._loads(
            plan,
            reader,
            pin_memory=self.trainer is not None and self.trainer.strategy.root_device.type == "cuda",
            on_report=partial(self._heed, split),
            is_alone=self.trainer is None,
        )
        return loader

    def _heed(self, split: str, report: ReadReport, waited: float) -> None:
        self._counters.add(**report.cost)
        if split == "train":
            self._counters.add(wait_seconds=waited)
            self.training.received(report)
        for key, reason in report.corrupt:
            repeats = ""
            if self._loaders[split].plan.fills:
                samples = next(slice_.samples for slice_ in self._sources[split].slices if slice_.key == key)
                repeats = f"In its place, others are repeated until the end of the epoch, at most {samples} samples. "
            self._warn_once(
                f"Slice {key!r} is corrupt, also when fetched again, and is quarantined",
                f": {reason} {repeats}Check it with 'lightning-bytescheduler slices verify'.",
            )
        for key, number, words in report.skipped:
            self._skipped.add((split, key, number))
            self._warn_once(f"Samples of slice {key!r} are left out", f", of which this is the first. {words}")
            skipped, read = len(self._skipped), self.statistics.samples
            if skipped > max(_FEW_SKIPPED, read / _READ_FOR_A_SKIPPED):
                raise BadSampleError(
                    f"{skipped} of the {read} samples that this rank has read cannot be made, which is more than one "
                    f"in {_READ_FOR_A_SKIPPED}. The last one: {words}"
                )

    def _warn_once(self, about: str, text: str) -> None:
        if about not in self._warned:  # several processes may find it
            self._warned.add(about)
            warnings.warn(about + text, stacklevel=3)

    # ------------------------------------------------------------------ position

    def state_dict(self) -> dict[str, Any]:
        """The position in the current epoch: what was trained on; see LightningDataModule."""
        return {} if self._training is None else self._training.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume where a state was saved; see LightningDataModule.

        Raises:
            TrackerStateError: If it was saved in the middle of an epoch of other slices or another order.
        """
        if self._training is None:
            self._pending = dict(state_dict)
        else:
            self._training.load_state_dict(state_dict)


def _not_set_up(split: str) -> OptionError:
    stage = {"train": "fit", "val": "fit"}.get(split, split)
    ways = f"give the data module to trainer.{stage}(model, datamodule=data), or call setup({stage!r}) first"
    return OptionError(split, None, "set up", says=f"The data for {split!r} is not set up: {ways}.")


class SliceSteps(pl.Callback):
    """Reports each trained step to the shared plan or to the tracker, and logs.

    A data module puts it before all other callbacks of a fit, so that a checkpoint saved after a step has a position
    that includes the step.

    Args:
        data: The data module.
        reload_epochs: The Trainer's own ``reload_dataloaders_every_n_epochs``, to be restored after the fit.
    """

    def __init__(self, data: SliceDataModule, reload_epochs: int) -> None:
        self._data = data
        self.reload_epochs = reload_epochs
        self._logged, self._steps = data.statistics, 0

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Report the step."""
        training = self._data.training
        training.trained()
        self._steps += 1
        if batch_idx + 1 >= trainer.num_training_batches:
            training.finish_epoch(trainer)
        every: int = trainer.log_every_n_steps  # type: ignore[attr-defined]
        if every and trainer.global_step % every == 0 and not trainer.barebones:
            self._log(pl_module)

    def _log(self, pl_module: pl.LightningModule) -> None:
        now, before, steps = self._data.statistics, self._logged, self._steps
        self._logged, self._steps = now, 0
        asked = now.cache_hits + now.cache_misses
        pl_module.log_dict(
            {
                "slices/wait_ms": 1e3 * (now.wait_seconds - before.wait_seconds) / steps,
                "slices/stall_ms": 1e3 * (now.stall_seconds - before.stall_seconds) / steps,
                "slices/megabytes_fetched": (now.bytes_fetched - before.bytes_fetched) / steps / 1e6,
                "slices/cache_hit_share": now.cache_hits / asked if asked else 1.0,
                **({"slices/skipped": float(now.skipped)} if now.skipped else {}),
            },
            on_step=True,
            on_epoch=False,
        )
