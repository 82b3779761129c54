"""What to expect of a model on a network, as figures.

What was measured of a user's model, how long a step of it takes with each strategy on a modelled link, and which of
them is recommended.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from lightning_bytescheduler.checks import require_one_of
from lightning_bytescheduler.simulation.bounds import clipped_bound, lower_bound
from lightning_bytescheduler.simulation.compressed_steps import CODECS, CompressedStep, auto_step, compressed_link
from lightning_bytescheduler.simulation.link import LinkModel
from lightning_bytescheduler.simulation.prediction import best_ddp, chosen_schedule
from lightning_bytescheduler.simulation.profiles import ModelProfile
from lightning_bytescheduler.simulation.simulator import Schedule, simulate

STEPS = 10
"""How many steps are timed."""

_EQUAL = 1.03  # steps that differ by less than this are the same, as far as a model of a network can tell
_MIB = 2**20

DDP = "ddp"
DDP_BEST = "ddp, best bucket size"
BF16 = "ddp, bf16 on the wire"
BYTESCHEDULER = "bytescheduler"
SERVERS = "bytescheduler, parameter servers"
AUTO = "bytescheduler, compression auto"
FIXED = {codec: f"bytescheduler, compression {codec}" for codec in ("int8", "int4")}
"""Strategies that compress all gradients, by what in; on a CPU."""
DILOCO = "diloco"
ALONE = "one worker alone"

DILOCO_OVERHEAD = 0.05
"""Share of computation up to which communication may add to it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredStep:
    """A training step on one worker that talks to nobody.

    Attributes:
        profile: Its layers; they take as long as the step.
        waiting: Seconds of the step spent waiting for data.
        batch_size: Samples in a batch, or ``None`` if the batch does not show it.
        device: Where it was measured, such as ``cpu`` or ``cuda``.
        compressed_share: Bytes of the gradients as bf16, as a share of what they are.
        unused: Names of parameters that got no gradient.
        synchronised_because: Why ``bytescheduler`` cannot carry updates across steps here, with the way out.
        norm_needed_by: What needs to know all gradients before an update, such as norm clipping.
    """

    profile: ModelProfile
    waiting: float = 0.0
    batch_size: int | None = None
    device: str = "cpu"
    compressed_share: float = 0.5
    unused: tuple[str, ...] = ()
    synchronised_because: tuple[str, ...] = ()
    norm_needed_by: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Expectation:
    """What one strategy makes of the model on the link.

    Attributes:
        strategy: Which one.
        step_seconds: Seconds of a step.
        same_training: Whether the weights are those of ``ddp``.
        bucket_bytes: The bucket size it takes, where that is a choice.
        inner_steps: Steps between two exchanges, for ``diloco``.
        compressed_share: Of the gradients' bytes, where that is a choice.
    """

    strategy: str
    step_seconds: float
    same_training: bool = True
    bucket_bytes: int | None = None
    inner_steps: int | None = None
    compressed_share: float | None = None


def expectations(measured: MeasuredStep, link: LinkModel) -> tuple[Expectation, ...]:
    """Simulate the strategies.

    ``ddp`` with bf16 on the wire has the default buckets. ``diloco`` exchanges all trained parameters at once,
    uncompressed, every `diloco_interval` steps, while nobody computes.

    Args:
        measured: The model.
        link: The network. Where it has parameter servers, there is one line more; all others reduce without.
    """
    profile, given, link = measured.profile, link, link.without_servers
    best = best_ddp(profile, link)
    smaller = replace(link, bandwidth=link.bandwidth / measured.compressed_share)
    inner = diloco_interval(profile, link)
    auto = _auto(measured, link)
    return (
        Expectation(strategy=DDP, step_seconds=_seconds(profile, link, [Schedule.ddp()])),
        Expectation(
            strategy=DDP_BEST,
            step_seconds=best.step_seconds,
            bucket_bytes=None if best.schedule is None else best.schedule.bucket_bytes,
        ),
        Expectation(strategy=BYTESCHEDULER, step_seconds=_bytescheduler(measured, link)),
        *_with_servers(measured, given),
        Expectation(
            strategy=BF16,
            step_seconds=_seconds(profile, smaller, [Schedule.ddp()]),
            same_training=False,
        ),
        Expectation(
            strategy=AUTO,
            step_seconds=auto.step_seconds,
            same_training=not auto.share,
            compressed_share=auto.share,
        ),
        *_fixed(measured, link),
        Expectation(
            strategy=DILOCO,
            step_seconds=profile.compute_seconds + communication_seconds(profile, link) / inner,
            same_training=False,
            inner_steps=inner,
        ),
    )


