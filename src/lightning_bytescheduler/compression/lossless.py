"""The same bits in fewer bytes: the exponents of neighbouring numbers are alike.

A number's bytes are taken apart, and turned by one bit first, so that its exponent is a byte of its own (of fp32 and
bf16; of fp16, with three more bits). Exponents are then entropy-coded by Zstandard, and all else, which is as good as
random in a gradient, travels as it is. A gradient has some three bits of information in the eight of its exponent: fp32
shrinks by a seventh, bf16 by a third.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_bytescheduler.checks import importing, require_one_of, require_whole
from lightning_bytescheduler.compression.blocks import chunk_size, chunks_of
from lightning_bytescheduler.compression.compressor import Compressor
from lightning_bytescheduler.exceptions import OptionError

__all__ = ["CODECS", "Lossless"]

CODECS = ("zstd", "lz4")
"""Libraries that code the exponents: ``zstandard``, of the extra ``data``, and ``lz4``, which shrinks them less."""

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_WHOLE = {4: torch.int32, 2: torch.int16}
_HEADER = 2  # the number of the dtype, and whether the exponents are coded
_MOST_LEVEL = 22


class Lossless(Compressor):
    """Exact: what is read again has the bits of what was compressed, whatever they mean, in its dtype.

    On a CPU, where the library works; a part on another device is copied there and back.

    Args:
        codec: One of ``CODECS``.
        level: Of the codec, 1 to 22; higher ones take longer, and hardly gain anything.

    Raises:
        OptionError: Names the value that is not allowed.
        ImportError: If the library is missing; says what installs it.
    """

    exact = True

    def __init__(self, codec: str = "zstd", level: int = 1) -> None:
        self.codec = require_one_of("codec", codec, CODECS)
        if require_whole("level", level, 1) > _MOST_LEVEL:
            raise OptionError("level", level, f"{_MOST_LEVEL} at most")
        self.level = level
        self._library: Any
        with importing("compression='lossless'", extra="data" if codec == "zstd" else None):
            if codec == "zstd":
                import zstandard

                self._library = zstandard
            else:
                import lz4.block  # type: ignore[import-not-found, import-untyped, unused-ignore]

                self._library = lz4.block

    def __reduce__(self) -> tuple[type[Lossless], tuple[str, int]]:
        return type(self), (self.codec, self.level)  # a library is a module, which cannot be pickled

    @property
    def spec(self) -> str:
        """See Compressor."""
        if self.level != 1:
            return f"lossless:{self.codec}:{self.level}"
        return "lossless" if self.codec == "zstd" else f"lossless:{self.codec}"

    def payload_bytes(self, elements: int) -> int:
        """See Compressor; of fp32 that cannot be compressed."""
        return _HEADER + 4 * elements

    def compress(self, part: Tensor, *, seed: int = 0, worker: int = 0, key: str = "") -> Tensor:
        """See Compressor; a part in another dtype than fp32, bf16 and fp16 travels as fp32."""
        values = part.detach().reshape(-1)
        values = values if values.dtype in _DTYPES else values.float()
        size, kind = values.element_size(), _DTYPES.index(values.dtype)
        exponents, rest = _taken_apart(values.cpu().contiguous().view(_WHOLE[size]))
        coded = self._coded(exponents.numpy())
        is_coded = len(coded) < len(exponents)
        first = torch.frombuffer(bytearray(coded), dtype=torch.uint8) if is_coded else exponents
        header = torch.tensor([kind, is_coded], dtype=torch.uint8)
        return torch.cat([header, rest, first]).to(part.device)

    def decompress(self, payload: Tensor, elements: int, *, out: Tensor | None = None) -> Tensor:
        """See Compressor."""
        host = payload.detach().cpu().contiguous()
        kind, is_coded = (int(host[0]), bool(host[1])) if len(host) >= _HEADER else (len(_DTYPES), False)
        if host.dtype != torch.uint8 or kind >= len(_DTYPES):
            raise ValueError(f"The payload is not one of {self.spec!r}: its header is damaged.")
        dtype = _DTYPES[kind]
        size = dtype.itemsize
        end = _HEADER + (size - 1) * elements
        exponents = host[end:]
        if is_coded:
            exponents = torch.frombuffer(bytearray(self._decoded(exponents.numpy(), elements)), dtype=torch.uint8)
        if len(host) < end or len(exponents) != elements:
            raise ValueError(f"The payload is not that of {elements} elements in {self.spec}: {len(host)} bytes.")
        found = _put_together(exponents, host[_HEADER:end], _WHOLE[size]).view(dtype).to(payload.device)
        return found if out is None else out.copy_(found)

    def _coded(self, exponents: Any) -> bytes:
        if self.codec == "zstd":
            return bytes(self._library.ZstdCompressor(level=self.level).compress(exponents))
        return bytes(self._library.compress(exponents, store_size=False))

    def _decoded(self, coded: Any, size: int) -> bytes:
        try:
            if self.codec == "zstd":
                if self._library.frame_content_size(coded) != size:
                    raise ValueError("it says that it holds another number of elements")
                return bytes(self._library.ZstdDecompressor().decompress(coded, allow_extra_data=False))
            return bytes(self._library.decompress(coded.tobytes(), uncompressed_size=size))
        except Exception as error:  # each library has its own
            raise ValueError(f"The payload is damaged: {error}.") from error


def _taken_apart(whole: Tensor) -> tuple[Tensor, Tensor]:
    """The exponents of numbers that are given as whole ones, and their other bits: two bytes of each, then a third."""
    size = whole.element_size()
    exponents = torch.empty(len(whole), dtype=torch.uint8)
    rest = torch.empty((size - 1) * len(whole), dtype=torch.uint8)
    low = rest[: 2 * len(whole)].view(torch.int16) if size > 2 else rest
    for first, length in chunks_of(len(whole), chunk_size(whole.device)):
        part = slice(first, first + length)
        turned = whole[part] << 1
        turned.bitwise_or_((whole[part] >> (8 * size - 1)).bitwise_and_(1))
        exponents[part] = turned >> (8 * size - 8)  # its lowest byte
        if size == 2:
            rest[part] = turned
        else:
            low[part] = turned
            rest[2 * len(whole) :][part] = turned >> 16
    return exponents, rest


def _put_together(exponents: Tensor, rest: Tensor, dtype: torch.dtype) -> Tensor:
    """What :func:`_taken_apart` was given."""
    size = dtype.itemsize
    whole = torch.empty(len(exponents), dtype=dtype)
    rest = rest.clone() if rest.storage_offset() % 2 else rest
    low = rest[: 2 * len(whole)].view(torch.int16) if size > 2 else rest
    for first, length in chunks_of(len(whole), chunk_size(whole.device)):
        part = slice(first, first + length)
        turned = exponents[part].to(dtype) << (8 * size - 8)
        if size == 2:
            turned.bitwise_or_(rest[part].to(dtype))
        else:
            turned.bitwise_or_(low[part].to(dtype).bitwise_and_(0xFFFF))
            turned.bitwise_or_(rest[2 * len(whole) :][part].to(dtype) << 16)
        sign = turned << (8 * size - 1)
        whole[part] = (turned >> 1).bitwise_and_((1 << (8 * size - 1)) - 1).bitwise_or_(sign)
    return whole
