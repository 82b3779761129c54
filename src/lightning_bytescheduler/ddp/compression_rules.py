"""Chooses a codec for each parameter from the user's options."""

from __future__ import annotations

import fnmatch
import platform
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lightning_bytescheduler.checks import did_you_mean, require_whole
from lightning_bytescheduler.compression import COMPRESSORS, Codec, Compressor, PowerSGD, make_codec
from lightning_bytescheduler.compression.dense import Dense, DenseKind
from lightning_bytescheduler.exceptions import OptionError, UnsupportedError

__all__ = ["CompressionRules", "names_that_count"]

MIN_SIZE = 1024
"""Elements of the smallest gradient that is compressed by default: below 4 kB latency dominates."""

_TO_NEAREST: dict[str, DenseKind] = {"int8": "int8", "int4": "int4"}


@dataclass(frozen=True, kw_only=True, slots=True)
class CompressionRules:
    """Which parameters' gradients travel encoded, and in which codec.

    Attributes:
        by_pattern: Pairs of a pattern of parameter names (:mod:`fnmatch`) and a codec. The first match counts, except
            that PowerSGD is skipped where it does not apply. ``None``, or no match, means uncompressed.
    """

    by_pattern: tuple[tuple[str, Codec | None], ...]
    min_size: int = MIN_SIZE

    @classmethod
    def resolve(cls, compression: Any, min_size: int | None = None) -> CompressionRules | None:
        """Make rules from options.

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
        if len({isinstance(codec, PowerSGD) for _, codec in pairs if codec is not None}) > 1:
            raise OptionError(
                "compression",
                compression,
                "a dict of 'powersgd' and None, or of other compressors and None",
                "What is no matrix, or for None, travels as it is, beside the factors of matrices.",
            )
        return cls(by_pattern=tuple(pairs), min_size=MIN_SIZE if min_size is None else min_size)

    def check_training(self, device: torch.device, *, automatic: bool) -> None:
        """Check that gradients on ``device`` can be compressed, and that each belongs to a step.

        Args:
            device: Where they are.
            automatic: Whether Lightning takes the steps. In a loop of the user's own a gradient may be dropped, as with
                two losses and optimizers, and what was left of it would be sent with another loss's.

        Raises:
            UnsupportedError: If they cannot.
        """
        if not automatic:
            raise UnsupportedError(
                f"compression={self.spec!r} needs automatic optimization: what is left of a gradient is sent with the "
                "next one, which manual optimization may take from another loss. Leave compression out, or set "
                "automatic_optimization=True."
            )
        if device.type not in ("cpu", "cuda"):
            raise UnsupportedError(
                f"compression={self.spec!r} is for gradients on a CPU or a CUDA GPU, and these are on {device.type}. "
                "Leave compression out: partitions, priorities and overlap are the same without."
            )

    def check_patterns(self, names: Mapping[str, str]) -> None:
        """Check that each pattern matters for a model.

        Args:
            names: All names of parameters, trained or not, each with the name that counts; tied parameters have
                several.

        Raises:
            OptionError: If a pattern matches no name, or an earlier one takes all its matches. A last pattern for the
                rest, such as ``"*"``, may match nothing.
        """
        counting = set(names.values())
        fits = {
            pattern: {name for name in counting if fnmatch.fnmatchcase(name, pattern)} for pattern, _ in self.by_pattern
        }
        for at, (pattern, codec) in enumerate(self.by_pattern):
            option, own = f"compression[{pattern!r}]", fits[pattern]
            if not own:
                tied = next((name for name in names if fnmatch.fnmatchcase(name, pattern)), None)
                if tied is not None:
                    way_out = f"{tied!r} is tied to {names[tied]!r}, and goes by that name."
                else:
                    way_out = did_you_mean(pattern, {*counting, *(f"{module}.*" for module in _modules(counting))})
                way_out = way_out or "Leave it out, or see model.named_parameters() for the names there are."
                raise OptionError(option, _name(codec), "for a parameter of the model: it fits no name", way_out)
            for earlier, first in self.by_pattern[:at]:
                takes_all = own < fits[earlier] or (own == fits[earlier] and fnmatch.fnmatchcase(pattern, earlier))
                if takes_all and first is not codec and not isinstance(first, PowerSGD):
                    raise OptionError(
                        option,
                        _name(codec),
                        f"before {earlier!r} in the dict: the first pattern that fits counts, and {earlier!r} fits all "
                        f"that {pattern!r} does",
                        f"Put {pattern!r} first.",
                    )

    def codec_for(self, name: str, parameter: nn.Parameter) -> Codec | None:
        """Return the codec of a parameter's gradient; ``None`` for uncompressed."""
        with torch._C.DisableTorchFunctionSubclass():
            size, dtype = parameter.numel(), parameter.dtype
        if size < max(self.min_size, 1) or not dtype.is_floating_point:
            return None
        for pattern, codec in self.by_pattern:
            if fnmatch.fnmatchcase(name, pattern):
                if isinstance(codec, PowerSGD):
                    if codec.shape_of(parameter):
                        return codec
                    continue  # PowerSGD saves nothing here: the next patterns decide
                fewer = codec is not None and codec.payload_bytes(size) < size * dtype.itemsize
                return codec if fewer else None
        return None

    def ratio(self, parameters: Mapping[str, nn.Parameter]) -> float:
        """Return how many times fewer bytes travel for all gradients."""
        plain = sent = 0
        for name, parameter in parameters.items():
            with torch._C.DisableTorchFunctionSubclass():
                size, nbytes = parameter.numel(), parameter.numel() * parameter.element_size()
            codec = self.codec_for(name, parameter)
            plain += nbytes
            if isinstance(codec, PowerSGD):
                sent += codec.payload_bytes(codec.shape_of(parameter) or (size, 1))
            else:
                sent += nbytes if codec is None else codec.payload_bytes(size)
        return plain / sent if sent else 1.0

    @property
    def whole_matrices(self) -> bool:
        """Whether some gradients travel as factors of a whole matrix, which excludes shards."""
        return any(isinstance(codec, PowerSGD) for _, codec in self.by_pattern)

    def facts(self, device: torch.device) -> dict[str, object]:
        """Return the facts that have to be the same on all ranks, by name.

        With PowerSGD each rank multiplies matrices itself, and the last bits of a product depend on these facts. Where
        they differ, weights would drift apart silently.
        """
        facts: dict[str, object] = {"compression": self.spec}
        if self.whole_matrices:
            facts["torch"] = torch.__version__
            with suppress(RuntimeError):  # raised where torch's newer options are in use
                facts["torch.get_float32_matmul_precision()"] = torch.get_float32_matmul_precision()
            if device.type == "cuda":
                facts["the GPU"] = torch.cuda.get_device_name(device)
            else:
                facts["the processor"] = f"{_processor()}, {torch.backends.cpu.get_cpu_capability()}"
                facts["torch.get_num_threads()"] = torch.get_num_threads()
        return facts

    @property
    def spec(self) -> str:
        """The codecs in words, for messages."""
        if len(self.by_pattern) == 1 and self.by_pattern[0][0] == "*":
            said = _name(self.by_pattern[0][1])
        else:
            said = ", ".join(f"{pattern}: {_name(codec)}" for pattern, codec in self.by_pattern)
        return f"{said} (min_size {self.min_size})"


