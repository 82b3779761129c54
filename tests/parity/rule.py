"""What each value of a factor does to the overlap, and how its training is compared with DDP's: the one rule.

Values that are not in these tables keep the overlap, and the weights are DDP's bit for bit.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import NamedTuple

from tests.parity.factors import Combination

__all__ = ["EFFECTS", "NEEDS_NORMS", "OTHER_ORDER", "Comparison", "Effect", "Mode", "comparison", "mode", "reasons"]


class Mode(enum.IntEnum):
    """How a step is taken; of several values the highest wins."""

    OVERLAPPED = 0  # its updates cross the step boundary
    PARTLY = 1  # those of some parameters do not
    READ = 2  # its gradients are waited for before the step
    SYNCHRONISED = 3  # decided at the start, for a reason that is told


class Effect(NamedTuple):
    """The effect of one value of a factor.

    Attributes:
        mode: Mode of a combination with this value, if no other value has a stronger effect.
        word: Occurs in the reason that the strategy gives, if the mode is synchronised.
        why: For the documentation's table.
        instead: What keeps the overlap, for the table.
    """

    mode: Mode
    word: str
    why: str
    instead: str


_OPTIMIZER = "it is not known to update each parameter on its own"
_MANUAL = Effect(Mode.SYNCHRONISED, "manual", "the step is yours", "automatic optimization with parameter groups")

EFFECTS: Mapping[tuple[str, str], Effect] = {
    ("optimizer", "LBFGS"): Effect(Mode.SYNCHRONISED, "LBFGS", _OPTIMIZER, "one of the above"),
    ("optimizer", "own-step"): Effect(Mode.SYNCHRONISED, "SignDescent", _OPTIMIZER, "one of the above"),
    ("optimizer", "own-part"): Effect(Mode.SYNCHRONISED, "SignedMomentum", _OPTIMIZER, "one of the above"),
    ("precision", "fp16-scaler"): Effect(
        Mode.SYNCHRONISED, "loss scaling", "the scaler looks at all gradients before a step", "`bf16-mixed`"
    ),
    ("model", "traced"): Effect(
        Mode.PARTLY, "", "its parameters are read unseen, so they are stepped at the step", "`torch.compile`"
    ),
    ("ddp", "no-bucket-views"): Effect(
        Mode.SYNCHRONISED,
        "gradient_as_bucket_view",
        "DDP copies gradients at the end of the backward pass",
        "the default, `True`",
    ),
    ("loop", "unfreezing"): Effect(
        Mode.PARTLY,
        "",
        "DDP does not reduce what was frozen when it wrapped the model; each rank steps that at the step, as with DDP",
        "[freeze them in `on_fit_start`](#layers-that-learn-later)",
    ),
    ("loop", "reads-gradients"): Effect(
        Mode.READ, "", "what is read has to be there", "read them every few steps only"
    ),
    ("loop", "second-pass"): Effect(
        Mode.READ, "", "it adds to the means, which have to be there", "add the penalty to the loss"
    ),
    ("loop", "other-memory"): Effect(
        Mode.READ, "", "what is changed has to be there", "`gradient_clip_val`, where that is meant"
    ),
    ("loop", "keeps-state"): Effect(
        Mode.READ, "", "what is kept shows each step at once", "ask for it when it is read; copy what is kept"
    ),
    ("loop", "step-hooks"): Effect(Mode.SYNCHRONISED, "step hooks", "hooks expect whole steps", "remove them"),
    ("loop", "manual"): _MANUAL,
    ("loop", "two-optimizers"): _MANUAL,
}

NEEDS_NORMS: frozenset[tuple[str, str]] = frozenset({("clipping", "norm"), ("clipping", "norm-unreached")})
"""Values with which no update may be taken before all gradients are known: parameter servers tell that at the end."""

_NO_NORMS = "parameter servers tell no norms"

OTHER_ORDER: frozenset[tuple[str, str]] = frozenset({("clipping", "norm")})
"""Values with which an overlapped step adds up some number in another order than DDP does."""


class Comparison(enum.Enum):
    """How a training is compared with DDP's."""

    BITS = "the same bits"
    ONE_STEP = "one step from an identical state is the same within rounding"


def mode(combination: Combination) -> Mode:
    """What is expected of the steps of ``combination``."""
    if _waits_for_norms(combination):
        return Mode.SYNCHRONISED
    return max((EFFECTS[item].mode for item in combination.items() if item in EFFECTS), default=Mode.OVERLAPPED)


def _waits_for_norms(combination: Combination) -> bool:
    asked = {item for item in combination.items() if item in NEEDS_NORMS}
    if EFFECTS.get(("loop", combination.loop)) is _MANUAL:  # where the Trainer clips nothing
        asked = {item for item in asked if item[0] != "clipping"}
    return combination.architecture == "ps" and bool(asked)


def reasons(combination: Combination) -> list[str]:
    """Words of the reasons that the strategy gives at the start; where steps are manual it asks no optimizer."""
    found = {item: EFFECTS[item] for item in combination.items() if item in EFFECTS}
    if _MANUAL in found.values():
        found = {item: effect for item, effect in found.items() if item[0] != "optimizer"}
    words = [effect.word for effect in found.values() if effect.mode is Mode.SYNCHRONISED]
    return [*words, _NO_NORMS] if _waits_for_norms(combination) else words


def comparison(combination: Combination) -> Comparison:
    """How ``combination`` is to be compared with DDP: synchronised steps are DDP's own, whatever they sum up.

    Where gradients are only read it is not DDP's sum either: ranks that read nothing have to do the same.
    """
    own = mode(combination) is Mode.SYNCHRONISED
    other_order = any(item in OTHER_ORDER for item in combination.items())
    return Comparison.ONE_STEP if other_order and not own else Comparison.BITS
