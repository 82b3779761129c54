"""Lightning's launchers for processes that the main process starts and joins (spawn, fork), with failures published.

There Lightning calls ``on_exception`` and tears down in the main process, when the workers are gone. The other ranks
have to hear of a failure from the worker it happens in, before it dies.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher

if TYPE_CHECKING:
    from lightning_bytescheduler.strategies.rank_strategy import RankStrategy

__all__ = ["PublishingLauncher"]


class PublishingLauncher(_MultiProcessingLauncher):
    """See Lightning's launcher.

    Args:
        strategy: Told about failures in each worker; pickled into it with the Trainer.
        start_method: See Lightning's launcher.
    """

    _strategy: RankStrategy

    def _wrapping_function(
        self, process_idx: int, trainer: Any, function: Callable[..., Any], *arguments: Any, **keywords: Any
    ) -> None:
        try:
            super()._wrapping_function(process_idx, trainer, function, *arguments, **keywords)
        except BaseException as error:
            self._strategy.publish_failure(error)
            raise
