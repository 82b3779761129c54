"""What of a model's gradients travels encoded, and in what: from what a user says to a codec for each parameter."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from lightning_bytescheduler.checks import require_one_of, require_whole
from lightning_bytescheduler.compression.wire_format import WIRE_DTYPES, WireFormat
from lightning_bytescheduler.exceptions import OptionError

__all__ = ["CompressionRules", "GradientCodec"]

_NAMES: tuple[Any, ...] = tuple(name for name in WIRE_DTYPES if name != "fp32")
_MIN_SIZE = 1024


class GradientCodec(Protocol):
    """Encodes flat tensors, to nearest: error feedback sees to what is left out."""

    @property
    def name(self) -> str:
        """As it is chosen and shown."""

    def payload_bytes(self, elements: int) -> int:
        """Size of the payload of so many elements."""

    def encode(self, values: Tensor, *, out: Tensor) -> None:
        """Fill ``out``, of uint8, with the payload of ``values``, in fp32; infinities and NaN decode to such."""

    def decode(self, payload: Tensor, elements: int) -> Tensor:
        """Read a payload: a new tensor in fp32."""


@dataclass(frozen=True, slots=True)
class _Blocks:
    """Numbers in 16, 8 or 4 bits; see :class:`WireFormat`."""

    wire: WireFormat

    @property
    def name(self) -> str:
        return self.wire.dtype

    def payload_bytes(self, elements: int) -> int:
        return self.wire.payload_bytes(elements)

    def encode(self, values: Tensor, *, out: Tensor) -> None:
        try:
            out.copy_(self.wire.encode(values))
        except ValueError:  # an overflow, which all ranks have to see
            out.fill_(255)  # NaN, as a scale and as a number

    def decode(self, payload: Tensor, elements: int) -> Tensor:
        try:
            return self.wire.decode(payload, elements)
        except ValueError:
            return torch.full((elements,), torch.nan)


@dataclass(frozen=True, kw_only=True, slots=True)
class CompressionRules:
    """Which parameters' gradients travel encoded, and in what.

    Attributes:
        by_pattern: Pairs of a pattern of parameter names, as of :mod:`fnmatch`, and a codec; the first that fits
            counts. ``None`` is for as they are, which is also what fits nothing.
        min_size: Elements below which a parameter's gradient travels as it is.
    """

    by_pattern: tuple[tuple[str, GradientCodec | None], ...]
    min_size: int = _MIN_SIZE

    @classmethod
    def resolve(cls, compression: Any, min_size: int | None = None) -> CompressionRules | None:
        """Make them of options.

        Args:
            compression: The name of a codec, or codecs by pattern; ``None`` for none.
            min_size: See the class.

        Raises:
            OptionError: Names the option, its value and what is allowed.
        """
        if min_size is not None:
            require_whole("compression_min_size", min_size, 0)
        if compression is None:
            if min_size is not None:
                raise OptionError("compression_min_size", min_size, "left out where nothing is compressed")
            return None
        if isinstance(compression, Mapping):
            if not compression or not all(isinstance(pattern, str) and pattern for pattern in compression):
                raise OptionError(
                    "compression", compression, "a codec, or a dict of patterns of parameter names and codecs"
                )
            pairs = [(pattern, _codec(f"compression[{pattern!r}]", value)) for pattern, value in compression.items()]
        else:
            pairs = [("*", _codec("compression", compression))]
        if all(codec is None for _, codec in pairs):
            return None
        return cls(by_pattern=tuple(pairs), min_size=_MIN_SIZE if min_size is None else min_size)

    def codec_for(self, name: str, parameter: nn.Parameter) -> GradientCodec | None:
        """What the gradient of a parameter travels in; ``None`` for as it is."""
        with torch._C.DisableTorchFunctionSubclass():
            size, dtype = parameter.numel(), parameter.dtype
        if size < max(self.min_size, 1) or not dtype.is_floating_point:
            return None
        for pattern, codec in self.by_pattern:
            if fnmatch.fnmatchcase(name, pattern):
                fewer = codec is not None and codec.payload_bytes(size) < size * dtype.itemsize
                return codec if fewer else None
        return None

    @property
    def spec(self) -> str:
        """What has to be the same on all ranks, in words."""
        if len(self.by_pattern) == 1 and self.by_pattern[0][0] == "*":
            said = _name(self.by_pattern[0][1])
        else:
            said = ", ".join(f"{pattern}: {_name(codec)}" for pattern, codec in self.by_pattern)
        return f"{said} (min_size {self.min_size})"


def _name(codec: GradientCodec | None) -> str:
    return "none" if codec is None else codec.name


def _codec(option: str, value: Any) -> GradientCodec | None:
    if value is None or value == "none":
        return None
    return _Blocks(WireFormat(dtype=require_one_of(option, value, _NAMES), rounding="nearest"))
