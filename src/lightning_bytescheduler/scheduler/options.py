"""The scheduler's options: arguments first, then the environment variables of the published ByteScheduler.

As in the published ByteScheduler, sizes are in parameters. The variables have the same meaning as there.

A policy sets the order and the pieces in which gradients travel:

- ``"bytescheduler"``: equal parts by first use, under a credit window (Peng et al., SOSP 2019).
- ``"fifo"``: whole buckets in order of arrival, all at once, as frameworks do, but across the step boundary.
- ``"p3"``: fixed slices by first use, one at a time: the most urgent slice is sent when the last one has arrived
  (Jayarajan et al., "Priority-based Parameter Propagation for Distributed DNN Training", MLSys 2019, sections 4.1 and
  4.2).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from lightning_bytescheduler.checks import parse_size, require_bool, require_new_file, require_one_of
from lightning_bytescheduler.exceptions import OptionError

__all__ = ["MODES", "POLICIES", "TUNED", "SchedulerOptions", "SchedulingPolicy", "policy_of"]

MODES = ("auto", "overlapped", "ddp")
"""Allowed values of ``mode``."""
TUNED = (False, "credit", "partition", "both")
"""Allowed values of ``tuning``."""

P3_SLICE = 50_000
"""Parameters of a slice: the best value according to P3's authors (section 5.7 and figure 12)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulingPolicy:
    """How buckets are ordered and cut.

    Attributes:
        in_words: A sentence on how gradients travel, with places for the sizes in force.
        by_first_use: Whether the order is that of first use in the forward pass; if false, the order of arrival.
        one_at_a_time: Whether a piece is sent only when the last one has arrived, whatever the credit.
    """

    name: str
    takes: tuple[str, ...]
    in_words: str
    by_first_use: bool = True
    one_at_a_time: bool = False

    @property
    def is_tuned(self) -> bool:
        """Whether sizes may be tuned."""
        return "credit" in self.takes

    def own_partition_size(self, parameters: int) -> int | None:
        """Return the policy's own partition size and credit; ``None`` if they are chosen from model and link."""
        if self.is_tuned:
            return None
        return P3_SLICE if self.one_at_a_time else parameters


_ALL = (
    SchedulingPolicy(
        name="bytescheduler",
        takes=("partition_size", "credit"),
        in_words="They are cut into partitions of {partition_size:,} parameters, and {credit:,} parameters "
        "(the credit) travel at once.",
    ),
    SchedulingPolicy(
        name="fifo", takes=(), in_words="Buckets travel whole, as they come (policy='fifo').", by_first_use=False
    ),
    SchedulingPolicy(
        name="p3",
        takes=("partition_size",),
        in_words="Slices of {partition_size:,} parameters travel one at a time (policy='p3').",
        one_at_a_time=True,
    ),
)

POLICIES = tuple(policy.name for policy in _ALL)
"""Names of the policies; the first is the default."""


def policy_of(name: str) -> SchedulingPolicy:
    """Return the policy of that name.

    Raises:
        OptionError: If there is none.
    """
    require_one_of("policy", name, POLICIES)
    return _ALL[POLICIES.index(name)]


