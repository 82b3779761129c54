"""ByteScheduler and DiLoCo for PyTorch Lightning. Importing this package registers its strategies by name.

Strategies and most other names are imported at their first use, and torch and Lightning with them. So the command line
starts without these, and at the first use it is known which Lightning a project uses (see
:mod:`~lightning_bytescheduler.registration`).
"""

import importlib
from typing import TYPE_CHECKING, Any

from lightning_bytescheduler.exceptions import *  # noqa: F403  # all of them
from lightning_bytescheduler.registration import __version__ as __version__
from lightning_bytescheduler.registration import register_strategies

if TYPE_CHECKING:
    from lightning_bytescheduler.checking.check import check as check
    from lightning_bytescheduler.checking.report import CheckReport as CheckReport
    from lightning_bytescheduler.collectives.push_pull_store import PushPullStore as PushPullStore
    from lightning_bytescheduler.ddp.fabric_strategy import ByteSchedulerFabricStrategy as ByteSchedulerFabricStrategy
    from lightning_bytescheduler.ddp.fit_report import OverlapPlan as OverlapPlan
    from lightning_bytescheduler.ddp.fit_report import SchedulerStatistics as SchedulerStatistics
    from lightning_bytescheduler.ddp.strategy import ByteSchedulerStrategy as ByteSchedulerStrategy
    from lightning_bytescheduler.diloco.performance_monitor import PerformanceMonitor as PerformanceMonitor
    from lightning_bytescheduler.diloco.strategy import DiLoCoStrategy as DiLoCoStrategy
    from lightning_bytescheduler.predicting.link import LinkModel as LinkModel
    from lightning_bytescheduler.predicting.predict import predict as predict
    from lightning_bytescheduler.predicting.prediction import Prediction as Prediction
    from lightning_bytescheduler.slices.data_module import SliceDataModule as SliceDataModule
    from lightning_bytescheduler.tuning.credit_tuner import CreditTuner as CreditTuner

_IMPORTED_AT_FIRST_USE = {
    "ByteSchedulerFabricStrategy": "ddp.fabric_strategy",
    "ByteSchedulerStrategy": "ddp.strategy",
    "CheckReport": "checking.report",
    "CreditTuner": "tuning.credit_tuner",
    "DiLoCoStrategy": "diloco.strategy",
    "LinkModel": "predicting.link",
    "OverlapPlan": "ddp.fit_report",
    "PerformanceMonitor": "diloco.performance_monitor",
    "Prediction": "predicting.prediction",
    "PushPullStore": "collectives.push_pull_store",
    "SchedulerStatistics": "ddp.fit_report",
    "SliceDataModule": "slices.data_module",
    "check": "checking.check",
    "predict": "predicting.predict",
}

if not TYPE_CHECKING:  # a type checker takes the names that are imported as themselves
    from lightning_bytescheduler.exceptions import __all__ as _exceptions

    __all__ = ["__version__", *_exceptions, *_IMPORTED_AT_FIRST_USE]


def __getattr__(name: str) -> Any:
    place = _IMPORTED_AT_FIRST_USE.get(name)
    if place is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{place}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_IMPORTED_AT_FIRST_USE})


register_strategies()
