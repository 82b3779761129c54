"""Finding parameters whose memory somebody else holds too.

A touch gate is on the Python object. Whoever made an alias of the memory earlier, with ``.data``, ``state_dict()`` or
``.numpy()``, reads it without a touch and would see weights before their deferred update. Every tensor over a memory
holds a reference to it, and PyTorch counts those: more than the parameter needs means that there is an alias, whoever
made it and whenever.

Code in C++ may also hold the very tensor: a module that ``torch.jit`` makes of a Python one, at any time, has the same
parameters. PyTorch counts references to tensors, too. How many there are when nobody but Python and DDP holds them is
taken from what was seen so far.

Not seen: an alias of which only the address is known (``data_ptr()``), and one held through ``untyped_storage()``.
A graph that is kept beyond its backward pass holds references too; that costs the overlap and nothing else.
"""

from __future__ import annotations

import ctypes
import sys
from collections import Counter
from collections.abc import Callable, Iterable

import torch
from torch import nn

from lightning_bytescheduler.gradients.gate import can_be_gated

__all__ = ["AliasDetector", "references_to_memory"]

_storage_of = torch.Tensor.untyped_storage
_tensor_use_count: Callable[[torch.Tensor], int] | None = getattr(torch.Tensor, "_use_count", None)


def _read_count(address: int) -> int:
    """The count is what every reference-counted object of PyTorch begins with, after its table of methods."""
    return ctypes.c_uint32.from_address(address + ctypes.sizeof(ctypes.c_void_p)).value


# Before 2.9 only builds for CUDA have the function. Whether either way works here is tried out before it is trusted.
_use_count: Callable[[int], int] = getattr(torch._C, "_storage_Use_Count", _read_count)


def references_to_memory(tensor: torch.Tensor) -> int:
    """How many references to the memory of ``tensor`` there are; alone, it has one or two, depending on PyTorch."""
    return _use_count(_storage_of(tensor)._cdata)


class AliasDetector:
    """Tells which parameters have an alias, whenever it is asked.

    Asking costs about 0.1 microseconds for each parameter.

    Args:
        parameters: What is asked about; what a gate cannot be put on is left out. Parameters may share a memory with
            each other without being aliases in this sense.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._parameters = [p for p in parameters if can_be_gated(p) and p.layout is torch.strided and p.numel()]
        self._alone = _references_of_one_tensor()
        self._holders = sys.maxsize  # of a tensor that nobody holds but Python, DDP and the graph's ends

    @property
    def works(self) -> bool:
        """Whether this version of PyTorch shows aliases at all; otherwise none is ever found."""
        return self._alone is not None

    def find(self) -> set[int]:
        """Ids of parameters whose memory somebody else holds. Opens no gate."""
        alone, use_count, storage_of = self._alone, _use_count, _storage_of
        if alone is None:
            return self._held_in_cpp()
        with torch._C.DisableTorchFunctionSubclass():
            held = [p for p in self._parameters if use_count(storage_of(p)._cdata) > alone]
            if not held:
                return self._held_in_cpp()
            sharing = Counter(storage_of(p)._cdata for p in held)
            aliased = {id(p) for p in held if use_count(key := storage_of(p)._cdata) > alone - 1 + sharing[key]}
            return aliased | self._held_in_cpp()

    def _held_in_cpp(self) -> set[int]:
        """Ids of parameters that more code holds in C++ than any parameter has to be held by."""
        if _tensor_use_count is None or not self._parameters:
            return set()
        with torch._C.DisableTorchFunctionSubclass():
            counts = list(map(_tensor_use_count, self._parameters))
        self._holders = min(self._holders, min(counts))
        if max(counts) == self._holders:
            return set()
        return {id(p) for p, count in zip(self._parameters, counts, strict=True) if count > self._holders}


def _references_of_one_tensor() -> int | None:
    """``None`` unless each alias adds one, and takes it away when it goes."""
    tensor = torch.zeros(1)
    alone = references_to_memory(tensor)
    aliases: list[torch.Tensor] = []
    for number in range(1, 4):
        aliases.append(tensor.detach())
        if references_to_memory(tensor) != alone + number:
            return None
    aliases.clear()
    return alone if references_to_memory(tensor) == alone else None
