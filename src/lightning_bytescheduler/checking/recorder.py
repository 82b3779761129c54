"""Record what a fit does on one rank, protect the user's files from it, and end it after some steps.

Also choose the strategy that replaces the one of a script's Trainer.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lightning_bytescheduler.checking.report import PROGRESS, RankRecord, RunSpec, keep, record_path
from lightning_bytescheduler.ddp.rank_strategy import callbacks_of
from lightning_bytescheduler.ddp.strategy import ByteSchedulerStrategy
from lightning_bytescheduler.exceptions import UnsupportedError
from lightning_bytescheduler.lightning_api import (
    Checkpoint,
    DDPStrategy,
    DummyLogger,
    SingleDeviceStrategy,
    Strategy,
    StrategyRegistry,
    pl,
)
from lightning_bytescheduler.registration import registered_class

_VALIDATION_BATCHES = 2
_OWN_METRICS = "bytescheduler/"


def digest(value: Any) -> str:
    """A text that is the same for the same bits."""
    if not isinstance(value, torch.Tensor):
        return repr(value)
    value = value.detach()
    if value.layout != torch.strided:
        value = value.to_dense()
    flat = value.cpu().contiguous().reshape(-1)
    content = memoryview(flat.view(torch.uint8).numpy()) if flat.numel() else b""
    bits = hashlib.blake2b(content, digest_size=8).hexdigest()
    return f"{value.dtype} {tuple(value.shape)} {bits}"


def _digests(module: nn.Module) -> dict[str, str]:
    """Digests of weights and buffers, by name."""
    return {name: digest(value) for name, value in (*module.named_parameters(), *module.named_buffers())}


class _Loggers(DummyLogger):
    """Replaces the user's loggers: publishes nothing, and records what is logged."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.logged: dict[str, str] = {}
        self._folder = folder

    @property
    def save_dir(self) -> str:
        """The run's folder, where files go that belong to a logger, such as LightningCLI's configuration."""
        return str(self._folder)

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        """Record ``metrics``, unless all are the epoch or this package's own: ``ddp`` would log nothing then."""
        if all(name == "epoch" or name.startswith(_OWN_METRICS) for name in metrics):
            return
        self.logged.update(_as_texts(metrics, f" at step {step}"))


def _as_texts(metrics: Any, suffix: str = "") -> dict[str, str]:
    """Numbers as exact texts, without those that only one strategy logs."""
    return {
        f"{name}{suffix}": float(value).hex()
        for name, value in metrics.items()
        if not name.startswith(_OWN_METRICS) and (not isinstance(value, torch.Tensor) or value.numel() == 1)
    }


