"""ByteScheduler and DiLoCo for PyTorch Lightning. Importing this package registers its strategies by name."""

from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.pytorch.strategies import StrategyRegistry

from lightning_bytescheduler.__about__ import __version__
from lightning_bytescheduler.advice.advice import Advice, advise
from lightning_bytescheduler.checking.notebook import check
from lightning_bytescheduler.checking.report import CheckReport
from lightning_bytescheduler.ddp.plan import OverlapPlan
from lightning_bytescheduler.ddp.rank_strategy import refuse_foreign_trainer
from lightning_bytescheduler.ddp.refused_names import refuse_in_fabric, refuse_misspelt
from lightning_bytescheduler.ddp.statistics import SchedulerStatistics
from lightning_bytescheduler.ddp.strategy import ByteSchedulerStrategy
from lightning_bytescheduler.diloco.performance_monitor import PerformanceMonitor
from lightning_bytescheduler.diloco.strategy import DiLoCoStrategy
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
from lightning_bytescheduler.simulation import LinkModel
from lightning_bytescheduler.slices.data_module import SliceDataModule
from lightning_bytescheduler.slices.dataset import SliceDataset
from lightning_bytescheduler.slices.slice_coordinator import SliceCoordinator
from lightning_bytescheduler.tuning.credit_tuner import CreditTuner

__all__ = [
    "Advice",
    "ByteSchedulerError",
    "ByteSchedulerStrategy",
    "CheckReport",
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
    "check",
]

if "bytescheduler" not in StrategyRegistry:  # importing twice, as after a reload, must not raise
    ByteSchedulerStrategy.register_strategies(StrategyRegistry)
    DiLoCoStrategy.register_strategies(StrategyRegistry)
    _names = [name for name in StrategyRegistry if name.startswith(("bytescheduler", "diloco"))]
    refuse_in_fabric(STRATEGY_REGISTRY, _names)
    refuse_misspelt(StrategyRegistry)
refuse_foreign_trainer(name for name in StrategyRegistry if name.startswith(("bytescheduler", "diloco")))
