"""How the steps of a fit are taken: with which mode they begin, who decides from there on, and when that ends.

Rank 0 decides, and all ranks know before the first step. With ``mode="auto"``, or where sizes are tuned, its tuner
chooses between sizes and plain DDP while the fit runs (``point_in_force.py``); the search space is one point beside
plain DDP where no size is tuned. On a link that is measured to be slow for the model, steps begin overlapped;
otherwise they begin as DDP's, until overlap is seen to pay.

Where partitions are tuned, the first guess is the partition size with the least cost of start-ups and waiting on the
measured link. A wrong guess costs one trial.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lightning_bytescheduler.collectives.number_exchange import AgreedValues
from lightning_bytescheduler.ddp.point_in_force import PointInForce, StepMode
from lightning_bytescheduler.ddp.runtime import SchedulerRuntime
from lightning_bytescheduler.lightning_api import pl, rank_zero_info
from lightning_bytescheduler.scheduler.options import MODES, SchedulerOptions
from lightning_bytescheduler.tuning.credit_tuner import CreditTuner
from lightning_bytescheduler.tuning.record import TuningIdentity
from lightning_bytescheduler.tuning.sizes import ALIGNMENT, PLAIN_DDP, LinkEstimate, SearchSpace, TuningPoint, distance

SHORTEST_FIT = 100
"""Steps: a fit known to be shorter would end before a search has found anything."""

_NEAR = 0.5  # octaves


def first_guess(space: SearchSpace, parameters: int, link: LinkEstimate, start: TuningPoint) -> tuple[TuningPoint, ...]:
    """Return the partition size with the least cost of start-ups and waiting, two in flight, unless ``start`` is near.

    Parts of ``p`` parameters cost ``alpha * parameters / p`` to start, and the most urgent part waits ``beta * 4 * p``
    for the one on the link. The sum is least where both are equal.
    """
    best = math.sqrt(link.alpha * max(parameters, 1) / (link.beta * 4))
    low, high = space.partitions
    partition = min(max(round(best / ALIGNMENT) * ALIGNMENT, low), high)
    credit = min(max(2 * partition, space.credits[0]), space.credits[1])
    guess = TuningPoint(credit=credit, partition_size=min(partition, credit))
    return (guess,) if distance(guess, start) >= _NEAR else ()


class FitTuning:
    """Makes the mode of a fit's steps; its tuner begins and ends with each fit.

    Args:
        options: This rank's options; rank 0's count.
    """

    def __init__(self, options: SchedulerOptions, *, timeout: timedelta | None) -> None:
        self._options = options
        self._timeout = timeout
        self._own: CreditTuner | None = None  # its knowledge outlives a fit
        self._pacing: CreditTuner | None = None  # where no size is searched: knows nothing that is to be kept
        self._stood = ""  # what was decided in the last fit
        self._tuner: CreditTuner | None = None  # the user's or this one, among the callbacks during a fit
        self._deciding: CreditTuner | None = None  # on rank 0, during a fit
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

    def begin(
        self,
        module: nn.Module,
        runtime: SchedulerRuntime,
        device: torch.device,
        on_change: Callable[[TuningPoint], None],
        *,
        slow: bool,
        in_shards: bool,
    ) -> tuple[StepMode, str]:
        """Begin a fit whose steps may overlap; every rank calls this before its first step.

        Args:
            module: What is trained.
            runtime: The scheduler.
            device: Where the default group needs its tensors.
            on_change: Called with the point in force, at first and when it changes, if one is decided on.
            slow: Whether the link is known to be slow for the model.
            in_shards: Whether gradients are reduced in shards.

        Returns:
            How steps are taken, and why they begin as they do, in a few words.
        """
        self._stood = ""
        if not self._tunes:
            self.say_untuned("there is no size to find (mode='auto' without credit=, tuning='credit' or 'both')")
        mode, trainer = self._options.mode, getattr(module, "_trainer", None)
        folder = None if trainer is None or not self._tunes else _record_folder(trainer)
        left = -1 if trainer is None or trainer.max_steps < 0 else trainer.max_steps - trainer.global_step
        tunes = self._tunes and self._tuner is not None and not (self._tuner is self._own and 0 <= left < SHORTEST_FIT)
        decides = mode == "auto" or tunes
        first = PLAIN_DDP
        if decides and dist.get_rank() == 0:
            asked = tunes and (self._tuner is not self._own or self._options.tunes_partition)
            self._deciding = self._tuner if tunes else None
            if self._deciding is None:
                self._deciding = self._pacing = self._pacing or CreditTuner()
                folder = None
            problem = self._problem(module, runtime, tunes=tunes, in_shards=in_shards)
            as_ddp = mode == "auto" and not slow and not asked
            first = self._deciding.begin(**problem, plain_ddp=mode == "auto", as_ddp=as_ddp, folder=folder)
        message = torch.tensor([MODES.index(mode), decides, slow, *first.numbers], dtype=torch.int64, device=device)
        dist.broadcast(message, src=0)
        number, decides, slow, *sizes = message.tolist()
        mode, first = MODES[number], TuningPoint.of(sizes)
        if not decides:
            return StepMode(mode == "ddp"), f"mode={mode!r}"
        self._in_force = PointInForce(
            core=runtime.core,
            values=AgreedValues(2, timeout=self._timeout, failure=lambda: runtime.core.abort_cause),
            point=first,
            tuner=self._deciding,
            on_change=on_change,
            device=device,
            others_try=lambda: runtime.layers is not None and not runtime.layers.is_settled,
        )
        return self._in_force, first_pace(mode, slow=bool(slow), as_ddp=first.is_plain_ddp)

    @property
    def tunes_now(self) -> bool:
        """Whether sizes are being searched, on rank 0."""
        tuner = self._deciding
        return tuner is not None and tuner.tunes_sizes and not tuner.current.is_plain_ddp

    @property
    def standing(self) -> str:
        """Result of this fit's decisions so far, in words; empty if nothing is known or decided."""
        if self._in_force is None:
            return self._stood
        # torch is not asked for the rank: a script may have destroyed its groups before this ends.
        return "rank 0 times steps and says what is fastest" if self._deciding is None else self._deciding.standing

    def say_untuned(self, reason: str) -> None:
        """Report why the user's tuner has nothing to do."""
        if self._tuner is not None and self._tuner is not self._own:
            rank_zero_info(f"bytescheduler: CreditTuner tunes nothing, as {reason}.")

    def end(self, callbacks: list[pl.Callback]) -> None:
        """Stop the tuner, and remove one that was added; bounded, idempotent."""
        self._stood = self.standing
        tuner, self._deciding, self._tuner = self._deciding, None, None
        if tuner is not None:
            tuner.stop()
        in_force, self._in_force = self._in_force, None
        if in_force is not None:
            in_force.close()
        if self._own in callbacks:
            callbacks.remove(self._own)

    def _problem(self, module: nn.Module, runtime: SchedulerRuntime, *, tunes: bool, in_shards: bool) -> dict[str, Any]:
        """Return what a tuner has to know of the model and the link."""
        options, sizes, link = self._options, runtime.agreed.sizes, runtime.agreed.link
        trained = [p for p in module.parameters() if p.requires_grad]
        width, count = max(p.element_size() for p in trained), sum(p.numel() for p in trained)
        start = TuningPoint(credit=sizes.credit, partition_size=sizes.partition_size)
        space = SearchSpace(credits=(sizes.credit,) * 2, partitions=(sizes.partition_size,) * 2)
        if tunes:
            # DDP gives a parameter above its limit a bucket of its own.
            largest_bucket = max(sizes.bucket_bytes // width, *(p.numel() for p in trained), 1)
            space = space_for(count, start, options, largest_bucket=largest_bucket, architecture=runtime.architecture)
        by_hand = {"credits": options.credit, "partitions": options.partition_size}
        return {
            "space": space,
            "start": start,
            "guesses": () if link is None or not space.tunes_partitions else first_guess(space, count, link, start),
            "given": [name for name, size in by_hand.items() if size is not None],
            "identity": TuningIdentity(
                parameters=count,
                bytes_per_parameter=width,
                workers=dist.get_world_size(),
                backend=dist.get_backend(runtime.group),
                link=link,
                in_shards=in_shards,
            ),
        }


def first_pace(mode: str, *, slow: bool, as_ddp: bool) -> str:
    """Return in a few words why steps begin as they do, if rank 0 decides later on; ``mode`` is its option."""
    if mode != "auto":
        return f"mode={mode!r}"
    if as_ddp:
        return "nothing has been measured yet; overlap is tried if training is seen to wait for gradients"
    return "the link is slow for this model" if slow else "tuning begins with them"


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