def _with_servers(measured: MeasuredStep, link: LinkModel) -> tuple[Expectation, ...]:
    if link.architecture != "ps":
        return ()
    return (Expectation(strategy=SERVERS, step_seconds=_bytescheduler(measured, link)),)


def ceiling(measured: MeasuredStep, link: LinkModel) -> float:
    """Seconds that a step takes at least, whatever the order in which these bytes are sent."""
    if measured.norm_needed_by and not measured.synchronised_because and link.architecture == "allreduce":
        return clipped_bound(measured.profile, link)
    return lower_bound(measured.profile, link)


def communication_seconds(profile: ModelProfile, link: LinkModel) -> float:
    """Seconds of sending all gradients in one go, with nothing else to do."""
    return profile.parameter_bytes * link.seconds_per_byte + link.overhead_seconds + link.latency_seconds


def diloco_interval(profile: ModelProfile, link: LinkModel) -> int:
    """The fewest steps between two exchanges for which these add 5% at most to the computation."""
    allowed = DILOCO_OVERHEAD * profile.compute_seconds
    # Rounded before it is rounded up: 1.0000000001 exchanges per allowance are 1.
    return max(1, math.ceil(round(communication_seconds(profile, link) / allowed, 6)))


def _bytescheduler(measured: MeasuredStep, link: LinkModel) -> float:
    """With the sizes that the strategy chooses by itself; it keeps DDP's way where that is faster."""
    profile, busy = measured.profile, measured.device == "cpu"
    # With servers, what waits for the norm is taken to wait for all gradients.
    if measured.synchronised_because or (measured.norm_needed_by and link.architecture == "ps"):
        chosen = chosen_schedule(profile, link, busy_processor=busy)
        return _seconds(profile, link, [replace(chosen, barrier=True)])
    clipping = "gather_early" if measured.norm_needed_by else None
    chosen = chosen_schedule(profile, link, clipping=clipping, busy_processor=busy)
    kept = _seconds(profile, link.without_servers, [Schedule.ddp()])
    return min(_seconds(profile, link, [chosen]), kept)


def _auto(measured: MeasuredStep, link: LinkModel) -> CompressedStep:
    """With as little in int4 as hides, at the codec's speed on one core; gradients on a GPU are not compressed."""
    if measured.device != "cpu" or link.workers == 1:
        return CompressedStep(_bytescheduler(measured, link), 0.0)
    int4 = next(codec for codec in CODECS if codec.name == "int4")
    return auto_step(partial(_bytescheduler, measured), measured.profile.compute_seconds, link, int4)


def _fixed(measured: MeasuredStep, link: LinkModel) -> Iterable[Expectation]:
    """With all gradients in one codec, as fast as on one core; where they are compressed at all."""
    if measured.device != "cpu" or link.workers == 1:
        return
    for codec in CODECS:
        if codec.name in FIXED:
            own = replace(codec, ratio=codec.ratio * 0.5 / measured.compressed_share)  # of gradients in 2 bytes, half
            seconds = _bytescheduler(measured, compressed_link(link, own))
            yield Expectation(strategy=FIXED[codec.name], step_seconds=seconds, same_training=False)


def _seconds(profile: ModelProfile, link: LinkModel, schedules: Iterable[Schedule]) -> float:
    # One step is as good as many; see ``simulate``.
    return min(simulate(profile, link, schedule, steps=1).step_seconds for schedule in schedules)


