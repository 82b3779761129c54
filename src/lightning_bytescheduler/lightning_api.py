"""All that the adapters take from Lightning, from the package that the project uses.

Nothing else here imports Lightning. :mod:`~lightning_bytescheduler.registration` says which of the two packages it is;
with this module it is decided.
"""

from typing import TYPE_CHECKING

from lightning_bytescheduler.registration import choose_package

PACKAGE = choose_package()

if TYPE_CHECKING or PACKAGE == "lightning":
    import lightning.pytorch as pl
    from lightning.fabric import Fabric
    from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment, TorchCheckpointIO
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
    from lightning.pytorch.utilities.memory import garbage_collection_cuda, is_oom_error
    from lightning.pytorch.utilities.model_helpers import is_overridden
    from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
    from lightning.pytorch.utilities.seed import isolate_rng
else:
    import pytorch_lightning as pl
    from lightning_fabric import Fabric
    from lightning_fabric.plugins import CheckpointIO, ClusterEnvironment, TorchCheckpointIO
    from lightning_fabric.plugins.collectives.torch_collective import default_pg_timeout
    from lightning_fabric.plugins.environments import LightningEnvironment, SLURMEnvironment
    from lightning_fabric.plugins.precision import MixedPrecision as FabricMixedPrecision
    from lightning_fabric.plugins.precision import Precision as FabricPrecision
    from lightning_fabric.strategies import DDPStrategy as FabricDDPStrategy
    from lightning_fabric.strategies.launchers import _MultiProcessingLauncher as _FabricLauncher
    from lightning_fabric.utilities.distributed import _init_dist_connection
    from lightning_fabric.utilities.seed import reset_seed
    from pytorch_lightning.callbacks import Checkpoint
    from pytorch_lightning.loggers import Logger
    from pytorch_lightning.loggers.logger import DummyLogger
    from pytorch_lightning.plugins.precision import MixedPrecision, Precision
    from pytorch_lightning.strategies import DDPStrategy, SingleDeviceStrategy, Strategy, StrategyRegistry
    from pytorch_lightning.strategies.launchers import _MultiProcessingLauncher
    from pytorch_lightning.trainer import trainer as trainer_module
    from pytorch_lightning.trainer.states import RunningStage, TrainerFn
    from pytorch_lightning.utilities import CombinedLoader, GradClipAlgorithmType
    from pytorch_lightning.utilities.exceptions import SIGTERMException
    from pytorch_lightning.utilities.memory import garbage_collection_cuda, is_oom_error
    from pytorch_lightning.utilities.model_helpers import is_overridden
    from pytorch_lightning.utilities.rank_zero import rank_zero_info, rank_zero_warn
    from pytorch_lightning.utilities.seed import isolate_rng
