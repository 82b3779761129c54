"""Training in phases with finetuning-scheduler: layers are thawed, and groups added to the optimizer, on the way."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from torch import Tensor, nn

from lightning_bytescheduler import ByteSchedulerStrategy
from tests.support.models import Tower

with warnings.catch_warnings():
    # It imports torch.distributed.optim, which scripts functions.
    warnings.simplefilter("ignore", DeprecationWarning)
    from finetuning_scheduler import (  # type: ignore[import-not-found]
        FinetuningScheduler,
        FTSCheckpoint,
        FTSEarlyStopping,
    )
    from finetuning_scheduler.strategy_adapters import StrategyAdapter  # type: ignore[import-not-found]

__all__ = [
    "AveragedPhases",
    "KeepsCheckpoints",
    "NormedTower",
    "NotesPhases",
    "OnlyTrainable",
    "Phases",
    "RefusedTower",
    "StopsPhases",
]


class NormedTower(Tower):
    """With a batch normalisation, whose statistics are tracked while it is frozen."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.norm = nn.BatchNorm1d(12)

    def predict(self, inputs: Tensor) -> Tensor:
        return super().predict(self.norm(inputs))


class OnlyTrainable(Tower):
    """Hands its optimizer what is trained in the first phase, as Lightning's documentation has it."""

    def configure_optimizers(self) -> Any:
        optimizer = self.make_optimizer(p for p in self.parameters() if p.requires_grad)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.7)}


class RefusedTower(Tower):
    """Is not trained."""

    expected_error = True


class Phases(FinetuningScheduler):  # type: ignore[misc]
    """On strategies that finetuning-scheduler does not know, unless told otherwise.

    Args:
        folder: For the schedule that it writes.
        options: See FinetuningScheduler.
    """

    def __init__(self, folder: Path, **options: Any) -> None:
        super().__init__(**{"log_dir": folder, "base_max_lr": 0.01, "allow_untested": True, **options})


class AveragedPhases(StrategyAdapter):  # type: ignore[misc]
    """Has DDP average the gradients of all phases: it wraps the model while no layer is frozen."""

    def on_after_init_fts(self) -> None:
        super().on_after_init_fts()
        self.pl_module.requires_grad_(True)

    def on_before_fts_fit_start(self) -> None:
        thawed = self.fts_handle._fts_state._curr_thawed_params
        for name, parameter in self.pl_module.named_parameters():
            parameter.requires_grad_(name in thawed)


class NotesPhases(Callback):
    """Notes at the start of each epoch which phase it is in, what learns, and how fast."""

    def on_train_epoch_start(self, trainer: Trainer, pl_module: Any) -> None:
        phases = next(c for c in trainer.callbacks if isinstance(c, FinetuningScheduler))
        optimizer = trainer.optimizers[0]
        learns = [name for name, parameter in pl_module.named_parameters() if parameter.requires_grad]
        rates = [(group["lr"], len(group["params"])) for group in optimizer.param_groups]
        note = ("phase", trainer.current_epoch, phases.curr_depth, learns, rates, type(optimizer).__name__)
        pl_module.notes.append(note)


class StopsPhases(FTSEarlyStopping):  # type: ignore[misc]
    """Ends a phase once the loss of validation has grown."""

    def __init__(self) -> None:
        super().__init__(monitor="validation_loss", patience=1)


class KeepsCheckpoints(FTSCheckpoint):  # type: ignore[misc]
    """Saves after each epoch, and notes at the end what is in the files.

    Args:
        folder: For the checkpoints, a folder for each strategy.
    """

    dirpath: Any

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, filename="{epoch}", monitor="validation_loss", save_top_k=-1)

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        strategy = trainer.strategy
        name = strategy._options.mode if isinstance(strategy, ByteSchedulerStrategy) else "ddp"
        self.dirpath = str(Path(self.dirpath, name))
        super().setup(trainer, pl_module, stage)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        super().on_train_end(trainer, pl_module)
        trainer.strategy.barrier()  # written by one rank, read by all
        for path in sorted(Path(self.dirpath).iterdir()):
            saved = torch.load(path, weights_only=False)
            phases = next(state for name, state in saved["callbacks"].items() if name.startswith("Phases"))
            parts = ("epoch", "global_step", "state_dict", "optimizer_states", "lr_schedulers")
            pl_module.notes.append((path.name, phases, *(saved[part] for part in parts)))