@dataclass(frozen=True, kw_only=True)
class AdviceFigures:
    """What to expect, as numbers.

    Attributes:
        measured: The model's step on one worker; of several, on the slowest.
        link: The network.
        expectations: One for each strategy.
        ceiling_seconds: Seconds that no order of these bytes can get a step below.
        communication_seconds: Seconds of sending all gradients once, with nothing else to do.
        worker_seconds: Seconds of a step on each worker, where several were measured.
    """

    measured: MeasuredStep
    link: LinkModel
    expectations: tuple[Expectation, ...]
    ceiling_seconds: float
    communication_seconds: float
    worker_seconds: tuple[float, ...] = ()

    @property
    def compute_seconds(self) -> float:
        """Seconds of a step on one worker that talks to nobody."""
        return self.measured.profile.compute_seconds

    @property
    def limited_by(self) -> str:
        """``"link"`` if communication cannot be hidden whatever the order, else ``"compute"``."""
        return "link" if self.ceiling_seconds > _EQUAL * self.compute_seconds else "compute"

    @property
    def recommended(self) -> Expectation:
        """Of the strategies that train as ``ddp`` does the simplest that is within 3% of the fastest."""
        names = (DDP, DDP_BEST, BYTESCHEDULER, SERVERS)
        exact = [one for name in names for one in self.expectations if one.strategy == name]
        fastest = min(expected.step_seconds for expected in exact)
        return next(expected for expected in exact if expected.step_seconds <= _EQUAL * fastest)

    @property
    def alone_is_faster(self) -> bool:
        """Whether one worker trains faster than all of them, with any strategy that trains as ``ddp`` does."""
        return self.speedup(self.recommended.step_seconds) < 1

    @property
    def line(self) -> str:
        """The line of Python that does what is recommended."""
        recommended = self.recommended
        if self.alone_is_faster:
            return "trainer = L.Trainer(devices=1)"
        if recommended.strategy == BYTESCHEDULER:
            return 'trainer = L.Trainer(strategy="bytescheduler")'
        if recommended.strategy == SERVERS:
            servers = min(self.link.servers, self.link.workers)
            return f"trainer = L.Trainer(strategy=ByteSchedulerStrategy(servers={servers}))"
        if recommended.strategy == DDP or recommended.bucket_bytes is None:
            return 'trainer = L.Trainer(strategy="ddp")'
        return f"trainer = L.Trainer(strategy=DDPStrategy(bucket_cap_mb={recommended.bucket_bytes / _MIB:g}))"

    def of(self, strategy: str) -> Expectation:
        """What is expected of a strategy.

        Raises:
            OptionError: If there is none of this name.
        """
        by_name = {expected.strategy: expected for expected in self.expectations}
        return by_name[require_one_of("strategy", strategy, by_name)]

    def efficiency(self, step_seconds: float) -> float:
        """Share of a step that computes: how much of the workers' joint speed is left."""
        return self.compute_seconds / step_seconds

    def speedup(self, step_seconds: float) -> float:
        """How many times as many samples all workers train on as one alone does."""
        return self.link.workers * self.efficiency(step_seconds)

    def samples_per_second(self, step_seconds: float) -> float | None:
        """Of all workers together; ``None`` if the batch does not show how many samples it has."""
        if self.measured.batch_size is None:
            return None
        return self.link.workers * self.measured.batch_size / step_seconds

    def figures(self) -> dict[str, Any]:
        """The figures as what JSON can hold; times in seconds, bandwidth in bytes per second."""
        measured, link = self.measured, self.link
        return {
            "model": measured.profile.name,
            "device": measured.device,
            "batch_size": measured.batch_size,
            "parameter_bytes": measured.profile.parameter_bytes,
            "workers": link.workers,
            "bandwidth": link.bandwidth,
            "latency": link.latency,
            "compute_seconds": self.compute_seconds,
            "waiting_seconds": measured.waiting,
            "communication_seconds": self.communication_seconds,
            "ceiling_seconds": self.ceiling_seconds,
            "worker_seconds": list(self.worker_seconds),
            "architecture": link.architecture,
            "servers": link.servers,
            "limited_by": self.limited_by,
            "recommended": ALONE if self.alone_is_faster else self.recommended.strategy,
            "line": self.line,
            "unused_parameters": list(measured.unused),
            "synchronised_because": list(measured.synchronised_because),
            "norm_needed_by": list(measured.norm_needed_by),
            "strategies": [
                {
                    "strategy": expected.strategy,
                    "step_seconds": expected.step_seconds,
                    "efficiency": self.efficiency(expected.step_seconds),
                    "samples_per_second": self.samples_per_second(expected.step_seconds),
                    "same_training": expected.same_training,
                    "bucket_bytes": expected.bucket_bytes,
                    "inner_steps": expected.inner_steps,
                    "compressed_share": expected.compressed_share,
                }
                for expected in self.expectations
            ],
            "layers": [
                {
                    "name": layer.name,
                    "parameter_bytes": layer.parameter_bytes,
                    "forward_seconds": layer.forward_seconds,
                    "backward_seconds": layer.backward_seconds,
                }
                for layer in measured.profile.layers
            ],
        }
