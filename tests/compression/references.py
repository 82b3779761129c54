"""Every compressor once more, in plain NumPy: the decoded part, for the same random numbers."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

_FLOAT = np.float32


def blockwise(levels: int, size: int, stochastic: bool) -> Callable:
    def sent(values: np.ndarray, seed: int) -> np.ndarray:
        found = np.zeros_like(values)
        raw = np.random.PCG64DXSM(seed).random_raw(-(-len(values) // 4))
        noise = (raw.view(np.int16)[: len(values)] | np.int16(1)).astype(_FLOAT) * _FLOAT(2.0**-16)
        for first in range(0, len(values), size):
            block = values[first : first + size]
            scale = _FLOAT(np.abs(block).max() / _FLOAT(levels))
            if scale == 0:
                continue
            # In double precision: what rounding to fp32 makes of the last digit decides one in millions.
            wanted = (block / scale).astype(np.float64)
            if stochastic:
                wanted += noise[first : first + size]
            found[first : first + size] = np.clip(np.rint(wanted), -levels, levels).astype(_FLOAT) * scale
        return found

    return sent


def bf16(values: np.ndarray, seed: int) -> np.ndarray:
    bits = values.view(np.uint32).astype(np.uint64)
    bits += 0x7FFF + ((bits >> 16) & 1)
    return (bits & 0xFFFF0000).astype(np.uint32).view(_FLOAT)


def fp16(values: np.ndarray, seed: int) -> np.ndarray:
    return values.astype(np.float16).astype(_FLOAT)


def onebit(values: np.ndarray, seed: int) -> np.ndarray:
    scale = _FLOAT(np.abs(values.astype(np.float64)).sum() / len(values))
    return np.where(values < 0, -scale, scale)


def topk(kept: int) -> Callable:
    def sent(values: np.ndarray, seed: int) -> np.ndarray:
        order = np.argsort(-np.abs(values), kind="stable")[:kept]
        found = np.zeros_like(values)
        found[order] = values[order]
        return found

    return sent
