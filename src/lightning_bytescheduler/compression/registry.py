"""Compressors by name, as options give them: ``"int8"``, ``"topk:0.01"``, ``"powersgd:2"``."""

from __future__ import annotations

from collections.abc import Callable

from lightning_bytescheduler.checks import did_you_mean, gone, require_bool, require_text
from lightning_bytescheduler.compression.compressor import Compressor
from lightning_bytescheduler.compression.dense import DENSE, Dense
from lightning_bytescheduler.compression.feedback import ErrorFeedback, FromSize, NesterovMomentum
from lightning_bytescheduler.compression.onebit import OneBit
from lightning_bytescheduler.compression.powersgd import PowerSGD
from lightning_bytescheduler.compression.sparse import TopK
from lightning_bytescheduler.exceptions import OptionError

__all__ = ["COMPRESSORS", "MIN_SIZE", "make_compressor"]

MIN_SIZE = 1024
"""Elements of the smallest part that is compressed by default: 4 kB, which take as long to send as fewer do."""

_Parser = Callable[[str], object]
_KINDS: dict[str, tuple[Callable[..., Compressor], tuple[_Parser, ...], int]] = {
    # what makes it, how its parameters are read, how many there must be
    **{kind: (lambda *rest, kind=kind: Dense(kind, *rest), (str,) * kind.startswith("int"), 0) for kind in DENSE[1:]},
    "onebit": (OneBit, (), 0),
    "topk": (TopK, (float, str), 1),
    "powersgd": (PowerSGD, (int,), 0),
}
COMPRESSORS = tuple(_KINDS)
"""Names of all compressors."""

_FORMS = "one of 'bf16', 'fp16', 'int8', 'int4', 'onebit', 'topk:DENSITY', 'powersgd:RANK'"


def make_compressor(
    spec: str,
    *,
    error_feedback: bool = True,
    momentum: float | None = None,
    min_size: int = MIN_SIZE,
    option: str = "compression",
) -> Compressor:
    """The compressor that an option asks for.

    Args:
        spec: A name and its parameters, with colons between them: ``"bf16"``, ``"fp16"``, ``"int8"`` and ``"int4"``
            (``:nearest`` rounds to nearest), ``"onebit"``, ``"topk:DENSITY"`` (``:bf16``, ``:int8`` or ``:int4`` for
            what is kept), ``"powersgd:RANK"``.
        error_feedback: Whether what is not sent is sent later.
        momentum: Of Nesterov, taken before compression; ``None`` for none.
        min_size: Elements of the smallest part that is compressed.
        option: What an error calls the option.

    Raises:
        OptionError: Names the option, and what is allowed.
    """
    name, *given = require_text(option, spec).split(":")
    if name not in _KINDS:
        raise OptionError(option, spec, _FORMS, gone("compression", name) or did_you_mean(name, COMPRESSORS))
    make, parsers, least = _KINDS[name]
    if not least <= len(given) <= len(parsers):
        count = f"{least} to {len(parsers)}" if least != len(parsers) else str(least)
        raise OptionError(option, spec, _FORMS, f"{name!r} has {count} parameters after a colon each.")
    try:
        made = make(*(parse(text) for parse, text in zip(parsers, given, strict=False)))
    except OptionError as error:
        raise OptionError(option, spec, _FORMS, str(error)) from error
    except ValueError as error:
        raise OptionError(option, spec, _FORMS, "A parameter is no number.") from error
    if require_bool("error_feedback", error_feedback):
        made = ErrorFeedback(made)
    if momentum is not None:
        made = NesterovMomentum(made, momentum)
    return FromSize(made, min_size) if min_size else made