def names_that_count(module: nn.Module) -> dict[str, str]:
    """Map each name of a parameter to the first name of the same parameter."""
    first: dict[int, str] = {}
    return {name: first.setdefault(id(p), name) for name, p in module.named_parameters(remove_duplicate=False)}


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    said = (line.partition(":")[2].strip() for line in lines if line.startswith(("model name", "CPU part")))
    return next(said, platform.machine())


def _modules(names: Collection[str]) -> set[str]:
    """Return the names of all modules that contain these parameters."""
    parts = (name.split(".") for name in names)
    return {".".join(path[:depth]) for path in parts for depth in range(1, len(path))}


def _name(codec: Codec | None) -> str:
    return "none" if codec is None else codec.spec


def _codec(option: str, value: Any) -> Codec | None:
    if value is None or value == "none":
        return None
    if isinstance(value, (Compressor, PowerSGD)):
        return value
    if not isinstance(value, str):
        raise OptionError(option, value, "None, the name of a compressor such as 'int8', or a Compressor")
    if value in _TO_NEAREST:  # with residuals, rounding to nearest leaves out less than random rounding
        return Dense(_TO_NEAREST[value], "nearest")
    if (kind := value.split(":")[0]) not in COMPRESSORS:
        names = ", ".join(map(repr, COMPRESSORS))
        raise OptionError(option, value, f"one of {names}", did_you_mean(kind, COMPRESSORS))
    return make_codec(value, option=option)
