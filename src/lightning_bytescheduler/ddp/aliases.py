"""Detects aliases of a parameter's memory or of an optimizer's state, through which code could read it unseen.

A touch gate sits on the Python object of a parameter. An alias of its memory (``.data``, ``state_dict()``,
``.numpy()``) can be read without a touch and would show weights before their deferred update. Every tensor over a
storage holds a reference to it, and PyTorch counts these references. A count higher than the parameter itself needs
means that there is an alias. Memory that PyTorch did not allocate (NumPy arrays, mapped files, shared memory) has other
readers, so it counts as aliased. ``untyped_storage()`` returns one Python object per storage, whose references Python
counts.

C++ code may hold the tensor itself, as a traced function does with a weight that it closes over. PyTorch counts
references to tensors, too. DDP holds each parameter several times, so only a parameter that is held more often than
most is reported.

``optimizer.state_dict()`` returns the dictionaries and tensors that the optimizer works with. Code that keeps one of
them, or an alias of such a tensor, sees new moments right after each step under DDP. A deferred step would show there
late. The same counts reveal this.

Not detected: memory of which only the address is known (``data_ptr()``), and GPU memory that another process has
opened. A graph that is kept after its backward pass also holds references; that costs overlap and nothing else.
"""

from __future__ import annotations

import ctypes
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_bytescheduler.ddp.gates import can_be_gated
from lightning_bytescheduler.ddp.partial_step import attributes_of

_storage_of = torch.Tensor.untyped_storage
_tensor_use_count: Callable[[torch.Tensor], int] | None = getattr(torch.Tensor, "_use_count", None)


def _read_count(address: int) -> int:
    """Read the count with which every reference-counted PyTorch object begins, after its virtual method table."""
    return ctypes.c_uint32.from_address(address + ctypes.sizeof(ctypes.c_void_p)).value


# Before 2.9 only builds for CUDA have the function. Both ways are tested below before they are trusted.
_use_count: Callable[[int], int] = getattr(torch._C, "_storage_Use_Count", _read_count)


def references_to_memory(tensor: torch.Tensor) -> int:
    """Count the references to the memory of ``tensor``. Without an alias these are its own and this function's."""
    storage = _storage_of(tensor)  # keeps the Python object alive while it is counted, as in every other count
    return _use_count(storage._cdata)


def _words(storage: torch.UntypedStorage) -> list[int]:
    """Return the first words of a storage object: among them are the address of the memory and that of its owner."""
    size = ctypes.sizeof(ctypes.c_void_p)
    return [ctypes.c_size_t.from_address(storage._cdata + size * n).value for n in range(1, 6)]


def _places_of(address: int, words: list[int]) -> list[int]:
    return [place for place, word in enumerate(words) if word == address]


def _place_of_owner() -> int | None:
    """Find which word holds the owner's address; ``None`` if unknown. PyTorch's own host memory owns itself."""
    own, foreign = (
        torch.zeros(3, dtype=torch.float32).untyped_storage(),
        torch.frombuffer(bytearray(12), dtype=torch.uint8),
    )
    twice = _places_of(own.data_ptr(), _words(own))
    once = _places_of(foreign.untyped_storage().data_ptr(), _words(foreign.untyped_storage()))
    return twice[1] if len(twice) == 2 and once == twice[:1] else None


_OWNER = _place_of_owner()


def is_foreign(storage: torch.UntypedStorage) -> bool:
    """Whether other code may read the memory: a NumPy array, a mapped file or another process."""
    if storage.resizable() and not (storage.device.type == "cpu" and storage.is_shared()):
        return False
    # What torch.load() has read cannot be resized either, but belongs to this process alone.
    return _OWNER is None or storage.device.type != "cpu" or _words(storage)[_OWNER] != storage.data_ptr()


