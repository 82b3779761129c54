"""Names that people try in place of a strategy's: registered, so that the error says which name is right.

Lightning's own error for a name that is not registered shows none of ours. Two registries are meant: the Trainer's,
where a name may be misspelt, and Fabric's, where one strategy is looked for in vain. Nothing of Lightning is
imported here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from lightning_bytescheduler.exceptions import OptionError, UnsupportedError

__all__ = ["refuse_in_fabric", "refuse_misspelt"]

_STARTS = ("", "_spawn", "_fork", "_notebook")
_FIND_UNUSED = ("_find_unused", "_find_unused_parameters", "_unused_parameters_true")
_MISSPELT = {
    "bytescheduler": (
        *("byte_scheduler", "byte-scheduler", "bytesheduler", "byteschedular", "bytescheduller", "byteps"),
        *("bytescheduler_ddp", "ddp_bytescheduler"),
    ),
    "diloco": ("di_loco", "di-loco", "diloko", "diloco_ddp", "ddp_diloco", "diloco_bytescheduler"),
}
_HINTS = {
    "diloco_ddp": "Where several processes form a worker, write DiLoCoStrategy(inner='ddp', inner_size=...).",
    "diloco_bytescheduler": "Where several processes form a worker, write DiLoCoStrategy(inner='bytescheduler', "
    "inner_size=...).",
}


class _Refused:
    """In a registry in a strategy's place.

    Args:
        error: Raised when the strategy is to be made.
    """

    def __init__(self, error: Exception) -> None:
        self._error = error

    def __call__(self, **_: object) -> Any:
        raise self._error


def _misspelt() -> Iterator[tuple[str, str, str]]:
    """Each name, the one that is meant, and what else to say."""
    for right, names in _MISSPELT.items():
        for name in names:
            yield name, right, _HINTS.get(name, "")
    for start in _STARTS:
        for ending in _FIND_UNUSED:
            yield f"bytescheduler{start}{ending}", f"bytescheduler{start}_find_unused_parameters_true", ""
        for ending in ("_find_unused_parameters_true", "_find_unused_parameters_false", *_FIND_UNUSED):
            hint = "A worker of one process has no use for find_unused_parameters."
            yield f"diloco{start}{ending}", f"diloco{start}", hint


def refuse_misspelt(registry: Any) -> None:
    """Register names that are nearly right with the Trainer's registry, as errors.

    Args:
        registry: Lightning's ``StrategyRegistry``.
    """
    for name, right, hint in _misspelt():
        if name not in registry:  # importing twice, as after a reload, must not raise
            says = f"There is no strategy {name!r}. Did you mean {right!r}? {hint}".rstrip()
            error = OptionError("strategy", name, f"{right!r}", hint, says)
            registry.register(name, _Refused(error), description=f"an error: the name is {right!r}")


def refuse_in_fabric(registry: Any, names: Iterable[str]) -> None:
    """Register strategies with Fabric's registry, as errors.

    Args:
        registry: Fabric's ``STRATEGY_REGISTRY``.
        names: Of this package's strategies.
    """
    for name in names:
        if name not in registry:
            error = UnsupportedError(
                f"strategy={name!r} is for Trainer, and not for Fabric: its rounds end between the Trainer's steps. "
                "Use Trainer, or Fabric(strategy='bytescheduler')."
            )
            registry.register(name, _Refused(error), description="an error: it is a strategy of the Trainer alone")
