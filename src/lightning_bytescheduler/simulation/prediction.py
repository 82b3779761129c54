"""What to expect of a model on a network, before it is there: DDP and ByteScheduler side by side.

DDP is given its best bucket size, not only its default, and ByteScheduler both the sizes that the strategy
would choose by itself and the best of a few.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from lightning_bytescheduler.scheduler.policies import POLICIES, SchedulingPolicy, policy_of
from lightning_bytescheduler.simulation.bounds import clipped_bound, lower_bound
from lightning_bytescheduler.simulation.compressed_steps import CODECS, auto_step, compressed_link
from lightning_bytescheduler.simulation.link import LinkModel
from lightning_bytescheduler.simulation.profiles import ModelProfile
from lightning_bytescheduler.simulation.simulator import Schedule, simulate
from lightning_bytescheduler.tuning.default_sizes import LinkEstimate, default_sizes

RIVALS = POLICIES[1:]
"""Policies that ByteScheduler's own is compared with."""

_MIB = 1024 * 1024
_DDP_BUCKETS = tuple(size * _MIB for size in (1, 2, 5, 10, 25, 50, 100, 250))
_PARTITIONS = tuple(size * _MIB // 4 for size in (1, 4, 16, 64, 256, 1024))
_MOST_PIECES = 2500  # finer ones order large models no better, and take long to play
_MOST_SLICES = 50_000  # of a policy with sizes of its own; a second to play
_WIDTH = 4  # bytes of a parameter


@dataclass(frozen=True, slots=True)
class Prediction:
    """One line of a comparison.

    Attributes:
        name: What it is.
        step_seconds: Seconds of a step.
        schedule: What was simulated, or ``None`` for a bound, and with compression.
        compressed_share: Of the gradients' bytes, where that is a choice.
    """

    name: str
    step_seconds: float
    schedule: Schedule | None
    compressed_share: float | None = None


def predict(
    profile: ModelProfile,
    link: LinkModel,
    *,
    policies: Iterable[str] = RIVALS,
) -> tuple[Prediction, ...]:
    """Compare what can be done for a model on a network.

    Args:
        profile: The model.
        link: The network. DDP has no servers: where the link has some, it is given an all-reduce.
        policies: Scheduling policies beside ByteScheduler's own: one that makes more than 50,000
            slices of the model is left out.

    Returns:
        The computation alone, the lower bound, DDP with its default and its best buckets, each policy, ByteScheduler
        with the strategy's own and the best sizes; with an all-reduce also norm clipping, and compression: all
        gradients in int8, and in int4 what would not hide (``"auto"``).

    Raises:
        OptionError: If there is no such policy.
    """
    chosen = chosen_schedule(profile, link)
    asked = [policy_of(policy) for policy in policies]
    lines = [
        Prediction("computation alone", profile.compute_seconds, None),
        Prediction("lower bound", lower_bound(profile, link), None),
        _simulated("ddp, default buckets", profile, link.without_servers, [Schedule.ddp()]),
        best_ddp(profile, link),
        *(
            _simulated(policy.name, profile, link, [policy_schedule(profile, link, policy)])
            for policy in asked
            if slices(profile, policy) <= _MOST_SLICES
        ),
        _simulated("bytescheduler, own sizes", profile, link, [chosen]),
        best_scheduled(profile, link),
    ]
    if link.architecture == "allreduce":
        lines.append(Prediction("lower bound with norm clipping", clipped_bound(profile, link), None))
        lines.append(best_scheduled(profile, link, clipping="gather_early"))
    if link.workers > 1 and link.architecture == "allreduce":
        lines += compressed_predictions(profile, link)
    return tuple(lines)


def slices(profile: ModelProfile, policy: SchedulingPolicy) -> int:
    """Into how many pieces a policy with a partition size of its own cuts the model; 1 for any other."""
    parameters = max(-(-profile.parameter_bytes // _WIDTH), 1)
    return -(-parameters // (policy.own_partition_size(parameters) or parameters))


def policy_schedule(profile: ModelProfile, link: LinkModel, policy: SchedulingPolicy) -> Schedule:
    """A policy with the sizes that the strategy would choose by itself; see :func:`chosen_schedule`."""
    chosen = chosen_schedule(profile, link)
    return Schedule.by_policy(
        policy,
        parameters=-(-profile.parameter_bytes // _WIDTH),
        partition_bytes=chosen.partition_bytes or _WIDTH,
        credit_bytes=chosen.credit_bytes or _WIDTH,
        bucket_bytes=chosen.bucket_bytes,
    )


def compressed_predictions(profile: ModelProfile, link: LinkModel) -> list[Prediction]:
    """The strategy's own sizes with ``compression="int8"`` and ``"auto"``; codecs as fast as ``CODECS`` says."""

    def step_on(other: LinkModel) -> float:
        return simulate(profile, other, chosen_schedule(profile, other), steps=1).step_seconds

    by_name = {codec.name: codec for codec in CODECS}
    auto = auto_step(step_on, profile.compute_seconds, link, by_name["int4"])
    return [
        Prediction("bytescheduler, int8", step_on(compressed_link(link, by_name["int8"])), None),
        Prediction("bytescheduler, auto", auto.step_seconds, None, auto.share),
    ]


def best_ddp(profile: ModelProfile, link: LinkModel) -> Prediction:
    """DDP with the best of several bucket sizes, its default among them, and an all-reduce."""
    schedules = [Schedule.ddp(), *(Schedule.ddp(bucket_bytes=size) for size in _DDP_BUCKETS)]
    return _simulated("ddp, best buckets", profile, link.without_servers, schedules)


def best_scheduled(profile: ModelProfile, link: LinkModel, *, clipping: str | None = None) -> Prediction:
    """ByteScheduler with the best of several sizes; those that the strategy would choose are among them.

    Args:
        profile: The model.
        link: The network.
        clipping: See ``Schedule``.

    Raises:
        UnsupportedError: If norm clipping meets a link that pushes and pulls.
    """
    name = "bytescheduler, best sizes" if clipping is None else "bytescheduler with norm clipping"
    return _simulated(name, profile, link, _scheduled(profile, link, clipping))


def chosen_schedule(
    profile: ModelProfile, link: LinkModel, *, clipping: str | None = None, busy_processor: bool = False
) -> Schedule:
    """What the strategy would choose by itself for this model, if it measured this link.

    Args:
        profile: The model.
        link: The network.
        clipping: See ``Schedule``.
        busy_processor: Whether the model computes on the processor.
    """
    # Nothing hides the overhead behind another message, so it weighs more.
    alpha = 4 * link.stages * link.overhead_seconds + link.latency_seconds
    sizes = default_sizes(
        parameters=profile.parameter_bytes // _WIDTH,
        bytes_per_parameter=_WIDTH,
        # A lone worker has nothing to measure; any sizes are good then.
        link=LinkEstimate(alpha=alpha, beta=link.seconds_per_byte or 1 / link.bandwidth),
        busy_processor=busy_processor,
        in_shards=clipping is not None,
        architecture=link.architecture,
    )
    coarser = 1
    if link.architecture == "ps":  # whose partitions of a very large model are so many that larger ones are played
        coarser = max(profile.parameter_bytes // (sizes.partition_size * _WIDTH * _MOST_PIECES), 1)
    return Schedule.scheduled(
        partition_bytes=coarser * sizes.partition_size * _WIDTH,
        credit_bytes=coarser * sizes.credit * _WIDTH,
        bucket_bytes=sizes.bucket_bytes,
        clipping=clipping,
    )


def _scheduled(profile: ModelProfile, link: LinkModel, clipping: str | None) -> Iterator[Schedule]:
    yield chosen_schedule(profile, link, clipping=clipping)
    # What the link carries in the time in which a lone piece is under way but not on the link.
    hidden = int(link.latency_seconds / link.seconds_per_byte) if link.seconds_per_byte else 0
    for partition in _PARTITIONS:
        if partition * _MOST_PIECES < profile.parameter_bytes and partition != _PARTITIONS[-1]:
            continue
        for window in sorted({hidden + link.stages * partition, profile.parameter_bytes or 1}):
            yield Schedule.scheduled(
                partition_bytes=partition,
                credit_bytes=window,
                bucket_bytes=partition,
                clipping=clipping,
            )


def _simulated(name: str, profile: ModelProfile, link: LinkModel, schedules: Iterable[Schedule]) -> Prediction:
    # One step is as good as many; see ``simulate``.
    timed = ((simulate(profile, link, schedule, steps=1).step_seconds, schedule) for schedule in schedules)
    seconds, schedule = min(timed, key=lambda entry: entry[0])
    return Prediction(name, seconds, schedule)
