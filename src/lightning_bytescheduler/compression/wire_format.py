"""How pseudo-gradients travel: fp32, bf16, or 8 or 4 bits with a scale for each block of 128 elements.

A payload is a flat tensor of bytes: the fp32 scales of all blocks, then the elements. Machines are taken to be
little-endian. Whatever travels, sums are made in fp32 or better.

Bounds, for an element x of a block whose largest magnitude is m, with a step s of m/127 for int8 and m/7 for int4 that
is no smaller than the smallest normal number of fp32: decoded, it differs from x by s at most with stochastic rounding,
by s/2 with rounding to nearest, and by rounding of fp32 (2^-20 m); in bf16 by 2^-8 |x|.

Rounding of int8 and int4 is stochastic by default. To nearest, an element below s/2 is lost in every round, and a
weight that always moves a little never moves; stochastic rounding is right on average, over rounds and over workers. It
is a function of the seed: the same seed and tensor give the same bytes on the same kind of device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from lightning_bytescheduler.checks import require_one_of, require_whole

__all__ = ["ROUNDINGS", "WIRE_DTYPES", "Rounding", "WireDtype", "WireFormat"]

WireDtype = Literal["fp32", "bf16", "int8", "int4"]
Rounding = Literal["stochastic", "nearest"]
WIRE_DTYPES: tuple[WireDtype, ...] = get_args(WireDtype)
"""From exact to small."""
ROUNDINGS: tuple[Rounding, ...] = get_args(Rounding)
"""Ways to round to int8 and int4."""

_BLOCK = 128  # 4 bytes of scale: 3 % on top of int8, 6 % on top of int4
_SCALE_BYTES = 4
_LEVELS = {"int8": 127, "int4": 7}
_BITS = {"fp32": 32, "bf16": 16, "int8": 8, "int4": 4}


@dataclass(frozen=True, kw_only=True, slots=True)
class WireFormat:
    """Encodes and decodes tensors.

    Attributes:
        dtype: One of ``WIRE_DTYPES``.
        rounding: One of ``ROUNDINGS``; bf16 is always rounded to nearest.

    Raises:
        OptionError: Names the value that is not allowed.
    """

    dtype: WireDtype = "fp32"
    rounding: Rounding = "stochastic"

    def __post_init__(self) -> None:
        require_one_of("dtype", self.dtype, WIRE_DTYPES)
        require_one_of("rounding", self.rounding, ROUNDINGS)

    def payload_bytes(self, elements: int) -> int:
        """Size of the payload of a tensor with so many elements."""
        scales = -(-elements // _BLOCK) * _SCALE_BYTES if self.dtype in _LEVELS else 0
        return scales + -(-elements * _BITS[self.dtype] // 8)

    def encode(self, tensor: Tensor, *, seed: int = 0) -> Tensor:
        """Make a payload.

        Args:
            tensor: Floating-point numbers, all finite, of any shape.
            seed: For stochastic rounding. Choose another one for every round, worker and fragment.

        Returns:
            ``payload_bytes(tensor.numel())`` of uint8, on the tensor's device.

        Raises:
            OptionError: If the seed is not a whole number from 0 on.
            ValueError: If a number is not finite, or becomes infinite in bf16.
        """
        require_whole("seed", seed, 0)
        values = tensor.detach().reshape(-1).float()
        if self.dtype == "bf16":
            values = values.bfloat16()
        if not bool(torch.isfinite(values).all()):
            raise ValueError(f"The tensor cannot be sent as {self.dtype}: it holds infinities or NaN.")
        if self.dtype not in _LEVELS:
            return values.contiguous().view(torch.uint8).clone()
        scales, integers = self._quantised(values, seed)
        if self.dtype == "int4":
            pairs = (integers + 8).to(torch.uint8)
            if len(pairs) % 2:
                pairs = torch.cat([pairs, pairs.new_zeros(1)])
            elements = pairs[0::2] | (pairs[1::2] << 4)
        else:
            elements = integers.view(torch.uint8)
        return torch.cat([scales.view(torch.uint8), elements])

    def decode(self, payload: Tensor, elements: int) -> Tensor:
        """Read a payload.

        Args:
            payload: What ``encode`` made.
            elements: Of the tensor that was encoded.

        Returns:
            A flat tensor in fp32.

        Raises:
            ValueError: If the payload has another size than that of so many elements, or its scales are not finite.
        """
        if payload.dtype != torch.uint8 or payload.shape != (self.payload_bytes(elements),):
            raise ValueError(
                f"The payload is not that of {elements} elements in {self.dtype}: it is {payload.dtype} of shape "
                f"{tuple(payload.shape)}."
            )
        payload = payload.clone()  # views below need an aligned start
        if self.dtype not in _LEVELS:
            return payload.view(torch.float32 if self.dtype == "fp32" else torch.bfloat16).float()
        scale_bytes = -(-elements // _BLOCK) * _SCALE_BYTES
        scales = payload[:scale_bytes].clone().view(torch.float32)
        if not bool(torch.isfinite(scales).all()):
            raise ValueError("The payload is damaged: its scales hold infinities or NaN.")
        packed = payload[scale_bytes:]
        if self.dtype == "int4":
            integers = torch.stack([packed & 15, packed >> 4], dim=1).reshape(-1)[:elements].to(torch.int8) - 8
        else:
            integers = packed.view(torch.int8)
        return _in_blocks(integers.float()).mul_(scales[:, None]).reshape(-1)[:elements]

    def _quantised(self, values: Tensor, seed: int) -> tuple[Tensor, Tensor]:
        levels = _LEVELS[self.dtype]
        blocks = _in_blocks(values)
        scales = blocks.abs().amax(dim=1) / levels
        # A block of zeros, or of what is next to nothing, has scale 0 and decodes to zeros.
        scaled = blocks / torch.where(scales == 0, torch.inf, scales)[:, None]
        if self.rounding == "stochastic":
            generator = torch.Generator(device=values.device).manual_seed(seed)
            scaled = torch.floor(scaled + torch.rand(scaled.shape, generator=generator, device=values.device))
        else:
            scaled = torch.round(scaled)
        integers = scaled.clamp_(-levels, levels).to(torch.int8)
        return scales, integers.reshape(-1)[: values.numel()].contiguous()


def _in_blocks(values: Tensor) -> Tensor:
    """The same in rows of one block, with zeros at the end."""
    rows = -(-values.numel() // _BLOCK)
    padded = values.new_zeros(rows * _BLOCK)
    padded[: values.numel()] = values
    return padded.reshape(rows, _BLOCK)
