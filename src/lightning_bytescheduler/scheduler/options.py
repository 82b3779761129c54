"""The scheduler's options: arguments first, then the environment variables of the published ByteScheduler.

Sizes are in parameters, as published (seed 000).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from lightning_bytescheduler.exceptions import OptionError

__all__ = ["MODES", "SchedulerOptions", "require_size"]

_SIZE = "a positive whole number of parameters"
_SWITCH = "0 or 1"
MODES = ("auto", "overlapped", "ddp")
"""How steps can be taken."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulerOptions:
    """How gradients are scheduled; validated when made.

    Attributes:
        partition_size: Largest piece sent at once, in parameters; ``None`` follows model and link.
        credit: What may be in flight, in parameters; ``None`` follows model and link.
        cross_barrier: Carry communication across the step boundary into the next forward pass.
        mode: ``"overlapped"``, ``"ddp"`` for steps as DDP takes them, or ``"auto"`` to time both and keep the faster.
        timeline: File for the Chrome-trace timeline, or ``None`` for none.
        debug: Log each scheduling decision.
        tunes_credit: Find the credit while training.
        tunes_partition: Find the partition size while training.
        ignored_variables: Environment variables that were set and have no effect here.
    """

    partition_size: int | None = None
    credit: int | None = None
    cross_barrier: bool = True
    mode: str = "auto"
    timeline: str | None = None
    debug: bool = False
    tunes_credit: bool = False
    tunes_partition: bool = False
    ignored_variables: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for option in ("partition_size", "credit"):
            value = getattr(self, option)
            if value is not None:
                object.__setattr__(self, option, _size(option, value))
        for option in ("cross_barrier", "debug", "tunes_credit", "tunes_partition"):
            value = getattr(self, option)
            if not isinstance(value, bool):
                raise OptionError(option, value, "True or False")
        if self.mode not in MODES:
            raise OptionError("mode", self.mode, f"one of {', '.join(map(repr, MODES))}")
        if self.timeline is not None:
            path = os.fspath(self.timeline) if isinstance(self.timeline, (str, os.PathLike)) else None
            if not isinstance(path, str) or not path:
                raise OptionError("timeline", self.timeline, "a file path")
            object.__setattr__(self, "timeline", path)

    @classmethod
    def resolve(
        cls,
        *,
        partition_size: int | None = None,
        credit: int | None = None,
        cross_barrier: bool = True,
        mode: str = "auto",
        timeline: str | None = None,
        debug: bool | None = None,
        credit_tuning: bool | None = None,
        partition_tuning: bool | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> SchedulerOptions:
        """Fill what was not given as an argument from the environment.

        Args:
            partition_size: Beats ``BYTESCHEDULER_PARTITION``.
            credit: Beats ``BYTESCHEDULER_CREDIT``.
            cross_barrier: Has no variable.
            mode: Has no variable.
            timeline: Beats ``BYTESCHEDULER_TIMELINE``.
            debug: Beats ``BYTESCHEDULER_DEBUG``.
            credit_tuning: Beats ``BYTESCHEDULER_CREDIT_TUNING``. If neither is given, the credit is tuned where the
                mode is ``"auto"``, unless it was given as an argument; ``BYTESCHEDULER_CREDIT`` alone says where to
                start, as published.
            partition_tuning: Beats ``BYTESCHEDULER_PARTITION_TUNING``; off if neither is given.
            environ: Where variables are looked up; the process's environment unless given.

        Raises:
            OptionError: Names the argument or variable, its value and what is allowed.
        """
        env = os.environ if environ is None else environ
        tuned = {"credit": credit_tuning, "partition": partition_tuning}
        for name, given in (("credit", credit), ("partition", partition_size)):
            tuned[name] = _tuning(name, tuned[name], given, mode=mode, env=env)
        if partition_size is None and "BYTESCHEDULER_PARTITION" in env:
            partition_size = _size("BYTESCHEDULER_PARTITION", env["BYTESCHEDULER_PARTITION"])
        if tuned["credit"] is None:
            tuned["credit"] = mode == "auto" and credit is None
        if credit is None and "BYTESCHEDULER_CREDIT" in env:
            credit = _size("BYTESCHEDULER_CREDIT", env["BYTESCHEDULER_CREDIT"])
        if timeline is None:
            timeline = env.get("BYTESCHEDULER_TIMELINE") or None
        if debug is None:
            debug = _switch("BYTESCHEDULER_DEBUG", env.get("BYTESCHEDULER_DEBUG", "0"))
        ignored = [name for name in ("BYTESCHEDULER_ROOT_IP", "BYTESCHEDULER_ROOT_PORT") if name in env]
        return cls(
            partition_size=partition_size,
            credit=credit,
            cross_barrier=cross_barrier,
            mode=mode,
            timeline=timeline,
            debug=debug,
            tunes_credit=bool(tuned["credit"]),
            tunes_partition=bool(tuned["partition"]),
            ignored_variables=tuple(ignored),
        )


def require_size(option: str, value: object) -> int:
    """Return ``value`` if it is a size, in parameters.

    Raises:
        OptionError: If it is not a positive whole number; names ``option``.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise OptionError(option, value, _SIZE)
    return value


def _size(option: str, value: object) -> int:
    """Parse a size; the published variables were read by ``int()`` and ``float()``, so ``16e6`` is fine."""
    try:
        number = _number(value) if isinstance(value, str) else value
        # Compared as numbers: int() of infinity or of "not a number" raises.
        if isinstance(number, float) and number == int(number):
            number = int(number)
    except (ValueError, OverflowError):
        raise OptionError(option, value, _SIZE) from None
    if isinstance(number, bool) or not isinstance(number, int) or number < 1:
        raise OptionError(option, value, _SIZE)
    return number


def _number(text: str) -> int | float:
    try:
        return int(text)  # exact, where a float would round above 2**53
    except ValueError:
        return float(text)


def _tuning(name: str, asked: bool | None, given: object, *, mode: str, env: Mapping[str, str]) -> bool | None:
    """Whether a size is tuned; ``None`` if nobody said so.

    Args:
        name: Of the size.
        asked: The argument.
        given: The size, if it was given as an argument.
        mode: How steps are taken.
        env: Variables.
    """
    option, variable = f"{name}_tuning", f"BYTESCHEDULER_{name.upper()}_TUNING"
    if asked is not None:
        if not isinstance(asked, bool):
            raise OptionError(option, asked, "True or False")
        if asked and mode == "ddp":
            raise OptionError(option, asked, "False, or left out, where mode='ddp' leaves no sizes to tune")
        return asked
    switched = _switch(variable, env[variable]) if env.get(variable, "").strip() else None
    if given is not None or mode == "ddp":
        return False  # an argument says what is used, whatever a variable says
    return switched


def _switch(option: str, value: str) -> bool:
    if value.strip() not in ("0", "1", ""):
        raise OptionError(option, value, _SWITCH)
    return value.strip() == "1"
