"""A tracker's state as plain values and tensors, and back, checked.

How slices are handed out: the tracker's options.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from lightning_bytescheduler.exceptions import OptionError, TrackerStateError
from lightning_bytescheduler.slices.catalogue import CatalogueFingerprint, SliceCatalogue
from lightning_bytescheduler.slices.epoch_slices import EpochSlices
from lightning_bytescheduler.slices.slice import SliceState

__all__ = ["DELIVERIES", "SavedEpoch", "TrackerOptions", "pack", "unpack"]

DELIVERIES = ("at_least_once", "at_most_once")
"""What a worker's death may cost: samples trained twice, or samples left out."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrackerOptions:
    """How slices are handed out; validated when made.

    Attributes:
        seed: Of the order of slices, from 0 to 2**64 - 1.
        shuffle: False hands slices out in the catalogue's order.
        delivery: ``"at_least_once"``: what a dead worker had begun comes back, from the last sample it is known to have
            trained on, so what it trained on after its last report is trained on twice. ``"at_most_once"``: that rest
            is dropped from the epoch and counted. Without deaths both train each sample exactly once.
        lease: Seconds without a message after which a worker is taken for dead.
        prefetch: Slices a worker may hold that it has not begun.

    Raises:
        OptionError: If a value is not allowed.
    """

    seed: int = 0
    shuffle: bool = True
    delivery: str = "at_least_once"
    lease: float = 300.0
    prefetch: int = 2

    def __post_init__(self) -> None:
        if isinstance(self.seed, bool) or not isinstance(self.seed, int) or not 0 <= self.seed < 2**64:
            raise OptionError("seed", self.seed, "a whole number from 0 to 2**64 - 1")
        if not isinstance(self.shuffle, bool):
            raise OptionError("shuffle", self.shuffle, "True or False")
        if self.delivery not in DELIVERIES:
            raise OptionError("delivery", self.delivery, f"one of {', '.join(map(repr, DELIVERIES))}")
        number = isinstance(self.lease, (int, float)) and not isinstance(self.lease, bool)
        if not number or not math.isfinite(self.lease) or self.lease <= 0:
            raise OptionError("lease", self.lease, "a finite number of seconds, more than 0")
        require_prefetch(self.prefetch)


