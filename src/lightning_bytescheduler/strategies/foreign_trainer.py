"""A clear error for the separate ``pytorch_lightning`` package.

Its Trainer accepts only strategies derived from its own classes. Where it is already imported, the names are registered
there too, bound to an error that says what to import instead.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from lightning_bytescheduler.exceptions import UnsupportedError

__all__ = ["refuse_foreign_trainer"]

_MESSAGE = (
    "strategy={name!r} was given to pytorch_lightning's Trainer, but lightning-bytescheduler extends the 'lightning' "
    "package. Use `import lightning as L` (or `from lightning import pytorch as pl`) for Trainer, LightningModule and "
    "callbacks alike."
)


def refuse_foreign_trainer(names: Iterable[str]) -> None:
    """Register ``names`` with ``pytorch_lightning``, if it is imported, as an error with the way out."""
    foreign = sys.modules.get("pytorch_lightning.strategies")
    registry = getattr(foreign, "StrategyRegistry", None)
    if foreign is None or registry is None:
        return
    for name in names:
        if name in registry:
            continue

        class Refused(foreign.Strategy):  # type: ignore[name-defined, misc]
            _name = name

            def __new__(cls, **_: Any) -> Any:
                raise UnsupportedError(_MESSAGE.format(name=cls._name))

        registry.register(name, Refused, description="lightning-bytescheduler needs the 'lightning' package")
