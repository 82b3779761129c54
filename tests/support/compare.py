"""Compares nested values to the last bit, and says where they differ."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

__all__ = ["bit_differences"]


def bit_differences(expected: Any, actual: Any, path: str = "") -> list[str]:
    """Differences, each with its path; tensors and numbers are compared by their bits, dictionaries in any order."""
    if type(expected) is not type(actual):
        return [f"{path}: {expected!r} became {actual!r}"]
    if isinstance(expected, Tensor):
        return _tensor_differences(expected, actual, path)
    if isinstance(expected, Mapping):
        if expected.keys() != actual.keys():
            return [f"{path}: keys {list(expected)} became {list(actual)}"]
        return [line for key in expected for line in bit_differences(expected[key], actual[key], f"{path}[{key!r}]")]
    if isinstance(expected, (list, tuple)):
        found, both = [], min(len(expected), len(actual))
        if len(expected) != len(actual):
            only = f"lacks {expected[both:]!r:.500}" if expected[both:] else f"has {actual[both:]!r:.500} besides"
            found = [f"{path}: {len(expected)} entries became {len(actual)}, which {only}"]
        for index, (one, other) in enumerate(zip(expected, actual, strict=False)):
            found += bit_differences(one, other, f"{path}[{index}]")
        return found
    if isinstance(expected, float):
        same = struct.pack("d", expected) == struct.pack("d", actual)
    else:
        same = expected == actual
    return [] if same else [f"{path}: {expected!r} became {actual!r}"]


def _tensor_differences(expected: Tensor, actual: Tensor, path: str) -> list[str]:
    if expected.layout != actual.layout:
        return [f"{path}: {expected.layout} became {actual.layout}"]
    if expected.is_sparse:  # a momentum of sparse gradients
        expected, actual = expected.to_dense(), actual.to_dense()
    if expected.dtype != actual.dtype or expected.shape != actual.shape:
        return [f"{path}: {expected.dtype} {tuple(expected.shape)} became {actual.dtype} {tuple(actual.shape)}"]
    if _bits(expected) != _bits(actual):
        return [f"{path}: differs by up to {(expected - actual).abs().max().item():g}"]
    return []


def _bits(tensor: Tensor) -> bytes:
    return bytes(tensor.detach().contiguous().flatten().view(torch.uint8).numpy())
