"""All names that the adapters take from Lightning, from the package that the project uses.

No other module here imports Lightning. :mod:`~lightning_bytescheduler.registration` says which of the two packages it
is; importing this module settles that.
"""

import ast
import importlib
import inspect
import sys
from typing import TYPE_CHECKING

from lightning_bytescheduler.registration import choose_package

PACKAGE = choose_package()
_OTHER_NAMES = {"pytorch": "pytorch_lightning", "fabric": "lightning_fabric"}

if TYPE_CHECKING or PACKAGE == "lightning":
    import lightning.pytorch as pl
    from lightning.fabric import Fabric
    from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
    from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
    from lightning.fabric.plugins.environments import LightningEnvironment, SLURMEnvironment
    from lightning.fabric.plugins.precision import MixedPrecision as FabricMixedPrecision
    from lightning.fabric.plugins.precision import Precision as FabricPrecision
    from lightning.fabric.strategies import DDPStrategy as FabricDDPStrategy
    from lightning.fabric.strategies.launchers import _MultiProcessingLauncher as _FabricLauncher
    from lightning.fabric.utilities.distributed import _init_dist_connection
    from lightning.fabric.utilities.seed import reset_seed
    from lightning.pytorch.callbacks import Checkpoint
    from lightning.pytorch.loggers import Logger
    from lightning.pytorch.loggers.logger import DummyLogger
    from lightning.pytorch.plugins.precision import MixedPrecision, Precision
    from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy, Strategy, StrategyRegistry
    from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher
    from lightning.pytorch.trainer import trainer as trainer_module
    from lightning.pytorch.trainer.states import RunningStage, TrainerFn
    from lightning.pytorch.utilities import CombinedLoader, GradClipAlgorithmType
    from lightning.pytorch.utilities.exceptions import SIGTERMException
    from lightning.pytorch.utilities.model_helpers import is_overridden
    from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
    from lightning.pytorch.utilities.seed import isolate_rng
else:
    # The list above, read once more in the other package's names.
    pl = importlib.import_module("pytorch_lightning")
    for _line in ast.walk(ast.parse(inspect.getsource(sys.modules[__name__]))):
        if isinstance(_line, ast.ImportFrom) and (_line.module or "").startswith("lightning."):
            _, _part, *_rest = _line.module.split(".")
            _there = importlib.import_module(".".join([_OTHER_NAMES[_part], *_rest]))
            globals().update({_name.asname or _name.name: getattr(_there, _name.name) for _name in _line.names})