def held_beside(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether one of ``tensors`` has an alias. No two of them may share memory. Opens no gate."""
    alone, use_count, storage_of = _ALONE, _use_count, _storage_of
    if alone is None:
        return False
    with torch._C.DisableTorchFunctionSubclass():
        return any(
            use_count((storage := storage_of(t))._cdata) > alone or (t.is_cpu and storage.is_shared()) for t in tensors
        )


def kept_elsewhere(of: Sequence[tuple[nn.Parameter, torch.Tensor]]) -> list[tuple[nn.Parameter, torch.Tensor]]:
    """Return the gradients whose memory is held by more than the given gradients."""
    if _ALONE is None or not of:
        return []
    dense = [(p, g) for p, g in of if g.layout is torch.strided]
    sharing = Counter(_storage_of(g)._cdata for _, g in dense)
    return [(p, g) for p, g in dense if references_to_memory(g) > _ALONE - 1 + sharing[_storage_of(g)._cdata]]


class AliasDetector:
    """Finds the parameters that have an alias.

    Args:
        parameters: Parameters to watch; those that cannot be gated are skipped. They may share memory with each other.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._parameters = [p for p in parameters if can_be_gated(p) and p.layout is torch.strided and p.numel()]
        self._alone = _references_of_one_tensor()

    @property
    def works(self) -> bool:
        """Whether this version of PyTorch shows aliases at all. If not, none is ever found."""
        return self._alone is not None

    def find(self) -> set[int]:
        """Return the ids of parameters that have an alias. Opens no gate."""
        alone, use_count, storage_of = self._alone, _use_count, _storage_of
        held: list[nn.Parameter] = []
        found = self._held_in_cpp()
        with torch._C.DisableTorchFunctionSubclass():
            for p in self._parameters:
                storage = storage_of(p)
                if sys.getrefcount(storage) > _STORAGE_ALONE:
                    found.add(id(p))
                elif alone is not None and use_count(storage._cdata) > alone:
                    held.append(p)
                elif (not storage.resizable() or (p.is_cpu and storage.is_shared())) and is_foreign(storage):
                    found.add(id(p))
            if alone is not None and held:
                sharing = Counter(storage_of(p)._cdata for p in held)
                found.update(id(p) for p in held if references_to_memory(p) > alone - 1 + sharing[storage_of(p)._cdata])
                found.update(id(p) for p in held if is_foreign(storage_of(p)))
        return found

    def _held_in_cpp(self) -> set[int]:
        if _tensor_use_count is None or not self._parameters:
            return set()
        with torch._C.DisableTorchFunctionSubclass():
            counts = list(map(_tensor_use_count, self._parameters))
        if max(counts) == min(counts):
            return set()
        usual, _ = max(Counter(counts).items(), key=lambda of: (of[1], -of[0]))
        return {id(p) for p, count in zip(self._parameters, counts, strict=True) if count > usual}


def _references_of_one_tensor() -> int | None:
    """Return ``None`` unless each alias adds one reference and removes it when it goes."""
    tensor = torch.zeros(1, dtype=torch.float32)
    alone = references_to_memory(tensor)
    aliases: list[torch.Tensor] = []
    for number in range(1, 4):
        aliases.append(tensor.detach())
        if references_to_memory(tensor) != alone + number:
            return None
    aliases.clear()
    return alone if references_to_memory(tensor) == alone else None


_ALONE = _references_of_one_tensor()


def _references_of_one_storage() -> int:
    tensor = torch.zeros(1, dtype=torch.float32)
    storage = _storage_of(tensor)
    return sys.getrefcount(storage)


_STORAGE_ALONE = _references_of_one_storage()


def state_is_kept(optimizer: Optimizer) -> bool:
    """Whether other code holds the state of ``optimizer``, or a dictionary or tensor of it."""
    own = attributes_of(optimizer)
    if sys.getrefcount(own["state"]) > _ALONE_AS_ATTRIBUTE:
        return True
    if _most_references(own["state"].values()) > _ALONE_IN_MAPPING:
        return True
    tensors = _tensors(own["state"])
    return _most_references(tensors) > _ALONE_IN_LIST or held_beside(tensors)


def _most_references(values: Iterable[Any]) -> int:
    return max(map(sys.getrefcount, values), default=0)


def _tensors(state: Mapping[Any, Any]) -> list[torch.Tensor]:
    return [
        value
        for values in state.values()
        if isinstance(values, dict)
        for value in values.values()
        if type(value) is torch.Tensor and value.layout is torch.strided and value.numel()
    ]


class _Holder:
    def __init__(self) -> None:
        self.state: dict[int, dict[str, torch.Tensor]] = {0: {"": torch.zeros(1, dtype=torch.float32)}}


# Python versions differ in the references that counting itself holds, so these are measured.
_holder = vars(_Holder())
_ALONE_AS_ATTRIBUTE = sys.getrefcount(_holder["state"])
_ALONE_IN_MAPPING = _most_references(_holder["state"].values())
_ALONE_IN_LIST = _most_references(_tensors(_holder["state"]))


_scripts: list[tuple[weakref.ref[Any], list[int]]] = []  # with the ids of the modules' parameters


def note_script(script: object, module: nn.Module) -> None:
    """Record that ``script`` was made of ``module``: while it lives, it reads the module's parameters unseen."""
    if ids := [id(parameter) for parameter in module.parameters()]:
        _scripts.append((weakref.ref(script), ids))


def scripted_parameters() -> set[int]:
    """Return the ids of parameters that living scripted or traced modules read."""
    if not _scripts:
        return set()
    _scripts[:] = [(script, ids) for script, ids in _scripts if script() is not None]
    return {key for _, ids in _scripts for key in ids}