class _Seclusion(pl.Callback):
    """First of the callbacks: redirects all that they write to the run's own folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """See Callback."""
        for index, callback in enumerate(callbacks_of(trainer)):
            if isinstance(callback, Checkpoint) and hasattr(callback, "dirpath"):
                callback.dirpath = str(self._folder / f"checkpoints{index}")
        # A callback or a module may also save and remove checkpoints by itself.
        strategy = trainer.strategy
        save, remove = strategy.save_checkpoint, strategy.remove_checkpoint
        strategy.save_checkpoint = (  # type: ignore[method-assign]
            lambda checkpoint, filepath, *rest, **options: save(checkpoint, self._inside(filepath), *rest, **options)
        )
        strategy.remove_checkpoint = lambda filepath: remove(self._inside(filepath))  # type: ignore[method-assign]

    def _inside(self, path: Any) -> str:
        given = Path(path)
        if self._folder in given.absolute().parents:
            return str(path)
        return str(self._folder / "saved" / given.absolute().relative_to(given.absolute().anchor))


class Recorder(pl.Callback):
    """Last of the callbacks: records the fit.

    Args:
        spec: The run.
        folder: Folder for the record, and for files that the training would have written elsewhere.
    """

    def __init__(self, spec: RunSpec, folder: Path) -> None:
        self._spec = spec
        self._folder = folder
        self._record = RankRecord()
        self._losses: list[torch.Tensor] = []
        self._loggers = _Loggers(folder)
        self._start = 0  # steps that a loaded checkpoint had taken
        self._batches = 0

    def attach(self, trainer: pl.Trainer) -> None:
        """Join the callbacks of ``trainer``, and replace its loggers."""
        trainer._default_root_dir = str(self._folder)  # type: ignore[attr-defined]
        trainer.loggers = [self._loggers] if trainer.loggers else []
        trainer.fit_loop.min_epochs = 0
        trainer.fit_loop.epoch_loop.min_steps = None
        limit = trainer.limit_val_batches
        if limit and (isinstance(limit, float) or limit > _VALIDATION_BATCHES):
            trainer.limit_val_batches = _VALIDATION_BATCHES
        callbacks_of(trainer).insert(0, _Seclusion(self._folder))
        callbacks_of(trainer).append(self)

    # ------------------------------------------------------------------ while it trains

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """See Callback."""
        self._start = trainer.global_step
        self._record.initial = _digests(pl_module)
        fit = trainer.strategy.fit if isinstance(trainer.strategy, ByteSchedulerStrategy) else None
        if fit is not None and self._spec.strategy == "undeferred":
            fit.reads.unseen.update(map(id, pl_module.parameters()))

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        """See Callback."""
        self._record.loss_steps.append(self._record.steps)

    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: torch.Tensor) -> None:
        """See Callback. Every update is complete at this point, so reading weights opens no gate."""
        if self._record.steps not in self._record.trace:
            self._record.trace[self._record.steps] = _digests(pl_module)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, *_: Any) -> None:
        """See Callback."""
        record = self._record
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if isinstance(loss, torch.Tensor) and loss.numel() == 1:
            self._losses.append(loss.detach().clone())
        else:
            record.loss_steps.pop()
        self._batches += 1
        taken = trainer.global_step - self._start if trainer.optimizers else self._batches
        if taken > record.steps:
            record.steps = taken
            if trainer.is_global_zero:
                (self._folder / PROGRESS).write_text(f"after step {taken}")
        if not pl_module.automatic_optimization:
            record.trace[taken] = _digests(pl_module)  # such steps are synchronised: nothing is deferred
        if taken >= self._spec.steps:
            trainer.should_stop = True

    # ------------------------------------------------------------------ afterwards

    def finish(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Record the state at the end of the fit."""
        record, plan = self._record, getattr(trainer.strategy, "plan", None)
        record.rank, record.world_size = trainer.global_rank, trainer.world_size
        record.losses = [float(loss.item()).hex() for loss in self._losses]
        record.weights = _digests(module)
        record.optimizer = {name: digest(value) for name, value in _optimizer_state(trainer, module).items()}
        record.metrics = {**_as_texts(trainer.callback_metrics), **self._loggers.logged}
        record.trace.setdefault(record.steps, record.weights)
        if plan is not None:
            record.plan, record.needs_norm = repr(plan), bool(plan.norm_needed_by)
        keep(record, record_path(self._folder, record))

    def failed(self, trainer: pl.Trainer, error: BaseException) -> None:
        """Record that the fit ended with an error."""
        text = f"rank {trainer.global_rank}, after {self._record.steps} steps: {type(error).__name__}: {error}"
        (self._folder / f"error{trainer.global_rank}.txt").write_text(text)


