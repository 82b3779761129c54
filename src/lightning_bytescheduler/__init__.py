"""ByteScheduler and DiLoCo for PyTorch Lightning. Importing this package registers its strategies by name."""

from lightning.pytorch.strategies import StrategyRegistry

from lightning_bytescheduler.__about__ import __version__
from lightning_bytescheduler.advice.advice import Advice
from lightning_bytescheduler.callbacks.credit_tuner import CreditTuner
from lightning_bytescheduler.callbacks.performance_monitor import PerformanceMonitor
from lightning_bytescheduler.callbacks.slice_coordinator import SliceCoordinator
from lightning_bytescheduler.data.slice_dataset import SliceDataset
from lightning_bytescheduler.data_modules.slices import SliceDataModule
from lightning_bytescheduler.exceptions import (
    ByteSchedulerError,
    LaunchOrderError,
    OptionError,
    RankFailedError,
    RanksDifferError,
    RanksDivergedError,
    SchedulerClosedError,
    SchedulerTimeoutError,
    SliceCorruptError,
    SliceIndexError,
    SourceUnavailableError,
    TaskStateError,
    TrackerStateError,
    UnsupportedError,
)
from lightning_bytescheduler.gradients.statistics import SchedulerStatistics
from lightning_bytescheduler.simulation import LinkModel
from lightning_bytescheduler.strategies.advise import advise
from lightning_bytescheduler.strategies.byte_scheduler import ByteSchedulerStrategy
from lightning_bytescheduler.strategies.diloco import DiLoCoStrategy
from lightning_bytescheduler.strategies.foreign_trainer import refuse_foreign_trainer
from lightning_bytescheduler.strategies.plan import OverlapPlan

__all__ = [
    "Advice",
    "ByteSchedulerError",
    "ByteSchedulerStrategy",
    "CreditTuner",
    "DiLoCoStrategy",
    "LaunchOrderError",
    "LinkModel",
    "OptionError",
    "OverlapPlan",
    "PerformanceMonitor",
    "RankFailedError",
    "RanksDifferError",
    "RanksDivergedError",
    "SchedulerClosedError",
    "SchedulerStatistics",
    "SchedulerTimeoutError",
    "SliceCoordinator",
    "SliceCorruptError",
    "SliceDataModule",
    "SliceDataset",
    "SliceIndexError",
    "SourceUnavailableError",
    "TaskStateError",
    "TrackerStateError",
    "UnsupportedError",
    "__version__",
    "advise",
]

if "bytescheduler" not in StrategyRegistry:  # importing twice, as after a reload, must not raise
    ByteSchedulerStrategy.register_strategies(StrategyRegistry)
    DiLoCoStrategy.register_strategies(StrategyRegistry)
refuse_foreign_trainer(name for name in StrategyRegistry if name.startswith(("bytescheduler", "diloco")))
