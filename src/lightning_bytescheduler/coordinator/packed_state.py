"""Nested plain values with tensors among them, taken apart into JSON and tensors, and put together again.

What JSON has no word for is written as an object with one key that begins with ``$``: a tensor by its name, a dict
whose keys are no texts, a number that is not finite. No code is in such a file, and reading it runs none.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = ["Packed", "pack", "tensor_chunks", "unpack"]

_TENSOR, _PAIRS, _NUMBER = "$tensor", "$pairs", "$number"
_DEEPEST = 50
_CHUNK = 2**22
_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


class Packed(NamedTuple):
    """Values taken apart.

    Attributes:
        plain: What JSON can hold.
        tensors: The tensors, by the names that ``plain`` has for them: their keys, joined with dots.
    """

    plain: Any
    tensors: Mapping[str, Tensor]


def pack(value: Mapping[str, Any]) -> Packed:
    """Take values apart.

    Args:
        value: Dicts, lists, tuples, texts, numbers, None and tensors.

    Raises:
        ValueError: If there is something else in it; names where.
    """
    tensors: dict[str, Tensor] = {}
    return Packed(_packed(value, "", tensors, 0), tensors)


def _packed(value: Any, place: str, tensors: dict[str, Tensor], depth: int) -> Any:
    if depth > _DEEPEST:
        raise ValueError(f"the state is nested too deeply at {place!r}")
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {_NUMBER: repr(value)}
    if isinstance(value, Tensor):
        if value.dtype not in _NAMES:
            raise ValueError(f"the state has a tensor of {value.dtype} at {place!r}, which cannot be saved")
        name = place or "tensor"
        while name in tensors:  # keys with dots in them
            name += "'"
        tensors[name] = value
        return {_TENSOR: name}
    if isinstance(value, Mapping):
        inner = {
            key: _packed(item, f"{place}.{key}" if place else str(key), tensors, depth + 1)
            for key, item in value.items()
        }
        if all(isinstance(key, str) and not key.startswith("$") for key in inner):
            return inner
        return {_PAIRS: [[_packed(key, place, tensors, depth + 1), item] for key, item in inner.items()]}
    if isinstance(value, (list, tuple)):
        return [_packed(item, f"{place}.{index}", tensors, depth + 1) for index, item in enumerate(value)]
    raise ValueError(f"the state has a {type(value).__name__} at {place!r}, which cannot be saved")


def unpack(packed: Packed) -> dict[str, Any]:
    """Put values together again; tuples are lists then.

    Raises:
        ValueError: If they are not what :func:`pack` makes.
    """
    value = _unpacked(packed.plain, packed.tensors, 0)
    if not isinstance(value, dict):
        raise ValueError("the state is no object")
    return value


def _unpacked(value: Any, tensors: Mapping[str, Tensor], depth: int) -> Any:
    if depth > _DEEPEST:
        raise ValueError("the state is nested too deeply")
    if isinstance(value, list):
        return [_unpacked(item, tensors, depth + 1) for item in value]
    if not isinstance(value, dict):
        return value
    kind = next(iter(value), "")
    if not kind.startswith("$"):
        return {key: _unpacked(item, tensors, depth + 1) for key, item in value.items()}
    inner = value[kind]
    if kind == _TENSOR and isinstance(inner, str) and inner in tensors:
        return tensors[inner]
    if kind == _NUMBER and inner in ("nan", "inf", "-inf"):
        return float(inner)
    if kind == _PAIRS and isinstance(inner, list) and all(isinstance(pair, list) and len(pair) == 2 for pair in inner):
        pairs = [[_unpacked(part, tensors, depth + 1) for part in pair] for pair in inner]
        if all(isinstance(key, (str, int, float, bool, type(None))) for key, _ in pairs):
            return dict(pairs)
    raise ValueError(f"the state has an object {kind!r} that is not as it should be")


def tensor_chunks(tensors: Mapping[str, Tensor]) -> Iterator[bytes | memoryview]:
    """The content of a file of safetensors, a piece at a time: no second copy of all tensors is made.

    The format is that of https://github.com/huggingface/safetensors: the length of a header, the header, the data.
    """
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))  # each lies aligned
    header: dict[str, Any] = {}
    end = 0
    for name, tensor in ordered:
        start, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for _, tensor in ordered:
        flat = tensor.detach().cpu().contiguous().flatten()
        data: Any = flat.view(torch.uint8).numpy() if flat.numel() else b""
        view = memoryview(data)
        for start in range(0, len(view), _CHUNK):
            yield view[start : start + _CHUNK]