def require_prefetch(value: object) -> int:
    """Return ``value`` if it is a number of slices to hold ahead.

    Raises:
        OptionError: If it is not a whole number, 1 or more.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise OptionError("prefetch", value, "a whole number of slices, 1 or more")
    return value


_VERSION = 1
_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedEpoch:
    """An epoch as it is saved.

    Attributes:
        epoch: Which.
        states: A :class:`SliceState` for each slice.
        positions: In samples, for each slice.
        quarantined: Reason by slice.
        cursor: Place in the epoch's order up to which slices were looked at.
        places: Places of slices that came back.
        workers: By name, what each holds, in order: the slice, and whether it was begun.
        returned: Count for the report.
        stolen: Count for the report.
    """

    epoch: int
    states: npt.NDArray[np.uint8]
    positions: npt.NDArray[np.int64]
    quarantined: dict[int, str]
    cursor: int
    places: list[int]
    workers: dict[str, list[tuple[int, bool]]]
    returned: int
    stolen: int

    @classmethod
    def of(
        cls, slices: EpochSlices, workers: dict[str, list[tuple[int, bool]]], *, returned: int, stolen: int
    ) -> SavedEpoch:
        """Copy of where an epoch stands."""
        return cls(
            epoch=slices.epoch,
            states=slices.states.copy(),
            positions=slices.positions,
            quarantined=dict(slices.quarantined),
            cursor=slices.cursor,
            places=list(slices.returned),
            workers=workers,
            returned=returned,
            stolen=stolen,
        )


def pack(
    saved: SavedEpoch, catalogue: SliceCatalogue, options: TrackerOptions, numbers: Mapping[str, int]
) -> dict[str, Any]:
    """State of an epoch: a byte a slice, and 16 for each whose position its state does not tell."""
    (partial,) = np.nonzero(saved.positions != _usual_positions(saved.states, catalogue))
    fingerprint = catalogue.fingerprint
    return {
        "version": _VERSION,
        "catalogue": {
            "slices": fingerprint.slices,
            "samples": fingerprint.samples,
            "blocks": list(fingerprint.blocks),
        },
        "seed": options.seed,
        "shuffle": options.shuffle,
        "epoch": saved.epoch,
        "states": torch.from_numpy(saved.states),
        "partial": torch.from_numpy(partial.astype(np.int64)),
        "partial_positions": torch.from_numpy(saved.positions[partial]),
        "quarantined": dict(saved.quarantined),
        "cursor": saved.cursor,
        "places": list(saved.places),
        "workers": {name: [list(pair) for pair in held] for name, held in saved.workers.items()},
        "returned": saved.returned,
        "stolen": saved.stolen,
        **numbers,
    }


def unpack(
    state: Mapping[str, Any], catalogue: SliceCatalogue, options: TrackerOptions
) -> tuple[SavedEpoch, dict[str, int]]:
    """The epoch that was saved, and the numbers beside it.

    Raises:
        TrackerStateError: If the state does not belong to these slices and this order, or is damaged.
    """
    if _get(state, "version", int) != _VERSION:
        raise TrackerStateError(
            f"The state is of version {state['version']}, and this release reads version {_VERSION}: "
            "resume with the release that saved it."
        )
    _compare_data(_get(state, "catalogue", dict), catalogue)
    for option in ("seed", "shuffle"):
        if state.get(option) != getattr(options, option):
            raise TrackerStateError(
                f"The state was saved with {option}={state.get(option)!r}, and {option} is "
                f"{getattr(options, option)!r} now: resume with the value it was saved with."
            )
    slices = len(catalogue)
    states = _column(state, "states", torch.uint8)
    partial = _column(state, "partial", torch.int64)
    partial_positions = _column(state, "partial_positions", torch.int64)
    if len(states) != slices or int(states.max()) > max(SliceState):
        raise _damaged("states", "has another length, or holds a value that is no state")
    if len(partial) != len(partial_positions) or not _are_indices(partial, slices):
        raise _damaged("partial", "names slices that are not there, or has another length than their positions")
    if ((partial_positions < 0) | (partial_positions > catalogue.samples[partial])).any():
        raise _damaged("partial_positions", "is outside its slice")
    positions = _usual_positions(states, catalogue)
    positions[partial] = partial_positions
    workers = _workers(_get(state, "workers", dict))
    held = np.array([index for pairs in workers.values() for index, _ in pairs], dtype=np.int64)
    if not np.array_equal(np.sort(held), np.nonzero(states == SliceState.ASSIGNED)[0]):
        raise _damaged("workers", "does not hold each assigned slice once")
    quarantined = _get(state, "quarantined", dict)
    places = _get(state, "places", list)
    cursor = _natural(state, "cursor")
    if not all(_is_index(index, slices) and isinstance(reason, str) for index, reason in quarantined.items()):
        raise _damaged("quarantined", "names slices that are not there, or has no reason for one")
    if not all(_is_index(place, slices) for place in places) or cursor > slices:
        raise _damaged("places", "or cursor is outside the order")
    saved = SavedEpoch(
        epoch=_natural(state, "epoch"),
        states=states,
        positions=positions,
        quarantined=quarantined,
        cursor=cursor,
        places=places,
        workers=workers,
        returned=_natural(state, "returned"),
        stolen=_natural(state, "stolen"),
    )
    return saved, {name: _natural(state, name) for name in ("next_grant", "next_session")}


def _usual_positions(states: npt.NDArray[np.uint8], catalogue: SliceCatalogue) -> npt.NDArray[np.int64]:
    return np.where(states == SliceState.USED, catalogue.samples, 0)


def _compare_data(data: dict[str, Any], catalogue: SliceCatalogue) -> None:
    blocks = _get(data, "blocks", list)
    saved = CatalogueFingerprint(
        slices=_natural(data, "slices"), samples=_natural(data, "samples"), blocks=tuple(blocks)
    )
    here = catalogue.fingerprint
    if saved.slices == here.slices and len(saved.blocks) != len(here.blocks):
        raise _damaged("blocks", "has another length")
    difference = here.difference(saved)
    if difference is not None:
        raise TrackerStateError(
            f"The state is of other slices: {difference}. Resume on the slices it was saved with, or start anew."
        )


def _workers(workers: dict[Any, Any]) -> dict[str, list[tuple[int, bool]]]:
    checked: dict[str, list[tuple[int, bool]]] = {}
    for name, held in workers.items():
        if not isinstance(name, str) or not name or not isinstance(held, list):
            raise _damaged("workers", "is not a list for each name")
        for pair in held:
            if len(pair) != 2 or not _is_index(pair[0], 2**31) or not isinstance(pair[1], bool):
                raise _damaged("workers", "is not a slice, and whether it was begun, for each one held")
        checked[name] = [(index, begun) for index, begun in held]
    return checked


def _get(state: Mapping[str, Any], name: str, kind: type[_T]) -> _T:
    value = state.get(name) if isinstance(state, Mapping) else None
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise _damaged(name, f"is not there, or not a {kind.__name__}")
    return value


def _natural(state: Mapping[str, Any], name: str) -> int:
    value = _get(state, name, int)
    if value < 0:
        raise _damaged(name, "is less than 0")
    return value


def _column(state: Mapping[str, Any], name: str, dtype: torch.dtype) -> npt.NDArray[Any]:
    value = _get(state, name, torch.Tensor)
    if value.dtype != dtype or value.dim() != 1:
        raise _damaged(name, f"is not a column of {dtype}")
    column: npt.NDArray[Any] = value.cpu().numpy()
    return column


def _are_indices(values: npt.NDArray[np.int64], stop: int) -> bool:
    return not len(values) or (int(values.min()) >= 0 and int(values.max()) < stop)


def _is_index(value: object, stop: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < stop


def _damaged(name: str, how: str) -> TrackerStateError:
    return TrackerStateError(f"The state is damaged: its {name!r} {how}.")
