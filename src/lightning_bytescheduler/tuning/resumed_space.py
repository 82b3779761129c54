"""Where a search goes on that was begun in another run.

Sizes that nobody chose follow a probe of the link, which never gives the same figures twice. So does the space around
them, and a search that went on in the same space only would never go on. What was chosen by hand is kept to.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from lightning_bytescheduler.exceptions import OptionError
from lightning_bytescheduler.tuning.search_space import SearchSpace

__all__ = ["resumed_space"]


def resumed_space(state: dict[str, Any], space: SearchSpace, *, given: Collection[str]) -> SearchSpace:
    """The space of a search's state, where it may be used instead of this run's.

    Args:
        state: ``CreditTuning.state_dict()``.
        space: This run's.
        given: Of ``"credits"`` and ``"partitions"``, what was chosen by hand. Where it is not tuned, the state has to
            agree.

    Returns:
        ``space`` itself, where the state's is of another kind or cannot be read.
    """
    try:
        found = SearchSpace(**{name: tuple(bounds) for name, bounds in state["space"].items()})
    except (KeyError, TypeError, ValueError, AttributeError, OptionError):
        return space
    for name in ("credits", "partitions"):
        ours, theirs = getattr(space, name), getattr(found, name)
        if _is_tuned(ours) != _is_tuned(theirs) or (name in given and not _is_tuned(ours) and ours != theirs):
            return space
    return found


def _is_tuned(bounds: tuple[int, int]) -> bool:
    return bounds[0] < bounds[1]
