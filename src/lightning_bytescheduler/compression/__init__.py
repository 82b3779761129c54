"""Codecs by name, and wire formats.

Pure: no Lightning, no process groups. Parts are flat tensors, on any device.
"""

from collections.abc import Callable

from lightning_bytescheduler.checks import did_you_mean, require_text
from lightning_bytescheduler.compression.compressor import Compressor
from lightning_bytescheduler.compression.dense import DENSE, Dense, OneBit
from lightning_bytescheduler.compression.powersgd import PowerSGD
from lightning_bytescheduler.compression.sparse import TopK
from lightning_bytescheduler.compression.wire_format import WireFormat
from lightning_bytescheduler.exceptions import OptionError

__all__ = ["COMPRESSORS", "Codec", "Compressor", "PowerSGD", "WireFormat", "make_codec", "make_compressor"]

Codec = Compressor | PowerSGD
"""Codec of parts of any size, or of whole matrices."""

_KINDS: dict[str, tuple[Callable[..., Codec], tuple[Callable[[str], object], ...], int]] = {
    # constructor, parsers of its parameters, least number of parameters
    **{kind: (lambda *rest, kind=kind: Dense(kind, *rest), (str,) * kind.startswith("int"), 0) for kind in DENSE[1:]},
    "onebit": (OneBit, (), 0),
    "topk": (TopK, (float, str), 1),
    "powersgd": (PowerSGD, (int,), 0),
}
COMPRESSORS = tuple(_KINDS)
"""Names of all codecs."""

_FORMS = "one of 'bf16', 'fp16', 'int8', 'int4', 'onebit', 'topk:DENSITY', 'powersgd:RANK'"


def make_codec(spec: str, *, option: str = "compression") -> Codec:
    """Return the codec for an option's value.

    Args:
        spec: A name and its parameters, separated by colons: ``"bf16"``, ``"fp16"``, ``"int8"`` and ``"int4"``
            (``:nearest`` rounds to nearest), ``"onebit"``, ``"topk:DENSITY"`` (``:bf16``, ``:int8`` or ``:int4`` for
            the kept values), ``"powersgd:RANK"``.
        option: Name of the option in errors.

    Raises:
        OptionError: Names the option, and what is allowed.
    """
    name, *given = require_text(option, spec).split(":")
    if name not in _KINDS:
        raise OptionError(option, spec, _FORMS, did_you_mean(name, COMPRESSORS))
    make, parsers, least = _KINDS[name]
    if not least <= len(given) <= len(parsers):
        count = f"{least} to {len(parsers)}" if least != len(parsers) else str(least)
        raise OptionError(option, spec, _FORMS, f"{name!r} takes {count} parameters, each after a colon.")
    try:
        return make(*(parse(text) for parse, text in zip(parsers, given, strict=False)))
    except OptionError as error:
        raise OptionError(option, spec, _FORMS, str(error)) from error
    except ValueError as error:
        raise OptionError(option, spec, _FORMS, "A parameter is no number.") from error


def make_compressor(spec: str) -> Compressor:
    """Return a codec of parts by its name; see ``make_codec``.

    Raises:
        OptionError: Also for ``"powersgd"``, which needs whole matrices of all ranks.
    """
    codec = make_codec(spec)
    if isinstance(codec, PowerSGD):
        hint = "'powersgd' takes whole matrices, of all ranks at once: ByteSchedulerStrategy(compression='powersgd')."
        raise OptionError("compression", spec, "a compressor of parts of any size", hint)
    return codec