def _optimizer_state(trainer: pl.Trainer, module: nn.Module) -> dict[str, Any]:
    """Tensors and numbers of the optimizers' state and parameter groups, by name."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    state: dict[str, Any] = {}
    for number, optimizer in enumerate(trainer.optimizers):
        held = [(names.get(id(p), f"#{index}"), held) for index, (p, held) in enumerate(optimizer.state.items())]
        groups = enumerate(optimizer.param_groups)
        held += [(f"group {index}", {k: v for k, v in group.items() if k != "params"}) for index, group in groups]
        for owner, entries in held:
            for key, value in entries.items() if isinstance(entries, dict) else [("state", entries)]:
                if isinstance(value, (torch.Tensor, bool, int, float, str)):
                    state[f"optimizer {number}: {key} of {owner}"] = value
    return state


# ---------------------------------------------------------------------- the strategy

_FROM_THE_CONNECTOR = ("accelerator", "parallel_devices", "cluster_environment", "checkpoint_io", "precision_plugin")
_HELD = (
    *_FROM_THE_CONNECTOR,
    *("process_group_backend", "timeout", "start_method"),
    *("ddp_comm_state", "ddp_comm_hook", "ddp_comm_wrapper", "model_averaging_period"),
)
"""Options of DDP that a strategy stores under their names."""
_OWN = ("partition_size", "credit", "cross_barrier", "mode")
_TUNED = (False, "credit", "partition", "both")

# Every tensor gets its own bucket, and so its own gate: touching another tensor does not open it. Sizes are fixed, as
# sizes from a measured link would differ between runs.
_STRICT: dict[str, Any] = {
    "mode": "overlapped",
    "bucket_cap_mb": 1e-5,
    "partition_size": 2**16,
    "credit": 2**18,
    "tuning": False,
    "policy": "bytescheduler",
}


def strategy_for(spec: RunSpec, given: str | Strategy | None, *, forked: bool = False) -> Strategy:
    """The strategy under check, with the DDP options of ``given``.

    Args:
        spec: The run.
        given: The Trainer's ``strategy``.
        forked: Whether the Trainer is a notebook's: ranks are forked, and a new connector sets devices and plugins.

    Raises:
        UnsupportedError: If ``given`` is neither DDP nor ByteScheduler, or cannot be replaced by them.
    """
    options, own = _options_of(given)
    if forked:
        options = {key: value for key, value in options.items() if key not in _FROM_THE_CONNECTOR}
        options["start_method"] = "fork"
    if spec.strategy == "ddp":
        if options.get("bucket_cap_mb") is None:
            options.pop("bucket_cap_mb", None)
        return DDPStrategy(**options)
    own["timeline"] = None  # the user's file must not be overwritten
    if spec.strategy != "configured":
        own.update(_STRICT)
        options.pop("bucket_cap_mb", None)
    return ByteSchedulerStrategy(**options, **own)


def _options_of(given: str | Strategy | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """Options that both strategies understand, and options of ByteScheduler only."""
    if given is None or given == "auto" or isinstance(given, SingleDeviceStrategy):
        return {}, {}
    if isinstance(given, str):
        entry = StrategyRegistry[given.lower()]
        if registered_class(entry["strategy"]) not in (DDPStrategy, ByteSchedulerStrategy):
            raise UnsupportedError(_not_comparable(f"strategy={given!r}"))
        return dict(entry["init_params"]), {}
    if not isinstance(given, DDPStrategy) or type(given) not in (DDPStrategy, ByteSchedulerStrategy):
        raise UnsupportedError(_not_comparable(type(given).__name__))
    held = {name: vars(given).get(f"_{name}", vars(given).get(name)) for name in _HELD}
    options = {**given._ddp_kwargs, **{name: value for name, value in held.items() if value is not None}}
    if not isinstance(given, ByteSchedulerStrategy):
        return options, {}
    facts = given._weighting.facts
    others = {
        "compression": given._rules is not None,
        "weighting": facts["weighting"] != "ranks",
        "batch_size": facts["batch_size"] is not None,
        "servers": given._servers.used,
    }
    if names := [name for name, is_set in others.items() if is_set]:
        raise UnsupportedError(
            f"The script's ByteSchedulerStrategy has {' and '.join(names)}, which ddp has not, so there is nothing to "
            "compare. Leave that out for the check."
        )
    own = {name: getattr(given._options, name) for name in _OWN}
    own["tuning"] = _TUNED[given._options.tunes_credit + 2 * given._options.tunes_partition]
    return options, {**own, "policy": given._options.policy.name, "log_metrics": given._log_metrics}


def _not_comparable(name: str) -> str:
    return (
        f"The script's Trainer has {name}, which is not trained with DDP, so there is nothing to compare. The check is "
        "for 'ddp', 'bytescheduler', their variants and 'auto'."
    )