_DEFAULT_POLICY = policy_of(POLICIES[0])


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulerOptions:
    """How gradients are scheduled; validated when made.

    Attributes:
        partition_size: Largest piece sent at once, in parameters; ``None``: chosen from model and link.
        credit: Most that may be in flight, in parameters; ``None``: chosen from model and link.
        cross_barrier: Carry communication across the step boundary into the next forward pass.
        mode: ``"overlapped"``, ``"ddp"`` for steps as DDP takes them, or ``"auto"`` to time both and keep the faster.
        timeline: File for the Chrome-trace timeline, or ``None`` for none.
    """

    partition_size: int | None = None
    credit: int | None = None
    cross_barrier: bool = True
    mode: str = "auto"
    timeline: str | None = None
    debug: bool = False
    policy: SchedulingPolicy = _DEFAULT_POLICY
    tunes_credit: bool = False
    tunes_partition: bool = False
    ignored_variables: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for option in ("partition_size", "credit"):
            value = getattr(self, option)
            if value is not None:
                object.__setattr__(self, option, parse_size(option, value))
        for option in ("cross_barrier", "debug", "tunes_credit", "tunes_partition"):
            require_bool(option, getattr(self, option))
        require_one_of("mode", self.mode, MODES)
        self._require_fitting_policy()
        if self.timeline is not None:
            object.__setattr__(self, "timeline", require_new_file("timeline", self.timeline))

    def _require_fitting_policy(self) -> None:
        policy, way_out = self.policy, f"left out, as policy={self.policy.name!r}"
        for option in ("partition_size", "credit"):
            value = getattr(self, option)
            if value is not None and option not in policy.takes:
                raise OptionError(option, value, f"{way_out} has its own")
        if (self.tunes_credit or self.tunes_partition) and not policy.is_tuned:
            raise OptionError(
                "tuning", "credit" if self.tunes_credit else "partition", f"{way_out} has nothing to tune"
            )
        if self.mode == "ddp" and policy != _DEFAULT_POLICY:
            raise OptionError(
                "policy", policy.name, "left out where mode='ddp', which takes steps as DDP does and orders nothing"
            )

    @classmethod
    def resolve(
        cls,
        *,
        partition_size: int | None = None,
        credit: int | None = None,
        cross_barrier: bool = True,
        mode: str = "auto",
        timeline: str | os.PathLike[str] | None = None,
        debug: bool | None = None,
        policy: str = POLICIES[0],
        tuning: bool | str | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> SchedulerOptions:
        """Fill missing arguments from the environment.

        Args:
            partition_size: Overrides ``BYTESCHEDULER_PARTITION``.
            credit: Overrides ``BYTESCHEDULER_CREDIT``.
            cross_barrier: Has no variable.
            mode: Has no variable.
            timeline: Overrides ``BYTESCHEDULER_TIMELINE``.
            debug: Overrides ``BYTESCHEDULER_DEBUG``.
            policy: Has no variable.
            tuning: ``"credit"``, ``"partition"``, ``"both"`` or ``False``; overrides ``BYTESCHEDULER_CREDIT_TUNING``
                and ``BYTESCHEDULER_PARTITION_TUNING``. Without any of them, the credit is tuned if the mode is
                ``"auto"`` and the argument ``credit`` was left out; tuning then starts at ``BYTESCHEDULER_CREDIT``, if
                set, as published.
            environ: Environment variables; the process's own if ``None``.

        Raises:
            OptionError: Names the argument or variable, its value and what is allowed.
        """
        given = os.environ if environ is None else environ
        # an empty variable counts as unset
        env = {name: value.strip() for name, value in given.items() if value.strip()}
        chosen = policy_of(policy)
        if tuning is not None and require_one_of("tuning", tuning, TUNED) and mode == "ddp":
            raise OptionError("tuning", tuning, "False, or left out, where mode='ddp' leaves no sizes to tune")
        tuned = {
            name: _tuned_by_variable(name, size, mode=mode, env=env) if tuning is None else tuning in (name, "both")
            for name, size in (("credit", credit), ("partition", partition_size))
        }
        if partition_size is None and "BYTESCHEDULER_PARTITION" in env:
            partition_size = parse_size("BYTESCHEDULER_PARTITION", env["BYTESCHEDULER_PARTITION"])
        if tuned["credit"] is None:
            tuned["credit"] = mode == "auto" and chosen.is_tuned
        if credit is None and "BYTESCHEDULER_CREDIT" in env:
            credit = parse_size("BYTESCHEDULER_CREDIT", env["BYTESCHEDULER_CREDIT"])
        if timeline is None and "BYTESCHEDULER_TIMELINE" in env:
            timeline = require_new_file("BYTESCHEDULER_TIMELINE", env["BYTESCHEDULER_TIMELINE"])
        if debug is None:
            debug = _switch("BYTESCHEDULER_DEBUG", env.get("BYTESCHEDULER_DEBUG", "0"))
        ignored = [name for name in ("BYTESCHEDULER_ROOT_IP", "BYTESCHEDULER_ROOT_PORT") if name in env]
        return cls(
            partition_size=partition_size,
            credit=credit,
            cross_barrier=cross_barrier,
            mode=mode,
            timeline=None if timeline is None else require_new_file("timeline", timeline),
            debug=debug,
            policy=chosen,
            tunes_credit=bool(tuned["credit"]),
            tunes_partition=bool(tuned["partition"]),
            ignored_variables=tuple(ignored),
        )


def _tuned_by_variable(name: str, given: object, *, mode: str, env: Mapping[str, str]) -> bool | None:
    """Whether a size is tuned; ``None`` if no variable decides. ``given`` is the size as an argument."""
    variable = f"BYTESCHEDULER_{name.upper()}_TUNING"
    switched = _switch(variable, env[variable]) if variable in env else None
    if given is not None or mode == "ddp":
        return False  # an argument overrides variables
    return switched


def _switch(option: str, value: str) -> bool:
    if value not in ("0", "1"):
        raise OptionError(option, value, "0 or 1")
    return value == "1"
