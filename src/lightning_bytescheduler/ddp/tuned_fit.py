"""Tuning of a fit: whether and from where, which sizes are in force in each step, and when it ends.

Rank 0 decides whether a fit is tuned, and all ranks know before the first step. Credit, partition size and mode are the
same on all ranks in every step. Rank 0 times steps and lets its tuner decide. ``AgreedValues`` sends the decision to
all ranks, with the step before which it takes effect. All ranks change all three at that step, between two backward
passes, so all buckets of a step are cut or merged alike. The credit must change on all ranks, too: a rank with a
smaller window than rank 0's would hold back what rank 0 has launched.

Tuning first tries points that the simulator suggests for a model of which only sizes are known. The computing time of
each layer is not known before the first step. It is assumed to be proportional to the layer's gradients, and their
total to equal the communication, where order matters most. On most links the measured link decides: how much must be in
flight to fill it, and how small a message may be. A wrong guess costs one trial.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta

import torch
import torch.distributed as dist

from lightning_bytescheduler.collectives.number_exchange import AgreedValues
from lightning_bytescheduler.ddp.ddp_mode import StepMode
from lightning_bytescheduler.ddp.runtime import SchedulerRuntime
from lightning_bytescheduler.lightning_api import pl, rank_zero_info
from lightning_bytescheduler.scheduler.core import ByteCore
from lightning_bytescheduler.scheduler.options import SchedulerOptions
from lightning_bytescheduler.simulation.link import LinkModel
from lightning_bytescheduler.simulation.profiles import LayerProfile, ModelProfile
from lightning_bytescheduler.simulation.simulator import Schedule, simulate
from lightning_bytescheduler.tuning.credit_tuner import CreditTuner
from lightning_bytescheduler.tuning.record import TuningIdentity
from lightning_bytescheduler.tuning.search import distance, first_guesses
from lightning_bytescheduler.tuning.sizes import ALIGNMENT, PLAIN_DDP, LinkEstimate, SearchSpace, TuningPoint

__all__ = ["SHORTEST_FIT", "FitTuning", "PointInForce", "likely_points", "space_for"]

_MOST_LAYERS = 24  # more layers are joined with neighbours; simulating a step then takes milliseconds
_NEAR = 0.5  # octaves
_BACKWARD = 2.0  # times the forward pass
_MESSAGES_IN_FLIGHT = {"gloo": 2, "nccl": 1}  # gloo's threads, NCCL's streams


def likely_points(
    space: SearchSpace,
    *,
    layer_bytes: Sequence[int],
    bucket_bytes: int,
    link: LinkEstimate,
    workers: int,
    backend: str,
    start: TuningPoint,
) -> tuple[TuningPoint, ...]:
    """Return the best points of a simulation of a typical model of this size, and that of a closed form.

    Args:
        space: The search space.
        layer_bytes: Bytes of the layers' gradients, in the order of the forward pass.
        bucket_bytes: Size at which DDP closes a bucket.
        link: The measured link.
        workers: Number of ranks.
        backend: Backend that reduces gradients.
        start: The point that is measured anyway; points near it are left out.
    """
    profile = _typical(layer_bytes, seconds=link.beta * sum(layer_bytes))
    network = replace(
        LinkModel.measured(workers=workers, alpha=link.alpha, beta=link.beta),
        messages_in_flight=_MESSAGES_IN_FLIGHT.get(backend),
    )
    width = 4  # bytes per parameter on the wire; only ratios matter

    def seconds(point: TuningPoint) -> float:
        credit, partition = point.sizes
        schedule = Schedule(partition_bytes=width * partition, credit_bytes=width * credit, bucket_bytes=bucket_bytes)
        return simulate(profile, network, schedule)

    guesses = [*first_guesses(space, seconds), *_closed_form(space, sum(layer_bytes) // width, link, width=width)]
    found: list[TuningPoint] = []
    for point in guesses:
        if all(distance(point, other) >= _NEAR for other in (start, *found)):
            found.append(point)
    return tuple(found)


def _closed_form(space: SearchSpace, parameters: int, link: LinkEstimate, *, width: int) -> tuple[TuningPoint, ...]:
    """Return the partition size with the least cost of start-ups and waiting, two partitions in flight.

    Parts of ``p`` parameters cost ``alpha * parameters / p`` to start, and the most urgent part waits ``beta * width *
    p`` for the one on the link. The sum is least where both are equal.
    """
    best = math.sqrt(link.alpha * max(parameters, 1) / (link.beta * width))
    low, high = space.partitions
    partition = min(max(round(best / ALIGNMENT) * ALIGNMENT, low), high)
    credit = min(max(2 * partition, space.credits[0], partition), space.credits[1])
    return (TuningPoint(credit=credit, partition_size=partition),) if partition <= credit else ()


def _typical(layer_bytes: Sequence[int], *, seconds: float) -> ModelProfile:
    """Return a model that computes for ``seconds``, each layer in proportion to its size."""
    joined: list[int] = []
    least = sum(layer_bytes) / _MOST_LAYERS
    for size in layer_bytes:
        if joined and joined[-1] + size <= least:
            joined[-1] += size
        else:
            joined.append(size)
    layers = tuple(
        LayerProfile(
            name=str(index), parameter_bytes=size, forward_seconds=float(size), backward_seconds=_BACKWARD * size
        )
        for index, size in enumerate(joined)
    )
    return ModelProfile(name="typical", layers=layers).scaled_to(seconds)


_SETTLED_INTERVAL = 16  # steps between exchanges while nothing is tried


class PointInForce(StepMode):
    """Sizes and mode in force on one rank; also says which steps are taken as DDP's.

    Args:
        tuner: Decides; only on rank 0.
        others_try: Returns whether something else is being tried, so that times of steps do not belong to the point.
    """

    may_wait = True

    def __init__(
        self,
        *,
        core: ByteCore,
        values: AgreedValues,
        point: TuningPoint,
        tuner: CreditTuner | None = None,
        on_change: Callable[[TuningPoint], None],
        others_try: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        super().__init__()
        self._others_try = others_try
        self._core = core
        self._values = values
        self._tuner = tuner
        self._on_change = on_change
        self._clock = clock
        self._step = 0
        self._began = 0.0
        self._put(point)

    @property
    def tries(self) -> bool:
        """See :class:`StepMode`."""
        return self._tuner is not None and not self._tuner.is_settled

    def before_forward(self, step: int) -> PointInForce:
        """See :class:`StepMode`.

        Args:
            step: Number of the step that this pass belongs to, from 1; several passes may belong to one.
        """
        if step > self._step:
            self._begin(step)
        return self

    def _begin(self, step: int) -> None:
        now = self._clock()
        if self._tuner is None:
            agreed = self._values.before_step(step)
        else:
            if self._step and (self._ddp_mode or not self._others_try()):  # others try only in overlapped steps
                # Until all ranks know a decision, steps are still at the old point.
                self._tuner.step_took(self._step, now - self._began, as_decided=self._tuner.current == self._point)
            wanted = self._tuner.current
            agreed = self._values.before_step(
                step,
                wanted.numbers,
                interval=_SETTLED_INTERVAL if self._tuner.is_settled else 1,
            )
        self._step, self._began = step, now
        if agreed is not None:
            point = TuningPoint.of(agreed)
            if point != self._point:
                self._put(point)

    def close(self) -> None:
        """Leave the exchange with the other ranks; bounded, idempotent."""
        self._values.close()

    def _put(self, point: TuningPoint) -> None:
        self._point = point
        self._ddp_mode = point.is_plain_ddp
        if not point.is_plain_ddp:
            self._core.credit, self._core.partition_size = point.sizes
        self._on_change(point)


SHORTEST_FIT = 100
"""Steps: a fit known to be shorter would end before a search has found anything."""


class FitTuning:
    """The strategy's part in tuning: provides a tuner, and lets it begin and end with each fit.

    Args:
        options: This rank's options; rank 0's count.
    """

    def __init__(self, options: SchedulerOptions, *, timeout: timedelta | None) -> None:
        self._options = options
        self._timeout = timeout
        self._own: CreditTuner | None = None  # its knowledge outlives a fit
        self._tuner: CreditTuner | None = None  # the user's or this one, during a fit
        self._in_force: PointInForce | None = None

    @property
    def _tunes(self) -> bool:
        return self._options.tunes_credit or self._options.tunes_partition

    def bring_tuner(self, callbacks: list[pl.Callback]) -> None:
        """Find the user's tuner among the callbacks, or add one if something is tuned."""
        self._tuner = next((callback for callback in callbacks if isinstance(callback, CreditTuner)), None)
        if self._tuner is None and self._tunes:
            self._tuner = self._own = self._own or CreditTuner()
            callbacks.insert(1, self._own)  # after the strategy's hooks

    @property
    def begins_at_once(self) -> bool:
        """Whether to tune from the start: the user asked for tuning, or the best point is already known.

        Otherwise tuning begins once overlapped steps are known to pay.
        """
        tuner = self._tuner
        return tuner is not None and (tuner is not self._own or self._options.tunes_partition or tuner.knows_something)

    def begin(
        self,
        module: pl.LightningModule,
        runtime: SchedulerRuntime,
        device: torch.device,
        on_change: Callable[[TuningPoint], None],
        *,
        in_shards: bool,
    ) -> PointInForce | None:
        """Tune this fit from here on, if rank 0's options say so. Every rank calls this at the same point.

        Returns:
            The mode of a tuned fit; ``None`` on all ranks if it is not tuned.
        """
        if not self._tunes:
            self.say_untuned("there is no size to find (mode='auto' without credit=, tuning='credit' or 'both')")
        left = module.trainer.max_steps - module.trainer.global_step
        short = self._tuner is self._own and module.trainer.max_steps >= 0 and left < SHORTEST_FIT
        tuner = self._tuner if dist.get_rank() == 0 and self._tunes and not short else None
        folder = _record_folder(module.trainer)
        first = None if tuner is None else self._first_point(tuner, module, runtime, folder, in_shards=in_shards)
        numbers = [first is not None, *(first or PLAIN_DDP).numbers]
        message = torch.tensor(numbers, dtype=torch.int64, device=device)
        dist.broadcast(message, src=0)
        is_tuned, *sizes = message.tolist()
        if not is_tuned:
            return None
        self._in_force = PointInForce(
            core=runtime.core,
            values=AgreedValues(2, timeout=self._timeout, failure=lambda: runtime.core.abort_cause),
            point=TuningPoint.of(sizes),
            tuner=tuner,
            on_change=on_change,
            others_try=lambda: runtime.layers is not None and not runtime.layers.is_settled,
        )
        return self._in_force

    @property
    def standing(self) -> str:
        """Result of tuning in this fit so far, in words; empty if nothing is tuned."""
        if self._in_force is None:
            return ""
        if dist.get_rank() != 0:
            return "rank 0 times steps and says what is fastest"
        return "" if self._tuner is None else self._tuner.standing

    def say_untuned(self, reason: str) -> None:
        """Report why the user's tuner has nothing to do."""
        if self._tuner is not None and self._tuner is not self._own:
            rank_zero_info(f"bytescheduler: CreditTuner tunes nothing, as {reason}.")

    def end(self, callbacks: list[pl.Callback]) -> None:
        """Stop the tuner, and remove one that was added; bounded, idempotent."""
        tuner, self._tuner = self._tuner, None
        if tuner is not None:
            tuner.stop()
        in_force, self._in_force = self._in_force, None
        if in_force is not None:
            in_force.close()
        if self._own in callbacks:
            callbacks.remove(self._own)

    def _first_point(
        self,
        tuner: CreditTuner,
        module: pl.LightningModule,
        runtime: SchedulerRuntime,
        folder: str | None,
        *,
        in_shards: bool,
    ) -> TuningPoint:
        sizes, link = runtime.agreed.sizes, runtime.agreed.link
        trained = [p for p in module.parameters() if p.requires_grad]
        width = max(p.element_size() for p in trained)
        count = sum(p.numel() for p in trained)
        workers, backend = dist.get_world_size(), dist.get_backend(runtime.group)
        start = TuningPoint(credit=sizes.credit, partition_size=sizes.partition_size)
        # DDP gives a parameter above its limit a bucket of its own.
        largest_bucket = max(sizes.bucket_bytes // width, *(p.numel() for p in trained), 1)
        space = space_for(count, start, self._options, largest_bucket=largest_bucket, architecture=runtime.architecture)
        guesses: tuple[TuningPoint, ...] = ()
        if link is not None:
            guesses = likely_points(
                space,
                layer_bytes=[p.numel() * width for p in trained],
                bucket_bytes=sizes.bucket_bytes,
                link=link,
                workers=workers,
                backend=backend,
                start=start,
            )
        by_hand = {"credits": self._options.credit, "partitions": self._options.partition_size}
        given = [name for name, size in by_hand.items() if size is not None]
        return tuner.begin(
            space=space,
            start=start,
            identity=TuningIdentity(
                parameters=count,
                bytes_per_parameter=width,
                workers=workers,
                backend=backend,
                link=link,
                in_shards=in_shards,
            ),
            guesses=guesses,
            given=given,
            plain_ddp=self._options.mode == "auto",
            folder=folder,
        )


def _record_folder(trainer: pl.Trainer) -> str | None:
    """Return where a run's files go; every rank has to call it, as the answer is broadcast on the default group."""
    if trainer.loggers:
        return trainer.log_dir
    given = os.path.abspath(trainer.default_root_dir) != os.getcwd()
    return trainer.default_root_dir if given else None


def space_for(
    parameters: int,
    start: TuningPoint,
    options: SchedulerOptions,
    *,
    largest_bucket: int,
    architecture: str = "allreduce",
) -> SearchSpace:
    """Return the search space, in which a size that is not tuned keeps its value."""
    credit, partition_size = start.sizes
    space = SearchSpace.for_model(parameters, architecture=architecture, largest_bucket=largest_bucket)
    if not (options.tunes_partition and space.tunes_partitions):  # a small model has only one partition size
        space = SearchSpace.for_model(parameters, architecture=architecture, partition_size=partition_size)
    space = space.including(start)
    if options.tunes_credit:
        return space
    low, high = space.partitions
    return replace(space, credits=(credit, credit), partitions=(low, min(high, credit)))
